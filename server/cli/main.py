"""`tidemark COMMAND …`: finds the command and runs it.

Commands are imported when they are called: `tidemark --help` waits for none of them.
"""

import difflib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import io
import os
import platform
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# gRPC's C core prints to stderr; our errors say it better
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from server.exit_status import EXIT_ERROR, EXIT_USAGE
from storage.model.errors import InvalidError, TidemarkError

EXIT_READER_GONE = 141
"""128 + SIGPIPE: what shells report of a program whose reader, such as `head`,
has closed the pipe.
"""

_EXTRAS = {"pyspark": "spark", "pandas": "spark", "psycopg": "spark", "tikv_client": "demo"}
"""The extra of the distribution that brings each module which daemons can do without."""

_WITHOUT_PANDAS = ("coordinator", "store", "capture", "pump", "gc-worker", "up")
"""Daemons, which have no use for it. pyarrow imports it at the first array where it is installed,
for 49 MB and 0.4 s a process.
"""

_NEEDS = {"spark": ("pyspark",), "play": ("pyspark",), "demo": ("tikv_client",)}
"""The packages that commands need."""

COMMANDS = {
    "up": "start all daemons on this machine, for a laptop or a trial",
    "coordinator": "start a coordinator: metadata, timestamps, GC safepoints (PD's and etcd's protocols)",
    "store": "start a store: transactions and a change feed (TiKV's protocol)",
    "capture": "start a capture: read a source, sort its changes, serve them to lake jobs",
    "pump": "start a pump: collect TiDB's binlogs (TiDB Pump's protocol)",
    "gc-worker": "start a GC worker: resolve locks, delete ranges, move the GC safepoint",
    "spark": "start Spark jobs that write lakes: spark run (one changefeed), spark keep (all)",
    "cli": "query and change a running cluster: changefeeds, captures, GC, timestamps",
    "config": "check a configuration file, or print all settings",
    "health": "check whether a daemon on this machine is ready, for containers and service managers",
    "completion": "print a script with which bash, zsh or fish completes commands and flags",
    "play": "run a playground: a MariaDB with a shop, a lake that follows it, SQL to try on both",
    "demo": "run a bank's transfers, and prove that the lake equals the store",
}


_BOTH = ("capture", "store", "pump")
"""Daemons by whose names `tidemark cli` has verbs, too."""


class NotInstalledError(InvalidError):
    """A command needs a module that is not installed here."""

    code = "ErrNotInstalled"

    def __init__(self, module: str) -> None:
        super().__init__(
            f"this command needs {module}, which is not installed here: pip install "
            f"'tidemark-cdc[{_EXTRAS[module]}]', or use the Spark image"
        )


class _NoPandas(importlib.abc.MetaPathFinder):
    """Has pandas look as if it were not installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:  # noqa: ARG002 - the base class's signature
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname, name=fullname)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of another character set shows `?`, and not a traceback.
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            # here, where a closed pipe can be answered; the interpreter would print a traceback
            sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except BaseExceptionGroup as group:
        if group.split(BrokenPipeError)[1] is not None:
            raise
        return _reader_gone()


def _open_closed_streams() -> None:
    """Replace standard streams that were closed before we began, as by `<&-`: Python has None for
    them, and the next file that is opened would get their numbers.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)  # noqa: FBT003 - its only form; for the processes that we start
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _reader_gone() -> int:
    """End quietly if the reader of our output has gone; any other broken pipe, such as a peer's,
    is an error.
    """
    closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
    if not closed:
        raise  # noqa: PLE0704 - called while it is handled
    for stream in closed:
        # What is still buffered would fail once more when the interpreter flushes it.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
    return EXIT_READER_GONE


def _is_closed_pipe(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # closed, or no file at all
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(
            f"tidemark {importlib.metadata.version('tidemark-cdc')} (Python "
            f"{platform.python_version()})"
        )
        return 0
    if wrong := _no_command(arguments):
        print(f"{wrong} See tidemark --help", file=sys.stderr)
        return EXIT_USAGE
    command, argv = arguments[0], arguments[1:]
    if command == "cli" and (odd := [text for text in argv if not _is_unicode(text)]):
        # gRPC sends Unicode only.
        print(f"tidemark cli: {odd[0]!r} is not UTF-8: type it again", file=sys.stderr)
        return EXIT_USAGE
    try:
        _check_installed(command)
        return _call(command, argv)
    except TidemarkError as err:
        print(err, file=sys.stderr)
    except ModuleNotFoundError as err:
        print(_not_installed(err), file=sys.stderr)
    except BaseExceptionGroup as group:
        missing = group.split(ModuleNotFoundError)[0]
        if missing is None:
            raise
        print(_not_installed(_first(missing)), file=sys.stderr)
    return EXIT_ERROR


def _no_command(arguments: Sequence[str]) -> str:
    """The fault of a command's name, and which one is meant; empty if it is a command."""
    name, verb = arguments[0], "".join(arguments[1:2])
    if name in COMMANDS:
        # A daemon takes flags only, and a capture starts its workers by this word.
        if name not in _BOTH or not verb or verb.startswith("-") or verb == "worker":
            return ""
        return (
            f"tidemark {name}: starts a daemon, and takes no {verb!r}. Did you mean tidemark cli "
            f"{name} {verb}?"
        )
    # Imported here: no other command waits for it.
    groups = importlib.import_module("server.cli.cli").GROUPS
    commands = {**{group: f"cli {group}" for group in groups}, **{each: each for each in COMMANDS}}
    nearest = [name] if name in commands else difflib.get_close_matches(name, commands, n=1)
    advice = f"; did you mean tidemark {commands[nearest[0]]}?" if nearest else "."
    return f"tidemark: no command {name!r}{advice}"


def _is_unicode(text: str) -> bool:
    """False: bytes of the command line that are no UTF-8 stand in it as surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _call(command: str, argv: list[str]) -> int:
    if command in _WITHOUT_PANDAS:
        sys.meta_path.insert(0, _NoPandas())
    if command in ("cli", "config", "completion", "health"):
        run = importlib.import_module(f"server.cli.{command}").run
    else:
        # `run_up`, `run_coordinator`, and so on.
        run = getattr(
            importlib.import_module("server.cli.daemon"), f"run_{command.replace('-', '_')}"
        )
    return int(run(argv))


def _check_installed(command: str) -> None:
    """Check for the packages that a command needs before it starts anything; `play` would run for a
    minute first.

    Raises:
        NotInstalledError: a module is not there.
    """
    for module in _NEEDS.get(command, ()):
        if importlib.util.find_spec(module) is None:
            raise NotInstalledError(module)


def _not_installed(err: ModuleNotFoundError) -> NotInstalledError:
    """Return the error for a package that turned out to be missing.

    Raises:
        ModuleNotFoundError: `err`, a defect: no extra has that module.
    """
    name = (err.name or "").partition(".")[0]
    if name not in _EXTRAS:
        raise err
    return NotInstalledError(name)


def _first(group: BaseExceptionGroup[ModuleNotFoundError]) -> ModuleNotFoundError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _usage() -> str:
    lines = "\n".join(f"  {name:<12} {summary}" for name, summary in COMMANDS.items())
    return f"usage: tidemark COMMAND [--help] …\n       tidemark --version\n\n{lines}"


if __name__ == "__main__":
    sys.exit(main())
