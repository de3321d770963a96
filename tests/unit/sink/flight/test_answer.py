"""The JSON documents of answers and tickets are those of the golden file:
readers of any version know them.
"""

import base64
import dataclasses
import json
from pathlib import Path

import pyarrow as pa

from sink.flight.documents import Plan, Ticket, described, planned
from sink.flight.feeds import FeedDescription, SliceEndpoint, TableDescription
from sink.versions import Ddl

GOLDEN = Path(__file__).parents[3] / "golden" / "flight.json"
TS = 470615457568391169
TABLE = TableDescription(
    table="bank.accounts",
    table_id=101,
    key=("id",),
    schema=pa.schema([("_op", pa.string()), ("id", pa.int64())]),
    schema_ts=TS - 2,
    resolved_ts=TS + 9,
    checkpoint_ts=TS,
)
SHARD = dataclasses.replace(
    TABLE, table="bank_1.accounts", table_id=102, shard=("bank.merged", "_shard")
)
DDLS = (
    Ddl(TS, "ALTER TABLE accounts ADD c INT", tables=("bank.accounts",)),
    Ddl(TS + 1, "DROP TABLE a, b", dropped=("bank.a", "bank.b")),
    Ddl(TS + 2, "TRUNCATE accounts", tables=("bank.accounts",), truncated=("bank.accounts",)),
    Ddl(TS + 3, "RENAME TABLE d TO e", tables=("bank.e",), renamed=(("bank.d", "bank.e"),)),
)
FEED = FeedDescription(
    changefeed="bank",
    state="normal",
    sink_uri="delta:///lake",
    start_ts=TS - 2,
    checkpoint_ts=TS,
    resolved_ts=TS + 9,
    tables=(TABLE, SHARD),
    ddls=DDLS,
)


def plan(*, before: bool) -> Plan:
    return Plan("bank", None, TS, TS + 9, 1 << 20, before)


def documents() -> dict[str, object]:
    part = SliceEndpoint("bank.accounts", TS, TS + 4, 170, 13052, ("grpc://worker:8311",))
    return {
        "describe": described(FEED),
        "slice": planned(plan(before=False), part, "grpc://capture:8301"),
        "slice_before": planned(plan(before=True), part, "grpc://capture:8301"),
    }


def test_answers_are_the_golden_ones():
    golden = json.loads(GOLDEN.read_text())
    made = json.loads(json.dumps(documents()))
    tables = [table for each in (golden, made) for table in each["describe"]["tables"]]
    schemas = [each.pop("schema") for each in tables]
    read = [
        pa.ipc.read_schema(pa.py_buffer(_bytes(schema))) for schema in schemas
    ]  # Arrow may lay it out otherwise
    assert read == [TABLE.schema] * 4
    assert made == golden


def test_golden_tickets_are_read():
    golden = json.loads(GOLDEN.read_text())
    for name, before in (("slice", False), ("slice_before", True)):
        ticket = json.dumps(golden[name]["ticket"]).encode()
        assert Ticket.parse(ticket) == Ticket("bank", "bank.accounts", TS, TS + 4, before)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def test_tables_that_the_reader_knows_are_left_out():
    assert described(FEED).keys() - described(dataclasses.replace(FEED, tables=None)).keys() == {
        "tables"
    }
