"""One `/metrics` for a capture and its workers."""

import socket
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, generate_latest

from server import http
from server.capture.worker.pool import WorkersRegistry


def shown(registry, name):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith((name, f"# TYPE {name}"))]


def test_workers_samples_stand_in_the_captures_families_and_a_silent_worker_is_down():
    remote = CollectorRegistry()
    Counter("tidemark_sorter_rows_in_total", "as the sorter's", registry=remote).inc(7)
    Counter("tidemark_only_there_total", "of workers only", ["by"], registry=remote).labels(
        "x"
    ).inc()
    registry = WorkersRegistry()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
    with http.listen("127.0.0.1:0", ready=lambda: True, registry=remote) as address:
        registry.workers = [
            SimpleNamespace(number=0, http=address),
            SimpleNamespace(number=1, http=nobody),
        ]
        assert 'tidemark_sorter_rows_in_total{worker="0"} 7.0' in shown(
            registry, "tidemark_sorter_rows_in_total"
        )
        assert (
            len(
                [
                    line
                    for line in shown(registry, "tidemark_sorter_rows_in_total")
                    if line.startswith("# TYPE")
                ]
            )
            == 1
        )
        assert shown(registry, "tidemark_only_there_total") == [
            "# TYPE tidemark_only_there_total counter",
            'tidemark_only_there_total{by="x",worker="0"} 1.0',
        ]
        assert shown(registry, "tidemark_capture_worker_up")[1:] == [
            'tidemark_capture_worker_up{worker="0"} 1.0',
            'tidemark_capture_worker_up{worker="1"} 0.0',
        ]


def test_without_workers_it_is_the_process_alone():
    assert shown(WorkersRegistry(), "tidemark_capture_worker_up") == []
    assert shown(WorkersRegistry(), "process_resident_memory_bytes")
