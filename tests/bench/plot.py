"""Draws how a benchmark grows, as SVG: `python -m tests.bench.plot --title "rows" < lines.jsonl >
picture.svg`.

Reads the JSON lines of runs, one panel for each of the fields `--against` (runs that differ in no
other of them than that), and draws rows/s and CPU µs/row, both axes logarithmic. Needs nothing but
Python.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 420, 260, 56
Series = Sequence[tuple[str, str, str]]
"""(field, label, colour) of the left axis, and of the right one."""
SERIES: Series = (("per_s", "rows/s", "#1f5fa8"), ("cpu_us_per_op", "CPU µs/row", "#b3541e"))

Run = dict[str, Any]


class Scale:
    """Maps numbers to pixels, logarithmically, between whole powers of ten."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.low, self.high = low, max(high, low + 1)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self._begin + part * (self._end - self._begin), 1)

    def ticks(self) -> list[float]:
        """The powers of ten."""
        return [10.0**power for power in range(self.low, self.high + 1)]


def select(runs: list[Run], field: str, others: Sequence[str]) -> list[Run]:
    """Runs along `field`: those that share the most common values of the other fields."""
    common = {other: Counter(run[other] for run in runs).most_common(1)[0][0] for other in others}
    chosen = [run for run in runs if all(run[other] == common[other] for other in others)]
    return sorted(chosen, key=lambda run: run[field])


def panel(runs: list[Run], field: str, at: tuple[float, float], series: Series) -> str:
    """Both series against `field`, each with an axis of its own; `at` is the left upper corner."""
    left, top = at
    across = Scale([run[field] for run in runs], left + MARGIN, left + WIDTH - MARGIN)
    bottom, ceiling = top + HEIGHT - MARGIN, top + MARGIN / 2
    parts = [_text(left + WIDTH / 2, top + HEIGHT - 14, field, "middle")]
    for tick in across.ticks():
        parts += [
            _line(across(tick), ceiling, across(tick), bottom, "#ddd"),
            _text(across(tick), bottom + 16, _number(tick), "middle"),
        ]
    for (name, label, colour), edge, anchor in zip(
        series, (left + MARGIN, left + WIDTH - MARGIN), ("end", "start"), strict=True
    ):
        up = Scale([run[name] for run in runs], bottom, ceiling)
        shift = -6 if anchor == "end" else 6
        parts += [
            _text(edge + shift, up(tick) + 4, _number(tick), anchor, colour) for tick in up.ticks()
        ]
        parts.append(_text(edge, ceiling - 12, label, "middle", colour))
        points = [(across(run[field]), up(run[name])) for run in runs]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
    return "\n".join(parts)


def draw(runs: list[Run], against: Sequence[str], title: str, series: Series = SERIES) -> str:
    """The whole picture."""
    panels = []
    for number, field in enumerate(against):
        others = [other for other in against if other != field]
        panels.append(panel(select(runs, field, others), field, (number * WIDTH, 30), series))
    width, height = WIDTH * len(panels), HEIGHT + 40
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            _text(width / 2, 20, title, "middle"),
            *panels,
            "</svg>\n",
        ]
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _number(value: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def main() -> None:
    """Read standard input, write the picture to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--title", required=True)
    parser.add_argument("--against", nargs="+", default=["tables", "rows"])
    args = parser.parse_args()
    runs = [json.loads(line) for line in sys.stdin if line.strip()]
    sys.stdout.write(draw(runs, args.against, args.title))


if __name__ == "__main__":
    main()
