"""`tidemark cli … | head`: a reader that goes early ends the command quietly, whatever the verb."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.rpc.pd import PdClient
from tests.integration.coordinator.processes import ENVIRONMENT
from tests.integration.coordinator.topology import a_region, a_store

PROGRAM = (sys.executable, "-m", "server.cli.main")
READER_GONE = 141


def run_without_reader(*argv: str, also_stderr: bool = False) -> tuple[int, str]:
    """Run a command whose standard output (and error) is a pipe nobody reads;
    returns its status and standard error.
    """
    reader, writer = os.pipe()
    os.close(reader)
    try:
        errors = writer if also_stderr else subprocess.PIPE
        process = subprocess.run(
            [*PROGRAM, *argv],
            stdout=writer,
            stderr=errors,
            env=ENVIRONMENT,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    return process.returncode, (process.stderr or b"").decode()


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("cli", "--help"),
        ("cli", "gc", "--help"),
        ("coordinator", "--help"),
        ("spark", "--help"),
    ],
    ids=" ".join,
)
def test_help_whose_reader_has_gone_ends_quietly(argv: tuple[str, ...]) -> None:
    status, error = run_without_reader(*argv)
    assert (status in (0, READER_GONE), error) == (
        True,
        "",
    )  # argparse ignores the pipe it cannot write to


@pytest.mark.parametrize(
    "argv",
    [
        ("tso", "query"),
        ("gc", "status"),
        ("service-gc-safepoint",),
        ("--json", "tso", "query"),
        ("pump", "list"),
    ],
    ids=" ".join,
)
async def test_a_verb_whose_reader_has_gone_ends_quietly(
    start: Any, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    coordinator = await asyncio.to_thread(start, f"leveldb:{tmp_path / 'meta'}")
    async with PdClient.open(coordinator.address) as pd:
        await pd.bootstrap(a_store(), a_region())
    ended = await asyncio.to_thread(run_without_reader, "cli", "--pd", coordinator.address, *argv)
    assert ended == (READER_GONE, "")


def test_an_error_whose_reader_has_gone_ends_quietly() -> None:
    assert (
        run_without_reader(
            "cli", "--server", "127.0.0.1:1", "changefeed", "list", also_stderr=True
        )[0]
        == READER_GONE
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_fault(closed: str) -> None:
    process = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *PROGRAM, "--version"],
        capture_output=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, b"")


def test_an_error_is_still_told_when_only_the_output_has_no_reader() -> None:
    status, error = run_without_reader("cli", "--server", "127.0.0.1:1", "changefeed", "list")
    assert (status, "ErrCaptureUnavailable" in error) == (1, True)
