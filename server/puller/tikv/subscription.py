"""One region of one span, pulled under a request id of its own.

A request id is never used again, so an event that was under way when its subscription ended cannot
be mistaken for one of the next.
"""

import itertools
from dataclasses import dataclass, field
from typing import TypeAlias

from kvproto import cdcpb_pb2 as cdcpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb

from server.puller.tikv.fault import Fault
from server.puller.tikv.inbox import Inbox
from server.puller.tikv.matcher import Matcher
from storage.model.span import KeyRange

_VERSION = "8.5.0"
_request_ids = itertools.count(1)

Delivery: TypeAlias = tuple["Subscription", "cdcpb.Event | int | Fault"]
"""An event, a resolved_ts, or the end of a subscription."""


def next_request_id() -> int:
    """A request id that this process has not used."""
    return next(_request_ids)


@dataclass(slots=True, eq=False)
class Subscription:
    """`part` lies within the region; `ended` is set by the puller once it has seen the fault."""

    request_id: int
    region_id: int
    epoch: metapb.RegionEpoch
    address: str
    part: KeyRange
    matcher: Matcher
    inbox: Inbox[Delivery] = field(repr=False)
    ended: bool = False

    def register(self, cluster_id: int) -> cdcpb.ChangeDataRequest:
        """The request that starts it."""
        return cdcpb.ChangeDataRequest(
            header=cdcpb.Header(cluster_id=cluster_id, ticdc_version=_VERSION),
            region_id=self.region_id,
            region_epoch=self.epoch,
            checkpoint_ts=self.matcher.start_ts,
            start_key=self.part.start_key,
            end_key=self.part.end_key,
            request_id=self.request_id,
            extra_op=kvrpcpb.ReadOldValue,
            register=cdcpb.ChangeDataRequest.Register(),
        )

    def deregister(self, cluster_id: int) -> cdcpb.ChangeDataRequest:
        """The request that ends it."""
        return cdcpb.ChangeDataRequest(
            header=cdcpb.Header(cluster_id=cluster_id, ticdc_version=_VERSION),
            region_id=self.region_id,
            request_id=self.request_id,
            deregister=cdcpb.ChangeDataRequest.Deregister(),
        )
