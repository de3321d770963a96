"""From MariaDB to Delta and Iceberg under `tidemark spark keep`: an audit finds a wrong row,
and the command it tells mends it.

Each takes minutes, so it runs with TIDEMARK_TEST_EXPLORE=1 only; `test_database.py` has the same
without a job.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark_tidemark.lake.manifest import DIRECTORY, read_cuts

from tests.integration.capture.processes import COMMAND, running_cluster
from tests.mariadb import running_mariadb

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        "TIDEMARK_TEST_EXPLORE" not in os.environ,
        reason="minutes each; test_database.py has a short one",
    ),
]
PATIENCE_S = 800
ROWS = 50


@contextmanager
def keeping(cluster, directory):
    """`tidemark spark keep` for the block; gives the address of its metrics."""
    flags = [
        "--capture",
        cluster.capture.endpoints["capture"],
        "--coordinator",
        cluster.pd,
        "--master",
        "local[1]",
    ]
    flags += ["--checkpoint-dir", str(directory / "checkpoints"), "--trigger", "0 seconds"]
    flags += ["--audit-max-lag-s", "600", "--http-addr", "127.0.0.1:0"]
    with (directory / "keep.log").open("ab") as log:
        process = subprocess.Popen(
            [*COMMAND, "spark", "keep", *flags], stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["endpoints"]["http"]
        finally:
            process.terminate()
            process.communicate(timeout=200)


def until(seen, wanted):
    """Wait for what should be seen, and show what was."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(found := seen()):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found


def rows_shown(lake):
    """How many changes the lake's cuts have shown so far."""
    cuts = read_cuts(lake / DIRECTORY)
    return sum(table.rows for cut in cuts for table in cut.tables)


def plant(lake, root, key, value):
    """Change column `v` of a row behind everybody's back, as another writer's commit."""
    command = [sys.executable, "-m", "tests.integration.verify.planted"]
    arguments = [lake, str(root), str(key), str(value)]
    subprocess.run([*command, *arguments], check=True, timeout=PATIENCE_S)


def metric(address, name):
    """The sum of a metric's series."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


@pytest.mark.parametrize("lake", ["delta", "iceberg"])
def test_a_wrong_row_is_a_warning_until_the_command_that_it_tells_has_mended_it(
    tmp_path: Path, lake: str
) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:

        def asked(*arguments):
            """An answer of the captures; on a busy machine their owner may lose its lease for a
            moment.
            """
            return until(
                lambda: cluster.cli("changefeed", *arguments),
                lambda answer: not isinstance(answer, str),
            )

        def query():
            return asked("query", "-c", "shop")

        server.execute("CREATE DATABASE shop")
        server.execute("CREATE TABLE shop.orders (id INT PRIMARY KEY, v INT)")
        create = ["create", "-c", "shop", "--source-uri", f"{server.uri}?idle-row-ms=500"]
        create += ["--filter", "shop.*", "--audit", "1m", "--sink-uri"]
        made = asked(*create, f"{lake}://{tmp_path}/lake")
        assert (made["state"], made["audit_seconds"]) == ("normal", 60), made
        server.execute(f"INSERT INTO orders SELECT seq, seq FROM seq_1_to_{ROWS}", database="shop")
        root = tmp_path / "lake"
        with keeping(cluster, tmp_path):
            until(lambda: rows_shown(root), lambda rows: rows == ROWS)
        plant(lake, root, 7, -7)
        server.execute(
            "UPDATE shop.orders SET v = 100 WHERE id = 9"
        )  # its cut shows what was planted, too
        with keeping(cluster, tmp_path) as address:
            found = until(query, lambda feed: feed["state"] == "warning")
            assert found["error"]["code"] == "TM:ErrAuditDiffers", found
            assert "shop.orders" in found["error"]["message"]
            until(
                lambda: metric(address, "tidemark_spark_audit_differences_total"),
                lambda ranges: ranges >= 1,
            )
        [listed] = asked("list")
        assert listed["summary"]["state"] == "warning"
        [told] = re.findall(r"`tidemark cli (verify [^`]* --repair)`", found["error"]["message"])
        assert told == "verify -c shop --table shop.orders --repair"
        flags = ["--server", cluster.capture.endpoints["capture"], "--pd", cluster.pd, "--json"]
        command = [*COMMAND, "cli", *flags, *shlex.split(told)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 1, done.stderr
        [repaired] = json.loads(done.stdout)["tables"]
        assert [(each["key"], each["kind"]) for each in repaired["differences"]] == [
            ({"id": 7}, "differs")
        ]
        assert repaired["repaired"]["version"] is not None
        mended = until(query, lambda feed: feed["state"] == "normal")
        assert mended["error"] is None
        off = asked("update", "-c", "shop", "--audit", "off")
        assert "audit_seconds" not in off
