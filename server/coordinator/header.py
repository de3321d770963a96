"""The header of PD's requests and answers: checked before a handler runs, filled in after it.

A request is refused when another coordinator may lead, or when it names another cluster. A refusal
that PD puts into the header is raised by the handler as RefusedError; without one, `header.error`
stays unset. A handler bears the name of its RPC, so that searching for the RPC finds it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf import message_factory
from kvproto import keyspacepb_pb2, pdpb_pb2

from server.coordinator.errors import RefusedError, WrongClusterError
from server.coordinator.leadership.leadership import Leadership

Handler = Callable[[Any], Awaitable[Any]]
Call = Callable[[Any, Any], Awaitable[Any]]
H = TypeVar("H", bound=Callable[..., Any])

_METHODS = {
    method.name: method
    for service in (
        pdpb_pb2.DESCRIPTOR.services_by_name["PD"],
        keyspacepb_pb2.DESCRIPTOR.services_by_name["Keyspace"],
    )
    for method in service.methods
}


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
        """Check one message of a call: answers from memory are valid only while no other
        coordinator can lead.

        Raises:
            NotLeaderError: another coordinator may lead.
            WrongClusterError: the request is meant for another cluster.
        """
        # With every message, not once a call: a stream may outlive the lease, and a stopped process
        # continues without having heard of its end.
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

    def calls(self, *handlers: Handler, before_bootstrap: bool = False) -> dict[str, Call]:
        """The RPCs that the handlers bear the names of.

        A handler gets checked requests, and its answer gets its header here. All RPCs need a
        bootstrapped cluster but those that clients call `before_bootstrap`.
        """
        return {
            name: self._call(name, handler, needs_cluster=not before_bootstrap)
            for name, handler in by_name(*handlers).items()
        }

    def _call(self, name: str, handler: Handler, *, needs_cluster: bool) -> Call:
        response = message_factory.GetMessageClass(_METHODS[name].output_type)

        async def call(request: Any, _context: Any) -> Any:
            self.check(request.header)
            try:
                if needs_cluster:
                    self.check_bootstrapped()
                answer = await handler(request)
            except RefusedError as err:
                return response(header=self.refused(err))
            answer.header.CopyFrom(self.ok)
            return answer

        return call


def by_name(*handlers: H) -> dict[str, H]:
    """Handlers by the names of their RPCs, which they bear."""
    return {handler.__name__: handler for handler in handlers}
