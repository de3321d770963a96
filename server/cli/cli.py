"""`tidemark cli …`: ask and steer a cluster.

The verbs and flags are those of `cdc cli` where it has them.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from server.cli import (
    capture,
    changefeed,
    gc,
    gc_state,
    pump,
    service_gc_safepoint,
    source,
    tso,
    unsafe,
    verify,
)
from server.cli.output import Output
from server.cli.remote import Remote
from server.log import configure_command
from server.rpc.credentials import SecurityConfig

Command: TypeAlias = Callable[[Remote, argparse.Namespace], Awaitable[Output]]

_GROUPS = (
    changefeed,
    capture,
    pump,
    tso,
    gc,
    service_gc_safepoint,
    gc_state,
    source,
    unsafe,
    verify,
)
_GLOBAL = {
    "--server": ("127.0.0.1:8300", "a capture's gRPC address"),
    "--pd": ("127.0.0.1:2379", "the coordinators, host:port[,host:port…]"),
    "--ca-path": ("", "file with the CA certificates that daemons are checked against"),
    "--cert-path": ("", "file with the client's certificate chain"),
    "--key-path": ("", "file with the client's private key"),
    "--log-level": ("warning", "what is logged to standard error: debug, info, warning or error"),
}


def run(argv: Sequence[str]) -> int:
    """Run one command; prints its output and returns the exit code."""
    arguments = _parser().parse_args(list(argv))
    configure_command(arguments.log_level)
    security = SecurityConfig(
        ca_path=arguments.ca_path, cert_path=arguments.cert_path, key_path=arguments.key_path
    )
    remote = Remote(arguments.server, arguments.pd, security)
    command: Command = arguments.command
    output = asyncio.run(_awaited(command, remote, arguments))
    # Ids may be no Unicode, which a terminal could not print.
    print(output.text(as_json=arguments.json).encode(errors="backslashreplace").decode())
    return output.status


async def _awaited(command: Command, remote: Remote, arguments: argparse.Namespace) -> Output:
    return await command(remote, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidemark cli", allow_abbrev=False)
    for flag, (default, text) in _GLOBAL.items():
        parser.add_argument(flag, default=default, help=f"{text} (default: {default or 'none'})")
    parser.add_argument(
        "--json", action="store_true", default=False, help="print one JSON document"
    )
    groups = parser.add_subparsers(required=True, metavar="GROUP")
    for module in _GROUPS:
        module.add_commands(groups, _after_the_verb())
    return parser


def _after_the_verb() -> argparse.ArgumentParser:
    """The global flags once more: they may stand behind the verb, too."""
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in _GLOBAL:
        parent.add_argument(flag, help=argparse.SUPPRESS)
    parent.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parent
