"""What `make bench` found: results.json, the tables between two marks of a page, and pictures.

results.json has an entry for each bench and size: the values of every run, the load when they
were over, and the machine and commit they were measured on. Another run replaces the entries that
it measures, and leaves the others. The page is the directory's neighbour, docs/benchmarks.md beside
docs/benchmarks.
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import plot

DIRECTORY = Path(__file__).parents[2] / "docs" / "benchmarks"
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"
_COLOURS = ("#1f5fa8", "#b3541e")

Entry = dict[str, Any]


class Results:
    """The entries of results.json; each `add` writes the file anew."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self._path = path
        self._machine = machine
        self.entries = entries_of(path)

    def add(self, entry: Entry) -> None:
        """Put an entry in the place of the one of the same bench and size, or at the end."""
        entry = {**entry, "machine": self._machine}
        same = [_key(other) for other in self.entries]
        if _key(entry) in same:
            self.entries[same.index(_key(entry))] = entry
        else:
            self.entries.append(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(json.dumps(each) for each in self.entries)
        self._path.write_text(f"[\n{text}\n]\n")


def entries_of(path: Path) -> list[Entry]:
    """What a results.json holds; nothing if there is none."""
    return list(json.loads(path.read_text())) if path.exists() else []


def write(directory: Path) -> None:
    """Make tables and pictures from results.json of the directory."""
    entries = sorted(entries_of(directory / "results.json"), key=lambda entry: entry["bench"])
    parts: list[str] = []
    for name, group in groupby(entries, key=lambda entry: entry["bench"]):
        sizes = sorted(group, key=lambda entry: entry["size"])
        picture = f"{re.sub('[^a-z0-9]+', '-', name.lower())}.svg"
        drawn = picture_of(sizes)
        if drawn:
            (directory / picture).write_text(drawn)
        parts.append(section(sizes, f"{directory.name}/{picture}" if drawn else ""))
    page = directory.with_suffix(".md")
    text = page.read_text() if page.exists() else ""
    page.write_text(put_between(text, "\n\n".join(parts)))


def put_between(page: str, text: str) -> str:
    """The page with `text` between its marks; a page without marks gets them at its end."""
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n{BEGIN}\n{END}\n".lstrip()
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def section(sizes: Sequence[Entry], picture: str) -> str:
    """One bench: what it was measured on, and a line for each size and subject."""
    first = sizes[0]
    figures = list(next(iter(first["values"].values())))
    flags = f", `{first['flags']}`" if first["flags"] else ""
    lines = [f"### {first['bench']}{flags}", "", _machines(sizes)]
    if picture:
        lines += ["", f"![{first['bench']}]({picture})"]
    lines += [
        "",
        f"| {first['grows']} | | {' | '.join(figures)} | load |",
        "|---" * (3 + len(figures)) + "|",
    ]
    for entry in sizes:
        for subject, values in entry["values"].items():
            shown = " | ".join(spread(values[figure]) for figure in figures)
            lines.append(f"| {entry['size']} | {subject} | {shown} | {entry['load_1m']} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """`median (least, most)`."""
    return f"{median(values):g} ({min(values):g}, {max(values):g})"


def picture_of(sizes: Sequence[Entry]) -> str:
    """Our medians of the first two figures, by size; empty where there is nothing to draw."""
    grows, ours = sizes[0]["grows"], [next(iter(entry["values"].values())) for entry in sizes]
    figures = list(ours[0])[:2]
    runs = [
        {grows: entry["size"], **{figure: median(values[figure]) for figure in figures}}
        for entry, values in zip(sizes, ours, strict=True)
    ]
    # The axes are logarithmic, and one point is no line.
    if (
        len(figures) < 2
        or len(runs) < 2
        or any(value <= 0 for each in runs for value in each.values())
    ):
        return ""
    series = [(figure, figure, colour) for figure, colour in zip(figures, _COLOURS, strict=True)]
    return plot.draw(runs, [grows], sizes[0]["bench"], series)


def _machines(sizes: Sequence[Entry]) -> str:
    told: list[str] = []
    for entry in sizes:
        machine = entry["machine"]
        count = len(next(iter(next(iter(entry["values"].values())).values())))
        line = (
            f"{count} runs on {machine['date']} of {machine['commit']}: {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['memory_gb']} GB, Linux {machine['kernel']}, "
            f"Python {machine['python']}."
        )
        if line not in told:
            told.append(line)
    return " ".join(told) + " Medians (least, most)."


def _key(entry: Entry) -> tuple[str, int]:
    return entry["bench"], entry["size"]
