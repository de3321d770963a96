"""`tidemark cli gc config [get NAME… | set NAME=VALUE…]`: the variables of mysql.tidb."""

import argparse
from typing import Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfigError, nearest
from gcsafepoint.worker.records import read_table
from server.cli.gc_leader import add_address, gc_leader, gc_records
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote

_COLUMNS = tuple((name, name) for name in ("VARIABLE_NAME", "VARIABLE_VALUE", "COMMENT"))


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `config`."""
    config = verbs.add_parser("config", help="the variables that steer GC, as in mysql.tidb", parents=[shared])
    config.set_defaults(command=get_config, names=[])
    actions = config.add_subparsers(metavar="[get | set]")
    get = actions.add_parser("get", help="some variables, or all", parents=[shared])
    get.add_argument("names", nargs="*", metavar="NAME", help="such as tikv_gc_life_time")
    get.set_defaults(command=get_config)
    put = actions.add_parser("set", help="set variables, all or none; in force at the next tick", parents=[shared])
    put.add_argument("settings", nargs="+", metavar="NAME=VALUE", type=setting, help="such as tikv_gc_life_time=24h")
    add_address(put)
    put.set_defaults(command=set_config)


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE; raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as tikv_gc_life_time=24h")
    return name.strip(), value.strip()


async def get_config(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The variables asked for, or all of them.

    Raises:
        GCConfigError: there is none of that name.
    """
    async with gc_records(remote) as records:
        table = await read_table(records)
    rows = {name: (name, value, comment) for name, value, comment in table}
    for name in arguments.names:
        if name not in rows:
            raise GCConfigError(f"{name}: no such variable, did you mean {nearest(name, rows)}?")
    chosen = [rows[name] for name in arguments.names or rows]
    return Output([dict(zip((title for title, _ in _COLUMNS), row, strict=True)) for row in chosen], _COLUMNS)


async def set_config(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The variables that were set, as they are now."""
    variables = dict(arguments.settings)
    async with gc_leader(remote, arguments.gc_worker) as leader:
        await leader.SetGCConfig(gc_pb2.SetGCConfigRequest(variables=variables), timeout=CALL_S)
    return await get_config(remote, argparse.Namespace(names=list(variables)))
