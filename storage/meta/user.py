"""The user for an etcd that demands one: name and password from the environment or a file,
and the token for them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.meta.errors import AuthNotEnabledError, MetaAuthError

NAME = "TIDEMARK_METADATA_USER"
PASSWORD = "TIDEMARK_METADATA_PASSWORD"  # noqa: S105 - the name of a variable
PASSWORD_FILE = "TIDEMARK_METADATA_PASSWORD_FILE"  # noqa: S105 - the name of a variable

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class User:
    """A name and a password; the password is not shown."""

    name: str
    password: str = field(repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "User | None":
        """The user that the variables name; None when there is none.

        Raises:
            MetaAuthError: a name without a password, or the password file cannot be read.
        """
        if not (name := environ.get(NAME, "")):
            return None
        if path := environ.get(PASSWORD_FILE, ""):
            try:
                return cls(name, Path(path).read_text().rstrip("\n"))
            except (OSError, UnicodeDecodeError) as err:
                raise MetaAuthError(
                    f"cannot read {path} ({PASSWORD_FILE}): {type(err).__name__}"
                ) from err
        if PASSWORD in environ:
            return cls(name, environ[PASSWORD])
        raise MetaAuthError(f"{NAME} is set, but neither {PASSWORD_FILE} nor {PASSWORD}")


class Token:
    """The token of a user, requested when it is first needed; without a user there is none."""

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._metadata: Metadata | None = None
        self._authenticating = asyncio.Lock()

    async def metadata(self, channel: grpc.aio.Channel) -> Metadata:
        """The metadata for a call on `channel`; empty, too,
        while the server has authentication switched off.

        Raises:
            grpc.aio.AioRpcError: as the call would.
        """
        if self._user is None:
            return ()
        async with self._authenticating:
            if self._metadata is None:
                self._metadata = await self._authenticate(self._user, channel)
            return self._metadata

    def invalidate(self) -> bool:
        """Request a new token next time; returns whether there is a user."""
        self._metadata = None
        return self._user is not None

    async def _authenticate(self, user: User, channel: grpc.aio.Channel) -> Metadata:
        request = rpc_pb2.AuthenticateRequest(name=user.name, password=user.password)
        try:
            return (("token", (await rpc_pb2_grpc.AuthStub(channel).Authenticate(request)).token),)
        except grpc.aio.AioRpcError as err:
            if AuthNotEnabledError.text in (err.details() or ""):
                return ()
            raise
