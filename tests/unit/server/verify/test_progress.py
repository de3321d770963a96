"""A comparison says which stage it is in, how far it is and how long it will take,
also while nothing comes.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile

import pytest

from server.cli import verify
from server.cli.arguments import seconds
from server.cli.verify import _in_time, _print_progress
from server.verify.errors import VerifyLakeError, VerifyTimeoutError
from server.verify.lake.client import Lake
from server.verify.progress import LAKE, UPSTREAM, Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_line_names_stage_table_rows_what_is_waited_for_and_the_time_to_go():
    clock = Clock()
    progress = Progress(clock)
    assert progress.eta_s is None
    clock.now += 5
    assert progress.line() == "reading the changefeed's records (5 s in all)"
    progress.begin_tables(3)
    progress.enter("comparing checksums of key ranges", "shop.a")
    with progress.awaiting(UPSTREAM), progress.awaiting(LAKE):
        progress.read(50)
        clock.now += 10
        assert progress.eta_s is None, "nothing tells yet how many rows there are"
        progress.expect(200)
        assert progress.line() == (
            "shop.a: comparing checksums of key ranges, 0 of 3 tables done, 50 of 200 rows, 5 rows/s, "
            "waiting for the lake and the source for 10 s, about 110 s to go (15 s in "
            "all)"
        )
    progress.read(150)
    progress.end_table()
    progress.enter("comparing checksums of key ranges", "shop.b")
    document = progress.document()
    assert (document["tables_done"], document["tables"], document["rows_total"]) == (1, 3, 200)
    assert (document["table"], document["waiting_for"], document["eta_seconds"]) == (
        "shop.b",
        [],
        20.0,
    )


def test_while_only_the_lake_is_awaited_nobody_promises_a_time():
    clock = Clock()
    progress = Progress(clock)
    progress.begin_tables(1)
    progress.enter("comparing checksums of key ranges", "shop.a")
    with progress.awaiting(LAKE):
        progress.read(200)
        progress.expect(200)
        clock.now += 20
        # It said `about 0 s to go` for half a minute, and a rate that fell.
        assert progress.line() == (
            "shop.a: comparing checksums of key ranges, 0 of 1 tables done, 200 rows, waiting for the "
            "lake for 20 s (20 s in all)"
        )
        assert progress.document()["eta_seconds"] is None
    assert progress.eta_s == 0


def test_when_all_is_done_there_is_nothing_to_go():
    progress = Progress(Clock())
    progress.begin_tables(1)
    progress.end_table()
    assert progress.eta_s == 0


@pytest.mark.parametrize("as_json", [False, True])
async def test_progress_is_told_while_nothing_comes(monkeypatch, capsys, as_json):
    monkeypatch.setattr(verify, "_EVERY_S", 0.001)
    progress, said = Progress(), ""
    progress.enter("comparing checksums of key ranges", "shop.a")
    telling = asyncio.get_running_loop().create_task(_print_progress(progress, as_json=as_json))
    async with asyncio.timeout(60):
        while said.count("\n") < 2:
            await asyncio.sleep(0)
            said += capsys.readouterr().err
    telling.cancel()
    line = said.splitlines()[0]
    assert (
        json.loads(line)["progress"]["table"] if as_json else line.partition(":")[0]
    ) == "shop.a"


async def test_the_deadline_names_the_stage(monkeypatch):
    async def hangs(remote, arguments, progress):
        progress.enter("comparing checksums of key ranges", "shop.a")
        with progress.awaiting(LAKE):
            await asyncio.Event().wait()

    monkeypatch.setattr(verify, "_compared", hangs)
    expected = r"no result within 0.01 s: shop\.a: comparing checksums of key ranges, waiting for the lake .*--table"
    with pytest.raises(VerifyTimeoutError, match=expected):
        await _in_time(None, argparse.Namespace(timeout=0.01), Progress())


async def test_a_timeout_of_something_else_is_not_called_the_deadline(monkeypatch):
    async def fails(remote, arguments, progress):
        raise TimeoutError

    monkeypatch.setattr(verify, "_compared", fails)
    with pytest.raises(TimeoutError):
        await _in_time(None, argparse.Namespace(timeout=60.0), Progress())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="seconds above 0"):
        seconds(text)


async def test_nothing_is_left_of_a_lakes_reader(monkeypatch, tmp_path):
    """It is ended by a signal, and each verify and audit left a directory behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with Lake.open(f"delta://{tmp_path}/lake", "feed", locked=False) as lake:
        with pytest.raises(VerifyLakeError, match="has no cut yet"):
            await lake.cut(None)
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


ASKS = """
import asyncio
from server.verify.lake.client import Lake

async def main():
    async with Lake.open("mysql://me@127.0.0.1:{port}/db", "feed", locked=False) as lake:
        print(lake._process.pid, flush=True)
        await lake.cut(None)

asyncio.run(main())
"""


async def test_the_lakes_reader_ends_in_the_middle_of_a_question_when_whoever_asked_is_killed():
    """Found by strangers: it went on with parent 1.

    Here it is at a server that never says anything.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        script = ASKS.format(port=silent.getsockname()[1])
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            reader = int(await asking.stdout.readline())
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                watched = os.pidfd_open(reader)
                asking.send_signal(signal.SIGKILL)
                await asking.wait()
                ended = asyncio.Event()
                asyncio.get_running_loop().add_reader(watched, ended.set)
                await ended.wait()
                asyncio.get_running_loop().remove_reader(watched)
                os.close(watched)
