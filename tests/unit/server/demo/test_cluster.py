"""Where the demo's cluster listens: it comes back there after a kill, so nobody else may get in."""

from pathlib import Path

import pytest

from server.demo import cluster
from server.up.tree import child_http_addr

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DAEMONS = ("coordinator", "store", "capture", "pump", "gc-worker")


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_ports_are_free_different_and_none_that_the_kernel_gives_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = set(range(20_000, 31_990)) - set(range(20_000, 31_990, 7))
    taken -= {http + offset for http in range(12_000, 20_000, 11) for offset in (-139, -87, 1, 2)}
    monkeypatch.setattr(cluster, "_is_free", lambda port: port not in taken)
    for _ in range(50):
        places = cluster.free_addresses()
        assert set(places) == {*DAEMONS, "flight", "http"}
        https = [child_http_addr(places["http"], name) for name in DAEMONS]
        ports = [*map(port, places.values()), *map(port, https)]
        assert len(set(ports)) == len(ports)
        assert not taken & set(ports)
        if _RANGE.exists() and (lowest := int(_RANGE.read_text().split()[0])) == 32_768:
            assert max(ports) < lowest


async def test_a_port_that_is_taken_is_told_with_the_flag_that_helps(tmp_path: Path) -> None:
    line = "[TM:ErrPortInUse] cannot listen on 127.0.0.1:8301; choose another --flight-addr"
    (tmp_path / "log").write_text(f"{line}\n{line}\n")
    with pytest.raises(cluster.ProcessFailedError) as caught:
        async with cluster.open_process("keyword", [], tmp_path / "log") as process:
            await cluster.json_line(process, tmp_path / "log")
    assert str(caught.value).count("cannot listen") == 1
    assert str(caught.value).endswith("--flight-addr; --any-ports uses free ports")


def test_without_free_ports_the_demo_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_is_free", lambda _: False)
    with pytest.raises(cluster.ProcessFailedError, match="stop what listens there"):
        cluster.free_addresses()
