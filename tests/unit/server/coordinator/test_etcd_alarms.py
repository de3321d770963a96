"""Alarms by etcd's API: only those that etcd has are raised, and all are shown."""

from types import SimpleNamespace
from typing import Any

import pytest
from etcdpb import rpc_pb2

from server.coordinator.etcd.service import MaintenanceService


class Etcd:
    """Has alarms, and nothing else."""

    revision = 1

    def __init__(self, alarms: set[int]) -> None:
        self.alarms = alarms

    async def set_alarms(self, alarms: set[int]) -> None:
        bytes(alarms)  # as they are kept
        self.alarms = alarms

    def statistics(self) -> Any:
        return SimpleNamespace(live_bytes=0)

    def disk_bytes(self) -> int:
        return 0


def service(etcd: Any) -> MaintenanceService:
    members: Any = None
    return MaintenanceService(etcd, 7, members, rpc_pb2.ResponseHeader)


@pytest.mark.parametrize("number", [3, 300, -1])
async def test_a_number_that_is_no_alarm_raises_none(number: int) -> None:
    etcd = Etcd({rpc_pb2.NOSPACE})
    request = rpc_pb2.AlarmRequest(action="ACTIVATE", alarm=number)
    assert not (await service(etcd).Alarm(request)).alarms
    assert etcd.alarms == {rpc_pb2.NOSPACE}


async def test_both_of_etcds_alarms_are_raised_shown_and_taken_back() -> None:
    etcd = Etcd(set())
    for alarm in ("NOSPACE", "CORRUPT"):
        await service(etcd).Alarm(rpc_pb2.AlarmRequest(action="ACTIVATE", alarm=alarm))
    status = await service(etcd).Status(rpc_pb2.StatusRequest())
    assert list(status.errors) == ["memberID:7 alarm:NOSPACE", "memberID:7 alarm:CORRUPT"]
    taken = await service(etcd).Alarm(rpc_pb2.AlarmRequest(action="DEACTIVATE", alarm="CORRUPT"))
    assert [each.alarm for each in taken.alarms] == [rpc_pb2.CORRUPT]
    assert etcd.alarms == {rpc_pb2.NOSPACE}


async def test_an_alarm_that_an_earlier_version_kept_is_shown_and_can_be_taken_back() -> None:
    etcd = Etcd({99})
    status = await service(etcd).Status(rpc_pb2.StatusRequest())
    assert list(status.errors) == ["memberID:7 alarm:99"]
    await service(etcd).Alarm(rpc_pb2.AlarmRequest(action="DEACTIVATE", alarm=99))
    assert etcd.alarms == set()
