"""A coordinator's part in the election, over real metadata."""

import asyncio

from server.coordinator.leadership.members import Members, member_at
from server.coordinator.term import CurrentTerm, Election
from storage.meta.errors import MetaUnavailableError

ME = member_at("here:2379", tls=False)


async def test_a_candidate_that_is_told_to_end_while_its_metadata_fails_ends(meta) -> None:
    """The failure comes out of the same group as the cancellation, and must not hide it."""
    members, loading = Members(ME), asyncio.Event()

    async def load(_leadership):
        loading.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise MetaUnavailableError("etcd is away, too")

    election = Election(meta, b"/leader", members, CurrentTerm(members), load)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(election.run(60))
        while not loading.is_set():
            members.update(None, [ME], read_at=0.0)
            await asyncio.sleep(0)
        running.cancel()
    assert running.cancelled()
