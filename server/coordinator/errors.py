"""The errors with which the coordinator refuses requests, in PD's words."""

from typing import Any

import grpc

from server.rpc.errors import StatusError
from storage.model.errors import InvalidError


class ClusterIdMismatchError(InvalidError):
    """The stored cluster id is not the configured one."""

    code = "ErrClusterIdMismatch"


class MetadataUrlError(InvalidError):
    """`--metadata` is neither etcd://… nor leveldb:…."""

    code = "ErrMetadataUrl"


class RequestError(StatusError):
    """A refused request, in PD's words: gRPC status Unknown, as Go's plain errors travel."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.UNKNOWN, message)


class NotLeaderError(StatusError):
    """Only the leader answers this; PD's words, and where it is, as far as we know."""

    def __init__(self, leader_url: str = "") -> None:
        where = f"the leader is {leader_url}" if leader_url else "there is no leader now, try again"
        super().__init__(grpc.StatusCode.UNAVAILABLE, f"not leader; {where}")


class WrongClusterError(StatusError):
    """The request names another cluster."""

    def __init__(self, ours: int, theirs: int) -> None:
        text = f"mismatch cluster id, need {ours} but got {theirs}"
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, text)


class RefusedError(InvalidError):
    """A refusal that travels in the answer's header, with gRPC status OK;
    `type` is a pdpb.ErrorType.
    """

    code = "ErrRefused"

    def __init__(self, type_: Any, message: str) -> None:
        super().__init__(message)
        self.type = type_
