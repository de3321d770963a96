"""The `etcd3` library for one-shot administration, with our generated modules in place of its own.

Its own generated code does not load under today's protobuf, so its stub module is replaced before
it is imported. Only one-shot calls go through it (status, put, get, transactions, leases): its
watcher spins without back-off while the server is away, forgets its subscriber, and never resumes.
Everything that lives longer uses `storage.meta.client`.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import grpc
from etcdpb import kv_pb2, rpc_pb2, rpc_pb2_grpc

_STUB_MODULE = "etcd3.etcdrpc"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a client; an empty path is none."""

    ca_path: str = ""
    cert_path: str = ""
    key_path: str = ""


NO_TLS: Final = TlsFiles()


def client(
    host: str,
    port: int,
    timeout_s: float = 5.0,
    *,
    tls: TlsFiles = NO_TLS,
    max_message_bytes: int = 4 << 20,
) -> Any:
    """An `etcd3.Etcd3Client` to one endpoint, with TLS if `tls` names PEM files;
    close it after use.
    """
    return _library().client(
        host=host,
        port=port,
        timeout=timeout_s,
        ca_cert=tls.ca_path or None,
        cert_cert=tls.cert_path or None,
        cert_key=tls.key_path or None,
        grpc_options=[("grpc.max_receive_message_length", max_message_bytes)],
    )


def failures() -> tuple[type[Exception], ...]:
    """The exceptions that the library raises when a server does not answer, or refuses."""
    return _library().exceptions.Etcd3Exception, grpc.RpcError


def _library() -> ModuleType:
    if _STUB_MODULE not in sys.modules:
        stubs = ModuleType(_STUB_MODULE)
        for source in (kv_pb2, rpc_pb2, rpc_pb2_grpc):
            vars(stubs).update(
                {name: part for name, part in vars(source).items() if not name.startswith("_")}
            )
        sys.modules[_STUB_MODULE] = stubs
    library = importlib.import_module("etcd3")
    vars(library)["etcdrpc"] = sys.modules[_STUB_MODULE]
    return library
