"""Each method of captures and GC workers has a right, and a guarded servicer asks for it."""

import asyncio
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2, gc_pb2, worker_pb2

from server.capture.worker.pool import stub_at
from server.rpc.access_guard import LOCAL, HttpContext, guarded, right_of
from server.rpc.access_list import (
    AccessFile,
    Client,
    ForbiddenError,
    OpenAccess,
    Right,
    UnauthenticatedError,
    digest,
)
from server.rpc.audit_log import audited
from server.rpc.client import connect
from server.rpc.server import RpcServer
from sink.flight.tokens import TokenFileError
from tests.unit.server.certificates import Certificates

CLIENTS = {
    b"read": Client("dashboard", "read"),
    b"shop": Client("shop", "operate", ("shop-*",)),
    b"root": Client("root", "admin"),
}
RIGHTS = {
    "CaptureService": {
        "ListCaptures": Right.SEE,
        "GetBlockers": Right.SEE,
        "DrainCapture": Right.OPERATE,
        "ResignOwner": Right.OPERATE,
    },
    "ChangefeedService": {
        "CreateChangefeed": Right.ADMIN,
        # It logs in to the source with a password that the request names.
        "CheckChangefeed": Right.ADMIN,
        "ListChangefeeds": Right.SEE,
        "QueryChangefeed": Right.SEE,
        "PauseChangefeed": Right.OPERATE,
        "ResumeChangefeed": Right.OPERATE,
        "RemoveChangefeed": Right.ADMIN,
        "UpdateChangefeed": Right.ADMIN,
        "MoveTable": Right.OPERATE,
        "SplitTable": Right.OPERATE,
        "AddReader": Right.OPERATE,
        "RemoveReader": Right.OPERATE,
    },
    "DumpService": {
        "StartDump": Right.OPERATE,
        "PauseDump": Right.OPERATE,
        "ResumeDump": Right.OPERATE,
        "UpdateDump": Right.OPERATE,
        "RestartDump": Right.OPERATE,
        "GetDumpStatus": Right.SEE,
    },
    "GCService": {
        "GetGCStatus": Right.SEE,
        "GetGCConfig": Right.SEE,
        "SetGCConfig": Right.ADMIN,
        "RunGC": Right.OPERATE,
        "ListRounds": Right.SEE,
        "RegisterDeleteRange": Right.ADMIN,
        "ListDeleteRanges": Right.SEE,
    },
}
FILES = (capture_pb2, changefeed_pb2, dump_pb2, gc_pb2, worker_pb2)


class Access:
    def client(self, tokens, names=()):
        if not tokens or tokens[0] not in CLIENTS:
            raise UnauthenticatedError("who?")
        return CLIENTS[tokens[0]]


class Servicer:
    def __init__(self):
        self.calls = []

    async def ListChangefeeds(self, request, context):
        self.calls.append(request)
        feeds = [changefeed_pb2.Changefeed(id=name) for name in ("shop-1", "bank", "shop-2")]
        return changefeed_pb2.ListChangefeedsResponse(changefeeds=feeds)

    async def PauseChangefeed(self, request, context):
        self.calls.append(request)
        return changefeed_pb2.PauseChangefeedResponse()

    async def ResumeChangefeed(self, request, context):
        self.calls.append(request)
        return changefeed_pb2.ResumeChangefeedResponse()

    async def Run(self, request, context):
        self.calls.append(request)
        yield worker_pb2.ShareProgress()


def service(name):
    return next(
        file.DESCRIPTOR.services_by_name[name]
        for file in FILES
        if name in file.DESCRIPTOR.services_by_name
    )


def bearing(token):
    return HttpContext(f"Bearer {token}")


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture
def changefeeds(servicer):
    return guarded(service("ChangefeedService"), servicer, Access())


def refused(reason):
    return REGISTRY.get_sample_value("tidemark_rpc_access_refused_total", {"reason": reason}) or 0


def test_each_method_has_the_right_that_somebody_thought_of():
    for name, rights in RIGHTS.items():
        methods = service(name).methods
        assert {each.name: right_of(each) for each in methods} == rights
    assert {right_of(each) for each in service("WorkerService").methods} == {Right.ADMIN}


@pytest.mark.parametrize("member", [{"overwrite_checkpoint_ts": 5}, {"overwrite_with_now": True}])
async def test_to_give_changes_up_takes_more_than_to_resume(changefeeds, servicer, member):
    request = changefeed_pb2.ResumeChangefeedRequest(id="shop-1")
    await changefeeds.ResumeChangefeed(request, bearing("shop"))
    request = changefeed_pb2.ResumeChangefeedRequest(id="shop-1", **member)
    with pytest.raises(ForbiddenError, match="that takes admin"):
        await changefeeds.ResumeChangefeed(request, bearing("shop"))
    await changefeeds.ResumeChangefeed(request, bearing("root"))
    assert len(servicer.calls) == 2


async def test_who_may_not_is_refused_before_anything_is_done(changefeeds, servicer):
    request = changefeed_pb2.PauseChangefeedRequest(id="bank")
    before = refused("unauthorized")
    for token, error in (
        ("read", ForbiddenError),
        ("shop", ForbiddenError),
        ("x", UnauthenticatedError),
    ):
        with pytest.raises(error):
            await changefeeds.PauseChangefeed(request, bearing(token))
    with pytest.raises(UnauthenticatedError):
        await changefeeds.PauseChangefeed(request, HttpContext())
    assert not servicer.calls
    assert refused("unauthorized") == before + 2
    await changefeeds.PauseChangefeed(request, bearing("root"))
    assert servicer.calls == [request]


async def test_a_client_of_some_changefeeds_sees_only_these(changefeeds):
    request = changefeed_pb2.ListChangefeedsRequest()
    listed = await changefeeds.ListChangefeeds(request, bearing("shop"))
    assert [each.id for each in listed.changefeeds] == ["shop-1", "shop-2"]
    listed = await changefeeds.ListChangefeeds(request, bearing("read"))
    assert len(listed.changefeeds) == 3


async def test_the_process_itself_is_not_asked(changefeeds):
    listed = await changefeeds.ListChangefeeds(changefeed_pb2.ListChangefeedsRequest(), LOCAL)
    assert len(listed.changefeeds) == 3


async def test_streams_are_checked_when_they_begin(servicer):
    workers = guarded(service("WorkerService"), servicer, Access())
    request = worker_pb2.RunRequest(changefeed="shop-1")
    with pytest.raises(ForbiddenError):
        [each async for each in workers.Run(request, bearing("shop"))]
    assert not servicer.calls
    assert len([each async for each in workers.Run(request, bearing("root"))]) == 1


@pytest.mark.parametrize("is_idle", [False, True])
async def test_streams_are_checked_while_they_go_on(servicer, is_idle, monkeypatch):
    access, closed = Access(), []

    async def run(_request, _context):
        try:
            yield worker_pb2.ShareProgress()
            while True:
                await asyncio.sleep(3600 if is_idle else 0.01)
                yield worker_pb2.ShareProgress()
        finally:
            closed.append(True)

    servicer.Run = run
    monkeypatch.setitem(CLIENTS, b"falls", CLIENTS[b"root"])
    workers = guarded(service("WorkerService"), servicer, access)
    answers = workers.Run(worker_pb2.RunRequest(changefeed="shop-1"), bearing("falls"))
    assert await anext(answers)
    monkeypatch.setitem(CLIENTS, b"falls", CLIENTS[b"shop"])

    async def rest():
        async with asyncio.timeout(60):
            return [each async for each in answers]

    with pytest.raises(ForbiddenError):
        await rest()
    assert closed


async def test_refusals_are_logged_once_a_client_and_changes_name_who_made_them(changefeeds):
    pause = "tidemarkpb.v1.ChangefeedService.PauseChangefeed"
    request = changefeed_pb2.PauseChangefeedRequest(id="shop-1")
    with capture_logs() as logs:
        await audited(changefeeds.PauseChangefeed, pause)(request, bearing("shop"))
        with pytest.raises(ForbiddenError):
            await audited(changefeeds.PauseChangefeed, pause)(request, bearing("read"))
        for _ in range(3):
            with pytest.raises(UnauthenticatedError):
                await changefeeds.ListChangefeeds(
                    changefeed_pb2.ListChangefeedsRequest(), bearing("x")
                )
    assert [(each["method"], each["client"], each["outcome"]) for each in logs] == [
        ("PauseChangefeed", "shop", "ok"),
        ("PauseChangefeed", "dashboard", "ErrUnauthorized"),
        ("ListChangefeeds", "", "ErrUnauthenticated"),
    ]


def test_without_a_file_the_servicer_is_served_as_it_is():
    servicer = SimpleNamespace()
    assert guarded(service("ChangefeedService"), servicer, OpenAccess()) is servicer


CHANGEFEEDS = "/tidemarkpb.v1.ChangefeedService/"
LISTING = changefeed_pb2.ListChangefeedsRequest().SerializeToString()
RUN = worker_pb2.RunRequest(changefeed="shop-1").SerializeToString()


async def test_a_listener_asks_by_token_or_certificate_and_clients_bring_theirs(engine, tmp_path):
    """On both engines; a token may change while a channel is open."""
    certificates = Certificates(tmp_path)
    own = certificates.security(ca=True)
    (tmp_path / "token").write_text("looks\n")
    file = tmp_path / "access.toml"
    file.write_text(
        f"[[client]]\nname='looks'\nrole='read'\ntoken-sha256='{digest(b'looks')}'\n"
        f"[[client]]\nname='boss'\nrole='admin'\ntoken-sha256='{digest(b'all')}'\n"
        "[[client]]\nname='peer'\nrole='admin'\ncommon-name='peer'\n"
    )
    access, server = AccessFile(str(file)), RpcServer(own)
    for name in ("ChangefeedService", "WorkerService"):
        server.add_service(service(name), guarded(service(name), Servicer(), access))

    async def outcomes(bound, security, token_file=""):
        """Of a call that looks, and of a stream that only captures may begin."""
        ended = []
        async with connect(bound, security, token_file) as channel:
            try:
                await channel.unary_unary(f"{CHANGEFEEDS}ListChangefeeds")(LISTING, timeout=60)
                ended.append("OK")
            except grpc.aio.AioRpcError as err:
                ended.append(err.code().name)
            try:
                run = channel.unary_stream("/tidemarkpb.v1.WorkerService/Run")(RUN, timeout=60)
                ended.append("OK" if len([each async for each in run]) == 1 else "nothing")
            except grpc.aio.AioRpcError as err:
                ended.append(err.code().name)
        return ended

    token = str(tmp_path / "token")
    async with server.listen("127.0.0.1:0") as bound:
        assert await outcomes(bound, own) == ["UNAUTHENTICATED"] * 2
        assert await outcomes(bound, own, token) == ["OK", "PERMISSION_DENIED"]
        assert await outcomes(bound, certificates.sign("peer")) == ["OK", "OK"]
        # Who brings a token is judged by it.
        assert await outcomes(bound, certificates.sign("peer"), token) == [
            "OK",
            "PERMISSION_DENIED",
        ]
        (tmp_path / "token").write_text("all")
        assert await outcomes(bound, own, token) == ["OK", "OK"]
        stub = await asyncio.to_thread(stub_at, bound, own, token)
        assert len(await asyncio.to_thread(lambda: list(stub.Run(worker_pb2.RunRequest())))) == 1
        # As long as nothing can be read, the former one is brought.
        for change in (lambda: (tmp_path / "token").write_text(""), (tmp_path / "token").unlink):
            change()
            assert await outcomes(bound, own, token) == ["OK", "OK"]
            labels = {"files": "the token for other daemons"}
            assert REGISTRY.get_sample_value("tidemark_rpc_files_unusable", labels) == 1
        (tmp_path / "token").write_text("looks")
        assert await outcomes(bound, own, token) == ["OK", "PERMISSION_DENIED"]
        assert REGISTRY.get_sample_value("tidemark_rpc_files_unusable", labels) == 0
        with pytest.raises(TokenFileError):
            await outcomes(bound, own, str(tmp_path / "none"))
