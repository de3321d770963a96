"""The page of metrics, read from where the code makes them."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_KIND = re.compile(r"(?:\w*?)(Counter|Gauge|Histogram)(?:MetricFamily)?$")
_NAME = re.compile(r"(?:tidemark|tikv|tidb|ticdc|binlog|gc|pd|etcd)_[a-z0-9_]+")
_HEAD = """# Metrics

What daemons show at `/metrics` of their `--http-addr`, beside Python's own `process_…` and
`python_…`. `tidemark up` shows those of all its daemons, with the label `daemon`. Names that begin
with `pd_`, `tikv_`, `tidb_`, `ticdc_` or `binlog_` are those of PD, TiKV, TiDB, TiCDC and Pump, with
their units, so that their dashboards and alerts find them. A TSO is TiDB's timestamp: milliseconds
since 1970, shifted left by 18 bits; beside it is its time as `…_timestamp_seconds`.
"""


@dataclass(frozen=True, order=True)
class Metric:
    """One metric, as Prometheus shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    room: str
    """The package that makes it, such as server/pump."""


def page(modules: Iterable[tuple[Path, ast.Module]]) -> str:
    """The page as Markdown, a table for each package."""
    made = sorted({metric for path, tree in modules for metric in metrics(path, tree)})
    lines = [_HEAD]
    for room in sorted({metric.room for metric in made}):
        lines += [f"## {room}\n", "| name | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in made if metric.room == room]
        lines.append("")
    return "\n".join(lines)


def metrics(path: Path, tree: ast.Module) -> Iterator[Metric]:
    """What one module makes: calls of prometheus_client's types,
    and tables of a changefeed's gauges by their names.
    """
    room = "/".join(path.parts[:2]) if path.parts[0] == "server" else path.parts[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            kind = _kind(node)
            name, meaning = _text(node.args[0]), _text(node.args[1])
            if kind and name and meaning and _NAME.fullmatch(name):
                yield Metric(name, kind, _labels(node), _sentence(meaning), room)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                name, meaning = _text(key), _text(value)
                if meaning and name.startswith("tidemark_"):
                    yield Metric(name, "gauge", ("changefeed",), _sentence(meaning), room)


def _kind(call: ast.Call) -> str:
    function = call.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name == "Metric":
        return _text(call.args[2]) if len(call.args) > 2 else ""
    match = _KIND.fullmatch(name)
    return match[1].lower() if match else ""


def _labels(call: ast.Call) -> tuple[str, ...]:
    given = [word.value for word in call.keywords if word.arg in ("labels", "labelnames")]
    for node in [*given, *call.args[2:3]]:
        if isinstance(node, ast.List | ast.Tuple):
            return tuple(map(_text, node.elts))
    return ()


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".")


def _row(metric: Metric) -> str:
    meaning = metric.meaning.replace("|", "\\|")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |"
