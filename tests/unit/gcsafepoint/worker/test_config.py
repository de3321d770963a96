"""The variables of mysql.tidb: the seed's defaults, and a reason for each refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.config import (
    COMMENTS,
    MAX_WRITE_BYTES,
    STATE_VARIABLES,
    UNBOUND,
    Bounds,
    GCConfig,
    GCConfigError,
    format_size,
    parse_size,
)

configs = st.builds(
    GCConfig,
    enable=st.booleans(),
    run_interval_ms=st.integers(600_000, 2**34),
    life_time_ms=st.integers(600_000, 2**34),
    mode=st.sampled_from(["distributed", "central"]),
    auto_concurrency=st.booleans(),
    concurrency=st.integers(1, 128),
    max_write_bytes_per_s=st.integers(0, 2**40),
)


def test_the_defaults_are_the_seeds() -> None:
    assert GCConfig().variables() == {
        "tikv_gc_enable": "true",
        "tikv_gc_run_interval": "10m0s",
        "tikv_gc_life_time": "10m0s",
        "tikv_gc_mode": "distributed",
        "tikv_gc_auto_concurrency": "true",
        "tikv_gc_concurrency": "2",
        "gc.max-write-bytes-per-sec": "0",
    }


def test_every_variable_has_a_comment_and_only_state_is_not_for_setting() -> None:
    assert set(COMMENTS) == {*GCConfig().variables(), *STATE_VARIABLES}
    assert {name for name, text in COMMENTS.items() if "not for setting" in text} == set(
        STATE_VARIABLES
    )


@given(configs)
def test_every_configuration_survives_being_shown(config: GCConfig) -> None:
    assert GCConfig().updated(config.variables()) == config
    assert GCConfig().updated(config.stored()) == config
    assert int(config.stored()[MAX_WRITE_BYTES]) == config.max_write_bytes_per_s


def test_a_day_is_set_as_the_seed_does() -> None:
    assert GCConfig().updated({"tikv_gc_life_time": "24h"}).life_time_ms == 86_400_000


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tikv_gc_life_tim", "1h", "did you mean tikv_gc_life_time"),
        ("tikv_gc_safe_point", "now", "not for setting"),
        ("tikv_gc_leader_uuid", "me", "not for setting"),
        ("tikv_gc_life_time", "10", "write it like 10m"),
        ("tikv_gc_life_time", "9m59s", "at least 10m0s and at most 8760h0m0s"),
        ("tikv_gc_life_time", "0s", "at least 10m0s"),
        ("tikv_gc_run_interval", "-1m", "at least 10m0s"),
        ("tikv_gc_run_interval", "8761h", "at most 8760h0m0s"),
        ("gc.max-write-bytes-per-sec", "-1", "write it like 10MB"),
        ("gc.max-write-bytes-per-sec", "10 parsecs", "write it like 10MB"),
        ("gc.max-write-bytes-per-sec", "2000GB", "up to 1TiB"),
        ("tikv_gc_enable", "maybe", "neither true nor false"),
        ("tikv_gc_mode", "sharded", "neither distributed nor central"),
        ("tikv_gc_concurrency", "0", "from 1 to 128"),
        ("tikv_gc_concurrency", "two", "from 1 to 128"),
        ("tikv_gc_concurrency", "9" * 5000, "from 1 to 128"),
        ("tikv_gc_concurrency", "٣", "from 1 to 128"),
        ("tikv_gc_life_time", "1" * 5000 + "h", "write it like 10m"),
        ("gc.max-write-bytes-per-sec", "9" * 5000, "write it like 10MB"),
    ],
)
def test_bad_values_are_refused_with_the_reason(name: str, text: str, reason: str) -> None:
    with pytest.raises(GCConfigError, match=reason) as caught:
        GCConfig().updated({name: text})
    assert len(caught.value.message) < 200  # it has to fit into a gRPC status


def test_a_name_without_end_is_refused_in_short() -> None:
    with pytest.raises(GCConfigError) as caught:
        GCConfig().updated({"x" * 5000: "1"})
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("10MB", 10 << 20, "10MiB"),
        ("10mib", 10 << 20, "10MiB"),
        ("512 KB", 512 << 10, "512KiB"),
        ("1G", 1 << 30, "1GiB"),
        ("1536", 1536, "1536"),
        ("0", 0, "0"),
        ("0MB", 0, "0"),
    ],
)
def test_sizes_are_read_as_tikv_reads_them(text: str, size: int, shown: str) -> None:
    assert parse_size(text) == size
    assert format_size(size) == shown


def test_a_shorter_least_time_can_be_agreed_on_for_a_cluster_without_history() -> None:
    assert GCConfig().updated({"tikv_gc_life_time": "1ms"}, UNBOUND).life_time_ms == 1
    with pytest.raises(GCConfigError, match="at least 1s"):
        GCConfig().updated({"tikv_gc_life_time": "1ms"}, Bounds(least_ms=1000))


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(GCConfigError, match=r"tikv_gc_mode: .*; tikv_gc_concurrency: "):
        GCConfig().updated({"tikv_gc_mode": "x", "tikv_gc_concurrency": "x"})


@given(configs, st.integers(0, 50))
def test_never_more_than_one_worker_a_store(config: GCConfig, stores: int) -> None:
    workers = config.workers(stores)
    assert workers <= stores
    assert workers == (stores if config.auto_concurrency else min(stores, config.concurrency))
