"""Ports of tests' servers."""

import subprocess
import sys

from tests import ports


def test_ports_are_none_of_those_that_the_kernel_gives_away_and_all_different():
    found = ports.free_ports(50)
    assert len(set(found)) == 50
    assert max(found) <= ports._last()


def test_where_the_kernel_chooses_from_all_ports_there_are_some_nevertheless(tmp_path, monkeypatch):
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_KERNELS_CHOICE", tmp_path / "range")
    assert ports._last() == ports._LAST


def test_each_process_of_a_session_has_ports_of_its_own(monkeypatch):
    given = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        some = ports._free_ports()
        given.append({next(some) for _ in range(200)})
    assert not given[0] & given[1]


TAKER = """
import sys
from tests.ports import free_ports
print(*free_ports(100), flush=True)
sys.stdin.read()
"""


def test_sessions_that_run_at_once_share_no_port():
    """Both of one share, and from the same start: the ports of the first are free to bind."""
    takers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import random\nrandom.SystemRandom = lambda: random.Random(1)\n{TAKER}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    taken = [taker.stdout.readline().split() for taker in takers]
    for taker in takers:
        taker.communicate()
    ports = [port for each in taken for port in each]
    assert len(ports) == 300
    assert len(set(ports)) == len(ports)
