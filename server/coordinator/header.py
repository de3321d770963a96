"""The header of PD's requests and answers: checked before a handler runs, filled in after it.

A request is refused when another coordinator may lead, or when it names another cluster. A refusal
that PD puts into the header is raised by the handler as RefusedError; without one, `header.error`
stays unset.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from kvproto import pdpb_pb2

from server.coordinator.errors import RefusedError, WrongClusterError
from server.coordinator.leadership.leadership import Leadership

Handler = Callable[[Any], Awaitable[Any]]
Call = Callable[[Any, Any], Awaitable[Any]]


class Headers:
    """The cluster's headers, and the checks that every PD request must pass."""

    def __init__(
        self, cluster_id: int, bootstrapped: Callable[[], bool], leadership: Leadership
    ) -> None:
        self.cluster_id = cluster_id
        self.bootstrapped = bootstrapped
        self.leadership = leadership
        self.ok = pdpb_pb2.ResponseHeader(cluster_id=cluster_id)

    def check(self, header: pdpb_pb2.RequestHeader) -> None:
        """Check one message of a call: memory answers only while nobody else can lead.

        Raises:
            NotLeaderError: another coordinator may lead.
            WrongClusterError: the request is meant for another cluster.
        """
        self.leadership.check()
        if header.cluster_id != self.cluster_id:
            raise WrongClusterError(self.cluster_id, header.cluster_id)

    def refused(self, err: RefusedError) -> pdpb_pb2.ResponseHeader:
        """A header that refuses."""
        error = pdpb_pb2.Error(type=err.type, message=err.message)
        return pdpb_pb2.ResponseHeader(cluster_id=self.cluster_id, error=error)

    def check_bootstrapped(self) -> None:
        """Raises: RefusedError: no store has started the cluster yet."""
        if not self.bootstrapped():
            raise RefusedError(pdpb_pb2.NOT_BOOTSTRAPPED, "cluster is not bootstrapped")

    def call_before_bootstrap(self, response: type[Any], handler: Handler) -> Call:
        """The RPC of `handler`, which gets checked requests; its answers get their header here."""

        async def call(request: Any, _context: Any) -> Any:
            self.check(request.header)
            try:
                answer = await handler(request)
            except RefusedError as err:
                return response(header=self.refused(err))
            answer.header.CopyFrom(self.ok)
            return answer

        return call

    def call(self, response: type[Any], handler: Handler) -> Call:
        """As `call_before_bootstrap`, for RPCs that need a bootstrapped cluster."""

        async def checked(request: Any) -> Any:
            self.check_bootstrapped()
            return await handler(request)

        return self.call_before_bootstrap(response, checked)
