"""The console in a real browser, beside a real cluster; skipped where there is no Chromium."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

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


class Browser:
    """A page in Chromium, steered by its protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        commands, self._to = os.pipe()
        answers, written = os.pipe()
        self._from = os.fdopen(answers, "rb")
        quiet = ("--disable-background-networking", "--disable-sync", "--no-first-run")
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{commands} 4>&{written}', "bash"),
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
            ],
            pass_fds=(commands, written),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(written)
        self._number = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._from.close()
        os.close(self._to)

    def open(self, url: str) -> None:
        """Show a page, from when it has what it asks its daemon for."""
        self._call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && at('live').textContent === 'live'")

    def value(self, expression: str) -> Any:
        """What JavaScript says."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        until_s = time.monotonic() + 60
        while not self.value(f"(() => {{ try {{ return {condition} }} catch {{}} }})()"):
            assert time.monotonic() < until_s, condition
            time.sleep(0.05)

    def press(self, key: str, code: int, text: str = "") -> None:
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        self._call("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(call).encode() + b"\0")
        while True:
            message = b""
            while not message.endswith(b"\0"):
                byte = self._from.read(1)
                assert byte, "Chromium ended"
                message += byte
            answer = json.loads(message[:-1])
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return dict(answer["result"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    try:
        yield opened
    finally:
        opened.close()


FOCUSED = """(() => {
  const one = document.activeElement;
  const seen = getComputedStyle(one).outlineStyle !== "none";
  return [one.getAttribute("aria-label") || one.textContent, seen];
})()"""


def test_the_console_shows_changefeeds_findings_captures_and_gc(endpoints, browser):
    browser.open(f"http://{endpoints['capture']}/")
    page = browser.value("document.documentElement.outerHTML")
    assert '<tr data-id="bank"' in page
    assert '<span class="state normal">normal</span>' in page
    assert '<span class="state stopped">stopped</span>' in page
    assert "<strong>changefeed paused</strong>: it is paused at" in page
    assert endpoints["flight"] in page
    assert "ticdc-default-paused" in page


def test_the_console_by_keyboard(endpoints, browser):
    """Tab goes through all there is; what has the focus keeps it, and Enter follows a link."""
    browser.open(f"http://{endpoints['capture']}/")
    passed = []
    for _ in range(6):
        browser.press("Tab", 9)
        passed.append(browser.value(FOCUSED))
    names = ["filter changefeeds", "bank", "pause bank", "paused", "resume paused", "API"]
    assert passed == [[name, True] for name in names]

    # The page is made anew every two seconds: nothing here may last in one element.
    browser.value("""(() => {
      const row = changefeedRow;
      changefeedRow = (feed) => row({ ...feed, spark_ui: feed.id === "bank" ? "#spark" : "" });
      document.addEventListener("click", (event) => {
        event.preventDefault();
        document.title = event.target.dataset.part;
      });
      show();
      document.querySelector("[data-part=spark]").focus();
      show();
    })()""")
    assert browser.value(FOCUSED) == ["Spark UI", True]
    browser.press("Enter", 13, "\r")
    browser.wait_for("document.title === 'spark'")
    assert browser.value("at('detail').hidden")

    browser.value("document.querySelector('[data-part=name]').focus()")
    browser.press("Enter", 13, "\r")
    browser.wait_for("!at('detail').hidden")
    assert browser.value(FOCUSED) == ["bank", True]


def test_who_hears_the_console_is_told_only_what_changes(endpoints, browser):
    browser.open(f"http://{endpoints['capture']}/")
    browser.value("""window.said = [];
      new MutationObserver(() => said.push(at("live").textContent))
        .observe(at("live"), { childList: true, characterData: true, subtree: true })""")
    browser.value("refresh(load).then(() => refresh(load))")
    assert browser.value("said") == []
    browser.value("window.fetch = () => Promise.reject(new Error('gone')); refresh(load)")
    assert browser.value("said[0]") == "not live: gone"


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


def test_a_daemons_page_shows_its_metrics(endpoints, browser):
    browser.open(f"http://{endpoints['http']}/")
    page = browser.value("document.documentElement.outerHTML")
    assert "tidemark_up_alive" in page
    assert '<p id="ready">ready</p>' in page
