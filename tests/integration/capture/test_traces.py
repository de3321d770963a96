"""Traces of captures: a reader's span is the parent of what worker processes did for it; and what a
capture does where its spans cannot be sent.
"""

import json
import time

import pyarrow.flight as fl
import pytest

from tests.integration.capture.many_tables import Feed
from tests.integration.capture.processes import (
    patiently,
    running_cluster,
    transaction_client,
)
from tests.otlp import collecting
from tests.ports import free_port

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


def read(location, part, traceparent):
    ticket = json.dumps(part["ticket"] | {"traceparent": traceparent}).encode()
    with fl.FlightClient(location) as client:
        return patiently(lambda: client.do_get(fl.Ticket(ticket)).read_all().num_rows)


def test_a_slice_is_shown_by_whichever_process_serves_it(tmp_path, monkeypatch):
    pytest.importorskip("tikv_client")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "tidemark-test")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with (
            running_cluster(tmp_path, "--workers", "2") as cluster,
            transaction_client(cluster) as store,
        ):
            feed = Feed(cluster, store)
            feed.write(3)
            parts = patiently(feed.reader.ask, "plan", start=feed.start, end=feed.resolved())
            [part, *_] = parts["slices"]
            worker, capture = part["locations"]
            # unsampled, and nonsense: rows come, spans do not
            assert read(worker, part, NOT_SAMPLED) == read(worker, part, "nonsense") == 3
            assert read(worker, part, SAMPLED) == 3
            shown = collector.wait_for(lambda spans: len(spans) >= 3 and list(spans))
            assert read(capture, part, SAMPLED) == 3
            again = collector.wait_for(lambda spans: len(spans) >= 7 and spans[len(shown) :])

    names = ["tidemark.pull", "tidemark.slice", "tidemark.sort"]
    assert sorted(span.name for span in shown if span.name != "tidemark.stage") == names
    assert {span.trace.hex() for span in [*shown, *again]} == {TRACE}
    assert {span.service for span in [*shown, *again]} == {"tidemark-test"}
    [first] = [span for span in shown if span.name == "tidemark.slice"]
    assert first.parent.hex() == SPAN
    assert "worker" in first.resource["tidemark.daemon"]

    # The capture serves a worker's slice by asking the worker, within its own span.
    of_capture, of_worker = sorted(
        (span for span in again if span.name == "tidemark.slice"),
        key=lambda span: "worker" in span.resource["tidemark.daemon"],
    )
    assert of_capture.parent.hex() == SPAN
    assert of_worker.parent == of_capture.id


def test_a_collector_that_is_away_is_told_of_once_and_holds_nothing_up(tmp_path, monkeypatch):
    pytest.importorskip("tikv_client")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        feed = Feed(cluster, store)
        feed.write(3)
        parts = patiently(feed.reader.ask, "plan", start=feed.start, end=feed.resolved())["slices"]
        for part in parts:
            assert read(part["locations"][-1], part, SAMPLED) == 3
        deadline = time.monotonic() + 60
        while "traces: " not in cluster.capture.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        begun_s = time.monotonic()
        assert cluster.capture.terminate() == 0
        assert time.monotonic() - begun_s < 20
    warnings = [line for line in cluster.capture.log.read_text().splitlines() if "traces: " in line]
    assert len(warnings) == 1
    assert json.loads(warnings[0])["level"] == "warning"
