"""Spans: sent where the environment asks for it, and nowhere else."""

import json
import subprocess
import sys

import pytest
from pyspark_tidemark import tracing
from pyspark_tidemark.flight import SliceEndpoint, slices_within

from tests.otlp import collecting, collecting_by_http

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def refused(text):
    raise AssertionError(text)


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported():
    program = (
        "import sys; from pyspark_tidemark import tracing\n"
        "with tracing.sending('x', print):\n"
        "    span = tracing.begin('cut', table='a')\n"
        "    span.child('part').end(); span.set(rows=1); span.end(ValueError('x'))\n"
        f"    assert tracing.begin_below('{CALLER}', 'slice') is tracing.NO_SPAN\n"
        "    assert not tracing.is_on() and not span.traceparent and not span.is_recording\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")],
)
def test_an_operator_switches_traces_off(monkeypatch, variable, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    with tracing.sending("test", refused):
        assert not tracing.is_on()


def only_warning():
    """Why nothing is traced."""
    warnings = []
    with tracing.sending("test", warnings.append):
        assert not tracing.is_on()
        assert tracing.begin("cut") is tracing.NO_SPAN
    [warning] = warnings
    return warning


def test_another_protocol_is_told_by_name(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    warning = only_warning()
    assert "'http/json'" in warning
    assert "grpc" in warning
    assert "http/protobuf" in warning


@pytest.mark.parametrize(
    ("protocol", "module", "extra"),
    [("grpc", "grpc", "otel"), ("http/protobuf", "http", "otel-http")],
)
def test_a_missing_extra_is_told_with_what_installs_it(monkeypatch, protocol, module, extra):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = f"opentelemetry.exporter.otlp.proto.{module}.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    warning = only_warning()
    assert f"pip install 'tidemark-cdc[{extra}]'" in warning


def test_a_variable_that_cannot_be_used_is_told(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    warning = only_warning()
    assert "soon" in warning


@pytest.mark.parametrize(
    ("protocol", "collects"), [("grpc", collecting), ("http/protobuf", collecting_by_http)]
)
def test_spans_arrive_with_their_parents_and_times(monkeypatch, protocol, collects):
    with collects() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        with tracing.sending("tidemark-test", refused):
            cut = tracing.begin("cut", 1_000, changefeed="shop")
            below = tracing.begin_below(cut.traceparent, "slice", table="a")
            with tracing.within(below):
                tracing.current().child("pull", 2_000, rows=3).end(end_ns=3_000)
            assert tracing.current() is tracing.NO_SPAN
            below.end(ValueError("the reader went away"))
            cut.end(end_ns=9_000)
        # what was begun before the end is sent at the end
        shown = {span.name.removeprefix("tidemark."): span for span in collector.spans}
    assert (shown["cut"].start_ns, shown["cut"].end_ns, shown["cut"].parent) == (1_000, 9_000, b"")
    assert shown["slice"].parent == shown["cut"].id
    assert shown["pull"].parent == shown["slice"].id
    assert (shown["pull"].start_ns, shown["pull"].end_ns) == (2_000, 3_000)
    assert shown["pull"].attributes == {"tidemark.rows": 3}
    assert shown["slice"].is_error
    assert not shown["cut"].is_error
    assert {span.trace for span in shown.values()} == {shown["cut"].trace}
    assert {span.service for span in shown.values()} == {"tidemark-test"}


def test_captures_begin_no_trace_of_their_own(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with tracing.sending("test", refused):
        for nobody in ("", "nonsense", CALLER[:-2] + "00"):
            assert tracing.begin_below(nobody, "slice") is tracing.NO_SPAN


def test_the_first_of_many_slices_are_traced():
    slices = [SliceEndpoint(f"t{n}", (), b'{"table":"t"}', 1, 1) for n in range(150)]
    assert slices_within("", slices) == slices
    traced = slices_within(CALLER, slices)
    assert [part.table for part in traced] == [part.table for part in slices]
    assert [part.is_traced for part in traced] == [True] * 100 + [False] * 50
    assert json.loads(traced[0].ticket) == {"table": "t", "traceparent": CALLER}
    assert traced[100:] == slices[100:]
