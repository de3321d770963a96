"""The lake's side as a process of its own: questions in, answers out; Spark stays out of the command's process."""

import asyncio
import base64
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
from pyspark_tidemark.digest import Leaves

from server.process import drain
from server.verify.catalog import Table
from server.verify.errors import VerifyLakeError

_LINE_BYTES = 16 << 20
_DRAIN_S = 20.0


class Lake:
    """A running `server.verify.lake_job`; one question at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def open(cls, uri: str, changefeed: str, *, repair: bool) -> AsyncIterator["Lake"]:
        """The lake for the block; its standard error is ours."""
        command = [sys.executable, "-m", "server.verify.lake_job", uri, changefeed, *(["--repair"] if repair else [])]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES)
        try:
            yield cls(process)
        finally:
            await drain(process, _DRAIN_S)

    async def cut(self, at: int | None) -> int:
        """The end of the newest cut at or below `at`; raises VerifyLakeError, as all calls do."""
        return int((await self._ask("cut", at=at))["cut"])

    async def leaves(self, table: Table, cut: int, bits: int) -> tuple[Leaves, bool]:
        """The leaves of a table, and whether there is one."""
        answer = await self._ask("leaves", **_of(table, cut), bits=bits)
        leaves = Leaves(bits)
        leaves.merge(bytes.fromhex(answer["counts"]), bytes.fromhex(answer["sums"]))
        return leaves, bool(answer["found"])

    async def rows(self, table: Table, cut: int, bits: int, leaves: Sequence[int]) -> pa.Table:
        """The rows of some leaves: `key` and `row` as text, and the key's columns."""
        answer = await self._ask("rows", **_of(table, cut), bits=bits, leaves=list(leaves))
        with pa.OSFile(answer["file"]) as file:
            return pa.ipc.open_file(file).read_all()

    async def repair(self, table: Table, cut: int, *, gone: str, live: str) -> int:
        """Replace the keys in the file `gone` by the rows in the file `live`; returns the table's new version."""
        return int((await self._ask("repair", **_of(table, cut), gone=gone, live=live))["version"])

    async def _ask(self, do: str, **members: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do} | members).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise VerifyLakeError(
                f"the lake's reader ended with status {await self._process.wait()}; its lines are above"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise VerifyLakeError(answer["error"])
        return answer


def _of(table: Table, cut: int) -> dict[str, Any]:
    schema = base64.b64encode(table.schema.serialize().to_pybytes()).decode()
    return {"table": table.name, "cut": cut, "key": list(table.mounter.key_columns), "schema": schema}
