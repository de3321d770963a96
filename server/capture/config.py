"""The settings of `tidemark capture`: light to import, as `--help` has no use for a capture."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server.capture.directory import check_sockets_directory
from server.config import HTTP_ADDRS, ConfigError, setting
from server.puller.stream_timeout import SILENT_S
from server.rpc.access_list import open_access
from server.rpc.credentials import SecurityConfig
from sink.flight.tokens import Readers, read_token

WORKERS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Where a capture listens, whom it asks, and what it may use."""

    addr: str = setting("127.0.0.1:8300", "gRPC address: the changefeed API")
    flight_addr: str = setting("127.0.0.1:8301", "Arrow Flight address: the rows")
    flight_token_file: str = setting(
        "", "file with the token that Flight readers must send; empty: they need none"
    )
    access_file: str = setting(
        "",
        "TOML file with the clients that may call, by token or certificate, and their roles; empty: "
        "everybody who reaches a port may do everything (docs/security.md)",
    )
    token_file: str = setting(
        "", "file with this capture's own token, for other captures that have an access file"
    )
    advertise_addr: str = setting(
        "", "gRPC address by which other captures reach this one; empty: the listening address"
    )
    advertise_flight_addr: str = setting(
        "", "Flight address by which readers reach this capture; empty: the listening address"
    )
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    data_dir: str = setting(
        "./data/capture", "directory for sorted rows; a cache, filled again after a restart"
    )
    http_addr: str = setting(HTTP_ADDRS["capture"], "/metrics, /healthz, /readyz")
    memory_quota_bytes: int = setting(
        512 << 20, "memory for the rows of one changefeed (TiCDC: 1 GiB)"
    )
    stream_silence_seconds: float = setting(
        SILENT_S,
        "seconds without a message after which a stream of a store or pump is opened again",
        least=0.001,
    )
    spill_compression: str = setting(
        "none", "compression of rows that do not fit into memory and go to disk: none or lz4"
    )
    spill_encryption: bool = setting(
        default=False,
        help_text="encrypt rows on disk (XChaCha20-Poly1305), by a key that is made at the start and never "
        "stored",
    )
    workers: int = setting(
        1, "processes that pull, sort and serve tables; 1: only this one; 0: one for each core"
    )
    worker_flight_addr: str = setting(
        "",
        "Flight address of the first worker; the others take the next ports; empty: any free ports",
    )

    def checked(self) -> "CaptureConfig":
        """This configuration.

        Raises:
            ConfigError: the workers cannot be started so, both an access file and a token of
                Flight are given, or a compression is not known.
            AccessFileError, TokenFileError: such a file cannot be used.
            DataDirError: the directory's name is too long for the workers' sockets.
        """
        from storage.spill_codec import COMPRESSIONS

        self.readers()
        if self.spill_compression not in COMPRESSIONS:
            raise ConfigError(
                f"--spill-compression is {' or '.join(COMPRESSIONS)}, not {self.spill_compression!r}"
            )
        if self.token_file:
            read_token(self.token_file)
        if (count := self.workers or cores()) != 1:
            check_workers(count, self.first_worker_flight_addr)
            check_sockets_directory(self.directory, count)
        return self

    def check_with(self, security: SecurityConfig) -> None:
        """See that Flight's readers can be told; raises CredentialsError."""
        from server.capture.listener import check_readers

        check_readers(security, self.readers())

    def readers(self) -> Readers | None:
        """Who may read over Flight; raises as `readers_of`, and AccessFileError."""
        from server.capture.listener import readers_of

        return readers_of(open_access(self.access_file), self.flight_token_file)

    @property
    def directory(self) -> Path:
        """The data directory; absolute, as the workers' Unix sockets are named by their path."""
        return Path(self.data_dir).absolute()

    @property
    def first_worker_flight_addr(self) -> str:
        """Where the first worker listens; the next ones have the next ports, if it is not 0."""
        return self.worker_flight_addr or f"{host_of(self.flight_addr)}:0"


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def host_of(address: str) -> str:
    """The host of `host:port`."""
    return address.rpartition(":")[0]


def check_workers(count: int, flight_addr: str) -> None:
    """Refuse so many workers, or an address of the first one.

    Raises:
        ConfigError: they cannot be used.
    """
    if not 1 < count <= WORKERS_MAX:
        raise ConfigError(f"--workers is a number from 0 to {WORKERS_MAX}, not {count}")
    host, _, port = flight_addr.rpartition(":")
    if not host or not port.isdecimal() or int(port) + count - 1 > 65535:
        raise ConfigError(f"--worker-flight-addr is host:port, not {flight_addr!r}")
