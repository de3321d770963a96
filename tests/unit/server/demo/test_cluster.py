"""Where the demo's cluster listens: it comes back there after a kill, so nobody else may get in."""

from pathlib import Path

import pytest

from server.demo import cluster

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_free_different_and_none_that_the_kernel_gives_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = set(range(20_000, 31_990))
    monkeypatch.setattr(cluster, "_is_free", lambda port: port not in taken)
    ports = [int(address.rpartition(":")[2]) for address in cluster._free_addresses(7)]
    assert len(set(ports)) == 7
    assert not taken & set(ports)
    if _RANGE.exists() and (lowest := int(_RANGE.read_text().split()[0])) == 32_768:
        assert max(ports) < lowest
