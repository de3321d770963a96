"""`tidemark cli …`: ask and steer a cluster.

The verbs and flags are those of `cdc cli` where it has them.
"""

import argparse
import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from server.cli.arguments import Parser, host_port, host_ports
from server.cli.output import FORMS, JSON, TABLE, Output, shown_again
from server.cli.remote import DEFAULT_PD, DEFAULT_SERVER, Remote
from server.config import ConfigError
from server.exit_status import EXIT_OK
from server.log import configure_command
from server.rpc.credentials import SecurityConfig

Command: TypeAlias = Callable[[Remote, argparse.Namespace], Awaitable[Output]]

GROUPS: Final = {
    "changefeed": ("changefeed", "create, watch, change and remove changefeeds"),
    "capture": ("cluster", "list and drain the captures of the cluster"),
    "processor": ("processor", "show which captures replicate the tables of a changefeed"),
    "tso": ("cluster", "get a new timestamp, or decode one"),
    "member": ("cluster", "list the coordinators, and which one leads"),
    "leader": ("cluster", "show the coordinator that leads"),
    "health": ("cluster", "check whether each coordinator answers"),
    "store": ("cluster", "list the stores, or show one"),
    "region": ("cluster", "list the regions, or show one"),
    "pump": ("pump", "list, pause and remove the pumps that TiDB writes binlogs to"),
    "gc": ("gc", "show and control garbage collection (GC) in TiDB and TiKV"),
    "service-gc-safepoint": (
        "gc_blockers", "list the services for which GC keeps old versions, the lowest safepoint first",
    ),
    "gc-state": ("gc_blockers", "show the GC states and GC barriers of keyspaces"),
    "doctor": ("doctor", "find what is slow or stuck, and say what helps"),
    "access": ("access", "create and list the clients of an access file, and their tokens"),
    "metadata": ("metadata", "back up and restore the records of all changefeeds"),
    "source": ("source", "check a source database before a changefeed reads it"),
    "unsafe": ("unsafe", "commands for emergencies, which can lose data"),
    "verify": ("verify", "compare a lake with its source, row by row"),
}  # fmt: skip
"""Module and help by name. A command imports the module of its own group: all take a second."""
_PREFIX = "TIDEMARK_CLI_"
_DEFAULTS: Final = {
    "--server": f"a capture that is registered at --pd, else {DEFAULT_SERVER}",
    "--pd": DEFAULT_PD,
}
"""What flags mean that nobody gives; help shows it."""
_NAMES: Final = {"--ca-path": "--ca", "--cert-path": "--cert", "--key-path": "--key"}
"""The names that `cdc cli` has for them."""
_TYPES: Final[dict[str, Callable[[str], str]]] = {"--server": host_port, "--pd": host_ports}
_GLOBAL = {
    "--server": ("", "a capture's gRPC address"),
    "--pd": ("", "the coordinators, host:port[,host:port…]"),
    "--ca-path": ("", "file with the CA certificates that daemons are checked against"),
    "--cert-path": ("", "file with the client's certificate chain"),
    "--key-path": ("", "file with the client's private key"),
    "--token-file": ("", "file with the client's token, for daemons that have an --access-file"),
    "--log-level": ("warning", "what is logged to standard error: debug, info, warning or error"),
}


def run(argv: Sequence[str]) -> int:
    """Run one command; prints its output and returns the exit code."""
    arguments = cli_parser(_group_of(argv)).parse_args(list(argv))
    arguments.json = arguments.json or arguments.output == JSON
    configure_command(arguments.log_level)
    security = SecurityConfig(
        ca_path=arguments.ca_path, cert_path=arguments.cert_path, key_path=arguments.key_path
    )
    remote = Remote(arguments.server, arguments.pd, security, arguments.token_file)
    command: Command = arguments.command
    try:
        return asyncio.run(_run(command, remote, arguments))
    except KeyboardInterrupt:
        # Ctrl-C is the good end of --watch, and only of that.
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
    """The defaults of the global flags: from the environment, else built in.

    Raises:
        ConfigError: a variable TIDEMARK_CLI_… is none of them.
    """
    variables = {_PREFIX + flag[2:].upper().replace("-", "_"): flag for flag in _GLOBAL}
    unknown = [name for name in os.environ if name.startswith(_PREFIX) and name not in variables]
    if unknown:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(variables)}")
    return {flag: os.environ.get(name) or _GLOBAL[flag][0] for name, flag in variables.items()}


def cli_parser(group: str | None = None) -> Parser:
    """With the commands of one group, and the names of all; None: with all commands."""
    defaults = _defaults()
    parser = Parser(
        prog="tidemark cli",
        epilog=f"Environment variables give other defaults: {_PREFIX}SERVER, {_PREFIX}PD, and so on.",
    )
    for flag, (_, text) in _GLOBAL.items():
        default = defaults[flag]
        shown = default or _DEFAULTS.get(flag, "none")
        parser.add_argument(
            *_names(flag),
            default=default,
            type=_TYPES.get(flag, str),
            help=f"{text} (default: {shown})",
        )
    parser.add_argument(
        "-o", "--output", choices=FORMS, default=TABLE, help="output format (default: table)"
    )
    parser.add_argument("--json", action="store_true", default=False, help="the same as -o json")
    groups = _Groups(parser.add_subparsers(required=True, metavar="GROUP"))
    modules = {module for name, (module, _) in GROUPS.items() if group in (name, None)}
    for name, (module, _) in GROUPS.items():
        # The other groups get a name and a help line: importing all of them takes a second.
        if module not in modules:
            groups.add_parser(name)
        elif name not in groups.added:
            importlib.import_module(f"server.cli.{module}").add_commands(groups, _after_the_verb())
    return parser


def _names(flag: str) -> list[str]:
    return [flag, _NAMES[flag]] if flag in _NAMES else [flag]


class _Groups:
    """The groups of a parser, whose help is in `GROUPS`."""

    def __init__(self, groups: Any) -> None:
        self.added: set[str] = set()
        self._groups = groups

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Add a parser, as argparse does."""
        self.added.add(name)
        parser: Parser = self._groups.add_parser(name, help=GROUPS[name][1], **settings)
        return parser


def _group_of(argv: Sequence[str]) -> str:
    """The first argument that is neither a flag nor its value; "" if there is none."""
    with_value = {*_GLOBAL, *_NAMES.values(), "-o", "--output"}
    rest = iter(argv)
    for text in rest:
        if text in with_value:
            next(rest, None)
        elif not text.startswith("-"):
            return text
    return ""


def _after_the_verb() -> Parser:
    """The global flags once more: they may stand behind the verb, too."""
    parent = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in _GLOBAL:
        parent.add_argument(*_names(flag), type=_TYPES.get(flag, str), help=argparse.SUPPRESS)
    parent.add_argument("-o", "--output", choices=FORMS, help=argparse.SUPPRESS)
    parent.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parent
