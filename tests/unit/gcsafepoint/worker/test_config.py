"""The variables of mysql.tidb: the seed's defaults, and a reason for each refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.config import GCConfig, GCConfigError

configs = st.builds(
    GCConfig,
    enable=st.booleans(),
    run_interval_ms=st.integers(1, 2**40),
    life_time_ms=st.integers(1, 2**40),
    mode=st.sampled_from(["distributed", "central"]),
    auto_concurrency=st.booleans(),
    concurrency=st.integers(1, 128),
)


def test_the_defaults_are_the_seeds() -> None:
    assert GCConfig().variables() == {
        "tikv_gc_enable": "true",
        "tikv_gc_run_interval": "10m0s",
        "tikv_gc_life_time": "10m0s",
        "tikv_gc_mode": "distributed",
        "tikv_gc_auto_concurrency": "true",
        "tikv_gc_concurrency": "2",
    }


@given(configs)
def test_every_configuration_survives_being_shown(config: GCConfig) -> None:
    assert GCConfig().updated(config.variables()) == config


def test_a_day_is_set_as_the_seed_does() -> None:
    assert GCConfig().updated({"tikv_gc_life_time": "24h"}).life_time_ms == 86_400_000


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tikv_gc_life_tim", "1h", "did you mean tikv_gc_life_time"),
        ("tikv_gc_safe_point", "now", "not for setting"),
        ("tikv_gc_leader_uuid", "me", "not for setting"),
        ("tikv_gc_life_time", "10", "write it like 10m"),
        ("tikv_gc_life_time", "0s", "too short"),
        ("tikv_gc_run_interval", "-1m", "too short"),
        ("tikv_gc_enable", "maybe", "neither true nor false"),
        ("tikv_gc_mode", "sharded", "neither distributed nor central"),
        ("tikv_gc_concurrency", "0", "from 1 to 128"),
        ("tikv_gc_concurrency", "two", "from 1 to 128"),
    ],
)
def test_bad_values_are_refused_with_the_reason(name: str, text: str, reason: str) -> None:
    with pytest.raises(GCConfigError, match=reason):
        GCConfig().updated({name: text})


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(GCConfigError, match=r"tikv_gc_mode: .*; tikv_gc_concurrency: "):
        GCConfig().updated({"tikv_gc_mode": "x", "tikv_gc_concurrency": "x"})


@given(configs, st.integers(0, 50))
def test_never_more_than_one_worker_a_store(config: GCConfig, stores: int) -> None:
    workers = config.workers(stores)
    assert workers <= stores
    assert workers == (stores if config.auto_concurrency else min(stores, config.concurrency))
