"""The shell blocks of the documentation, and what an HTML comment right above one says of it. Pure.

<!-- walk: skip: REASON -->        the walk leaves the block out, for this reason
<!-- walk: beside until: TEXT -->  it goes on beside the next ones, which begin when it prints TEXT
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- walk: (?P<verb>skip|beside until|after ending): (?P<what>[^\n]+?) -->\n)?"
    r"```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_COMMENT = re.compile(r"<!-- walk:")
_COMMAND = re.compile(r"^(?:\$ |make |pip |docker |tidemark |(?:\.venv/bin|data/play)/)", re.M)


@dataclass(frozen=True)
class Block:
    """One block to paste; `line` is that of its first command."""

    page: str
    line: int
    text: str
    skipped: str
    """Why the walk leaves it out; empty if it does not."""
    until: str
    """What it prints when the next block may begin; empty if it is to end first."""
    ending: str
    """What Ctrl-C ends before it; empty if all goes on."""


class PageError(Exception):
    """A page holds commands that the walk would not see, or a comment that speaks of no block."""


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that readers paste from, the README first."""
    return [
        root / "README.md",
        root / "CONTRIBUTING.md",
        root / "SECURITY.md",
        *sorted((root / "docs").rglob("*.md")),
    ]


def blocks(page: str, text: str) -> Iterator[Block]:
    """The shell blocks of a page, in order.

    Raises:
        PageError: commands in a block that is not marked as `sh`, or a comment without a block.
    """
    found = list(_BLOCK.finditer(text))
    if len(_COMMENT.findall(text)) != sum(
        match["verb"] is not None and match["kind"] == "sh" for match in found
    ):
        raise PageError(
            f"{page}: a comment `walk:` does not stand right above a block of sh, or says "
            "something else"
        )
    for match in found:
        line = text.count("\n", 0, match.start("text")) + 1
        if match["kind"] == "sh":
            what = {match["verb"]: match["what"]}
            yield Block(
                page,
                line,
                match["text"],
                what.get("skip", ""),
                what.get("beside until", ""),
                what.get("after ending", ""),
            )
        elif not match["kind"] and _COMMAND.search(match["text"]):
            raise PageError(f"{page}:{line}: commands in a block that does not begin with ```sh")
