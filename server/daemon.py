"""The life of a daemon: configuration, logs, HTTP port, signals, the ready line, exit codes.

Exit codes: 0 drained after SIGTERM or SIGINT, 1 an error that was printed as `[TM:ErrName] …`, 2
bad usage. A daemon started by `tidemark up` also ends, at once, when its parent is gone: the
parent's death closes the pipe whose other end is this process's standard input.
"""

import asyncio
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from server import http
from server.exit_status import EXIT_ERROR, EXIT_OK
from server.log import LogConfig, configure, log_config, set_level, set_redaction
from server.process import exit_with_parent
from server.routes import Answer, Handler, Request, Route, Routes
from server.rpc.access_list import open_access
from server.rpc.credentials import SecurityConfig
from storage.model.errors import TidemarkError, ours_alone

Endpoints: TypeAlias = Mapping[str, str]
"""The addresses of a started daemon: name -> host:port; `cluster_id`, where known, is shown beside
them.
"""

OpenDaemon: TypeAlias = Callable[[], AbstractAsyncContextManager[Endpoints]]
"""Opens a daemon for the block: everything it owns runs in tasks of its own,
and is drained on the way out.
"""


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The settings that every daemon has."""

    log: LogConfig
    http_addr: str
    security: SecurityConfig | None = None
    access_file: str = ""
    """The access file of a daemon whose clients have roles; the HTTP routes check it, too."""
    follow_parent: bool = False
    """Whether the daemon ends when its standard input closes, as it does when its parent ends."""


@dataclass(frozen=True, slots=True)
class HttpPort:
    """The metrics of a registry and the answers of routes that a daemon's HTTP port shows beside
    its health; they may be added later.
    """

    registry: CollectorRegistry = REGISTRY
    routes: Routes | None = None


def run(
    name: str,
    opened: OpenDaemon,
    settings: DaemonSettings,
    http_port: HttpPort,
) -> int:
    """Run one daemon until SIGTERM or SIGINT; returns the exit code."""
    configure(settings.log, name)
    routes = http_port.routes or Routes()
    _open_as_many_files_as_may_be()
    if settings.follow_parent:
        exit_with_parent()
    try:
        with routes.serving(_LOG):
            asyncio.run(
                _serve(
                    opened,
                    partial(
                        http.listen,
                        settings.http_addr,
                        registry=http_port.registry,
                        routes=routes,
                        security=settings.security,
                        access=open_access(settings.access_file),
                    ),
                )
            )
    except asyncio.CancelledError:
        return EXIT_OK  # stopped before it served
    except TidemarkError as err:
        return failed([err])
    except BaseExceptionGroup as group:
        return failed(ours_alone(group))
    return EXIT_OK


def _shown_level(_: Request) -> Answer:
    return Answer(200, f"{log_config().log_level}\n".encode())


def _set_level(request: Request) -> Answer:
    before = log_config().log_level
    set_level(request.body.decode(errors="replace").strip())
    _log.warning("the log level was changed", before=before, now=log_config().log_level)
    return _shown_level(request)


def _shown_redaction(_: Request) -> Answer:
    return Answer(200, b"on\n" if log_config().redact_info_log else b"off\n")


def _set_redaction(request: Request) -> Answer:
    set_redaction(request.body.decode(errors="replace").strip())
    _log.warning("redaction of the log was changed", is_on=log_config().redact_info_log)
    return _shown_redaction(request)


_LOG: Final[Mapping[Route, Handler]] = {
    ("GET", "/log-level"): _shown_level,
    ("PUT", "/log-level"): _set_level,
    ("GET", "/log-redact"): _shown_redaction,
    ("PUT", "/log-redact"): _set_redaction,
}
"""The routes of every daemon; bodies are text: the level, and `on` or `off`."""


def _open_as_many_files_as_may_be() -> None:
    """Raise the soft limit of open files to the hard one: the number of connections depends on it.

    Shells and systemd set a soft limit of 1024 for programs that use select(), which these do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as err:
        _log.info("the limit of open files stays as it is", files=soft, reason=str(err))


def failed(errors: Sequence[TidemarkError]) -> int:
    """Say each error once, for people on stderr and for machines in the log;
    returns the exit code.
    """
    for err in {str(err): err for err in errors}.values():
        print(err, file=sys.stderr, flush=True)  # noqa: T201 - the one clear line for whoever started us
        _log.error("daemon failed", code=err.code, kind=err.kind.value, error=err.message)
    return EXIT_ERROR


async def _serve(opened: OpenDaemon, listen: Callable[..., AbstractContextManager[str]]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    opening = asyncio.current_task()
    serving = False

    def stop() -> None:
        stopping.set()
        if not serving and opening is not None:
            # it may wait for an election, or for a peer: there is nothing to drain
            opening.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with listen(ready=lambda: serving and not stopping.is_set()) as http_bound:
        async with opened() as endpoints:
            serving = True
            shown = {**endpoints, "http": http_bound}
            _log.info("daemon ready", **shown)
            line = ready_text(shown) if sys.stdout.isatty() else _ready_line(shown)
            print(line, flush=True)  # noqa: T201 - read by `tidemark up`, scripts, and people
            await stopping.wait()
            _log.info("daemon draining")


def ready_text(shown: Mapping[str, str]) -> str:
    """What a terminal shows instead of the JSON line, below all that was logged."""
    places = ", ".join(
        f"{name} {address}"
        for name, address in shown.items()
        if name != "cluster_id" and not name.endswith("_http")
    )
    console = f"\nA browser shows the console at {shown['capture']}." if "capture" in shown else ""
    return f"\nReady: {places}.{console}\nCtrl-C ends it.\n"


def _ready_line(shown: Mapping[str, str]) -> str:
    facts = {"cluster_id": int(shown["cluster_id"])} if "cluster_id" in shown else {}
    endpoints = {name: address for name, address in shown.items() if name != "cluster_id"}
    return json.dumps({"ready": True, **facts, "endpoints": endpoints})
