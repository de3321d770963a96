"""The console in a real browser, beside a real cluster; skipped where there is no Chromium."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from storage.tidb.schema import Column, TableInfo

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")
TABLE = TableInfo.build(101, "accounts", [Column.bigint("id"), Column.bigint("balance")])

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Where a `tidemark up` listens that has one running and one paused changefeed."""
    place = tmp_path_factory.mktemp("console")
    ports = [part for name in LISTENERS for part in (f"--{name}-addr", "127.0.0.1:0")]
    tidemark = (sys.executable, "-m", "server.cli.main")
    command = (*tidemark, "up", "--no-spark", "--follow-parent", "--data-dir", str(place), *ports)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as up:
        try:
            assert up.stdout is not None
            ready = json.loads(up.stdout.readline())["endpoints"]
            tables = [{"schema_name": "bank", "table_info": json.loads(TABLE.to_json())}]
            (place / "tables.json").write_text(json.dumps(tables))
            cli = (*tidemark, "cli", "--server", ready["capture"], "--pd", ready["coordinator"])
            for name in ("bank", "paused"):
                create = (
                    "changefeed",
                    "create",
                    "-c",
                    name,
                    "--tables",
                    str(place / "tables.json"),
                )
                subprocess.run([*cli, *create, "--sink-uri", "none://"], check=True, timeout=120)
            subprocess.run([*cli, "changefeed", "pause", "-c", "paused"], check=True, timeout=120)
            yield ready
        finally:
            up.terminate()
            up.wait(60)


def dom_of(url: str, profile: Path) -> str:
    """The page as it is after its script has run for some seconds."""
    quiet = ("--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run")
    command = (
        CHROMIUM, "--headless", "--no-sandbox", *quiet, f"--user-data-dir={profile}",
        "--virtual-time-budget=8000", "--dump-dom", url,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


def test_the_console_shows_changefeeds_findings_captures_and_gc(endpoints, tmp_path):
    page = dom_of(f"http://{endpoints['capture']}/", tmp_path)
    assert ">live, " in page
    assert '<tr data-id="bank"' in page
    assert '<span class="state normal">normal</span>' in page
    assert '<span class="state stopped">stopped</span>' in page
    assert "<strong>changefeed paused</strong>: it is paused at" in page
    assert endpoints["flight"] in page
    assert "ticdc-default-paused" in page


def test_the_map_says_of_every_daemon_since_when_it_runs(endpoints):
    with urllib.request.urlopen(
        f"http://{endpoints['capture']}/console.json", timeout=60
    ) as answer:
        document = json.load(answer)
    rows = [*document["daemons"], *({"kind": "capture", **one} for one in document["captures"])]
    assert {row["kind"] for row in rows} == {
        *("coordinator", "store", "pump", "gc-worker", "capture"),
    }
    for row in rows:
        age_s = time.time() - datetime.fromisoformat(row["started"]).timestamp()
        assert 0 <= age_s < 600, row


def test_a_daemons_page_shows_its_metrics(endpoints, tmp_path):
    page = dom_of(f"http://{endpoints['http']}/", tmp_path)
    assert ">live, " in page
    assert "tidemark_up_alive" in page
    assert '<p id="ready">ready</p>' in page
