"""What can go wrong before anything runs gives one clear error, a non-zero status,
and loses nothing.
"""

import os
import socket
import subprocess
import sys


def tidemark(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli.main", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **environment},
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("[TM:")]


def test_a_busy_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tidemark(
            "up", "--no-spark", "--data-dir", str(tmp_path), "--coordinator-addr", address
        )
    assert done.returncode == 1
    assert any("ErrPortInUse" in line and address in line for line in errors(done)), done.stderr


def test_a_data_directory_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a directory")
    done = tidemark("up", "--no-spark", "--data-dir", str(path))
    assert done.returncode == 1
    assert any("ErrDataDirUnusable" in line and str(path) in line for line in errors(done)), (
        done.stderr
    )
    assert path.read_text() == "not a directory"


def test_a_corrupt_leveldb(tmp_path):
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    (metadata / "CURRENT").write_text("MANIFEST-000404\n")
    done = tidemark(
        "coordinator",
        "--addr",
        "127.0.0.1:0",
        "--http-addr",
        "127.0.0.1:0",
        "--metadata",
        f"leveldb:{metadata}",
    )
    assert done.returncode == 1
    assert any("ErrDatabaseCorrupt" in line and str(metadata) in line for line in errors(done)), (
        done.stderr
    )
    assert (metadata / "CURRENT").read_text() == "MANIFEST-000404\n"


def test_an_unknown_configuration_key_names_the_nearest(tmp_path):
    config = tmp_path / "tidemark.toml"
    config.write_text('[store]\ndata-dri = "x"\n')
    done = tidemark("store", "--config", str(config))
    assert done.returncode == 1
    assert any(
        "ErrConfigInvalid" in line and "data-dri" in line and "data-dir" in line
        for line in errors(done)
    )


def test_a_missing_java(tmp_path):
    done = tidemark(
        "demo", "--data-dir", str(tmp_path), "--any-ports", PATH=str(tmp_path), JAVA_HOME=""
    )
    assert done.returncode == 1
    assert any("ErrJavaNotFound" in line for line in errors(done)), done.stderr


def test_an_unknown_command():
    assert tidemark("stroe").returncode == 2
