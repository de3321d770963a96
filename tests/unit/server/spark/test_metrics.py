"""Lines of the lake job become metrics; lines that older or newer jobs print are no trouble."""

from prometheus_client import REGISTRY

from server.spark.metrics import observe


def value(name, **labels):
    return REGISTRY.get_sample_value(f"tidemark_spark_{name}", {"changefeed": "metrics", **labels})


def test_a_cut_its_batch_and_maintenance_are_counted():
    observe("metrics", {"ready": True})
    observe("metrics", {"end_ts": 5, "rows": {"a.b": 7}, "seconds": 0.5, "checkpoint": 4})
    observe(
        "metrics",
        {
            "progress": {
                "captures_lag_s": 1.5,
                "spark_lag_s": 0.5,
                "ms": {"addBatch": 250, "new": 1},
            }
        },
    )
    found = {"files": 4, "small_file_ratio": 0.25, "deleted_row_ratio": 0.5, "seconds": 2.0}
    observe("metrics", {"maintenance": found})
    observe("metrics", {"replaced": {"a.b": 2, "a.c": 1}})
    observe("metrics", {"replaced": {"a.b": 3}})
    assert (
        value("replaced_inserts_total", table="a.b"),
        value("replaced_inserts_total", table="a.c"),
    ) == (5, 1)
    assert value("rows_total") == 7
    assert value("stage_lag_seconds", stage="captures") == 1.5
    assert value("stage_lag_seconds", stage="spark") == 0.5
    assert value("step_seconds_sum", step="addBatch") == 0.25
    assert (value("small_file_ratio"), value("deleted_row_ratio")) == (0.25, 0.5)
    assert value("maintenance_seconds_count") == 1
