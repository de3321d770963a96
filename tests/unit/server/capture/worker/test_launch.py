"""How many workers there are, where they listen, and which of them has which table."""

from contextlib import ExitStack, contextmanager

import pytest

from server.capture.config import WORKERS_MAX
from server.capture.directory import DataDirError, control_socket
from server.capture.worker.pool import Launch
from server.config import ConfigError
from server.log import LogConfig
from server.rpc.credentials import SecurityConfig


def launch(directory, **changed):
    members = {
        "directory": directory,
        "coordinator": "pd:2379",
        "flight_addr": "0.0.0.0:8310",
        "advertise_host": "capture",
        "memory_quota_bytes": 1 << 20,
        "security": SecurityConfig(),
    }
    return Launch(**members | changed)


@contextmanager
def ready(workers):
    """As if they listened where they were told to."""
    with ExitStack() as stack:
        for worker in workers:
            arguments = worker.child._arguments
            worker.child.endpoints = {"flight": arguments[arguments.index("--flight-addr") + 1]}
            stack.callback(worker.child.endpoints.clear)
        yield workers


def test_each_next_worker_has_the_next_port_and_a_socket_of_its_own(tmp_path):
    with ready(launch(tmp_path).workers(3)) as workers:
        assert [worker.location for worker in workers] == [
            f"grpc://capture:{port}" for port in (8310, 8311, 8312)
        ]
    assert len({worker.control for worker in workers}) == 3
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with ready(launch(tmp_path, flight_addr="127.0.0.1:0").workers(2)) as workers:
        assert {worker.location for worker in workers} == {"grpc://capture:0"}


def test_with_tls_the_workers_have_the_captures_files(tmp_path):
    security = SecurityConfig(ca_path="ca", cert_path="cert", key_path="key")
    with ready(launch(tmp_path, security=security).workers(2)) as [first, _]:
        assert first.location.startswith("grpc+tls://")
        files = first.child._arguments
        assert [
            files[files.index(flag) + 1] for flag in ("--ca-path", "--cert-path", "--key-path")
        ] == [
            "ca",
            "cert",
            "key",
        ]


def test_the_workers_log_as_the_capture_does(tmp_path):
    with ready(
        launch(tmp_path, log=LogConfig(log_level="debug", log_format="text")).workers(2)
    ) as [first, _]:
        assert first.child._arguments[-4:] == ["--log-level", "debug", "--log-format", "text"]


def test_the_workers_ask_readers_for_the_captures_token(tmp_path):
    with ready(launch(tmp_path, flight_token_file="tokens/readers").workers(2)) as workers:
        arguments = [worker.child._arguments for worker in workers]
    assert all(
        each[each.index("--flight-token-file") + 1] == "tokens/readers" for each in arguments
    )


@pytest.mark.parametrize("count", [-1, 0, 1, WORKERS_MAX + 1])
def test_a_number_of_workers_that_cannot_be_is_refused(tmp_path, count):
    with pytest.raises(ConfigError, match="--workers"):
        launch(tmp_path).workers(count)


@pytest.mark.parametrize("address", ["8310", "host:", "host:x", "host:65535"])
def test_an_address_without_room_for_all_workers_is_refused(tmp_path, address):
    with pytest.raises(ConfigError, match="--worker-flight-addr"):
        launch(tmp_path, flight_addr=address).workers(2)


def test_a_path_too_long_for_sockets_is_refused(tmp_path):
    with pytest.raises(DataDirError, match="shorter --data-dir"):
        launch(tmp_path / ("x" * 100)).workers(2)
    assert control_socket(tmp_path, 3) == f"unix:{tmp_path}/run/3.control"
