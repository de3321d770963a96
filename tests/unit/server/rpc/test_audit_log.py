"""Calls that change something are in the log, whoever sent them and however they end."""

import asyncio

import pytest
import structlog
from tidemarkpb.v1 import changefeed_pb2

from server.rpc.audit_log import audited, is_audited
from storage.model.errors import NotFoundError

METHOD = "tidemarkpb.v1.ChangefeedService.PauseChangefeed"
REQUEST = changefeed_pb2.PauseChangefeedRequest(id="orders")


class Context:
    def peer(self):
        return "ipv4:10.0.0.7:5"

    def auth_context(self):
        return {"x509_common_name": (b"ops",)}


class GoneError(NotFoundError):
    code = "ErrGone"


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (METHOD, True),
        ("tidemarkpb.v1.ChangefeedService.ListChangefeeds", False),
        ("tidemarkpb.v1.ChangefeedService.CheckChangefeed", False),
        ("tidemarkpb.v1.DumpService.StartDump", True),
        ("tidemarkpb.v1.GCService.SetGCConfig", True),
        ("tidemarkpb.v1.PumpService.WriteBinlogs", False),
        ("tidemarkpb.v1.WorkerService.ChangeShare", False),
        ("pdpb.PD.UpdateServiceGCSafePoint", False),
    ],
)
def test_only_what_changes_something_for_people_is_audited(method, changes):
    assert is_audited(method) is changes


async def test_a_call_is_logged_with_who_what_and_its_outcome():
    async def pause(request, context):
        return "paused"

    with structlog.testing.capture_logs() as lines:
        assert await audited(pause, METHOD)(REQUEST, Context()) == "paused"
    [line] = lines
    shown = {name: line[name] for name in ("logger", "method", "of", "peer", "client", "outcome")}
    assert shown == {
        "logger": "audit",
        "method": "PauseChangefeed",
        "of": "orders",
        "peer": "ipv4:10.0.0.7:5",
        "client": "ops",
        "outcome": "ok",
    }


@pytest.mark.parametrize(
    ("error", "outcome"), [(GoneError("no"), "ErrGone"), (ValueError("defect"), "ErrInternal")]
)
async def test_a_call_that_fails_is_logged_with_its_code_and_fails_as_before(error, outcome):
    async def pause(request, context):
        raise error

    with structlog.testing.capture_logs() as lines, pytest.raises(type(error)):
        await audited(pause, METHOD)(REQUEST, Context())
    assert [line["outcome"] for line in lines] == [outcome]


async def test_a_call_that_is_cancelled_is_no_refusal():
    """Its client is gone: what it has begun may have been carried out."""

    async def pause(request, context):
        raise asyncio.CancelledError

    with structlog.testing.capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        await audited(pause, METHOD)(REQUEST, Context())
    [line] = lines
    assert line["outcome"] == "cancelled"
    assert line["event"] == "call was cancelled, and may have changed something"
