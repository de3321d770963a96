"""Patterns of a table filter against names, in time that grows with their lengths' product at most,
whoever wrote them.

Python's own regular expressions try again and again: `/(a+)+$/` or `*a*a*a*a*` would hold a capture
for hours on one long name. So regular expressions are RE2's, which Arrow brings along, and which is
the dialect of TiDB's filters; and of a name with `*` each part is looked for once, from the left.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

ANY_TEXT = "*"


class NamePattern(Protocol):
    """What a name must be like; case does not matter."""

    def matches(self, name: str) -> bool:
        """Whether it is."""
        ...


@dataclass(frozen=True, slots=True)
class Wildcards:
    """A whole name."""

    _compiled: re.Pattern[str]

    @classmethod
    def of(cls, parts: Sequence[str]) -> "Wildcards":
        """`ANY_TEXT`, or regular expressions of one character each, in order; raises re.error."""
        pieces = [""]
        for part in parts:
            if part == ANY_TEXT:
                pieces.append("")
            else:
                pieces[-1] += part
        first, *others = pieces
        # what was found first stays
        middle = "".join(f"(?>.*?{piece})" for piece in others[:-1] if piece)
        last = f".*{others[-1]}" if others else ""
        return cls(re.compile(first + middle + last, re.IGNORECASE | re.DOTALL))

    def matches(self, name: str) -> bool:
        """See `NamePattern.matches`."""
        return self._compiled.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Regex:
    """Any part of a name."""

    _text: str

    @classmethod
    def of(cls, text: str) -> "Regex":
        """Raises ValueError: RE2 cannot read it, which has no look-around and no references to
        groups.
        """
        pattern = cls("(?s)" + text)
        pattern.matches("")
        return pattern

    def matches(self, name: str) -> bool:
        """See `NamePattern.matches`."""
        return bool(pc.match_substring_regex(pa.scalar(name), self._text, ignore_case=True).as_py())
