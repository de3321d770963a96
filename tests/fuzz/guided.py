"""Coverage-guided fuzzing of what parses bytes of others: each target takes any bytes, and must
return, or raise an error of ours.

    .venv/bin/python -m tests.fuzz.guided                          # the targets
    .venv/bin/python -m tests.fuzz.guided mysql-log --seconds 600
    .venv/bin/python -m tests.fuzz.guided all --seconds 60         # each of them, one after another

The fuzzer is atheris (`pip install atheris`), which no other test needs. Inputs that reach new code
are kept in `build/fuzz/TARGET`, from run to run. An input that fails goes, once the defect is
mended, to `tests/fuzz/cases/TARGET`: `tests/unit/test_fuzz_cases.py` tries all of these.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark_tidemark.errors import SourceError

from storage.model.errors import TidemarkError

_TESTS = Path(__file__).parents[1]
CASES = Path(__file__).parent / "cases"
_KEPT = _TESTS.parent / "build" / "fuzz"
_LONGEST_S, _MOST_MIB, _MOST_BYTES = 10, 2048, 4096
"""What one input may take, and how long it may be."""


class Target(NamedTuple):
    """One parser."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterator[bytes]]
    """Good inputs to begin with."""
    modules: tuple[str, ...]
    """Whose code is watched."""


def _hex_strings(document: Any) -> Iterator[bytes]:
    """All values of a golden file that are bytes."""
    if isinstance(document, dict | list):
        for each in document.values() if isinstance(document, dict) else document:
            yield from _hex_strings(each)
    elif isinstance(document, str):
        with suppress(ValueError):
            yield bytes.fromhex(document)


def _golden(name: str) -> Any:
    return json.loads((_TESTS / "golden" / name).read_text("utf-8"))


def _texts(*texts: str) -> Callable[[], Iterator[bytes]]:
    return lambda: (text.encode() for text in texts)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# -- MySQL's log


def _mysql_log(data: bytes) -> None:
    """A whole log: events, what is compressed, what they tell of, rows and their values."""
    from storage.mysql.buffer import PAD_BYTES
    from storage.mysql.compressed import expanded
    from storage.mysql.event import split_events
    from storage.mysql.rows import TableMaps

    if not data:
        return
    mariadb = bool(data[0] & 1)
    content = data[1:]
    events, _ = split_events(content + bytes(PAD_BYTES), checksums=False, end=len(content))
    maps = TableMaps(mariadb=mariadb)
    for piece in expanded(events):
        piece.check_known()
        for number in range(len(piece)):
            _mysql_event(piece.header(number), piece.body(number))
        for group in maps.group(piece):
            with suppress(TidemarkError):
                _mysql_rows(piece, group)


def _mysql_event(header: bytes, body: bytes) -> None:
    from storage.mysql import control
    from storage.mysql.event import EventType

    readers: dict[int, Callable[[], object]] = {
        EventType.QUERY: lambda: control.Query.parse(body),
        EventType.ROTATE: lambda: control.Rotate.parse(body),
        EventType.FORMAT_DESCRIPTION: lambda: control.FormatDescription.parse(
            body, split_with_checksums=False
        ),
        EventType.GTID: lambda: control.MysqlGtid.parse(body),
        EventType.GTID_TAGGED: lambda: control.MysqlGtid.parse_tagged(body),
        EventType.MARIADB_GTID: lambda: control.MariaGtid.parse(header, body),
        EventType.MARIADB_GTID_LIST: lambda: control.MariaGtidList.parse(body),
        EventType.XA_PREPARE: lambda: control.XaPrepare.parse(body),
    }
    if reader := readers.get(header[4]):
        with suppress(TidemarkError):
            reader()


def _mysql_rows(events: Any, group: Any) -> None:
    from storage.mysql.arrow import arrow_columns
    from storage.mysql.changes import Plan, read_changes

    table = group.table.to_table(1)
    commits = np.arange(1, len(events) + 1, dtype=np.uint64)
    batch = read_changes(events, group, Plan.of(table), commits).batch
    for image in ("value", "old_value"):
        arrow_columns(table, batch.column(image))


def _mysql_log_seeds() -> Iterator[bytes]:
    for version in _golden("mysql_events.json"):
        flag = b"\1" if "maria" in version["version"].lower() else b"\0"
        for value in version.values():
            parts = [*_hex_strings(value)]
            yield flag + b"".join(map(_whole_event, parts))


def _whole_event(event: bytes) -> bytes:
    """With the size that it has without its checksum."""
    return event[:9] + len(event).to_bytes(4, "little") + event[13:]


def _mysql_json(data: bytes) -> None:
    from storage.mysql.json import decode_json

    json.loads(decode_json(data), parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


_SQL = (
    "ALTER TABLE `a`.b ADD COLUMN (c INT UNSIGNED NOT NULL DEFAULT 0 AFTER d, KEY (c)), DROP d",
    "CREATE TABLE t (id BIGINT PRIMARY KEY, e ENUM('a','b') CHARACTER SET latin1, v INT AS (id+1))",
    "/*!40101 SET NAMES utf8 */; RENAME TABLE a TO b, c TO d.e",
    "/*M!100100 DROP TABLE IF EXISTS a, b */ # x",
    "INSERT INTO t VALUES (1,'x\\'y',0x41,b'1',_utf8'z') ON DUPLICATE KEY UPDATE a=1",
    "XA START 'a','b',1",
    "ALTER TABLE t MODIFY d DECIMAL(10,2), CONVERT TO CHARACTER SET utf8mb4, EXCHANGE PARTITION p",
)


def _mysql_ddl(data: bytes) -> None:
    """A statement of each dialect, and what it makes of a table."""
    from server.puller.mysql.ddl.column_types import LostError
    from server.puller.mysql.ddl.statement import read_statement
    from server.puller.mysql.ddl.tokens import Dialect
    from server.puller.mysql.ddl.tracker import Context, altered, created
    from server.puller.mysql.ddl.tree import AlterTable, CreateTable
    from storage.mysql.schema import Table

    if not data:
        return
    dialect = Dialect(mariadb=bool(data[0] & 1), version=80_000 + data[0])
    statement = read_statement(_text(data[1:]), "a", dialect=dialect)
    context = Context(dialect=dialect)
    with suppress(LostError):
        if isinstance(statement.tree, CreateTable):
            created(statement.tree, 1, 1, context)
        if isinstance(statement.tree, AlterTable):
            altered(Table.parse(_golden("mysql_table.json")["record"]), statement.tree, context)


def _mysql_gtids(data: bytes) -> None:
    from storage.mysql.gtid import MariaGtidSet, MysqlGtidSet

    with suppress(TidemarkError):
        MariaGtidSet.parse(_text(data))
    with suppress(TidemarkError):
        one = MysqlGtidSet.parse(_text(data))
        assert MysqlGtidSet.decode(one.encode()) == one
    MysqlGtidSet.decode(data)


# -- TiDB's rows, keys and metadata


def _tidb_rows(data: bytes) -> None:
    """One row of each golden table, mounted: key, value and old value are parts of the input."""
    from sink.tidb_mounter import TidbMounter
    from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
    from storage.tidb.record import record_key, record_prefix
    from storage.tidb.schema import TableInfo

    if len(data) < 3:
        return
    tables = [*_golden("tidb_rows.json").values()]
    table = TableInfo.parse(tables[data[0] % len(tables)]["table"])
    begin = 3 + data[1] % 64
    key = (
        record_prefix(table.id) + data[3:begin]
        if table.common_handle_columns
        else record_key(table.id, int.from_bytes(data[3:begin][:8], "little", signed=True))
    )
    middle = begin + (len(data) - begin) * data[2] // 256
    op = (INSERT, UPDATE, DELETE)[data[2] % 3]
    value = None if op == DELETE else data[begin:middle]
    old = None if op == INSERT else data[middle:]
    batch = raw_batch(
        commit_ts=[2], start_ts=[1], op=[op], key=[key], value=[value], old_value=[old]
    )
    TidbMounter(table, "s").mount(batch)


def _tidb_row_seeds() -> Iterator[bytes]:
    for number, table in enumerate(_golden("tidb_rows.json").values()):
        for part in _hex_strings(table):
            yield bytes((number, 0, 255)) + part


def _tidb_values(data: bytes) -> None:
    from storage.tidb.datum import decode_datum
    from storage.tidb.json import decode_json
    from storage.tidb.number import decode_decimal
    from storage.tidb.record import decode_record_key
    from storage.tidb.row import as_v2, decode_pairs, decode_row

    for read in (decode_datum, decode_decimal, decode_record_key, decode_row, decode_pairs, as_v2):
        with suppress(TidemarkError):
            read(data)
    json.loads(decode_json(data), parse_constant=_no_constant)


def _tidb_documents(data: bytes) -> None:
    from storage.tidb.ddl import Job, decode_schema_key
    from storage.tidb.schema import TableInfo

    with suppress(TidemarkError):
        decode_schema_key(data)
    with suppress(TidemarkError):
        Job.parse(data)
    table = TableInfo.parse(data)
    assert TableInfo.parse(table.to_json()) == table


def _tidb_document_seeds() -> Iterator[bytes]:
    for table in _golden("tidb_rows.json").values():
        yield json.dumps(table["table"]).encode()


def _tidb_binlog(data: bytes) -> None:
    from storage.pump.binlog import parse

    parse(data)


# -- our own listeners


def _http2(data: bytes) -> None:
    """A connection's frames, in two cuts: nothing is raised, nothing left behind."""
    from server.rpc.http2 import frames
    from tests.unit.server.rpc.http2.wire import Client

    client = Client()
    cut = data[0] * len(data) // 256 if data else 0
    for part in (data[1:cut], data[cut:]):
        client.send(part)
        client.take()
    connection = client.connection
    assert client.host.open_now == len(connection.streams)
    assert len(connection._rest) <= frames.MAX_FRAME_BYTES + frames.HEADER_BYTES
    connection.abort()
    assert (client.host.open_now, client.host.request_bytes, connection.unsent_bytes) == (0, 0, 0)


def _http2_seeds() -> Iterator[bytes]:
    from server.rpc.http2 import frames
    from tests.unit.server.rpc.http2.wire import Client, message

    block, body = Client().block(), message(b"hello")
    call = frames.header_block(1, block, end_stream=False) + frames.frame(frames.DATA, 1, 1, body)
    yield b"\0" + call
    yield b"\x80" + frames.settings({1: 4096, 4: 1 << 20}) + call + frames.window_update(0, 9)
    yield (
        b"\x80"
        + call
        + frames.rst_stream(1, frames.ErrorCode.CANCEL)
        + frames.frame(6, 0, 0, bytes(8))
    )


def _flight(data: bytes) -> None:
    from sink.flight import documents

    kinds = (documents.Describe, documents.Latest, documents.Plan, documents.Ack)
    for kind in (*kinds, documents.JobReport, documents.Ticket):
        with suppress(TidemarkError):
            kind.parse(data)


def _flight_seeds() -> Iterator[bytes]:
    for each in _golden("flight.json").values():
        yield json.dumps(each).encode()
    yield from _texts('{"changefeed": "a", "ts": 5, "reader": "b", "table": "a.b"}')()


# -- what users write


def _uris(data: bytes) -> None:
    from pyspark_tidemark.sink_uri import SinkUri

    from server.changefeed.source import SourceUri

    with suppress(TidemarkError):
        SourceUri.parse(_text(data))
    SinkUri.parse(_text(data))


def _filters(data: bytes) -> None:
    from server.changefeed.filter import TableFilter
    from sink.row_filter import Condition

    rules = _text(data).split("\0")
    with suppress(TidemarkError):
        TableFilter(rules).takes("shop", "orders")
    condition = Condition(rules[0])
    row = {"id": [1, None], "t": ["a", None], "d": [1.5, None], "b": [b"x", None]}
    rows = pa.RecordBatch.from_pydict(row)
    condition.check(rows.schema)
    condition.mask(rows)


def _records(data: bytes) -> None:
    """Records of the metadata, and lines of a lake's manifest."""
    from pyspark_tidemark.lake.cut_record import CutRecord

    from server.changefeed.info import ChangefeedInfo, checkpoint_of

    with suppress(TidemarkError):
        ChangefeedInfo.from_json(data)
    with suppress(TidemarkError):
        checkpoint_of(data)
    CutRecord.from_json(_text(data))


TARGETS = {
    "mysql-log": Target(_mysql_log, _mysql_log_seeds, ("storage",)),
    "mysql-json": Target(
        _mysql_json, lambda: _hex_strings(_golden("mysql_events.json")), ("storage",)
    ),
    "mysql-ddl": Target(_mysql_ddl, _texts(*(f"0{one}" for one in _SQL)), ("server",)),
    "mysql-gtids": Target(
        _mysql_gtids,
        _texts("0-1-5,1-2-9", "3c22d75d-e5e0-11f1-ba82-02fc00000001:1-7:blue:1"),
        ("storage",),
    ),
    "tidb-rows": Target(_tidb_rows, _tidb_row_seeds, ("storage", "sink")),
    "tidb-values": Target(
        _tidb_values, lambda: _hex_strings(_golden("tidb_rows.json")), ("storage",)
    ),
    "tidb-documents": Target(_tidb_documents, _tidb_document_seeds, ("storage",)),
    "tidb-binlog": Target(_tidb_binlog, lambda: iter((b"\x08\x02\x10\x05\x18\x05",)), ("storage",)),
    "http2": Target(_http2, _http2_seeds, ("server",)),
    "flight": Target(_flight, _flight_seeds, ("sink",)),
    "uris": Target(
        _uris,
        _texts(
            "mysql://u@h:1,h2:2?tls=verify&ca=/x",
            "iceberg+rest://c/n?mode=append&keep-cuts-hours=4",
            "delta:///lake?deletion-vectors=off",
            "kafka://h:9092/t?protocol=canal-json",
        ),
        ("server", "pyspark_tidemark"),
    ),
    "filters": Target(
        _filters,
        _texts("shop.*\0!shop.a?b\0/^x/./y$/", "id > 1 and t in ('a', 'b') or d is not null"),
        ("server", "sink"),
    ),
    "records": Target(
        _records,
        _texts('{"changefeed_id": "a", "start_ts": 1, "state": "normal"}', '{"checkpoint_ts": 5}'),
        ("server", "pyspark_tidemark"),
    ),
}


def attempt(name: str, data: bytes) -> None:
    """Give one target one input; it may refuse it by an error of ours."""
    with suppress(TidemarkError, SourceError):
        TARGETS[name].run(data)


def _fuzz(name: str, seconds: int) -> None:
    """Does not return: the fuzzer ends the process."""
    import atheris

    target, corpus, begin = TARGETS[name], _KEPT / name, _KEPT / f"{name}.seeds"
    for directory in (corpus, begin):
        directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (begin / str(number)).write_bytes(seed)
    with atheris.instrument_imports(include=list(target.modules)):
        attempt(name, next(target.seeds()))
    limits = [f"-timeout={_LONGEST_S}", f"-rss_limit_mb={_MOST_MIB}", f"-max_len={_MOST_BYTES}"]
    artifacts = f"-artifact_prefix={_KEPT}/{name}."
    arguments = [f"-max_total_time={seconds}", artifacts, "-print_final_stats=1", *limits]
    atheris.Setup(
        [sys.argv[0], str(corpus), str(begin), *arguments], lambda data: attempt(name, data)
    )
    atheris.Fuzz()


def _fuzz_all(seconds: int) -> int:
    failed = []
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.fuzz.guided", name, f"--seconds={seconds}"]
        print(f"{name}: {seconds} s", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(json.dumps({"targets": len(TARGETS), "seconds_each": seconds, "failed": failed}))
    return 1 if failed else 0


def main() -> int:
    """Fuzz one target, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.target is None:
        print("\n".join(TARGETS))
    elif arguments.target == "all":
        return _fuzz_all(arguments.seconds)
    else:
        _fuzz(arguments.target, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
