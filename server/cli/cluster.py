"""`tidemark cli member|leader|health|store|region`: what pd-ctl shows, by the coordinator's HTTP
API, which PD has, too.
"""

import argparse
import asyncio
import json
import ssl
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import quote

from server.cli.output import Output
from server.cli.remote import Remote, RemoteError
from server.rpc.credentials import SecurityConfig
from server.rpc.members import addresses_of
from server.rpc.pd import PdUnavailableError

_API: Final = "/pd/api/v1/"
_CALL_S: Final = 10.0
_VERBS: Final = {
    "member": ("members", "members", (
        ("NAME", "name"), ("ID", "member_id"), ("ADDRESS", "client_urls"),
    )),
    "leader": ("leader", "", ()),
    "health": ("health", "", (
        ("NAME", "name"), ("ID", "member_id"), ("HEALTHY", "health"), ("ADDRESS", "client_urls"),
    )),
    "store": ("stores", "stores", (
        ("ID", "store.id"), ("ADDRESS", "store.address"), ("STATE", "store.state_name"),
        ("REGIONS", "status.region_count"), ("LEADERS", "status.leader_count"),
    )),
    "region": ("regions", "regions", (
        ("ID", "id"), ("LEADER STORE", "leader.store_id"), ("START", "start_key"),
        ("END", "end_key"),
    )),
}  # fmt: skip
"""Path, the member of the answer that lists them, and columns, by verb."""
_ONE: Final = {"store": "store/", "region": "region/id/"}


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verbs."""
    for name, (path, listed, columns) in _VERBS.items():
        verb = groups.add_parser(name, parents=[shared])
        verb.set_defaults(command=show, path=path, listed=listed, columns=columns, one="", id="")
        if name in _ONE:
            verb.add_argument("id", nargs="?", default="", metavar="ID", help="only this one")
            verb.set_defaults(one=_ONE[name])


async def show(remote: Remote, arguments: argparse.Namespace) -> Output:
    """What the coordinator says.

    Raises:
        PdUnavailableError: none answers.
        RemoteError: it refused, and says why.
    """
    if arguments.id:
        return Output(await _get(remote, arguments.one + quote(arguments.id, safe="")))
    answer = await _get(remote, arguments.path)
    rows = answer[arguments.listed] if arguments.listed else answer
    if not isinstance(rows, list):
        return Output(rows)
    shown = Output([_joined(row) for row in rows], arguments.columns)
    return Output(answer, shown=shown.text())


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of addresses as one text."""
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in row.items()
    }


async def _get(remote: Remote, path: str) -> Any:
    said = ""
    for address in addresses_of(remote.pd):
        try:
            return await asyncio.to_thread(_fetched, address, path, remote.security)
        except urllib.error.HTTPError as err:
            with err:
                said = err.read().decode(errors="replace").strip()
            if err.code != 503:  # another one may know the leader
                raise RemoteError(said or str(err)) from err
        except (OSError, ValueError) as err:
            said = str(err)
    raise PdUnavailableError(f"no coordinator answers at {remote.pd}: {said}")


def _fetched(address: str, path: str, security: SecurityConfig) -> Any:
    host = address.rpartition("//")[2]
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if security.enabled:
        context = ssl.create_default_context(cafile=security.ca_path or None)
        if security.cert_path:
            context.load_cert_chain(security.cert_path, security.key_path or None)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    scheme = "https" if security.enabled else "http"
    opener = urllib.request.build_opener(*handlers)
    with opener.open(f"{scheme}://{host}{_API}{path}", timeout=_CALL_S) as answer:
        return json.load(answer)
