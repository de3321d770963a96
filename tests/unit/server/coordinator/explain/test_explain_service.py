"""Who may not explain, and what may not be asked."""

from types import SimpleNamespace

import pytest
from kvproto import pdpb_pb2 as pdpb

from server.coordinator.errors import NotLeaderError
from server.coordinator.explain_service import Explainer, ExplainRequestError
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.leadership.members import Members
from server.rpc.client import connect
from tests.unit.gcsafepoint.explain.situations import view


def explainer(meta, leadership=None, after=lambda: None):
    """Of a coordinator that leads while `leadership` is held;
    `after` happens when the safe points are read.
    """

    async def read():
        after()
        return view()

    term = leadership and SimpleNamespace(
        leadership=leadership, safe_points=SimpleNamespace(view=read)
    )
    members = Members(pdpb.Member(member_id=1))
    return Explainer(meta, SimpleNamespace(term=term), members, connect)


async def test_a_follower_refuses(meta):
    with pytest.raises(NotLeaderError, match="not leader"):
        await explainer(meta).explain()


async def test_a_leader_that_was_deposed_while_it_gathered_says_nothing(meta):
    leadership = Leadership()
    assert (await explainer(meta, leadership).explain())["min_safe_point_id"] == "gc_worker"
    with pytest.raises(NotLeaderError):
        await explainer(meta, leadership, leadership.end).explain()


@pytest.mark.parametrize("names", [["x"] * 101, ["x" * 1025]])
async def test_too_much_to_think_away_is_refused(meta, names):
    with pytest.raises(ExplainRequestError, match="at most 100 names of 1024 characters"):
        await explainer(meta, Leadership()).explain(names)
