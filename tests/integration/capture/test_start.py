"""A capture that cannot start says why in one line, with status 1."""

import socket
import subprocess

import pytest

from tests.integration.capture.processes import COMMAND, LOOPBACK, Daemon, running_cluster


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    directory = tmp_path_factory.mktemp("coordinator")
    daemon = Daemon(directory, "coordinator", "--metadata", f"leveldb:{directory / 'metadata'}")
    yield daemon.endpoints["coordinator"]
    daemon.terminate()


def failed_start(*flags):
    listen = ["--addr", LOOPBACK, "--flight-addr", LOOPBACK, "--http-addr", LOOPBACK]
    done = subprocess.run(
        [*COMMAND, "capture", *listen, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if line.startswith("[TM:")]
    assert "Traceback" not in done.stderr
    return line


@pytest.fixture
def busy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("flag", ["--addr", "--flight-addr", "--http-addr"])
def test_a_busy_port_is_named(coordinator, busy, tmp_path, flag):
    line = failed_start("--coordinator", coordinator, "--data-dir", str(tmp_path), flag, busy)
    assert line.startswith("[TM:ErrPortInUse]")
    assert busy in line


def test_an_absent_coordinator_is_named(tmp_path):
    line = failed_start("--coordinator", "127.0.0.1:1", "--data-dir", str(tmp_path))
    assert line.startswith("[TM:ErrCoordinatorUnavailable]")
    assert "127.0.0.1:1" in line


def test_a_data_directory_that_cannot_be_written_is_named(coordinator, tmp_path):
    (tmp_path / "file").write_text("")
    line = failed_start("--coordinator", coordinator, "--data-dir", str(tmp_path / "file"))
    assert line.startswith("[TM:ErrDataDirUnusable]")


def test_two_captures_in_one_directory_are_refused(coordinator, tmp_path):
    first = Daemon(
        tmp_path, "capture", "--coordinator", coordinator, "--data-dir", str(tmp_path / "data")
    )
    try:
        line = failed_start("--coordinator", coordinator, "--data-dir", str(tmp_path / "data"))
        assert line.startswith("[TM:ErrDataDirUnusable] another capture runs")
    finally:
        assert first.terminate() == 0


def test_a_misspelt_flag_is_wrong_usage(coordinator):
    done = subprocess.run(
        [*COMMAND, "capture", "--dta-dir", "x"], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2


def test_a_cluster_whose_capture_does_not_start_leaves_no_daemon_behind(tmp_path):
    with (
        pytest.raises(AssertionError, match="capture did not start"),
        running_cluster(tmp_path, "--no-such-flag"),
    ):
        pass
    Daemon(
        tmp_path, "coordinator", "--metadata", f"leveldb:{tmp_path / 'metadata'}"
    ).stop()  # its lock is free
