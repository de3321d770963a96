"""The parser of every command: argparse's, which also names the nearest verb or flag."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICES = re.compile(r"invalid choice: '(?P<given>.*?)' \(choose from (?P<names>.*)\)$", re.S)


class Parser(argparse.ArgumentParser):
    """Its verbs have parsers of this class, too; flags are not abbreviated."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | settings))

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what is unknown here, where the flags of the verb are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            advice = _nearest(flags[0], self._option_string_actions) if flags else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong; status 2."""
        wrong = _CHOICES.search(message)
        if wrong:
            message += _nearest(wrong["given"], re.findall(r"'([^']*)'", wrong["names"]))
        super().error(message)


def _nearest(given: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
