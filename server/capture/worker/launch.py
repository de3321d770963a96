"""How many workers a capture has, and the command lines they are started with."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from server.capture.worker.directory import make_sockets_directory
from server.capture.worker.pool import WorkerProcess
from server.child import Child
from server.config import ConfigError
from server.log import LogConfig, log_config
from server.puller.patience import SILENT_S
from server.rpc.credentials import SecurityConfig

WORKERS_MAX: Final = 256
_COMMAND = "capture worker"


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def host_of(address: str) -> str:
    """The host of `host:port`."""
    return address.rpartition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the workers of a capture have in common."""

    directory: Path
    """The capture's; absolute."""
    coordinator: str
    flight_addr: str
    """Of the first worker; the next ones have the next ports, if it is not port 0."""
    advertise_host: str
    memory_quota_bytes: int
    """Of each worker, for each changefeed."""
    security: SecurityConfig
    flight_token_file: str = ""
    stream_silence_seconds: float = SILENT_S
    log: LogConfig = field(default_factory=log_config)
    """As the capture logs."""

    def workers(self, count: int) -> list[WorkerProcess]:
        """The workers, not yet started.

        Raises:
            ConfigError: their number, or their address, cannot be used.
            DataDirError: their sockets cannot lie in the data directory.
        """
        if not 1 < count <= WORKERS_MAX:
            raise ConfigError(f"--workers is a number from 0 to {WORKERS_MAX}, not {count}")
        make_sockets_directory(self.directory, count)
        return [self._worker(number) for number in range(count)]

    def _worker(self, number: int) -> WorkerProcess:
        arguments = {
            "--number": number,
            "--data-dir": self.directory,
            "--coordinator": self.coordinator,
            "--flight-addr": self._flight_addr(number),
            "--http-addr": "127.0.0.1:0",
            "--memory-quota-bytes": self.memory_quota_bytes,
            "--flight-token-file": self.flight_token_file,
            "--stream-silence-seconds": self.stream_silence_seconds,
            "--ca-path": self.security.ca_path,
            "--cert-path": self.security.cert_path,
            "--key-path": self.security.key_path,
            "--log-level": self.log.log_level,
            "--log-format": self.log.log_format,
        }
        child = Child(
            _COMMAND, [str(part) for flag in arguments.items() if flag[1] != "" for part in flag]
        )
        scheme = "grpc+tls" if self.security.enabled else "grpc"
        return WorkerProcess(number, self.directory, child, self.advertise_host, scheme)

    def _flight_addr(self, number: int) -> str:
        host, _, port = self.flight_addr.rpartition(":")
        if not host or not port.isdecimal() or int(port) + number > 65535:
            raise ConfigError(f"--worker-flight-addr is host:port, not {self.flight_addr!r}")
        return f"{host}:{int(port) + number if int(port) else 0}"
