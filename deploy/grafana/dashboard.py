"""What a dashboard of Grafana is made of, and the JSON that Grafana reads of it.

A panel is one or more PromQL queries with their legends. Its place on the grid and its number
follow from the order; colours and the rest are the same everywhere.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_COLUMNS: Final = 24
_HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph, or one line of numbers."""

    title: str
    queries: dict[str, str]
    """PromQL by its legend, in which `{{label}}` is a label's value."""
    text: str
    """What it shows, and what to do when it looks wrong."""
    unit: str = "short"
    """Grafana's name of the unit: s, bytes, Bps, cps (counts a second), percentunit, short."""
    kind: str = "timeseries"
    """timeseries, stat, or state-timeline."""
    width: int = 8
    red_from: float | None = None
    """A stat is red from this value on, and green below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One file; its name and its address in Grafana are `tidemark-` and the name."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]
    changefeeds: bool = False
    """Whether its queries name `$changefeed`, which one then chooses at the top."""

    def document(self) -> dict[str, Any]:
        """What Grafana reads."""
        return {
            "uid": f"tidemark-{self.name}",
            "title": self.title,
            "description": self.text,
            "tags": ["tidemark"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [_links()],
            "templating": {"list": list(_variables(changefeeds=self.changefeeds))},
            "annotations": {"list": [_alerts()]},
            "panels": list(_placed(self.rows)),
        }


def text_of(dashboard: Dashboard) -> str:
    """The file's text."""
    return json.dumps(dashboard.document(), indent=2, ensure_ascii=False) + "\n"


def _placed(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Headings and panels from left to right and from top to bottom."""
    y = number = 0
    for row in rows:
        number += 1
        yield _heading(number, row.title, y)
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}
            yield _panel(number, panel) | {"gridPos": place}
            x += panel.width
        y += _HEIGHT


def _heading(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": query,
                "legendFormat": legend,
                "range": True,
            }
            for position, (legend, query) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _field(panel: Panel) -> dict[str, Any]:
    shown: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        shown["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 8}
    if panel.kind == "stat":
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if panel.red_from is not None:
            steps.append({"color": "red", "value": panel.red_from})
        shown["color"] = {"mode": "thresholds"}
        shown["thresholds"] = {"mode": "absolute", "steps": steps}
    return shown


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
            "calcs": [],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
    "state-timeline": {
        "showValue": "never",
        "mergeValues": True,
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "tooltip": {"mode": "single", "sort": "none"},
    },
}


def _variables(*, changefeeds: bool) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
        "regex": "",
    }
    if changefeeds:
        values = "label_values(tidemark_capture_changefeed_state, changefeed)"
        yield {
            "name": "changefeed",
            "label": "Changefeed",
            "type": "query",
            "datasource": _SOURCE,
            "definition": values,
            "query": {"query": values, "refId": "changefeeds"},
            "hide": 0,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "options": [],
            "regex": "",
        }


def _links() -> dict[str, Any]:
    """To the other dashboards, with the time that is looked at."""
    return {
        "type": "dashboards",
        "title": "Tidemark",
        "tags": ["tidemark"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _alerts() -> dict[str, Any]:
    """A mark where an alert of deploy/prometheus/rules.yaml fires."""
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing",alertname=~"Tidemark.+"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{changefeed}} {{daemon}}",
        "step": "30s",
    }
