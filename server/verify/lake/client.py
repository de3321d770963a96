"""The client of the lake's side, which is a process of its own:
Spark stays out of the command's process.

That process has the read end of a pipe as its standard input: when this one dies, however it dies,
the other ends, too.
"""

import base64
import json
import os
import sys
import tempfile
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pyarrow as pa
from pyspark_tidemark.digest import RangeChecksums, Ranges

from server.process import ChildFailedError, drain, kill_group, start_child
from server.verify.catalog import LakeCut, Table
from server.verify.errors import VerifyLakeError
from server.verify.spans import Extent

_LINE_BYTES = 64 << 20
"""The sums of 2^20 ranges in base64 have half of it."""
_DRAIN_S, _DRAIN_LOCKED_S = 2.0, 20.0
"""A reader has nothing to bring to an end; who holds the lake's lock may be writing."""
_RELAY_S = 2.0
_JVM_NOTICE = "WARNING: Using incubator modules"


class Lake:
    """A running `server.verify.lake.job`; one question at a time.

    All calls raise VerifyLakeError.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def open(
        cls, uri: str, changefeed: str, *, locked: bool, gently: bool = False
    ) -> AsyncIterator["Lake"]:
        """The lake for the block, `locked` against its job, or read `gently` beside it;
        its standard error goes to ours.
        """
        flags = [*(["--locked"] if locked else []), *(["--gently"] if gently else [])]
        command = [sys.executable, "-m", "server.verify.lake.job", uri, changefeed]
        # Ours to remove: that process is ended by signals.
        with (
            tempfile.TemporaryDirectory(
                prefix="tidemark-verify-", ignore_cleanup_errors=True
            ) as directory,
            _relayed_errors() as errors,
        ):
            try:
                process = await start_child(
                    "the lake's reader",
                    [*command, directory, *flags],
                    stderr=errors,
                    line_bytes=_LINE_BYTES,
                )
            except ChildFailedError as err:
                raise VerifyLakeError(err.message) from err
            finally:
                os.close(errors)
            try:
                yield cls(process)
            finally:
                await drain(process, _DRAIN_LOCKED_S if locked else _DRAIN_S)
                kill_group(process)  # Spark's JVM and its Python workers

    async def cut(self, at: int | None) -> LakeCut:
        """The newest cut at or below `at`."""
        answer = await self._ask("cut", at=at)
        return LakeCut(int(answer["cut"]), answer["mode"], answer["beyond"], answer["newest_only"])

    async def range_checksums(self, table: Table, ranges: Ranges) -> RangeChecksums:
        """The sums of a table; without a row where the lake has no such table."""
        answer = await self._ask("leaves", **_table_members(table), **_range_members(ranges))
        range_checksums = RangeChecksums(ranges)
        range_checksums.merge(base64.b64decode(answer["leaves"]))
        return range_checksums

    async def extent(self, table: Table) -> Extent:
        """Return the number of rows of the table, and the least and greatest value of its key's
        first column, an integer.
        """
        answer = await self._ask("extent", **_table_members(table))
        return Extent(int(answer["rows"]), answer["least"], answer["greatest"])

    async def rows(self, table: Table, ranges: Ranges, chosen: Sequence[int]) -> pa.Table:
        """The rows of some ranges, of `Question.answer_schema`."""
        answer = await self._ask(
            "rows", **_table_members(table), **_range_members(ranges), chosen=list(chosen)
        )
        with pa.OSFile(answer["file"]) as file:
            return pa.ipc.open_file(file).read_all()

    async def check_repair(self, table: Table) -> None:
        """See that `repair` could be asked for."""
        await self._ask("check_repair", **_table_members(table))

    async def repair(self, table: Table, *, gone: str, live: str) -> int:
        """Replace the keys in the file `gone` by the rows in the file `live`;
        returns the table's new version.
        """
        return int(
            (await self._ask("repair", **_table_members(table), gone=gone, live=live))["version"]
        )

    async def _ask(self, do: str, **members: Any) -> dict[str, Any]:
        # One question at a time: answers come in order and have no number.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do} | members).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise VerifyLakeError(
                f"the lake's reader ended with status {await self._process.wait()}; its lines are "
                "above"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise VerifyLakeError(answer["error"])
        return answer


@contextmanager
def _relayed_errors() -> Iterator[int]:
    """A pipe for a process's standard error, whose lines come to ours, but for the one that every
    JVM with Spark's modules prints. The caller closes the pipe when the process has it.
    """
    reader, writer = os.pipe()

    def relay() -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.startswith(_JVM_NOTICE):
                    sys.stderr.write(line)
                    sys.stderr.flush()

    thread = threading.Thread(target=relay, name="lake-errors", daemon=True)
    thread.start()
    try:
        yield writer
    finally:
        thread.join(_RELAY_S)


def _table_members(table: Table) -> dict[str, Any]:
    schema = base64.b64encode(table.schema.serialize().to_pybytes()).decode()
    spans = {} if table.spans is None else {"spans": table.spans.document()}
    part = {} if table.part is None else {"part": table.part.document()}
    members = {
        "table": table.target_name,
        "ts": table.ts,
        "since": table.since,
        "key": list(table.key),
        "schema": schema,
    }
    return members | spans | part


def _range_members(ranges: Ranges) -> dict[str, Any]:
    return {"bits": ranges.bits, "within": list(ranges.within)}
