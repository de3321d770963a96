"""Odd requests to each method of the public protocols of real daemons: PD's, etcd's, TiKV's, its
change feed's and Pump's, and our own of stores, pumps and GC.

    .venv/bin/python -m tests.fuzz.services --seconds 300 --seed 1

Messages are made from their descriptors: members are left out, at the ends of their range, enum
values that nobody knows, keys and timestamps of the cluster, or long lists. Streams get several
messages, and are cancelled amid them. At the end all daemons run, answer, and have told no error
that nobody expected.
"""

import argparse
import importlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvproto import pdpb_pb2

from storage.codec import encode_bytes
from storage.tidb.record import record_key
from tests.integration.capture.processes import Cluster, Daemon, running_cluster

SERVICES: Final = {
    "coordinator": (
        ("kvproto.pdpb_pb2", "PD"),
        ("kvproto.keyspacepb_pb2", "Keyspace"),
        ("kvproto.meta_storagepb_pb2", "MetaStorage"),
        *(("etcdpb.rpc_pb2", name) for name in ("KV", "Watch", "Lease", "Cluster", "Maintenance")),
        ("etcdpb.election_pb2", "Election"),
        ("etcdpb.lock_pb2", "Lock"),
        ("tidemarkpb.v1.explain_pb2", "ExplainService"),
    ),
    "store": (
        *(("kvproto.tikvpb_pb2", "Tikv") for _ in range(4)),
        ("kvproto.cdcpb_pb2", "ChangeData"),
        ("kvproto.debugpb_pb2", "Debug"),
        ("tidemarkpb.v1.store_pb2", "StoreService"),
    ),
    "pump": (("tipb.pump_pb2", "Pump"), ("tidemarkpb.v1.pump_pb2", "PumpService")),
    "gc-worker": (("tidemarkpb.v1.gc_pb2", "GCService"),),
}
_DEPTH_MAX: Final = 6
_CALL_S: Final = 4.0
_SLOW_S: Final = 3.0
_WHOLE_NUMBERS: Final = {
    FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_SINT32: 31,
    FieldDescriptor.TYPE_SFIXED32: 31, FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_SINT64: 63, FieldDescriptor.TYPE_SFIXED64: 63,
    FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_UINT64: 64, FieldDescriptor.TYPE_FIXED64: 64,
}  # fmt: skip
_UNSIGNED: Final = (32, 64)
_SHOWN: Final = ("INTERNAL", "DATA_LOSS")
"""Statuses that say what happened; PD and Pump answer many a wrong request by UNKNOWN."""
_LEFT_OUT: Final = ("etcdserverpb.Maintenance.Alarm",)
"""Whoever raises the alarm that there is no space has the coordinator give no timestamps."""
_UNEXPECTED: Final = ("unexpected exception", "Traceback", "ErrInternal")


class Requests:
    """Makes messages by one seed, that are nearly right for one cluster."""

    def __init__(self, chance: random.Random, cluster_id: int, now: Callable[[], int]) -> None:
        self._chance = chance
        self._cluster_id = cluster_id
        self._now = now()
        self._keys = [
            *(b"", b"a", b"k" * 9, b"\xff", b"\0", record_key(101, 1), record_key(101, -1)),
            *(encode_bytes(record_key(101, 5)), b"m" + encode_bytes(b"DBs"), b"x" * 70_000),
        ]

    def message(self, kind: Any, depth: int = 0) -> Message:
        """One of a type."""
        made = GetMessageClass(kind)()
        likely = 0.75 if depth < _DEPTH_MAX else 0.1
        for field in kind.fields:
            if self._chance.random() < likely:
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        if field.is_repeated:
            long = field.message_type is None and self._chance.random() < 0.03
            count = 20_000 if long else self._chance.choice((0, 1, 1, 2, 3))
            for _ in range(count):
                if field.message_type is not None:
                    getattr(made, field.name).append(self.message(field.message_type, depth + 1))
                else:
                    getattr(made, field.name).append(self._scalar(field))
        elif field.message_type is not None:
            if depth < _DEPTH_MAX:
                inner = self.message(field.message_type, depth + 1)
                getattr(made, field.name).CopyFrom(inner)
        else:
            setattr(made, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        chance = self._chance
        if field.type == FieldDescriptor.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return chance.choice((*known, *known, 77, -1, (1 << 31) - 1))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.choice(self._keys) if chance.random() < 0.8 else chance.randbytes(30)
        if field.type == FieldDescriptor.TYPE_STRING:
            return chance.choice(("", "a", "gc_worker", "é😀", "x" * 5000, "127.0.0.1:1", "%s{}'"))
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return chance.choice((0.0, -1.0, float("nan"), float("inf"), 1e308))
        return self._number(field)

    def _number(self, field: FieldDescriptor) -> int:
        chance, bits = self._chance, _WHOLE_NUMBERS[field.type]
        if field.name == "cluster_id" and chance.random() < 0.97:
            return self._cluster_id
        if field.name in ("region_id", "store_id", "conf_ver", "version") and bits == 64:
            return chance.choice((1, 1, 1, 2, 3, 4, 5, 0, (1 << 64) - 1, self._now))
        most = (1 << bits) - 1
        near = (self._now, self._now - 1, self._now + (1 << 40)) if bits > 32 else ()
        least = () if bits in _UNSIGNED else (-1, -most - 1)
        return chance.choice((0, 1, 1, 2, 7, 1000, most, most - 1, most >> 1, *near, *near, *least))


class Fuzzed:
    """Daemons that get odd requests."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        pump_flags = ("--coordinator", cluster.pd, "--data-dir", str(cluster.directory / "pump"))
        self._daemons: dict[str, Daemon] = {
            "coordinator": cluster.coordinator,
            "store": cluster.store,
            "pump": cluster.start("pump", *pump_flags),
            "gc-worker": cluster.start("gc-worker", "--coordinator", cluster.pd),
        }
        self._chance = chance
        self._channels = {
            name: grpc.insecure_channel(daemon.endpoints[name])
            for name, daemon in self._daemons.items()
        }
        members = self._channels["coordinator"].unary_unary(
            "/pdpb.PD/GetMembers", response_deserializer=pdpb_pb2.GetMembersResponse.FromString
        )
        cluster_id = members(b"", timeout=60).header.cluster_id
        self._requests = Requests(chance, cluster_id, cluster.now)
        self._methods = [
            (name, method)
            for name, services in SERVICES.items()
            for module, service in services
            for method in _service(module, service).methods
            if method.full_name not in _LEFT_OUT
        ]

    @property
    def ended(self) -> list[str]:
        """The daemons that do not run any more."""
        daemons = self._daemons.items()
        return [name for name, daemon in daemons if daemon.process.poll() is not None]

    def one_call(self) -> str:
        """Call a method; returns what came of it."""
        name, method = self._chance.choice(self._methods)
        channel = self._channels[name]
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = getattr(channel, _shape(method))(path)
        count = self._chance.choice((1, 1, 2, 5)) if method.client_streaming else 1
        kind = method.input_type
        messages = [self._requests.message(kind).SerializeToString() for _ in range(count)]
        began = time.monotonic()
        status = self._answer(call, method, messages)
        took_s = time.monotonic() - began
        waits = method.server_streaming or method.client_streaming
        if took_s > _SLOW_S and not waits and status == "DEADLINE_EXCEEDED":
            return f"slow {path}"
        return f"{status} {path}" if status.startswith(_SHOWN) else status

    def _answer(self, call: Any, method: MethodDescriptor, messages: list[bytes]) -> str:
        given = iter(messages) if method.client_streaming else messages[0]
        try:
            answer = call(given, timeout=_CALL_S if not method.server_streaming else 1.0)
            if method.server_streaming:
                for _ in itertools.islice(answer, self._chance.choice((0, 1, 3))):
                    pass
                answer.cancel()
        except grpc.RpcError as err:
            code = err.code()
            shown = f": {err.details()[:300]}" if code.name in _SHOWN else ""
            return f"{code.name}{shown}"
        return "OK"

    def faults(self) -> list[str]:
        """Lines of the daemons' logs that tell an error that nobody expected."""
        return [
            f"{name}: {line[:2000]}"
            for name, daemon in self._daemons.items()
            for line in daemon.log.read_text(errors="replace").splitlines()
            if any(word in line for word in _UNEXPECTED)
        ]

    def close(self) -> None:
        """Let go of the channels."""
        for channel in self._channels.values():
            channel.close()


def _service(module: str, name: str) -> ServiceDescriptor:
    return importlib.import_module(module).DESCRIPTOR.services_by_name[name]


def _shape(method: MethodDescriptor) -> str:
    kinds = {False: "unary", True: "stream"}
    return f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"


def fuzz(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """What calls gave, and what is wrong: daemons that ended, errors in their logs."""
    chance, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        fuzzed = Fuzzed(cluster, chance)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not fuzzed.ended:
            outcomes[fuzzed.one_call()] += 1
        wrong = [f"{name} ended" for name in fuzzed.ended]
        if not wrong:
            cluster.now()
        wrong += fuzzed.faults()
        fuzzed.close()
    return outcomes, wrong


def defects(outcomes: Counter[str]) -> Iterator[str]:
    """The outcomes that no named error explains."""
    return (each for each in outcomes if each.startswith("INTERNAL"))


def main() -> int:
    """Print the outcomes; 1 if a daemon ended, or answered by a defect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    outcomes, wrong = fuzz(chosen.seconds, chosen.seed)
    print(json.dumps({"seed": chosen.seed, "outcomes": outcomes.most_common(), "wrong": wrong}))
    return bool(wrong) or any(defects(outcomes))


if __name__ == "__main__":
    sys.exit(main())
