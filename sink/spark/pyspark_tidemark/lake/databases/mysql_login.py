"""Logins to MySQL and MariaDB that give the password to nobody whose identity is not proved.

The server chooses how a client logs in, also in the middle of a login. PyMySQL follows it: a server
that asks for `mysql_clear_password`, or hands out an RSA key of its own, gets the password. Here
only plugins that answer a challenge are followed, unless TLS has checked the server's certificate
*and* its host name. The sources' log-ins use this, too.
"""

from typing import Any

from pymysql.connections import Connection
from pymysql.constants import CR
from pymysql.err import OperationalError

CHALLENGES = ("mysql_native_password", "caching_sha2_password", "client_ed25519")
"""Plugins in which a client proves that it knows the password, without sending it."""
_CACHING_SHA2 = "caching_sha2_password"
_FAST_AUTH_DONE = 3
_WHY_FULL = (
    ", as it does where the password is wrong, or the user has not logged in since the server began"
)


class GuardedConnection(Connection):
    """A connection of PyMySQL that logs in by challenge only,
    where `server_is_verified` is not set.
    """

    _auth_plugin_name: str
    """The plugin that the server's greeting names."""

    def __init__(self, *, server_is_verified: bool, **settings: Any) -> None:
        guards: dict[Any, Any] = (
            {} if server_is_verified else {_CACHING_SHA2: _CachingSha2Challenge}
        )
        self._server_is_verified = server_is_verified
        super().__init__(**settings, local_infile=False, auth_plugin_map=guards)

    def query(self, sql: Any, unbuffered: bool = False) -> int:  # noqa: FBT001, FBT002 - PyMySQL's signature
        """Run a statement; a server that answers it by asking for a file of this machine (LOAD
        LOCAL) gets none.
        """
        try:
            return super().query(sql, unbuffered)
        except RuntimeError as err:
            if "LOAD_LOCAL" not in str(err):
                raise
            message = "the server asks for a file of this machine, and gets none"
            raise OperationalError(CR.CR_MALFORMED_PACKET, message) from None

    def _get_server_information(self) -> None:
        """Read the greeting; PyMySQL would answer some plugins that it may name with the password
        itself.
        """
        super()._get_server_information()  # type: ignore[misc]
        if not self._server_is_verified and self._auth_plugin_name not in CHALLENGES:
            self._auth_plugin_name = CHALLENGES[0]

    def _process_auth(self, plugin_name: bytes, auth_packet: Any, handler: Any = None) -> Any:
        """Follow a server that asks for another plugin than its greeting has named."""
        plugin = plugin_name.decode("ascii", "replace")
        if not self._server_is_verified and plugin not in CHALLENGES:
            raise _refused(f"{plugin[:64]!r}")
        return super()._process_auth(plugin_name, auth_packet, handler)  # type: ignore[misc]


class _CachingSha2Challenge:
    """caching_sha2_password without its second half,
    in which the client sends the password itself.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def authenticate(self, packet: Any) -> Any:
        """Answer the challenge; PyMySQL calls it for a change of the plugin,
        and for what the server says after it.
        """
        from pymysql._auth import scramble_caching_sha2

        connection = self._connection
        if packet.is_auth_switch_request():
            connection.salt = packet.read_all().removesuffix(b"\0")
            packet = self._answer(scramble_caching_sha2(connection.password, connection.salt))
        if not packet.is_extra_auth_data():
            return packet
        packet.advance(1)
        if packet.read_uint8() != _FAST_AUTH_DONE:
            raise _refused("the full form of 'caching_sha2_password'", _WHY_FULL)
        packet = connection._read_packet()  # noqa: SLF001 - the only way to the next packet
        packet.check_error()
        return packet

    def _answer(self, payload: bytes) -> Any:
        self._connection.write_packet(payload)
        packet = self._connection._read_packet()  # noqa: SLF001 - the only way to the next packet
        packet.check_error()
        return packet


def _refused(plugin: str, why: str = "") -> OperationalError:
    return OperationalError(
        CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
        f"the server asks for the password itself, by {plugin}{why}; it is sent only over TLS that "
        "checks the server's certificate and host name",
    )
