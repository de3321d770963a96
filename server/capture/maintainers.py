"""The changefeeds that this capture runs: as their owner, and as the maintainer of single logs.

A log's changefeed has one maintainer, the capture that holds its key (`keys.maintainer`) with its
lease. The owner says who it is to be (`server.capture.owner`); the one that is it stops the
changefeed, saves, and deletes the key, before another one takes it. A capture that dies loses the
key with its lease. So a log moves without two captures serving it at a time.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import structlog

from server.capture import metrics
from server.capture.changefeeds import Changefeeds
from server.capture.errors import NotOwnerError
from server.capture.feed import Feed
from server.capture.fence import Fence, free_from_dead
from server.capture.owner import Owner, captures_of
from server.changefeed import keys
from server.puller.tikv.puller import TablePuller
from storage.meta.meta import Compare, Delete, Lease, Meta, Put
from storage.model.errors import UnavailableError
from storage.tasks import wait_at_most

_ADJUST_EVERY_S = 0.5

MakeChangefeeds: TypeAlias = Callable[[Fence, str], Changefeeds]
"""Builds the changefeeds of a maintainer from its fence and the changefeed's id."""

_log = structlog.get_logger(__name__)


class Maintainers:
    """All changefeeds of this capture; `decided` is set when the owner, in this process, has placed
    them.
    """

    def __init__(
        self,
        meta: Meta,
        identity: str,
        owner: Owner,
        make: MakeChangefeeds,
        decided: asyncio.Event,
    ) -> None:
        self.owner = owner
        self._decided = decided
        self._meta = meta
        self.id = identity
        self._make = make
        self._lease: Lease | None = None
        self._maintained: dict[str, Changefeeds] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()

    @property
    def feeds(self) -> dict[str, Feed]:
        """All that run here, by id."""
        feeds = dict(self.owner.feeds)
        for changefeeds in self._maintained.values():
            feeds |= changefeeds.feeds
        return feeds

    def changefeeds_of(self, changefeed: str) -> Changefeeds:
        """Return the `Changefeeds` that run a changefeed in this capture; for one that does not run
        here the owner's, whose error says why.

        Callable from any thread.
        """
        maintained = self._maintained.get(changefeed)
        if maintained is not None and changefeed in maintained.feeds:
            return maintained
        return self.owner

    def has(self, changefeed: str) -> bool:
        """Whether the changefeed runs here; may be called from any thread."""
        return changefeed in self.changefeeds_of(changefeed).feeds

    def feed(self, changefeed: str) -> Feed:
        """The changefeed of that id; callable from any thread.

        Raises:
            NotOwnerError, ChangefeedNotExistsError: it is elsewhere, or nowhere.
        """
        return self.changefeeds_of(changefeed).feed(changefeed)

    def pullers(self) -> list[TablePuller]:
        """The pullers of tables of the cluster, at this moment."""
        return self.owner.pullers()

    def check_held(self) -> None:
        """See that this capture's keys were surely its own until now; callable from any thread.

        Raises:
            NotOwnerError: the lease may have ended.
        """
        # A capture that hung may go on for a moment without knowing what it has lost. Whoever runs
        # its changefeeds by now has read chunks of a dump again: a reader that took a cut from here
        # would acknowledge them there without having them.
        lease = self._lease  # its end is another thread's
        if lease is None or time.monotonic() >= lease.deadline:
            raise NotOwnerError("this capture's lease has ended; ask again")

    async def run(self, lease: Lease) -> None:
        """Maintain the changefeeds placed on this capture, until cancelled."""
        self._lease, self._tasks, self._leaving = lease, {}, set()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._decided.clear()
                    try:
                        await self._adjust(tasks, lease)
                    except UnavailableError as err:
                        _log.warning("placements cannot be looked up now", error=str(err))
                    await wait_at_most(self._decided, _ADJUST_EVERY_S)
        finally:
            self._lease = None

    async def _adjust(self, tasks: asyncio.TaskGroup, lease: Lease) -> None:
        """Start the changefeeds that were placed here, and end those that were moved away or
        removed.
        """
        placed = await captures_of(self._meta, keys.PLACEMENTS)
        mine = {changefeed for changefeed, capture in placed.items() if capture == self.id}
        for changefeed, task in self._tasks.items():
            # Once only: a second time would interrupt what it saves and gives back.
            goes = changefeed not in mine or self._is_removed(changefeed)
            if goes and changefeed not in self._leaving:
                self._leaving.add(changefeed)
                tasks.create_task(self._leave(changefeed, task), name=f"leaves {changefeed}")
        await self._give_back(lease, mine)
        for changefeed in mine - self._tasks.keys():
            self._tasks[changefeed] = tasks.create_task(
                self._maintain(changefeed, lease), name=f"maintainer of {changefeed}"
            )

    async def _leave(self, changefeed: str, task: asyncio.Task[None]) -> None:
        """Stop running a changefeed once no change to it is being made."""
        maintained = self._maintained.get(changefeed)
        if maintained is not None:
            await maintained.drain_changes()
        task.cancel()

    async def _give_back(self, lease: Lease, mine: Collection[str]) -> None:
        """Delete keys of changefeeds that do not run here, and are to run elsewhere: one that could
        not be deleted in its time would keep the changefeed from all others.
        """
        for pair in await self._meta.get_prefix(keys.MAINTAINERS):
            changefeed = pair.key.removeprefix(keys.MAINTAINERS).decode(errors="replace")
            if pair.lease == lease.id and changefeed not in {*mine, *self._tasks}:
                await self._release(Compare.unchanged(pair.key, pair.mod_revision))

    def _is_removed(self, changefeed: str) -> bool:
        maintained = self._maintained.get(changefeed)
        return maintained is not None and maintained.is_active and not maintained.feeds

    async def _maintain(self, changefeed: str, lease: Lease) -> None:
        """Run a changefeed until cancelled, if no other capture does."""
        fence: Fence | None = None
        try:
            fence = await self._claimed(changefeed, lease)
            if fence is not None:
                _log.info("maintains a changefeed", changefeed=changefeed)
                with self._maintaining(changefeed, fence) as changefeeds:
                    await changefeeds.run(lambda: None)
        except* UnavailableError as group:
            _log.warning(
                "a changefeed cannot be run now",
                changefeed=changefeed,
                error=str(group.exceptions[0]),
            )
        finally:
            try:
                if fence is not None:
                    await self._release(fence.compare)
                    _log.info("maintains a changefeed no more", changefeed=changefeed)
            finally:
                # Also where the release is cancelled, as the changefeed is placed elsewhere by
                # then: `_give_back` deletes the key later.
                self._tasks.pop(changefeed, None)
                self._leaving.discard(changefeed)

    @contextmanager
    def _maintaining(self, changefeed: str, fence: Fence) -> Iterator[Changefeeds]:
        self._maintained[changefeed] = self._make(fence, changefeed)
        metrics.MAINTAINED.inc()
        try:
            yield self._maintained[changefeed]
        finally:
            metrics.MAINTAINED.dec()
            del self._maintained[changefeed]

    async def _claimed(self, changefeed: str, lease: Lease) -> Fence | None:
        """The fence by which this capture runs a changefeed; None: another one still does, or there
        is no such changefeed.
        """
        key = keys.maintainer(changefeed)
        holder = await free_from_dead(self._meta, key, self.id, lease.id)
        if holder is not None and holder.lease == lease.id:
            # Given back by this capture, and that got no answer: written again, so that a deletion
            # which arrives late is refused.
            fence = Fence(key, holder.create_revision)
            fence.note_unknown_outcome()
            await fence.settled(self._meta)
            return fence
        exists = Compare(keys.info(changefeed), "create_revision", ">", 0)
        claim = Put(key, self.id.encode(), lease.id)
        result = await self._meta.txn([Compare.absent(key), exists], [claim])
        return Fence(key, result.revision) if result.succeeded else None

    async def _release(self, key: Compare) -> None:
        """Delete a key that is as it was."""
        # Everything is saved by now: who takes the key goes on where this capture ended.
        with suppress(UnavailableError):
            await self._meta.txn([key], [Delete(key.key)])
