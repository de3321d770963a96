"""One trace shows a cut from MariaDB to the lake, over OTLP as it is."""

import time
from collections import defaultdict

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_job_errors import keeping
from tests.mariadb import running_mariadb
from tests.otlp import collecting

pytestmark = pytest.mark.timeout(500)


def test_a_trace_shows_a_cut_from_the_source_to_the_lake(tmp_path, monkeypatch):
    with collecting() as collector, running_mariadb() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=shop")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY)")
        with running_cluster(tmp_path) as cluster, keeping(cluster, tmp_path):
            made = cluster.cli(
                *("changefeed", "create", "-c", "shop", "--filter", "shop.*"),
                *("--sink-uri", f"delta://{tmp_path}/lake"),
                *("--source-uri", f"{server.uri}?idle-row-ms=300"),
            )
            assert made["state"] == "normal", made
            before_ns = time.time_ns()
            server.execute("INSERT INTO shop.a VALUES (1), (2), (3)")

            def cut_with_rows(spans):
                cuts = (span for span in spans if span.name == "tidemark.cut")
                return next((cut for cut in cuts if cut.attributes["tidemark.rows"]), None)

            cut = collector.wait_for(cut_with_rows)
            spans = collector.wait_for(lambda spans: whole(spans, cut))

        by_name = defaultdict(list)
        for span in spans:
            by_name[span.name.removeprefix("tidemark.")].append(span)
        staged = by_name.pop("stage", [])  # where the job came a second or more after the rows
        names = ("cut", "plan", "table", "slice", "pull", "sort", "commit", "acknowledge")
        assert {name: len(spans) for name, spans in by_name.items()} == dict.fromkeys(names, 1)
        [part] = by_name["slice"]
        [pulled], [ordered] = by_name["pull"], by_name["sort"]
        assert cut.parent == b""
        assert all(
            span.parent == cut.id for name in ("table", "slice", "commit") for span in by_name[name]
        )
        assert {pulled.parent, ordered.parent} == {part.id}

        assert cut.attributes["tidemark.changefeed"] == "shop"
        assert part.attributes["tidemark.table"] == "shop.a"
        assert part.attributes["tidemark.rows"] == pulled.attributes["tidemark.rows"] == 3
        assert part.attributes["tidemark.commit_ts"] == cut.attributes["tidemark.commit_ts"]
        assert cut.attributes["tidemark.start_ts"] < cut.attributes["tidemark.commit_ts"]
        assert {cut.service, part.service} == {"tidemark-lake-job", "tidemark-capture"}
        assert part.resource["deployment.environment"] == "test"
        assert all(headers["x-tenant"] == "shop" for headers in collector.headers)

        # MariaDB's commits have whole seconds, and a change is there before it is in the lake.
        assert before_ns - 1_000_000_000 <= pulled.start_ns <= pulled.end_ns <= part.start_ns
        assert cut.start_ns <= pulled.start_ns
        assert pulled.end_ns == ordered.start_ns <= ordered.end_ns <= part.start_ns
        assert all(ordered.end_ns <= span.start_ns <= part.start_ns for span in staged)
        assert part.end_ns <= by_name["commit"][0].end_ns <= cut.end_ns


def whole(spans, cut):
    """The spans of the cut's trace, once the captures have sent theirs, too."""
    of_cut = [span for span in spans if span.trace == cut.trace]
    return of_cut if any(span.name == "tidemark.slice" for span in of_cut) else None
