"""The dashboards are those of the tables, and ask for metrics that exist.

That their queries have answers is proved against a real Prometheus, in
tests/integration/test_dashboards.py.
"""

import json
from itertools import pairwise

import pytest
import yaml

from deploy.grafana import __main__ as generated
from deploy.grafana.dashboard import Dashboard, Panel
from deploy.grafana.panels import DASHBOARDS
from tests.dashboards import ROOT, documented_metrics, metrics_of, queries

GRAFANA = ROOT / "deploy" / "grafana"


def test_the_files_are_what_the_tables_say():
    found = {path: path.read_text() for path in generated.DIRECTORY.iterdir()}
    assert found == generated.files(), "run `python -m deploy.grafana`"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_every_metric_of_a_query_is_in_the_reference(dashboard):
    pythons = {
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "ALERTS",
    }
    known = documented_metrics() | pythons
    unknown = {name: query for query in queries(dashboard) for name in metrics_of(query) - known}
    assert unknown == {}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_panels_lie_side_by_side_and_have_numbers_of_their_own(dashboard):
    panels = dashboard.document()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in pairwise(panels):
        left, right = one["gridPos"], other["gridPos"]
        beside = left["y"] == right["y"] and left["x"] + left["w"] <= right["x"]
        assert beside or left["y"] + left["h"] <= right["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_addresses_and_titles_are_told_apart():
    documents = [json.loads(path.read_text()) for path in generated.DIRECTORY.iterdir()]
    assert len({document["uid"] for document in documents}) == len(DASHBOARDS)
    assert len({document["title"] for document in documents}) == len(DASHBOARDS)
    titles = {
        dashboard.name: [panel.title for row in dashboard.rows for panel in row.panels]
        for dashboard in DASHBOARDS
    }
    assert {name: len(set(each)) for name, each in titles.items()} == {
        name: len(each) for name, each in titles.items()
    }


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_the_choice_of_a_changefeed_is_offered_where_queries_use_it(dashboard: Dashboard):
    uses = any("$changefeed" in query for query in queries(dashboard))
    assert uses == dashboard.changefeeds


def test_every_panel_says_what_it_shows():
    panels: list[Panel] = [
        panel for dashboard in DASHBOARDS for row in dashboard.rows for panel in row.panels
    ]
    assert [panel.title for panel in panels if not panel.text or not panel.queries] == []


def test_the_provisioning_points_at_what_the_composition_mounts():
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/tidemark.yaml").read_text())
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/tidemark.yaml").read_text())[
        "datasources"
    ]
    mounts = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["grafana"][
        "volumes"
    ]
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in mounts
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in mounts
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
