"""`tidemark cli access create|list`: the clients of an access file, which captures and GC workers
ask for with `--access-file` (docs/security.md, *Roles*). No daemon is called.

A token is written into a file of its own, which only its owner may read; the access file has its
SHA-256.
"""

import argparse
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from server.cli.arguments import period
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.access_list import ROLES, AccessFileError, Client, clients_of, digest
from storage.whole_file import create_private_file, replace_file

_TOKEN_BYTES: Final = 32
_COLUMNS: Final = (
    ("NAME", "name"),
    ("ROLE", "role"),
    ("CHANGEFEEDS", "changefeeds"),
    ("EXPIRES", "expires"),
    ("TOLD BY", "told_by"),
)


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `access`."""
    verbs = groups.add_parser("access").add_subparsers(required=True, metavar="VERB")
    create = verbs.add_parser(
        "create", help="create a token, and add its client to an access file", parents=[shared]
    )
    create.add_argument("name", metavar="NAME", help="the client's name in logs")
    create.add_argument("--role", required=True, choices=ROLES, help="what the client may do")
    create.add_argument(
        "--changefeed",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only changefeeds whose id matches, with * and ?; may be repeated (default: all)",
    )
    create.add_argument(
        "--expires-in",
        type=period,
        default=0,
        metavar="TIME",
        help="how long the token is valid, such as 720h (default: without end)",
    )
    create.add_argument(
        "--access-file",
        required=True,
        help="the access file, which is created if it does not exist",
    )
    create.add_argument(
        "--new-token-file",
        required=True,
        help="the new file for the token, which must not exist yet",
    )
    create.set_defaults(command=create_client)
    listed = verbs.add_parser("list", help="list the clients of an access file", parents=[shared])
    listed.add_argument("--access-file", required=True, help="the access file")
    listed.set_defaults(command=list_clients)


async def create_client(_remote: Remote, arguments: argparse.Namespace) -> Output:
    """Add a client with a new token.

    Raises:
        AccessFileError: the access file cannot be used with it, or a file cannot be written.
    """
    path = Path(arguments.access_file)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    now = datetime.now(UTC).replace(microsecond=0)
    expires = now + timedelta(seconds=arguments.expires_in) if arguments.expires_in else None
    client = Client(arguments.name, arguments.role, tuple(arguments.changefeed), expires)
    text = _with(_text(path), client, digest(token.encode()))
    # As the daemons will read it: nothing is written that they would refuse.
    clients_of(text, str(path))
    _write_both(Path(arguments.new_token_file), token, path, text)
    return Output(
        _shown(client, "token")
        | {"token_file": arguments.new_token_file, "access_file": arguments.access_file}
    )


async def list_clients(_remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the clients of a file.

    Raises:
        AccessFileError: it cannot be used.
    """
    path = Path(arguments.access_file)
    clients = clients_of(_text(path, must_exist=True), str(path))
    rows = [_shown(client, "token") for client in clients.by_digest.values()]
    rows += [
        _shown(client, f"common name {name.decode()}") for name, client in clients.by_name.items()
    ]
    return Output(sorted(rows, key=lambda row: str(row["name"])), _COLUMNS)


def _shown(client: Client, told_by: str) -> dict[str, Any]:
    return {
        "name": client.name,
        "role": client.role,
        "changefeeds": ", ".join(client.changefeeds) or "*",
        "expires": client.expires.isoformat() if client.expires else "never",
        "told_by": told_by,
    }


def _with(text: str, client: Client, sha256: str) -> str:
    """The file with one client more; TOML's strings are those of JSON for what names may have."""
    lines = [f"name = {_string(client.name)}", f"role = {_string(client.role)}"]
    lines.append(f'token-sha256 = "{sha256}"')
    if client.changefeeds:
        lines.append(f"changefeeds = [{', '.join(map(_string, client.changefeeds))}]")
    if client.expires is not None:
        lines.append(f"expires = {client.expires.isoformat()}")
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(["[[client]]", *lines]) + "\n"


def _string(text: str) -> str:
    escaped = "".join(
        f"\\u{ord(char):04x}" if ord(char) < ord(" ") or char in '"\\\x7f' else char
        for char in text
    )
    return f'"{escaped}"'


def _text(path: Path, *, must_exist: bool = False) -> str:
    """The file's text; empty if it is not there, and need not be."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise AccessFileError(f"there is no access file {path}") from None
        return ""
    except (OSError, UnicodeDecodeError) as err:
        raise AccessFileError(f"cannot read the access file {path}: {err}") from None


def _write_both(token_path: Path, token: str, path: Path, text: str) -> None:
    """The token first: an entry without a token would be of no use."""
    try:
        create_private_file(token_path, f"{token}\n".encode())
    except OSError as err:
        raise AccessFileError(f"cannot write the token file {token_path}: {err.strerror}") from None
    try:
        replace_file(path, text.encode())
    except OSError as err:
        token_path.unlink()
        raise AccessFileError(f"cannot write the access file {path}: {err.strerror}") from None
