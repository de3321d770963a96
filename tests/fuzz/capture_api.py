"""Fuzzing of a real capture: mutated requests to each method of its gRPC services,
mutated bodies to Flight actions.

The process that was started is alive at the end, still lists its changefeeds, and has answered
nothing by an exception that nobody expected:

    .venv/bin/python -m tests.fuzz.capture_api --seconds 600 --seed 1
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.flight as fl
from google.protobuf import json_format, message_factory
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from tests.fuzz.mutation import mutated
from tests.fuzz.table_info import documents
from tests.integration.capture.processes import running_cluster

FEED = "fuzzed"
MALFORMED = "error unmarshalling request"
# Its request has no members to mutate, and the calls of a second after it meet no owner.
LEFT_OUT = "ResignOwner"
SERVICES = (
    changefeed_pb2.DESCRIPTOR.services_by_name["ChangefeedService"],
    capture_pb2.DESCRIPTOR.services_by_name["CaptureService"],
    dump_pb2.DESCRIPTOR.services_by_name["DumpService"],
)
ACTIONS = {
    "describe": {"changefeed": FEED, "ts": 1, "before": True, "known_ts": 1},
    "latest": {"changefeed": FEED, "start": 1, "max_rows": 5, "max_bytes": 5, "wait_ms": 1},
    "plan": {"changefeed": FEED, "start": 1, "end": 2, "tables": ["s.t"], "slice_bytes": 5},
    "ack": {"changefeed": FEED, "ts": 1, "table": "s.t"},
    "report": {"changefeed": FEED, "state": "ready", "cut_ts": 1, "code": "Err", "message": "m"},
}


def request_text(name: str, chance: random.Random) -> str:
    """JSON of a request that is nearly right."""
    if name == "CreateChangefeed":
        table = {"schemaName": "s", "tableInfoJson": mutated(chance.choice(documents()), chance)}
        members = {
            "id": f"f{chance.randrange(50)}",
            "sinkUri": "delta:///lake/x",
            "tables": [table],
        }
        return (
            json.dumps(members)
            if chance.random() < 0.7
            else mutated(members | {"filter": ["a.*"], "columns": ["s.t=*"]}, chance)
        )
    members = {
        "id": FEED,
        "changefeed": FEED,
        "overwriteCheckpointTs": "5",
        "limit": 3,
        "tables": ["s.t"],
    }
    return mutated(members, chance)


def one_call(channel: grpc.Channel, chance: random.Random) -> str:
    """Call a method; returns the status."""
    service = chance.choice(SERVICES)
    method = chance.choice([each for each in service.methods if each.name != LEFT_OUT])
    message = message_factory.GetMessageClass(method.input_type)()
    try:
        json_format.Parse(request_text(method.name, chance), message, ignore_unknown_fields=True)
        raw = message.SerializeToString()
    except (json_format.ParseError, RecursionError, ValueError, TypeError):
        raw = chance.randbytes(chance.randrange(200))
    call = channel.unary_unary(f"/{service.full_name}/{method.name}")
    try:
        call(raw, timeout=60)
    except grpc.RpcError as err:
        return _outcome(err.code().name, err.details() or "")
    return "OK"


def _outcome(status: str, details: str) -> str:
    """The status; INTERNAL with what it says, but for bytes that are no message,
    which gRPC's own servers answer so.
    """
    if MALFORMED in details:
        return "malformed"
    return f"{status}: {details}" if status in ("INTERNAL", "UNKNOWN") else status


def one_action(client: fl.FlightClient, chance: random.Random) -> str:
    """Call an action, or read; returns what came of it."""
    name = chance.choice(list(ACTIONS))
    body = mutated(ACTIONS[name], chance).encode(errors="replace")
    try:
        if chance.random() < 0.2:
            client.do_get(fl.Ticket(body)).read_all()
        else:
            list(client.do_action(fl.Action(name, body)))
    except pa.ArrowException as err:
        is_named = "[TM:Err" in str(err) and "[TM:ErrInternal]" not in str(err)
        return "Flight refused" if is_named else f"Flight INTERNAL: {err}"
    return "Flight OK"


def defects(outcomes: Counter[str]) -> list[str]:
    """The outcomes that no named error explains."""
    return [
        outcome for outcome in outcomes if "INTERNAL" in outcome or outcome.startswith("UNKNOWN")
    ]


def fuzz(seconds: float, seed: int) -> tuple[Counter[str], bool]:
    """What calls gave, and whether the capture's process lived through all of it."""
    chance, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory)) as cluster:
        process = cluster.capture.process
        client = fl.connect(f"grpc://{cluster.capture.endpoints['flight']}")
        with grpc.insecure_channel(cluster.capture.endpoints["capture"]) as channel:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends and process.poll() is None:
                outcomes[
                    one_call(channel, chance)
                    if chance.random() < 0.8
                    else one_action(client, chance)
                ] += 1
            alive = process.poll() is None
            if alive:
                ChangefeedServiceStub(channel).ListChangefeeds(
                    changefeed_pb2.ListChangefeedsRequest(), timeout=60
                )
        log = cluster.capture.log.read_text(errors="replace")
        sys.stderr.write(
            "\n".join(line for line in log.splitlines() if "unexpected exception" in line)[:5000]
        )
    return outcomes, alive


def main() -> int:
    """Print the outcomes; 1 if the capture ended, or answered by a defect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    outcomes, alive = fuzz(chosen.seconds, chosen.seed)
    print(json.dumps({"seed": chosen.seed, "alive": alive, "outcomes": outcomes}))
    return not alive or bool(defects(outcomes))


if __name__ == "__main__":
    sys.exit(main())
