"""What the daemon commands share: flags from the configuration dataclasses, `--config`, and the run itself."""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from server.config import add_flags, check_environment, load, read_document
from server.daemon import Endpoints, run
from server.log import LogConfig
from server.routes import Routes
from server.rpc.credentials import SecurityConfig
from server.rpc.engine import RpcConfig, choose

C = TypeVar("C")
SECTIONS = (
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


def run_daemon(
    argv: Sequence[str],
    name: str,
    section: type[C],
    opened: Callable[[C, SecurityConfig], AbstractAsyncContextManager[Endpoints]],
    *,
    registry: CollectorRegistry = REGISTRY,
    routes: Routes | None = None,
    command: str = "",
) -> int:
    """Read the settings of daemon `name` and run it; `section` must have a field `http_addr`.

    `command` is what users type, where that is not the name.
    """
    parser = argparse.ArgumentParser(prog=f"tidemark {command or name}", allow_abbrev=False)
    parser.add_argument("--config", help="TOML file with the sections " + ", ".join(SECTIONS))
    parser.add_argument("--follow-parent", action="store_true", help=argparse.SUPPRESS)
    sections: dict[str, type[Any]] = {name: section, "security": SecurityConfig, "rpc": RpcConfig, "log": LogConfig}
    for part in sections.values():
        add_flags(parser, part)
    flags = vars(parser.parse_args(list(argv)))
    document = read_document(flags["config"], SECTIONS)
    settings = {
        key: load(part, key, document=document, environ=os.environ, flags=flags) for key, part in sections.items()
    }
    config: Any = settings[name]
    _check_own_variables(sections)
    choose(settings["rpc"])
    return run(
        name,
        lambda: opened(config, settings["security"]),
        log=settings["log"],
        http_addr=config.http_addr,
        follow_parent=flags["follow_parent"],
        registry=registry,
        routes=routes,
        security=settings["security"],
    )


def _check_own_variables(sections: dict[str, type[Any]]) -> None:
    """Variables of other daemons are not our business; a misspelt one of ours is an error."""
    prefixes = tuple(f"TIDEMARK_{key.upper().replace('-', '_')}_" for key in sections)
    own = {variable: text for variable, text in os.environ.items() if variable.startswith(prefixes)}
    check_environment(sections, own)
