"""The commands that run something on this machine: the daemons, `tidemark up | coordinator |
store | capture | pump | gc-worker | spark`, and `tidemark demo` and `tidemark play`.

`run_daemon` is what the daemons share: flags from the configuration dataclasses, `--config`, and
the run itself. Each command imports its daemon when it is called, so that no command pays for the
libraries of another one.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TypeVar

from grpc.aio import AioRpcError

from server.cli.arguments import Parser
from server.cli.main import COMMANDS
from server.config import (
    ConfigError,
    add_flags,
    check_environment,
    listening_address,
    load,
    read_document,
)
from server.daemon import DaemonSettings, Endpoints, HttpPort, run
from server.exit_status import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from server.log import LogConfig, configure_command
from server.routes import Routes
from server.rpc.access_list import open_access
from server.rpc.config import RpcConfig, choose
from server.rpc.credentials import SecurityConfig, client_tls
from storage.model.errors import TidemarkError, leaves, ours_alone

C = TypeVar("C")
SECTIONS: Final = (
    "coordinator",
    "store",
    "capture",
    "pump",
    "gc-worker",
    "up",
    "spark",
    "spark-keep",
    "security",
    "rpc",
    "log",
)
SHARED: Final[dict[str, type[Any]]] = {
    "security": SecurityConfig,
    "rpc": RpcConfig,
    "log": LogConfig,
}
"""The sections that every daemon reads."""
SPARK_VERBS: Final = {
    "run": ("spark", "run the lake job of one changefeed"),
    "keep": (
        "spark-keep",
        "run the lake jobs of all changefeeds, and start them again when they fail",
    ),
}
"""The section and the help of each verb of `tidemark spark`."""
_CALLERS: Final = ("spark", "spark-keep")
"""The daemons that listen with no protocol but HTTP."""
_LISTENING: Final = frozenset(
    {"addr", "flight_addr", "http_addr", "coordinator_addr", "store_addr", "capture_addr"}
    | {"pump_addr", "gc_worker_addr"}
)
"""The settings that are addresses to listen on."""
_SPARK_USAGE: Final = "usage: " + "\n       ".join(
    f"{f'tidemark spark {verb} [--help] …':<33}{text}" for verb, (_, text) in SPARK_VERBS.items()
)


def run_up(argv: Sequence[str]) -> int:
    """`tidemark up`: start all daemons and keep them until SIGTERM; returns the exit code,
    as do all of these.
    """
    from server.up.tree import REGISTRY, UpConfig, open_tree

    return run_daemon(
        argv, "up", UpConfig, open_tree, http_port=lambda: HttpPort(registry=REGISTRY)
    )


def run_coordinator(argv: Sequence[str]) -> int:
    """`tidemark coordinator`: PD's and etcd's services on one port."""
    from server.coordinator.daemon import CoordinatorConfig, open_coordinator

    routes = Routes()
    return run_daemon(
        argv,
        "coordinator",
        CoordinatorConfig,
        partial(open_coordinator, routes=routes),
        http_port=lambda: HttpPort(routes=routes),
    )


def run_store(argv: Sequence[str]) -> int:
    """`tidemark store`: the transactional store."""
    from server.store.config import StoreConfig

    return run_daemon(argv, "store", StoreConfig, _deferred("server.store.app", "open_store"))


def run_capture(argv: Sequence[str]) -> int:
    """`tidemark capture`; it starts `tidemark capture worker` by itself when it has workers."""
    from server.capture.config import CaptureConfig

    if argv[:1] == ["worker"]:
        from server.capture.worker.process import WorkerConfig, open_worker

        return run_daemon(argv[1:], "worker", WorkerConfig, open_worker)
    open_capture = _deferred("server.capture.daemon", "open_capture")
    return run_daemon(argv, "capture", CaptureConfig, open_capture, http_port=_port_of_workers)


def _port_of_workers() -> HttpPort:
    from server.capture.worker.pool import REGISTRY

    return HttpPort(registry=REGISTRY)


def run_pump(argv: Sequence[str]) -> int:
    """`tidemark pump`: receive, match and serve TiDB binlogs."""
    from server.pump.app import PumpConfig, open_pump

    routes = Routes()
    return run_daemon(
        argv,
        "pump",
        PumpConfig,
        partial(open_pump, routes=routes),
        http_port=lambda: HttpPort(routes=routes),
    )


def run_gc_worker(argv: Sequence[str]) -> int:
    """`tidemark gc-worker`: resolve locks, delete ranges, do GC."""
    from server.gc_worker.daemon import GCWorkerConfig, open_gc_worker

    return run_daemon(argv, "gc-worker", GCWorkerConfig, open_gc_worker)


def run_spark(argv: Sequence[str]) -> int:
    """`tidemark spark run` and `tidemark spark keep`."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_SPARK_USAGE)
        return EXIT_OK
    if argv[:1] == ["keep"]:
        from server.spark.config import KeepConfig

        open_keep = _deferred("server.spark.keep", "open_keep")
        return run_daemon(argv[1:], "spark-keep", KeepConfig, open_keep, command="spark keep")
    if argv[:1] == ["run"]:
        from server.spark.config import SparkConfig

        open_run = _deferred("server.spark.job", "open_run")
        return run_daemon(argv[1:], "spark", SparkConfig, open_run, command="spark run")
    print(_SPARK_USAGE, file=sys.stderr)
    return EXIT_USAGE


def run_demo(argv: Sequence[str]) -> int:
    """`tidemark demo`: 0 only if the lake was proved equal to the store."""
    from server.demo import run as demo

    flags = vars(demo_parser().parse_args(list(argv)))
    config = load(demo.DemoConfig, "demo", document={}, environ=os.environ, flags=flags)
    configure_command("warning")  # its own lines say all that a user needs
    try:
        equal = asyncio.run(demo.run_demo(config))
    except KeyboardInterrupt:
        # With --keep, Ctrl-C is how the demo ends.
        return EXIT_OK if config.keep else EXIT_ERROR
    except BaseExceptionGroup as group:
        for line in dict.fromkeys(map(str, ours_alone(group))):
            print(line, file=sys.stderr)
        return EXIT_ERROR
    return EXIT_OK if equal else EXIT_ERROR


def _deferred(
    module: str, name: str
) -> Callable[[Any, SecurityConfig], AbstractAsyncContextManager[Endpoints]]:
    """A daemon's `open_…` function, whose module is imported when it is called: `--help` needs the
    settings only.
    """

    def open_daemon(
        config: Any, security: SecurityConfig
    ) -> AbstractAsyncContextManager[Endpoints]:
        opening: AbstractAsyncContextManager[Endpoints] = getattr(
            importlib.import_module(module), name
        )(config, security)
        return opening

    return open_daemon


class Settings:
    """The settings of one daemon, by section, and all that it refuses of them when it starts.

    `config check` asks here, too, so that it refuses the same. What is missing is refused when the
    daemon opens: it may come by a flag or a variable, which a file does not tell.
    """

    def __init__(
        self,
        name: str,
        section: type[Any],
        *,
        document: Mapping[str, Any],
        environ: Mapping[str, str],
        flags: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._settings: dict[str, Any] = {}
        self._faults: list[tuple[str, TidemarkError]] = []
        for key, part in {name: section, **SHARED}.items():
            with self._noting(key):
                self._settings[key] = load(
                    part, key, document=document, environ=environ, flags=flags
                )
        for key, settings in self._settings.items():
            if hasattr(settings, "checked"):
                with self._noting(key):
                    settings.checked()
        self._own_faults = len(self._faults)
        if {name, "security"} <= self._settings.keys():
            self._check_daemon(self._settings[name], self._settings["security"])

    def __getitem__(self, section: str) -> Any:
        return self._settings[section]

    def check(self) -> None:
        """Raise the only fault as it is, or all of them as one ConfigError."""
        if len(self._faults) == 1:
            raise self._faults[0][1]
        if self._faults:
            raise ConfigError("; ".join(self.fault_texts()))

    def fault_texts(self, *, is_meant: bool = True) -> list[str]:
        """The faults, each with the section that holds it. With `is_meant` False, only those that
        do not depend on which daemon reads the settings.
        """
        faults = self._faults if is_meant else self._faults[: self._own_faults]
        return list(dict.fromkeys(f"in [{key}]: {err.message}" for key, err in faults))

    def _check_daemon(self, config: Any, security: SecurityConfig) -> None:
        """Check settings that depend on each other, or on files."""
        for field in dataclasses.fields(config):
            if field.name in _LISTENING and (address := getattr(config, field.name)):
                with self._noting(self._name):
                    listening_address(field.name.replace("_", "-"), address)
        with self._noting(self._name):
            open_access(getattr(config, "access_file", ""))
        with self._noting("security"):
            # A job of Spark only calls others: a CA is enough.
            if self._name not in _CALLERS:
                security.check_listener()
            elif security.enabled:
                client_tls(security)
        if hasattr(config, "check_with"):
            with self._noting(self._name):
                config.check_with(security)

    @contextlib.contextmanager
    def _noting(self, section: str) -> Iterator[None]:
        try:
            yield
        except TidemarkError as err:
            if all(err.message != other.message for _, other in self._faults):
                self._faults.append((section, err))


def run_daemon(
    argv: Sequence[str],
    name: str,
    section: type[C],
    open_daemon: Callable[[C, SecurityConfig], AbstractAsyncContextManager[Endpoints]],
    *,
    http_port: Callable[[], HttpPort] = HttpPort,
    command: str = "",
) -> int:
    """Read the settings of daemon `name` and run it; `section` must have a field `http_addr`.

    `command` is what users type, where that is not the name. `http_port` is called once the daemon
    is to run.
    """
    flags = vars(daemon_parser(command or name, section).parse_args(list(argv)))

    # One file for all daemons: sections of the others are checked for their names only.
    document = read_document(flags["config"], SECTIONS)
    settings = Settings(name, section, document=document, environ=os.environ, flags=flags)
    settings.check()
    config = settings[name]
    _check_own_variables({name: section, **SHARED})
    # Before anything opens a connection or a port: both depend on it.
    choose(settings["rpc"])
    return run(
        name,
        lambda: open_daemon(config, settings["security"]),
        DaemonSettings(
            log=settings["log"],
            http_addr=config.http_addr,
            security=settings["security"],
            access_file=getattr(config, "access_file", ""),
            follow_parent=flags["follow_parent"],
        ),
        http_port(),
    )


def daemon_parser(command: str, section: type[Any]) -> Parser:
    """The flags of a daemon: its own settings, and those that all daemons have."""
    parser = Parser(prog=f"tidemark {command}", description=_description(command))
    parser.add_argument("--config", help="TOML file with the sections " + ", ".join(SECTIONS))
    parser.add_argument("--follow-parent", action="store_true", help=argparse.SUPPRESS)
    for part in (section, *SHARED.values()):
        add_flags(parser, part)
    return parser


def _description(command: str) -> str | None:
    """What a command does, as a sentence; None for a command that users do not call."""
    summaries = COMMANDS | {f"spark {verb}": text for verb, (_, text) in SPARK_VERBS.items()}
    summary = summaries.get(command)
    return summary and f"{summary[0].upper()}{summary[1:]}."


def demo_parser() -> Parser:
    """The flags of `tidemark demo`."""
    from server.demo.run import DemoConfig

    parser = Parser(prog="tidemark demo", description=_description("demo"))
    add_flags(parser, DemoConfig)
    return parser


def _check_own_variables(sections: dict[str, type[Any]]) -> None:
    """Refuse variables of this daemon that name no setting; those of other daemons are left to
    them.
    """
    names = {*SECTIONS, *sections}
    own = {
        variable: text
        for variable, text in os.environ.items()
        if _section_of(variable, names) in sections
    }
    check_environment(sections, own)


def _section_of(variable: str, names: set[str]) -> str:
    """The section whose prefix the variable has: TIDEMARK_SPARK_KEEP_… is not of `spark`."""
    prefixes = {f"TIDEMARK_{name.upper().replace('-', '_')}_": name for name in names}
    matching = [prefix for prefix in prefixes if variable.startswith(prefix)]
    return prefixes[max(matching, key=len)] if matching else ""


def run_play(argv: Sequence[str]) -> int:
    """`tidemark play`: run the playground until Ctrl-C or SIGTERM, after which it exits with 0."""
    from server.play.playground import PlayConfig, play

    flags = vars(play_parser().parse_args(list(argv)))
    config = load(PlayConfig, "play", document={}, environ=os.environ, flags=flags)
    status = EXIT_OK
    try:
        asyncio.run(_until_signal(play(config)))
    except* TidemarkError as ours:
        status = EXIT_ERROR
        print(*dict.fromkeys(map(str, leaves(ours))), sep="\n", file=sys.stderr)
    except* AioRpcError as theirs:
        status = EXIT_ERROR
        print(*dict.fromkeys(_details(theirs)), sep="\n", file=sys.stderr)
    return status


def play_parser() -> Parser:
    """The flags of `tidemark play`."""
    from server.play.playground import PlayConfig

    parser = Parser(prog="tidemark play", description=_description("play"))
    add_flags(parser, PlayConfig)
    return parser


async def _until_signal(playing: Awaitable[None]) -> None:
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await playing


def _details(group: BaseExceptionGroup[AioRpcError]) -> Iterator[str]:
    for err in group.exceptions:
        yield from _details(err) if isinstance(err, BaseExceptionGroup) else [str(err.details())]
