"""`tidemark cli unsafe show-metadata`: Tidemark's records in etcd or PD, key by key, as `cdc cli` shows them."""

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

from pyspark_tidemark.sink_uri import redacted

from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.credentials import SecurityConfig
from server.rpc.limits import MAX_MESSAGE_BYTES
from server.rpc.members import addresses_of
from storage.codec import prefix_end
from storage.meta import etcd3
from storage.meta.errors import MetaUnavailableError

_COLUMNS: Final = (("KEY", "key"), ("REVISION", "mod_revision"), ("VALUE", "value"))
_PAGE: Final = 500


def add_command(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb `show-metadata`."""
    verb = verbs.add_parser("show-metadata", help="show Tidemark's records in etcd or PD", parents=[shared])
    verb.add_argument("--prefix", default="/tidemark/", help="what the keys begin with (default: %(default)s)")
    verb.set_defaults(command=show_metadata)


async def show_metadata(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All keys below a prefix; where a URI may hold a secret, it is masked.

    Raises:
        NoAddressError: none is named.
        MetaUnavailableError: none answers.
    """
    for address in addresses_of(remote.pd):
        try:
            return Output(await asyncio.to_thread(_records, address, remote.security, arguments.prefix), _COLUMNS)
        except etcd3.failures() as err:
            last = err
    raise MetaUnavailableError(f"no metadata server answers at {remote.pd}: {last or type(last).__name__}")


def _records(address: str, security: SecurityConfig, prefix: str) -> list[dict[str, Any]]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise MetaUnavailableError(f"{address!r} is no address; --pd takes host:port[,host:port…]")
    certificates = {name: getattr(security, name) for name in ("ca_path", "cert_path", "key_path")}
    with etcd3.client(host, int(port), max_message_bytes=MAX_MESSAGE_BYTES, **certificates) as client:
        return [
            {"key": _text(pair.key), "mod_revision": pair.mod_revision, "value": _shown(value)}
            for value, pair in _pairs(client, prefix.encode())
        ]


def _pairs(client: Any, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
    """All pairs, in pages: together they may be more than one message holds."""
    start, end = prefix or b"\0", prefix_end(prefix) or b"\0"
    while page := list(client.get_range(start, end, limit=_PAGE)):
        yield from page
        start = page[-1][1].key + b"\0"


def _shown(value: bytes) -> Any:
    try:
        return _masked(json.loads(value))
    except ValueError:
        return _masked(_text(value))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _masked(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_masked(member) for member in value]
    return redacted(value) if isinstance(value, str) and "://" in value else value


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
