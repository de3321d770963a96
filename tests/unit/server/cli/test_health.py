"""`tidemark health`: it asks the port that the daemon would take from the same settings."""

import subprocess
import sys
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry

from server import http
from server.cli import main
from server.cli.config import sections
from server.cli.health import ROLES
from server.config import HTTP_ADDRS
from tests.ports import free_port


@pytest.fixture
def daemon():
    """The HTTP port of a daemon, and a switch for what it says."""
    serving = [True]
    with http.listen(
        "127.0.0.1:0", ready=lambda: serving[0], registry=CollectorRegistry()
    ) as address:
        yield address, serving


def test_a_daemon_that_serves_is_ready_and_one_that_drains_is_not(daemon, capsys):
    address, serving = daemon
    assert main.main(["health", "store", "--http-addr", address]) == 0
    assert capsys.readouterr().out == f"store at {address} is ready\n"
    serving[0] = False
    assert main.main(["health", "store", "--http-addr", address]) == 1
    assert "not ready: starting or stopping" in capsys.readouterr().err


def test_nobody_at_the_port_is_an_error_that_names_it(capsys):
    address = f"127.0.0.1:{free_port()}"
    assert main.main(["health", "pump", "--http-addr", address]) == 1
    assert f"[TM:ErrDaemonNotReady] nothing answers at {address}" in capsys.readouterr().err


def test_the_port_comes_from_the_environment_of_the_daemon(daemon, monkeypatch, capsys):
    port = daemon[0].rpartition(":")[2]
    monkeypatch.setenv("TIDEMARK_GC_WORKER_HTTP_ADDR", f"0.0.0.0:{port}")
    assert main.main(["health", "gc-worker"]) == 0
    assert f"127.0.0.1:{port}" in capsys.readouterr().out


def test_the_port_comes_from_the_file_of_the_daemon(daemon, tmp_path):
    path = tmp_path / "tidemark.toml"
    path.write_text(f'[pump]\nhttp-addr = "{daemon[0]}"\nnode-id = "one"\n')
    assert main.main(["health", "pump", "--config", str(path)]) == 0


def test_a_port_that_the_kernel_chose_is_not_guessed(capsys):
    assert main.main(["health", "spark", "--http-addr", "127.0.0.1:0"]) == 1
    assert "give it a fixed http-addr" in capsys.readouterr().err


def test_every_daemon_with_an_http_port_is_a_role():
    with_port = [
        name
        for name, section in sections().items()
        if "http_addr" in {field.name for field in fields(section)}
    ]
    assert with_port == list(ROLES)


def test_a_probe_imports_no_daemon():
    code = (
        "import sys; from server.cli import main\n"
        "main.main(['health', 'store', '--http-addr', '127.0.0.1:9'])\n"
        "sys.exit(any(name.split('.')[0] in ('grpc', 'pyarrow', 'asyncio') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


def test_the_help_of_a_daemon_waits_for_none_of_its_libraries():
    code = (
        "import contextlib, sys; from server.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main.main([*command.split(), '--help'])\n"
        "    heavy = {'pyarrow', 'numpy', 'pyspark', 'nacl'} & sys.modules.keys()\n"
        "    assert not heavy, (command, heavy)\n"
    )
    daemons = [name for name in main.COMMANDS if name not in ("cli", "spark", "demo", "play")]
    done = subprocess.run(
        [sys.executable, "-c", code, *daemons, "spark run", "spark keep"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "Start a capture: read a source, sort its changes, serve them to lake jobs." in shown
    assert "Run the lake jobs of all changefeeds, and start them again when they fail." in shown


def test_daemons_of_one_machine_have_ports_of_their_own_by_default():
    """Of `spark run` there may be several, one for each changefeed: the kernel chooses."""
    ports = {
        role: sections()[role]().http_addr.rpartition(":")[2] for role in ROLES if role != "spark"
    }
    assert "0" not in ports.values()
    assert len(set(ports.values())) == len(ports)


def test_the_ports_of_roles_are_those_of_their_daemons() -> None:
    """A probe that asked another port than the daemon has would restart it for ever."""
    for role, address in HTTP_ADDRS.items():
        assert sections()[role]().http_addr == address
