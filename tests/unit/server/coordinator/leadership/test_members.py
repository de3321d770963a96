"""Who leads, as one member sees it: never itself by hearsay, never by an old picture."""

import asyncio

import pytest
from kvproto import pdpb_pb2

from server.coordinator.leadership.leadership import Leadership
from server.coordinator.leadership.members import STALE_AFTER_S, Members, member_at

ME, OTHER = member_at("here:2379", tls=False), member_at("there:2379", tls=True)


def test_a_members_id_is_its_addresss_and_its_url_says_whether_it_speaks_tls() -> None:
    assert member_at("here:2379", tls=True).member_id == ME.member_id != OTHER.member_id
    assert ME.client_urls == ["http://here:2379"]
    assert OTHER.client_urls == ["https://there:2379"]


def test_a_picture_that_gets_old_names_no_leader() -> None:
    now_s = [10.0]
    members = Members(ME, clock=lambda: now_s[0])
    assert members.leader is None
    members.update(OTHER, [ME, OTHER], read_at=9.0)
    assert members.leader == OTHER
    assert members.not_leader().message == "not leader; the leader is https://there:2379"
    now_s[0] = 9.0 + STALE_AFTER_S
    assert members.leader is None
    assert members.not_leader().message == "not leader; there is no leader now, try again"
    assert list(members.listed) == [ME, OTHER]  # clients may still ask them


def test_we_lead_by_our_own_leadership_only() -> None:
    members = Members(ME, clock=lambda: 0.0)
    members.update(ME, [ME], read_at=0.0)
    assert members.leader is None  # the key is ours, of a term that is over or of an earlier life
    members.leadership = Leadership(clock=lambda: 5.0)
    assert members.leader == ME
    members.update(OTHER, [ME, OTHER], read_at=4.9)  # older than our election
    assert members.leader == ME
    members.leadership.end()
    assert members.leader == OTHER


@pytest.mark.parametrize("leader", [None, OTHER])
def test_a_leader_whose_key_is_not_there_any_more_leads_no_longer(
    leader: pdpb_pb2.Member | None,
) -> None:
    members = Members(ME, clock=lambda: 5.0)
    members.leadership = Leadership(clock=lambda: 5.0)
    members.update(ME, [ME], read_at=5.1)
    assert members.leadership.held
    members.update(leader, [ME, OTHER], read_at=5.2)
    assert not members.leadership.held


async def test_leaderless_is_what_a_new_picture_says() -> None:
    members = Members(ME, clock=lambda: 0.0)
    members.update(None, [ME], read_at=0.0)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(members.wait_leaderless())
        await asyncio.sleep(0)
        members.update(OTHER, [ME, OTHER], read_at=0.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        members.update(None, [ME], read_at=0.0)
