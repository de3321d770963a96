"""TiKV's dashboards find GC's metrics under TiKV's names."""

import pytest
from prometheus_client import REGISTRY, generate_latest

from server.store import metrics


def test_samples_carry_tikvs_names_as_they_are() -> None:
    metrics.observe_gc(5, 3)
    metrics.show_gc_state("working")
    lines = generate_latest(REGISTRY).decode().splitlines()
    assert any(
        line.startswith('tikv_gcworker_gc_keys{cf="write",tag="deleted"} ') for line in lines
    )
    assert "# TYPE tikv_gcworker_gc_keys untyped" in lines
    assert not any("tikv_gcworker_gc_keys_total" in line for line in lines)
    assert 'tikv_gcworker_autogc_status{state="working"} 1.0' in lines
    assert 'tikv_gcworker_autogc_status{state="idle"} 0.0' in lines
    assert any(line.startswith("tikv_storage_mvcc_gc_delete_versions_sum ") for line in lines)


def test_a_failed_task_is_counted_as_such() -> None:
    def failed() -> float:
        return REGISTRY.get_sample_value("tikv_gcworker_gc_task_fail_vec", {"task": "gc"}) or 0.0

    before = failed()
    with pytest.raises(ValueError, match="disk"), metrics.gc_task("gc"):
        raise ValueError("disk")
    assert failed() == before + 1
