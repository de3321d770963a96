"""Leaders, followers and etcd die under load: another leads soon,
and the whole history of answers is that of one.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.coordinator.clusters import Cluster, in_thread, members_of, running_cluster
from tests.integration.coordinator.load import SEED, load_on


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("failover"), etcds=3) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Three coordinators and three etcd members, all healthy."""
    shared.heal()
    return shared


async def test_after_kill_9_of_the_leader_another_goes_on_above_all_it_answered(
    cluster: Cluster,
) -> None:
    leader = await in_thread(cluster.leader)
    async with load_on(cluster.addresses, SEED) as load:
        leader.kill()
        await load.goes_on()
        assert await in_thread(cluster.leader, but=leader) is not leader
        leader.launch()
        await load.goes_on()


async def test_kill_9_of_followers_is_not_noticed(cluster: Cluster) -> None:
    followers = await in_thread(lambda: cluster.followers)
    async with load_on(cluster.addresses, SEED) as load:
        before = list(load.refusals)
        for follower in followers:
            follower.kill()
        await load.goes_on(100)
        assert load.refusals == before


async def test_a_leader_that_stops_hands_over_without_waiting_for_its_lease(tmp_path: Path) -> None:
    with running_cluster(tmp_path, flags=("--leader-lease", "600")) as cluster:
        leader = await in_thread(cluster.leader)
        async with load_on(cluster.addresses, SEED) as load:
            leader.send(signal.SIGTERM)
            await load.goes_on()
            assert await in_thread(leader.wait) == 0
        await in_thread(wait_until_listed, cluster, set(cluster.addresses) - {leader.address})


async def test_kill_9_of_an_etcd_member_changes_nothing_but_the_time(cluster: Cluster) -> None:
    async with load_on(cluster.addresses, SEED) as load:
        for member in cluster.etcd:  # one of them leads
            member.kill()
            await load.goes_on()
            await in_thread(member.start)


async def test_kill_9_of_all_of_etcd_ends_the_term_and_its_return_begins_another(
    cluster: Cluster,
) -> None:
    leader = await in_thread(cluster.leader)
    async with load_on(cluster.addresses, SEED) as load:
        for member in cluster.etcd:
            member.kill()
        await in_thread(cluster.wait_until_nobody_leads)
        assert leader.running
        for member in cluster.etcd:
            member.launch()
        await load.goes_on()


async def test_compaction_under_load_is_not_noticed(cluster: Cluster) -> None:
    async with load_on(cluster.addresses, SEED) as load:
        before = list(load.refusals)
        for _ in range(3):
            await load.goes_on()
            await in_thread(compact, cluster)
        await load.goes_on()
        assert load.refusals == before


def wait_until_listed(cluster: Cluster, addresses: set[str]) -> None:
    deadline = time.monotonic() + 60
    while set(members_of(cluster.leader().address).members) != addresses:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def compact(cluster: Cluster) -> None:
    etcd = cluster.etcd[0]
    revision = (
        etcd.ctl("endpoint", "status", "--write-out", "fields").split('"Revision" : ')[1].split()[0]
    )
    etcd.ctl("compact", revision, "--physical")
    etcd.ctl("defrag")
