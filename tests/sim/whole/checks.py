"""What must hold at every moment, and at the end."""

import asyncio
import contextlib
import itertools
from typing import Any

from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo, State, checkpoint_of
from storage.codec import encode_bytes
from storage.meta.errors import MetaUnavailableError
from storage.mvcc.engine import Versions
from storage.tidb.record import decode_record, record_key
from tests.sim.checks import BrokenError
from tests.sim.whole.cluster import FEED, LIMITED, Cluster
from tests.sim.whole.history import Tables
from tests.sim.whole.lake import Lake
from tests.sim.whole.machine import STORES
from tests.sim.whole.workload import ACCOUNTS, COUNT

_LOOK_EVERY_S = 0.25
_ENDS_WITHIN_S = 180.0
_STAND_S = 600.0
"""For so long timestamps may stand still, and locks of dead clients do not expire: a clock that was
ahead was set right.
"""
_GC_LEASE_S = 5.0
"""A little more than the lease of a GC worker."""
_GC_SAFE_POINT = b"/pd/7/gc/safe_point"


class Checks:
    """Looks at a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._checkpoint_ts = 0
        self._term: Any = None
        self._leads_since_s = 0.0
        """Since when the same coordinator leads."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """See that everything holds now.

        Raises:
            BrokenError: it does not.
        """
        cluster = self._cluster
        cluster.history.settle([cluster.machines[name].disk for name in STORES])
        _expect(not cluster.defects, f"nobody expected this: {cluster.defects}")
        self._check_alone()
        self._check_regions()
        with contextlib.suppress(MetaUnavailableError):
            await self._check_feed()

    def _check_alone(self) -> None:
        """Of those who must be one at a time there is one, as far as they know themselves."""
        now_s = asyncio.get_running_loop().time()
        up = [each for each in self._cluster.machines.values() if each.is_up]
        leading = {
            "coordinators": [
                each.name
                for each in up
                if (current := each.parts.get("term")) is not None
                and current.term is not None
                and current.term.leadership.held
            ],
            "GC workers": [
                each.name
                for each in up
                if (worker := each.parts.get("worker")) is not None and worker.election.leads
            ],
            "owners": [
                each.name
                for each in up
                if each.feeds is not None
                and (owning := each.feeds._maintainers).owner.is_active
                and owning._lease is not None
                and now_s < owning._lease.deadline
            ],
        }
        terms = [
            self._cluster.machines[name].parts["term"].term for name in leading["coordinators"]
        ]
        if terms and terms[0] is not self._term:
            self._term, self._leads_since_s = terms[0], now_s
        # A GC worker's lease ends early when timestamps jump (`gcsafepoint.worker.election`).
        if self._cluster.time_jumped or now_s < self._leads_since_s + _GC_LEASE_S:
            del leading["GC workers"]
        for who, names in leading.items():
            _expect(len(names) <= 1, f"{who} that lead: {names}")
        for name, process in self._cluster.clients.items():
            _expect(process.is_dead or not process.end, f"{name} ended: {process.end}")
        for each in up:
            _expect(not each.process.end, f"{each.name} ended: {each.process.end}")

    def _check_regions(self) -> None:
        """No key is served by two stores."""
        served = sorted(
            (region.start_key, region.end_key or b"\xff" * 16, name)
            for name in STORES
            if (store := self._cluster.machines[name].parts.get("store")) is not None
            for region in store.gate.regions
        )
        for (_, end, one), (start, _, other) in itertools.pairwise(served):
            _expect(end <= start, f"{one} and {other} serve the same keys, from {start.hex()} on")

    async def _check_feed(self) -> None:
        cluster = self._cluster
        meta, lake = cluster.meta, cluster.lakes[FEED]
        point = await meta.get(_GC_SAFE_POINT)
        status, info = await meta.get(keys.status(FEED)), await meta.get(keys.info(FEED))
        if status is None or info is None:
            return
        record = ChangefeedInfo.from_json(info.value)
        checkpoint_ts = checkpoint_of(status.value)
        before, self._checkpoint_ts = self._checkpoint_ts, checkpoint_ts
        _expect(checkpoint_ts >= before, f"checkpoint {before} → {checkpoint_ts}")
        _expect(record.state is not State.FAILED, f"{FEED} has failed: {record.error}")
        reached_ts = max(lake.acked_ts, record.start_ts)
        _expect(
            checkpoint_ts <= reached_ts, f"checkpoint {checkpoint_ts}, acknowledged {reached_ts}"
        )
        safe_point = int(point.value, 16) if point else 0
        _expect(safe_point < checkpoint_ts, f"GC to {safe_point}, the checkpoint {checkpoint_ts}")
        for name in STORES:
            store = cluster.machines[name].parts.get("store")
            begun = store.collector.walk.begun_safe_point if store is not None else 0
            _expect(begun < checkpoint_ts, f"{name} collects to {begun}: {checkpoint_ts}")
        self._check_kept(checkpoint_ts)

    def _check_kept(self, ts: int) -> None:
        """What the changefeed may ask for is in the stores: all rows as of its checkpoint."""
        cluster = self._cluster
        states = [Versions(cluster.machines[name].disk) for name in STORES]
        wanted = cluster.history.at(ts)["accounts"]
        for number in range(1, COUNT + 1):
            key = record_key(ACCOUNTS.id, number)
            values = [state.value(encode_bytes(key), ts) for state in states]
            found = [decode_record(ACCOUNTS, key, each)["balance"] for each in values if each]
            row = wanted.get(number)
            balances = [row["balance"]] if row else []
            _expect(found == balances, f"account {number} at {ts}: {found}, not {balances}")

    def at(self, ts: int) -> Tables:
        """The tables as of `ts`, as far as the stores say what became of open transactions."""
        cluster = self._cluster
        cluster.history.settle([cluster.machines[name].disk for name in STORES])
        return cluster.history.at(ts)

    def committed(self, lake: Lake, end_ts: int) -> None:
        """A lake has got a cut: it equals the history.

        Raises:
            BrokenError: it does not.
        """
        cluster = self._cluster
        cluster.tell(f"{lake.changefeed}: cut at {end_ts}")
        is_below = lake.changefeed != LIMITED or end_ts <= cluster.target_ts
        _expect(is_below, f"a cut at {end_ts}, above the target_ts {cluster.target_ts}")
        wanted = self.at(end_ts)
        for table, rows in wanted.items():
            if lake.tables.get(table) != rows:
                differ = {
                    number: (lake.tables[table].get(number), rows.get(number))
                    for number in sorted({*rows, *lake.tables[table]})
                    if lake.tables[table].get(number) != rows.get(number)
                }
                raise BrokenError(f"{table} at {end_ts}: the lake and the history: {differ}")

    async def end(self) -> None:
        """See that the lake gets everything, once nothing is harmed any more.

        Raises:
            BrokenError: it does not.
        """
        cluster, lake = self._cluster, self._cluster.lakes[FEED]
        deadline = asyncio.get_running_loop().time() + _ENDS_WITHIN_S
        deadline += _STAND_S if cluster.time_jumped else 0.0
        last_ts = await cluster.write_last()
        while lake.end_ts < last_ts:
            now_s = asyncio.get_running_loop().time()
            _expect(now_s < deadline, f"the lake stands at {lake.end_ts}, not {last_ts}")
            await asyncio.sleep(_LOOK_EVERY_S)
            # A pause may arrive when whoever asked for it has long gone on.
            await cluster.resume()
        # Where timestamps are ahead of the clock, they stand still, and do not come there.
        while not cluster.time_jumped and not await self._has_ended():
            now_s = asyncio.get_running_loop().time()
            _expect(now_s < deadline, f"{LIMITED} does not end at {cluster.target_ts}")
            await asyncio.sleep(_LOOK_EVERY_S)
        while cluster.dumps and not await cluster.dump_is_over():
            now_s = asyncio.get_running_loop().time()
            _expect(now_s < deadline, "the dump does not end")
            await asyncio.sleep(_LOOK_EVERY_S)
        await self.look()

    async def _has_ended(self) -> bool:
        """Whether the changefeed with a target_ts is finished, if there is one."""
        cluster = self._cluster
        with contextlib.suppress(MetaUnavailableError):
            info = await cluster.meta.get(keys.info(LIMITED))
            if info is None:
                return True
            is_finished = ChangefeedInfo.from_json(info.value).state is State.FINISHED
            return is_finished and cluster.lakes[LIMITED].end_ts == cluster.target_ts
        return False


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenError(what)
