"""The notebook of docs/examples, whose cells are the blocks of the page beside it (`make docs`),
runs as it stands; only the addresses in its first cell are the test's.
"""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).parents[3] / "docs" / "examples" / "read_a_changefeed.ipynb"


def blocks():
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def lake_of(spark, upstream, root):
    """A Delta lake of one cut, as the lake job leaves it."""
    rows = list(upstream.accounts.state(upstream.end_ts).values())
    spark.createDataFrame(rows).write.format("delta").save(f"{root}/bank/accounts")
    cut = {
        "format": 1,
        "changefeed": "bank",
        "start_ts": 0,
        "end_ts": 10,
        "batch": 0,
        "mode": "upsert",
    }
    cut |= {
        "applied_at": "2026-01-01T00:00:00+00:00",
        "tables": [{"table": "bank.accounts", "rows": 1, "version": 0}],
    }
    (root / "_tidemark_cuts").mkdir()
    (root / "_tidemark_cuts" / f"{10:020d}.json").write_text(json.dumps(cut) + "\n")


def test_the_page_can_be_pasted(spark, captures, upstream, tmp_path, capsys):
    lake_of(spark, upstream, tmp_path)
    first, *others = blocks()
    names = {}
    exec(first, names)
    assert names.keys() >= {"endpoint", "changefeed", "lake"}
    names |= {"endpoint": captures.uri, "changefeed": "bank", "lake": f"delta://{tmp_path}"}
    for block in others:
        exec(compile(block, str(PAGE), "exec"), names)
    living = upstream.accounts.state(upstream.end_ts)
    assert {row.id: row.balance for row in names["accounts"].collect()} == {
        key: row["balance"] for (key,), row in living.items()
    }
    assert names["seen"][-1].query_s == 0
    assert names["seen"][-1].end_ts == upstream.end_ts
    assert f"{len(upstream.accounts.rows)} changes" in capsys.readouterr().out
    assert names["kept"].where("_table = 'bank.accounts'").count() == len(upstream.accounts.rows)
    assert names["tables"]["bank.accounts"].count() == len(living)
    assert captures.acks == []
