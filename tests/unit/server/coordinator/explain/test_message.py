"""Every explanation fits the gRPC message, and comes out of it as the document it was."""

from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st
from tidemarkpb.v1 import explain_pb2 as pb

from gcsafepoint.explain.explanation import document, explain, holders
from gcsafepoint.explain.links import Kind
from server.cli.gc_blockers import tree
from server.cli.output import plain
from tests.unit.gcsafepoint.explain.situations import situations


@given(situations(), st.data())
def test_the_message_is_the_document(situation, data):
    removable = [one.id for one in holders(situation) if one.kind is not Kind.GC_WORKER]
    names = data.draw(st.lists(st.sampled_from(removable), max_size=2)) if removable else []
    told = document(explain(situation, names))
    assert plain(ParseDict(told, pb.ExplainGCResponse())) == told


@given(situations())
def test_people_see_every_link_and_every_command(situation):
    told = document(explain(situation))
    text = "\n".join(tree(told))
    for blocker in told["blockers"]:
        for link in blocker["chain"]:
            assert f"{link['kind'].replace('_', ' ')} {link['name']}" in text
            assert all(f"$ {command}" in text for command in link["commands"])
