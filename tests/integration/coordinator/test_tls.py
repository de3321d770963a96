"""Certificates everywhere: between clients and coordinators, between coordinators and etcd,
and after a takeover.
"""

from pathlib import Path

from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from tests.integration.coordinator.clusters import in_thread, members_of
from tests.integration.coordinator.processes import Coordinator, etcd_members
from tests.ports import free_ports
from tests.unit.server.certificates import Certificates


async def test_the_leader_is_found_and_followed_over_tls(tmp_path: Path) -> None:
    security = Certificates(tmp_path).security(ca=True)
    with etcd_members(tmp_path, 1, security=security) as (etcd,):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        coordinators = [
            Coordinator(
                address, f"etcd://{etcd.address}", tmp_path / f"{address}.log", flags_of(security)
            )
            for address in addresses
        ]
        try:
            for coordinator in coordinators:
                coordinator.launch()
            async with PdClient.open(",".join(addresses), security) as pd:
                last = await pd.tso()
                while not (leader := (await in_thread(members_of, addresses[0], security)).leader):
                    pass  # it may have begun later than the other one
                coordinators[addresses.index(leader)].kill()
                assert await pd.tso() > last
        finally:
            for coordinator in coordinators:
                coordinator.kill()


def flags_of(security: SecurityConfig) -> list[str]:
    paths = {"ca": security.ca_path, "cert": security.cert_path, "key": security.key_path}
    return [word for name, path in paths.items() for word in (f"--{name}-path", path)]
