"""pdpb.PD: what every coordinator answers, whether it leads or not."""

from collections.abc import Mapping
from typing import Any

from kvproto import pdpb_pb2

from server.coordinator.leadership.members import Members


class MemberService:
    """Who is there and who leads."""

    def __init__(self, cluster_id: int, members: Members) -> None:
        self._header = pdpb_pb2.ResponseHeader(cluster_id=cluster_id)
        self._members = members

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        return {"GetMembers": self.get_members, "GetClusterInfo": self.get_cluster_info}

    async def get_members(self, _request: pdpb_pb2.GetMembersRequest, _context: Any) -> pdpb_pb2.GetMembersResponse:
        """Clients ask this first, before they know the cluster id; without a leader they ask again, or another."""
        leader = self._members.leader
        return pdpb_pb2.GetMembersResponse(
            header=self._header, members=self._members.listed, leader=leader, etcd_leader=leader
        )

    async def get_cluster_info(
        self, _request: pdpb_pb2.GetClusterInfoRequest, _context: Any
    ) -> pdpb_pb2.GetClusterInfoResponse:
        """All services are here."""
        return pdpb_pb2.GetClusterInfoResponse(header=self._header, serviceModes=[pdpb_pb2.PD_SVC_MODE])
