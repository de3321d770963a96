"""The parser of all commands, and what flags of several commands share: numbers, times, and the
confirmation before irreversible changes.

`Parser` is argparse's, which also names the nearest verb or flag. A number that is none, or does
not fit where it is sent, is wrong usage. Where nobody can be asked, the answer is no.
"""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from gcsafepoint.worker.config import DurationError, parse_duration_ns
from server.exit_status import EXIT_USAGE
from sink.retention import Retention
from storage.model.errors import InvalidError
from storage.model.ts import MAX_TS

DEFAULT_NAMESPACE: Final = "default"
_PORT_MAX: Final = 65535
_COUNT_MAX: Final = (1 << 31) - 1
_BYTES_MAX: Final = (1 << 63) - 1
_SIZE = re.compile(r"(?P<number>[0-9]{1,18})\s*(?P<unit>[KMGT]iB|B)", re.I)
_UNITS: Final = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_CHOICES = re.compile(r"invalid choice: '(?P<given>.*?)' \(choose from (?P<names>.*)\)$", re.S)


class Parser(argparse.ArgumentParser):
    """Its verbs have parsers of this class, too; flags are not abbreviated."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | settings))
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, where the flags of the verb are known."""
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._advice(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the fault in one line, and where to find all flags; exit status 2."""
        wrong = _CHOICES.search(message)
        if wrong:
            # newer Pythons leave out the quotes
            names = [name.strip("'") for name in wrong["names"].split(", ")]
            if meant := _nearest(wrong["given"], names):
                message = f"{message[: wrong.start()]}there is no {wrong['given']!r}{meant}"
        elif message.startswith("the following arguments are required"):
            message += self._advice(self._given)
        ending = "" if message.endswith("?") else "."
        self.exit(EXIT_USAGE, f"{self.prog}: {message}{ending} See {self.prog} --help\n")

    def _advice(self, given: Iterable[str]) -> str:
        """Return the flag nearest to the first unknown long flag."""
        flags = [text.partition("=")[0] for text in given if text.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return _nearest(unknown[0], self._option_string_actions) if unknown else ""


def _nearest(given: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class Refused(argparse.Action):
    """A flag of `cdc cli` that is refused: `const` says why."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        """Say it; exit status 2."""
        parser.error(f"{given[-1]} cannot be given: {self.const}")


class NotConfirmedError(InvalidError):
    """The user did not say yes."""

    code = "ErrNotConfirmed"


def host_port(text: str) -> str:
    """Return one `host:port` without its scheme, or an empty text; raises ArgumentTypeError."""
    if "@" in text:  # what stands before it may be a password
        raise argparse.ArgumentTypeError("an address is host:port, without user and password")
    address = text.strip().rpartition("//")[2].rstrip("/")
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdecimal() and 0 < int(port) <= _PORT_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:8300")
    return address


def host_ports(text: str) -> str:
    """Parse `host:port[,host:port…]`; raises ArgumentTypeError."""
    return ",".join(host_port(each) for each in text.split(",") if each.strip())


def timestamp(text: str) -> int:
    """A TSO, in decimal or 0x hexadecimal; raises ArgumentTypeError."""
    return _number(text, MAX_TS)


def count(text: str) -> int:
    """Parse a number of things, 0 to 2^31 - 1; raises ArgumentTypeError."""
    return _number(text, _COUNT_MAX)


def period(text: str) -> int:
    """Seconds of a duration such as 1h or 90m, 0 for `off`; raises ArgumentTypeError."""
    try:
        return 0 if text == "off" else count(str(parse_duration_ns(text) // 10**9))
    except DurationError as err:
        raise argparse.ArgumentTypeError(err.message) from None


def retention(text: str) -> Retention:
    """Parse the limits of kept history: a duration such as 24h, a size such as 50GiB, both with a
    comma between, or `off`; raises ArgumentTypeError.
    """
    age_s = size_bytes = 0
    for part in () if text == "off" else re.split(r"[,|]", text):
        size = _SIZE.fullmatch(part.strip())
        if size is None and not age_s and part.strip() != "off":
            age_s = period(part.strip())
        elif size is not None and not size_bytes:
            size_bytes = int(size["number"]) * _UNITS[size["unit"].lower()]
        else:
            raise argparse.ArgumentTypeError(f"{text!r} says a time, or a size, twice")
    if size_bytes > _BYTES_MAX or (text != "off" and not (age_s or size_bytes)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time such as 24h, nor a size such as 50GiB, nor both (24h,50GiB)"
        )
    return Retention(age_s, size_bytes)


def seconds(text: str) -> float:
    """A number of seconds above 0; raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return number


def byte_count(text: str) -> int:
    """Parse a number of bytes, 0 to 2^63 - 1; raises ArgumentTypeError."""
    return _number(text, _BYTES_MAX)


def _number(text: str, most: int) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {most}")
    return number


def add_yes(verb: argparse.ArgumentParser, text: str = "do not ask") -> None:
    """Add the flag that says yes beforehand; `--no-confirm` is its name in `cdc cli`."""
    add_flag(verb, "--yes", "--no-confirm", text=text)


def add_flag(verb: argparse.ArgumentParser, *names: str, text: str) -> None:
    """Add a flag that is given by its name; scripts for `cdc cli` also say `--flag=true`."""
    verb.add_argument(
        *names,
        nargs="?",
        type=_flag,
        const=True,
        default=False,
        metavar="true|false",
        help=text,
    )


def add_namespace(verb: argparse.ArgumentParser) -> None:
    """Accept the flag of `cdc cli` for groups of changefeeds, of which there is one."""
    verb.add_argument(
        *("-n", "--namespace", "-k", "--keyspace"),
        choices=(DEFAULT_NAMESPACE,),
        default=DEFAULT_NAMESPACE,
        help=argparse.SUPPRESS,
    )


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def confirm(question: str) -> None:
    """Ask at the terminal.

    Raises:
        NotConfirmedError: the answer is another one than yes, or there is no terminal.
    """
    # A script that is asked and cannot answer must not hang, nor be taken for a yes.
    if not sys.stdin.isatty():
        raise NotConfirmedError(
            f"{question} Pass --yes or --no-confirm to say yes where nobody can be asked"
        )
    print(f"{question} [Y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmedError("nothing was changed")
