"""The daemon's settings."""

import socket

import pytest

from server.config import ConfigError
from server.gc_worker.daemon import GCWorkerConfig, _advertised


def test_the_defaults_are_tidbs_tick_and_lease() -> None:
    config = GCWorkerConfig().checked()
    assert (config.tick_seconds, config.lease_seconds) == (60.0, 120.0)


@pytest.mark.parametrize(("tick_s", "lease_s"), [(60, 100), (0, 10), (-1, 10), (0.1, 1.5)])
def test_a_lease_that_would_run_out_between_ticks_is_refused(tick_s: float, lease_s: float) -> None:
    with pytest.raises(
        ConfigError, match=r"--lease-seconds \(.*\) must be at least 2, and two --tick-seconds"
    ):
        GCWorkerConfig(tick_seconds=tick_s, lease_seconds=lease_s).checked()


def test_the_shortest_times_are_tidbs_unless_told_otherwise() -> None:
    assert GCWorkerConfig().bounds().least_ms == 600_000
    assert GCWorkerConfig(min_gc_time="1ms").bounds().least_ms == 1


@pytest.mark.parametrize("text", ["10", "0s", "9000h"])
def test_a_shortest_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--min-gc-time"):
        GCWorkerConfig(min_gc_time=text).checked()


def test_a_wildcard_is_told_as_the_hosts_name() -> None:
    assert _advertised("127.0.0.1:8302") == "127.0.0.1:8302"
    assert _advertised("0.0.0.0:8302") == _advertised("[::]:8302") == f"{socket.gethostname()}:8302"
