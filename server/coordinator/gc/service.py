"""pdpb.PD: everything about GC, put together: two families of calls over one state (docs/design/0008-gc-state.md)."""

from collections.abc import Mapping
from typing import Any

from gcsafepoint.state.service import SafePointService
from server.coordinator.gc.barriers import GcBarrierService
from server.coordinator.gc.classic import GcClassicService
from server.coordinator.gc.state import GcStateService
from server.coordinator.gc.v2 import GcV2Service
from server.coordinator.header import Headers
from server.rpc.front import BatchHandler


class GcService:
    """All calls about GC."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._classic = GcClassicService(headers, safe_points)
        self._newer = (
            GcStateService(headers, safe_points),
            GcBarrierService(headers, safe_points),
            GcV2Service(headers, safe_points),
        )

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served one by one."""
        calls = dict(self._classic.calls())
        for service in self._newer:
            calls |= service.calls()
        return calls

    def batches(self) -> Mapping[str, BatchHandler]:
        """PD's names for what is served in batches."""
        return self._classic.batches()
