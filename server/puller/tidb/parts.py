"""Parts of big tables: the region bounds at which a table is split, and the proof that parts do not
share rows.

A table is split where regions begin, so that a region's changes go to one capture. Regions may
merge later: the store is asked for a part's keys only, but not every version of TiKV leaves out
what lies outside of them. A row that came with two parts would be delivered twice, so `WithinPart`
looks at every key.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from server.puller.tikv.puller import Sorter
from server.rpc.pd import PdClient
from server.rpc.region_cache import after, region_start
from storage.codec import encode_bytes
from storage.model.span import Span

_REGIONS_AT_ONCE: Final = 1024


async def regions_within(pd: PdClient, start_key: bytes, end_key: bytes) -> list[bytes]:
    """Return the region bounds within `(start_key, end_key)`, ascending.

    Raises:
        UnavailableError: the coordinator does not answer.
    """
    begins: list[bytes] = []
    key, encoded_end = start_key, encode_bytes(end_key) if end_key else b""
    while True:
        routes = await pd.scan_regions(encode_bytes(key), encoded_end, _REGIONS_AT_ONCE)
        begins += [begin for route in routes if (begin := region_start(route)) > start_key]
        # Where a region is splitting, the coordinator may know fewer for a moment.
        following = after(routes[-1], end_key) if len(routes) == _REGIONS_AT_ONCE else None
        if following is None or following <= key:
            return sorted({*begins})
        key = following


class WithinPart:
    """Implements `server.puller.tikv.puller.Sorter` for a part, by the one that its rows go to."""

    def __init__(self, span: Span, sorter: Sorter) -> None:
        self._start = pa.scalar(span.start_key, pa.binary())
        self._end = pa.scalar(span.end_key, pa.binary()) if span.end_key else None
        self._sorter = sorter

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA; those of other parts are left out."""
        key = batch.column("key")
        inside = pc.greater_equal(key, self._start)
        if self._end is not None:
            inside = pc.and_(inside, pc.less(key, self._end))
        if not pc.all(inside, min_count=0).as_py():
            batch = batch.filter(inside)
        self._sorter.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        """Note that all changes up to `ts` were added."""
        self._sorter.resolve(span, ts)
