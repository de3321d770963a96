"""The parser of every command: argparse's, which also names the nearest verb or flag."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICES = re.compile(r"invalid choice: '(?P<given>.*?)' \(choose from (?P<names>.*)\)$", re.S)


class Parser(argparse.ArgumentParser):
    """Its verbs have parsers of this class, too; flags are not abbreviated."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | settings))
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what is unknown here, where the flags of the verb are known."""
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._advice(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong; status 2."""
        wrong = _CHOICES.search(message)
        if wrong:
            message += _nearest(wrong["given"], re.findall(r"'([^']*)'", wrong["names"]))
        elif message.startswith("the following arguments are required"):
            message += self._advice(self._given)
        super().error(message)

    def _advice(self, given: Iterable[str]) -> str:
        """For the first long flag that is none of ours, the nearest one."""
        flags = [text.partition("=")[0] for text in given if text.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return _nearest(unknown[0], self._option_string_actions) if unknown else ""


def _nearest(given: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
