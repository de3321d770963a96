"""The queries of Grafana's dashboards, for tests of what they name and of what they answer."""

import re
from collections.abc import Iterator
from pathlib import Path

from deploy.grafana.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"(?<![\w\"$])([a-zA-Z_:][\w:]*_[\w:]*|ALERTS)(?=[\s{\[)]|$)")


def queries(dashboard: Dashboard) -> Iterator[str]:
    """Every query of every panel."""
    for row in dashboard.rows:
        for panel in row.panels:
            yield from panel.queries.values()


def metrics_of(query: str) -> set[str]:
    """The metrics that a query names, by the names that the reference has for them."""
    plain = re.sub(r'"[^"]*"', '""', query)
    plain = re.sub(r"\bby \([^)]*\)", "", plain)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _NAME.findall(plain)}


def with_variables(query: str) -> str:
    """The query as Grafana sends it, with every changefeed chosen."""
    return query.replace("$__rate_interval", "1m").replace("$changefeed", ".*")


def documented_metrics() -> set[str]:
    """The metrics of docs/reference, and what the rules make of them."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rules = (ROOT / "deploy/prometheus/rules.yaml").read_text()
    return set(re.findall(r"^\| `(\w+)`", page, re.M)) | set(re.findall(r"record: (\S+)", rules))
