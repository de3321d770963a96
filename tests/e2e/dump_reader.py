"""A reader as a lake is one, but for Spark's price: cut after cut over Flight,
durable table by table, then told.

It dies itself now and then: between two tables of a cut, or before it acknowledges. Then it begins
at its last durable cut and asks for the same range again; what it gets must be what it got. An
exception are rows of a chunk whose capture was killed meanwhile: they come again later, with
another watermark, and may be missing.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from tests.e2e.dump_audit import Again, Cut

T = TypeVar("T")
_OPTIONS = fl.FlightCallOptions(timeout=70)
_LOST = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightInternalError)
_DEATH_SHARE = 0.15


class Reader:
    """Follows one changefeed in a thread of its own until it is at `until`."""

    def __init__(
        self,
        address: str,
        changefeed: str,
        start_ts: int,
        dice: random.Random,
        life: Callable[[], int],
    ) -> None:
        self.cuts: list[Cut] = []
        self.again: list[Again] = []
        self.deaths: Counter[str] = Counter()
        self._changefeed = changefeed
        self._address = address
        self._dice = dice
        self._life = life
        """Which capture this is."""
        self._at = start_ts
        self._until: int | None = None
        self._client: fl.FlightClient | None = None
        self._keys: dict[str, tuple[str, ...]] = {}
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended it."""
        if self._error is not None:
            raise self._error

    def end_at(self, ts: int, limit_s: float) -> None:
        """Read everything up to `ts`, then end; raises what went wrong."""
        self._until = ts
        self._thread.join(limit_s)
        self.check()
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self._changefeed} stands at {self._at}, not at {ts}, after {limit_s} s"
            )

    def give_up(self) -> None:
        """End, wherever it is."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._take_tables(self._ask("describe", ts=self._at))
            while (self._until is None or self._at < self._until) and not self._ended.is_set():
                rows = self._dice.choice((40, 400, 4000, None))
                limit = {} if rows is None else {"max_rows": rows}
                end = self._ask("latest", start=self._at, wait_ms=300, **limit)["ts"]
                if end > self._at:
                    self._cut(end)
        except BaseException as err:  # noqa: BLE001 - told by `check`
            self._error = err
        finally:
            if self._client is not None:
                self._client.close()

    def _cut(self, end: int) -> None:
        """One range: read, made durable, acknowledged."""
        durable: dict[str, pa.Table] = {}
        while not self._take(end, durable):
            pass  # it has died; what is durable of the cut stays
        described = self._ask("describe", ts=end)
        is_schema = bool(described["ddls"]) and described["ddls"][0]["ts"] == end
        self.cuts.append(
            Cut(self._at, end, durable, dict(self._keys), described if is_schema else None)
        )
        self._take_tables(described)
        self._at = end  # durable
        if self._dice.random() < _DEATH_SHARE:
            self.deaths["before acknowledging"] += 1
            return
        self._ask("ack", ts=end)

    def _take(self, end: int, durable: dict[str, pa.Table]) -> bool:
        """Read the cut's tables; returns whether it lived to see all of them."""
        dies_behind = self._dice.randint(0, 3) if self._dice.random() < _DEATH_SHARE else None
        first: dict[str, tuple[pa.Table, int]] = {}
        plan = self._ask("plan", start=self._at, end=end)["slices"]
        for number, part in enumerate(plan):
            life = self._life()
            rows = self._read(part["ticket"])
            if dies_behind is not None:
                first[part["table"]] = rows, life
            if number == dies_behind:
                break
            durable.setdefault(part["table"], rows)
        else:
            return True
        self.deaths["within a cut"] += 1
        time.sleep(self._dice.random() * 0.3)
        for table, (rows, life) in first.items():
            ticket = {"changefeed": self._changefeed, "table": table, "start": self._at, "end": end}
            second = self._read(ticket)
            self.again.append(Again(table, self._keys[table], rows, second, life != self._life()))
        return False

    def _take_tables(self, described: dict[str, Any]) -> None:
        self._keys |= {table["table"]: tuple(table["key"]) for table in described["tables"]}

    def _ask(self, action: str, **members: Any) -> Any:
        body = json.dumps({"changefeed": self._changefeed} | members).encode()

        def ask(client: fl.FlightClient) -> Any:
            [result] = client.do_action(fl.Action(action, body), _OPTIONS)
            return json.loads(result.body.to_pybytes())

        return self._called(ask)

    def _read(self, ticket: dict[str, Any]) -> pa.Table:
        body = json.dumps(ticket).encode()
        return self._called(lambda client: client.do_get(fl.Ticket(body), _OPTIONS).read_all())

    def _called(self, call: Callable[[fl.FlightClient], T]) -> T:
        """Call the capture, or the one after it."""
        while True:
            if self._ended.is_set():
                raise InterruptedError(self._changefeed)
            try:
                if self._client is None:
                    self._client = fl.FlightClient(
                        f"grpc://{self._address}",
                        generic_options=[("grpc.use_local_subchannel_pool", 1)],
                    )
                return call(self._client)
            except _LOST:
                if self._client is not None:
                    self._client.close()
                self._client = None
                time.sleep(0.05)
