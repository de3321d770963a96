"""Reads of transactional stores as of a timestamp; a lock that hides an answer is raised,
never resolved here.

`Passing` says which locks a read may look through: kvrpcpb.Context's resolved_locks and
committed_locks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import check, raise_for
from server.rpc.pd import RegionRoute
from server.rpc.region_cache import after, below, nearer, region_end, region_start
from server.rpc.region_router import RegionRouter

_KEY, _VALUE = attrgetter("key"), attrgetter("value")
Pairs = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Passing:
    """Transactions whose locks a read passes: `resolved` ones commit later or never,
    `committed` ones already did.
    """

    resolved: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()

    def __or__(self, other: "Passing") -> "Passing":
        """Both."""
        return Passing(self.resolved | other.resolved, self.committed | other.committed)

    def context(self) -> kvrpcpb.Context:
        """The part of a request's context that says so."""
        return kvrpcpb.Context(resolved_locks=self.resolved, committed_locks=self.committed)


NOTHING_PASSED = Passing()


class KvReads:
    """The reading calls of `KvClient`."""

    router: RegionRouter

    async def get(
        self, key: bytes, version: int, passing: Passing = NOTHING_PASSED
    ) -> bytes | None:
        """The value of `key` at timestamp `version`.

        Raises:
            LockedError: a lock older than `version` hides the answer.
        """
        request = kvrpcpb.GetRequest(context=passing.context(), key=key, version=version)
        answer = await self.router.call(key, lambda s: s.KvGet, request)
        check(answer)
        return None if answer.not_found else answer.value

    async def batch_get(
        self, keys: Iterable[bytes], version: int, passing: Passing = NOTHING_PASSED
    ) -> dict[bytes, bytes]:
        """The values of those `keys` that exist at `version`.

        Raises:
            LockedError: with every lock that was met.
        """
        answers = await self.router.fan_out(
            keys,
            lambda s: s.KvBatchGet,
            lambda part: kvrpcpb.BatchGetRequest(
                context=passing.context(), keys=part, version=version
            ),
        )
        for _, answer in answers:
            check(answer)
        pairs = [pair for _, answer in answers for pair in answer.pairs]
        raise_for(pair.error for pair in pairs if pair.HasField("error"))
        return {pair.key: pair.value for pair in pairs}

    async def scan(
        self,
        start_key: bytes,
        end_key: bytes,
        version: int,
        limit: int,
        *,
        key_only: bool = False,
        passing: Passing = NOTHING_PASSED,
    ) -> Pairs:
        """At most `limit` pairs of `[start_key, end_key)` at `version`, in key order;
        an empty end is no end.

        Raises:
            LockedError: with the locks met in the first region that has any.
        """
        pairs_read: Pairs = []
        key: bytes | None = start_key
        while key is not None and len(pairs_read) < limit:
            request = kvrpcpb.ScanRequest(
                context=passing.context(),
                start_key=key,
                version=version,
                limit=limit - len(pairs_read),
                key_only=key_only,
                end_key=end_key,
            )
            pairs, key = await self._scan_region(request)
            raise_for(pair.error for pair in pairs if pair.HasField("error"))
            pairs_read += [(pair.key, pair.value) for pair in pairs]
        return pairs_read

    async def scan_columns(
        self,
        start_key: bytes,
        end_key: bytes,
        version: int,
        limit: int,
        *,
        passing: Passing = NOTHING_PASSED,
    ) -> tuple[list[bytes], list[bytes]]:
        """As `scan`, for many rows: keys and values apart, at half the price.

        No value is empty, as in TiKV.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        key: bytes | None = start_key
        while key is not None and len(keys) < limit:
            request = kvrpcpb.ScanRequest(
                context=passing.context(),
                start_key=key,
                version=version,
                limit=limit - len(keys),
                end_key=end_key,
            )
            pairs, key = await self._scan_region(request)
            values_read = list(map(_VALUE, pairs))
            if not all(values_read):  # only then somebody has to look at each
                raise_for(pair.error for pair in pairs if pair.HasField("error"))
            keys += map(_KEY, pairs)
            values += values_read
        return keys, values

    async def last_key(
        self, start_key: bytes, end_key: bytes, version: int, *, passing: Passing = NOTHING_PASSED
    ) -> bytes | None:
        """The greatest key of `[start_key, end_key)` at `version`; None: there is none.

        Raises as `scan`.
        """
        upper = end_key
        while True:

            def request(route: RegionRoute, upper: bytes = upper) -> kvrpcpb.ScanRequest:
                return kvrpcpb.ScanRequest(
                    context=passing.context(),
                    start_key=nearer(upper, region_end(route)),
                    end_key=max(start_key, region_start(route)),
                    version=version,
                    limit=1,
                    key_only=True,
                    reverse=True,
                )

            route, answer = await self.router.call_region(below(upper), lambda s: s.KvScan, request)
            check(answer)
            raise_for(pair.error for pair in answer.pairs if pair.HasField("error"))
            if answer.pairs:
                return answer.pairs[0].key
            upper = region_start(route)
            if upper <= start_key:
                return None

    async def _scan_region(
        self, request: kvrpcpb.ScanRequest
    ) -> tuple[Sequence[kvrpcpb.KvPair], bytes | None]:
        end_key = request.end_key

        def clamped(route: RegionRoute) -> kvrpcpb.ScanRequest:
            request.end_key = nearer(end_key, region_end(route))
            return request

        route, answer = await self.router.call_region(
            request.start_key, lambda s: s.KvScan, clamped
        )
        check(answer)
        return answer.pairs, after(route, end_key)
