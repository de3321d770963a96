"""`tidemark cli …`: ask and steer a cluster.

The verbs and flags are those of `cdc cli` where it has them.
"""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from server.cli import (
    capture,
    changefeed,
    cluster,
    gc,
    gc_state,
    pump,
    service_gc_safepoint,
    source,
    tso,
    unsafe,
    verify,
)
from server.cli.output import FORMS, JSON, TABLE, Output
from server.cli.parser import Parser
from server.cli.remote import Remote
from server.cli.watch import shown_again
from server.config import ConfigError
from server.daemon import EXIT_OK
from server.log import configure_command
from server.rpc.credentials import SecurityConfig

Command: TypeAlias = Callable[[Remote, argparse.Namespace], Awaitable[Output]]

_GROUPS = (
    changefeed,
    capture,
    pump,
    tso,
    cluster,
    gc,
    service_gc_safepoint,
    gc_state,
    source,
    unsafe,
    verify,
)
_PREFIX = "TIDEMARK_CLI_"
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
    arguments.json = arguments.json or arguments.output == JSON
    configure_command(arguments.log_level)
    security = SecurityConfig(
        ca_path=arguments.ca_path, cert_path=arguments.cert_path, key_path=arguments.key_path
    )
    remote = Remote(arguments.server, arguments.pd, security)
    command: Command = arguments.command
    try:
        return asyncio.run(_run(command, remote, arguments))
    except KeyboardInterrupt:
        if not _watched_s(arguments):
            raise
        return EXIT_OK


async def _run(command: Command, remote: Remote, arguments: argparse.Namespace) -> int:
    def show(output: Output) -> None:
        text = output.text(as_json=arguments.json, form=arguments.output)
        # Ids may be no Unicode, which a terminal could not print.
        print(text.encode(errors="backslashreplace").decode())

    every_s = _watched_s(arguments)
    if every_s:
        await shown_again(every_s, lambda: command(remote, arguments), show)
    output = await command(remote, arguments)
    show(output)
    return output.status


def _watched_s(arguments: argparse.Namespace) -> float:
    return getattr(arguments, "watch", None) or 0.0


def _defaults() -> dict[str, str]:
    """Of the global flags: what the environment says, else what is built in.

    Raises:
        ConfigError: a variable TIDEMARK_CLI_… is none of them.
    """
    variables = {_PREFIX + flag[2:].upper().replace("-", "_"): flag for flag in _GLOBAL}
    unknown = [name for name in os.environ if name.startswith(_PREFIX) and name not in variables]
    if unknown:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(variables)}")
    return {flag: os.environ.get(name) or _GLOBAL[flag][0] for name, flag in variables.items()}


def _parser() -> Parser:
    defaults = _defaults()
    parser = Parser(
        prog="tidemark cli",
        epilog=f"{_PREFIX}SERVER, {_PREFIX}PD and so on in the environment are the defaults.",
    )
    for flag, (_, text) in _GLOBAL.items():
        default = defaults[flag]
        parser.add_argument(flag, default=default, help=f"{text} (default: {default or 'none'})")
    parser.add_argument(
        "-o", "--output", choices=FORMS, default=TABLE, help="how it is printed (default: table)"
    )
    parser.add_argument(
        "--json", action="store_true", default=False, help="print one JSON document"
    )
    groups = parser.add_subparsers(required=True, metavar="GROUP")
    for module in _GROUPS:
        module.add_commands(groups, _after_the_verb())
    return parser


def _after_the_verb() -> Parser:
    """The global flags once more: they may stand behind the verb, too."""
    parent = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in _GLOBAL:
        parent.add_argument(flag, help=argparse.SUPPRESS)
    parent.add_argument("-o", "--output", choices=FORMS, help=argparse.SUPPRESS)
    parent.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parent
