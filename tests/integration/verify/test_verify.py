"""`tidemark cli verify` against a real store and a Delta lake that somebody has edited;
then the repair.
"""

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut

from server.demo.bank import ACCOUNTS
from storage.tidb.record import encode_record
from tests.integration.capture.processes import COMMAND, running_cluster
from tests.integration.spark.cluster import changefeed, flight, write

pytestmark = pytest.mark.timeout(900)
NAME = "bank.accounts"
COUNT = 500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def lake(cluster, tmp_path_factory):
    """A Delta lake at two cuts: at the first it equals its upstream,
    before the second somebody edited it.
    """
    root = tmp_path_factory.mktemp("lake")
    with changefeed(cluster, "shop", [("bank", ACCOUNTS)], f"delta://{root}") as (reader, start_ts):
        first = reader.wait_resolved(write(cluster, accounts(0, COUNT)))
        second = reader.wait_resolved(cluster.now())
        asked = [flight(cluster), str(start_ts), str(first), f"{root}/bank/accounts"]
        subprocess.run(
            [sys.executable, "-m", "tests.integration.verify.edited", *asked],
            check=True,
            timeout=500,
        )
        cut = CutRecord(
            "shop", start_ts, first, 0, "2026-01-01T00:00:00+00:00", (TableCut(NAME, COUNT, 0),)
        )
        commit(root, cut)
        commit(
            root,
            dataclasses.replace(cut, start_ts=first, end_ts=second, tables=(TableCut(NAME, 4, 4),)),
        )
        yield root, second


def accounts(first, count):
    rows = (
        {"id": n, "owner": f"owner '{n}'", "balance": 100 * n, "updated_at": 0}
        for n in range(first, first + count)
    )
    return dict(encode_record(ACCOUNTS, row) for row in rows)


def commit(root, cut):
    directory = Path(root) / "_tidemark_cuts"
    directory.mkdir(exist_ok=True)
    (directory / f"{cut.end_ts:020d}.json").write_text(cut.to_json() + "\n")


def verify(cluster, *arguments):
    """Exit status, the document, and what was told beside it."""
    flags = [
        "cli",
        "--server",
        cluster.capture.endpoints["capture"],
        "--pd",
        cluster.pd,
        "--json",
        "verify",
    ]
    done = subprocess.run(
        [*COMMAND, *flags, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def test_every_edited_row_is_told_and_repaired(cluster, lake):
    root, second = lake
    status, document, told = verify(cluster, "-c", "shop", "--table", NAME, "--repair")
    assert (status, document["equal"], document["cut"]) == (1, False, second), told
    assert "incubator" not in told  # a line that Spark's JVM prints
    [table] = document["tables"]
    found = {difference["key"]["id"]: difference for difference in table["differences"]}
    assert {key: (row["kind"], row["columns"]) for key, row in found.items()} == {
        3: ("only upstream", []),
        5: ("differs", ["balance"]),
        7: ("more than once in the lake", []),
        9999: ("only in the lake", []),
    }
    assert (found[5]["upstream"]["balance"], found[5]["lake"]["balance"]) == (500, -1)
    assert (table["complete"], table["repaired"]) == (
        True,
        {"removed": 3, "written": 3, "version": 5},
    )

    status, document, told = verify(cluster, "-c", "shop")
    assert (status, document["equal"]) == (0, True), told
    [table] = document["tables"]
    assert (table["table"], table["upstream_rows"], table["lake_rows"]) == (NAME, COUNT, COUNT)
    assert (
        sorted(path.name for path in (root / "_tidemark_cuts").glob("*.json"))[-1]
        == f"{second:020d}.json"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-c", "none"], "ErrVerifyNotFound"),
        (["-c", "shop", "--table", "bank.none"], "ErrVerifyNotFound"),
        (["-c", "shop", "--at", "1"], "ErrVerifyLake] [TM:ErrCutNotFound"),
        (["-c", "shop", "--at", "1", "--repair"], "ErrVerifyUnsupported"),
    ],
)
def test_what_cannot_be_compared_ends_with_status_two_and_says_why(cluster, lake, arguments, code):
    status, document, told = verify(cluster, *arguments)
    assert (status, document["equal"]) == (2, None)
    assert f"[TM:{code}]" in told
    assert f"[TM:{code}]" in document["error"]


def test_a_lake_that_never_answers_ends_it_at_the_deadline_with_the_stage(cluster):
    """Found by strangers: no answer in 120 s, no progress.

    This lake is a server that says nothing.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sink = f"mysql://me@127.0.0.1:{silent.getsockname()[1]}/db"
        with changefeed(cluster, "silent", [("bank", ACCOUNTS)], sink):
            status, document, said = verify(cluster, "-c", "silent", "--timeout", "20")
    stage = "opening the lake and looking up its cut"
    assert status == 2
    assert "[TM:ErrVerifyTimeout] no result within 20 s" in document["error"]
    assert stage in document["error"]
    assert document["progress"]["waiting_for"] == ["the lake"]
    # The last of them: on a slow machine the first one is still of the stage before.
    (*_, told) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert told["progress"]["stage"] == stage
