"""The demo from end to end: cluster, changefeed, Spark job, a busy bank with killed clients,
and the proof.

`run_demo` puts them together, `DemoRun` is the order of events. Meanwhile a line of progress is
printed each second, and a table of results at the end.
"""

import asyncio
import random
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.config import setting
from server.demo import bank as tables
from server.demo.bank import Bank
from server.demo.client import BankClient, connect, default_client
from server.demo.cluster import Cluster, ProcessFailedError, open_process, path_from_here
from server.demo.lake import (
    CHANGEFEED,
    FORMATS,
    Applied,
    JoinedLake,
    Lake,
    LakeJob,
    LakeReader,
    Proof,
    ensure_changefeed,
    prove,
)
from server.demo.workload import Tally, Teller, open_accounts
from server.rpc.pd import PdClient
from server.spark.config import require_java
from storage.backoff import Backoffer
from storage.codec import encode_bytes
from storage.model.errors import InvalidError, UnavailableError
from storage.model.ts import physical_ms

_CATCH_UP_SECONDS = 600.0  # of a busy machine; a job that dies is noticed at once
_SPLIT_SECONDS = 30.0
_TRANSFER_BITS_PER_MS = 14
_TRANSFERS_PER_TELLER = 1 << 20
_WARM_UP_TRANSFERS = 5
_PROGRESS_SECONDS = 1.0


class LagError(UnavailableError):
    """The lake did not catch up in time."""

    code = "ErrLakeLags"


class RegionsNotSplitError(UnavailableError):
    """The store has not split the bank's regions yet."""

    code = "ErrRegionsNotSplit"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The settings of the demo."""

    data_dir: str = setting("./data", "directory for the cluster, the lake and the logs")
    lake: str = setting(
        "delta",
        "delta or iceberg (tables of rows), parquet (a changelog), or a PostgreSQL database of "
        "yours, as postgresql://user@host:5432/database?password-file=/path",
    )
    transactions: int = setting(1000, "transfers to make")
    rate: int = setting(
        40, "transfers a second at most, all tellers together; 0: as fast as they can"
    )
    accounts: int = setting(500, "accounts of the bank", least=2)
    tellers: int = setting(8, "concurrent clients", least=1)
    killed_clients: int = setting(3, "clients that are killed in the middle of a transaction")
    kills: int = setting(
        0, "times the whole cluster is killed (kill -9) and started again under load"
    )
    seed: int = setting(0, "seed of the workload; 0 takes one from the clock")
    client: str = setting("", "tikv-client or own (default: tikv-client where it is installed)")
    any_ports: bool = setting(
        default=False, help_text="listen on free ports instead of the default ones"
    )
    keep: bool = setting(
        default=False, help_text="leave the cluster and the Spark job up until Ctrl-C"
    )
    join: str = setting(
        "", "coordinator (host:port) of a running cluster to use instead of starting one"
    )
    capture: str = setting("", "a capture of that cluster (host:port), for --join")
    lake_dir: str = setting(
        "", "where that cluster's Spark job keeps the lake, for --join (e.g. /lake)"
    )

    @property
    def client_kind(self) -> str:
        """The client to use."""
        return self.client or default_client()


async def run_demo(config: DemoConfig) -> bool:
    """Run the demo; returns whether the lake was proved equal to the store.

    Raises:
        JavaMissingError: there is no Java.
        ProcessFailedError: a daemon or the Spark job died for good.
        LagError: the lake did not catch up.
    """
    require_java()
    if config.join:
        return await _run_joined(config)
    data = _data_dir(config)
    lake = Lake.at(data / "lake", config.lake)  # refused before anything starts
    lake.check()
    began = time.monotonic()
    async with Cluster.started(data, any_ports=config.any_ports) as cluster:
        listening = ", ".join(f"{name} {address}" for name, address in cluster.endpoints.items())
        print(
            f"cluster {cluster.cluster_id} is up after {time.monotonic() - began:.1f} s: "
            f"{listening}",
            flush=True,
        )
        await ensure_changefeed(cluster.endpoints["capture"], CHANGEFEED, lake.uri, _tables())
        async with LakeJob.started(cluster.endpoints["flight"], CHANGEFEED, lake, data) as job:
            proof = await DemoRun(config, cluster, job, data).run()
            if config.keep:
                print(hints_while_up(cluster.endpoints), flush=True)
                await asyncio.Event().wait()
    print(hints(config), flush=True)
    return proof.equal


def hints(config: DemoConfig) -> str:
    """Return commands to try after the demo, which can be pasted in this directory."""
    tidemark = path_from_here(Path(sys.executable).parent / "tidemark")
    demo = f"{tidemark} demo{' --any-ports' if config.any_ports else ''}"
    other = next(each for each in FORMATS if each != config.lake)
    data, lake = shlex.quote(config.data_dir), shlex.quote(config.lake)
    other_data = shlex.quote(f"{config.data_dir.rstrip('/')}-{other}")
    return f"""
What to try next (the bank and its lake stay in {data}):

  {demo} --data-dir {data} --lake {lake} --keep       # the same bank goes on, until Ctrl-C
  {demo} --data-dir {data} --lake {lake} --kills 3    # kill the whole cluster meanwhile
  {demo} --data-dir {other_data} --lake {other}    # another kind of lake
  {tidemark} play    # a MariaDB with a shop, a lake that follows it, and SQL on both
"""


def hints_while_up(endpoints: Mapping[str, str]) -> str:
    """Return commands to try while the cluster runs."""
    tidemark = path_from_here(Path(sys.executable).parent / "tidemark")
    cli = f"{tidemark} cli --server {endpoints['capture']} --pd {endpoints['coordinator']}"
    return f"""
The cluster stays up until Ctrl-C. In another terminal, try:

  {cli} changefeed list
  {cli} doctor     # what is slow or stuck, and what helps
  {cli} verify -c {CHANGEFEED}    # compare lake and store once more

A browser shows how the changefeed is, at http://{endpoints["capture"]}/."""


async def _run_joined(config: DemoConfig) -> bool:
    if not config.capture:
        # A default would be another cluster's capture, if this machine runs several.
        raise InvalidError("--join needs --capture, the address of a capture of that cluster")
    if config.kills:
        raise InvalidError("--kills needs a cluster of the demo's own; leave out --join")
    data = _data_dir(config)
    cluster = Cluster(data, any_ports=False)
    cluster.endpoints = {"coordinator": config.join, "capture": config.capture}
    lake = Lake.at(Path(config.lake_dir or data / "lake"), config.lake)
    await ensure_changefeed(config.capture, CHANGEFEED, lake.uri, _tables())
    proof = await DemoRun(config, cluster, JoinedLake(lake, config.capture, CHANGEFEED), data).run()
    return proof.equal


class DemoRun:
    """One day of the bank: its tellers, its accidents, and the closing of the books."""

    def __init__(self, config: DemoConfig, cluster: Cluster, job: Applied, data: Path) -> None:
        self._config = config
        self._cluster = cluster
        self._job = job
        self._logs = data / "logs"
        self._bank = Bank(config.accounts)
        self._tally = Tally()
        self._seed = config.seed or int(time.time())
        self._random = random.Random(self._seed)
        self._opened_ts = 0

    async def run(self) -> Proof:
        """Work until all transfers are made, wait for the lake, and compare."""
        progress = Progress(self._config.transactions, self._tally, self._job)
        async with asyncio.TaskGroup() as tasks:
            shown = tasks.create_task(progress.run(), name="progress")
            # Followed from the start: a job that ends fails the group, wherever the day is.
            following = tasks.create_task(self._job.follow(), name="lake")
            await self._open()
            progress.begin_transfers()
            async with LakeReader.started(self._job.lake, self._logs / "proof.log") as reader:
                for _ in range(self._config.kills):
                    await self._work(kill_after_s=self._random.uniform(1.0, 6.0))
                    await self._cluster.start()
                await self._work(kill_after_s=None)
                async with connect(
                    self._config.client_kind, self._cluster.endpoints["coordinator"]
                ) as client:
                    await self._catch_up(await client.now())
                    progress.stage = "comparing lake and store"
                    proof = await prove(self._bank, client, reader, self._opened_ts)
                    shown.cancel()
                    print(summary(proof, self._tally, self._job, client.name), flush=True)
            following.cancel()
        return proof

    async def _open(self) -> None:
        """Open the accounts and let a few transfers reach the lake, since a cold JVM's first cuts
        are slow.
        """
        async with connect(
            self._config.client_kind, self._cluster.endpoints["coordinator"]
        ) as client:
            span = tables.SPANS[tables.ACCOUNTS_NAME]
            accounts = len(await client.scan(span.start_key, span.end_key, await client.now()))
            # An earlier run's bank goes on as it is: its lake has those accounts already.
            bank = self._bank = Bank(accounts or self._config.accounts)
            print(
                f"bank of {bank.accounts} accounts, total {bank.total}, {client.name}, seed "
                f"{self._seed}",
                flush=True,
            )
            if not accounts:
                await split_regions(self._cluster.endpoints["coordinator"])
                await open_accounts(bank, client)
                self._tally.row_changes += bank.accounts
            await self._catch_up(await client.now())
            first = physical_ms(await client.now()) << _TRANSFER_BITS_PER_MS
            await Teller(bank, client, self._seed, first, Tally()).work(_WARM_UP_TRANSFERS, 0.0)
            self._opened_ts = await client.now()
            await self._catch_up(self._opened_ts)

    async def _work(self, *, kill_after_s: float | None) -> None:
        """Make the transfers that are left; with `kill_after_s` the cluster dies while that is
        going on.
        """
        coordinator = self._cluster.endpoints["coordinator"]
        async with (
            connect(self._config.client_kind, coordinator) as client,
            asyncio.TaskGroup() as working,
        ):
            work = working.create_task(self._transfers(client, coordinator), name="transfers")
            if kill_after_s is not None:
                await asyncio.sleep(kill_after_s)
                await self._cluster.kill()
                work.cancel()

    async def _transfers(self, client: BankClient, coordinator: str) -> None:
        left = self._config.transactions - self._tally.committed - self._tally.rolled_back
        tellers = self._config.tellers
        interval_s = tellers / self._config.rate if self._config.rate else 0.0
        # Numbered by the time, so that a later day does not write over the transfers of this one.
        first = physical_ms(await client.now()) << _TRANSFER_BITS_PER_MS
        async with asyncio.TaskGroup() as tasks:
            for number in range(tellers):
                seed, transfer = (
                    self._random.getrandbits(32),
                    first + number * _TRANSFERS_PER_TELLER,
                )
                teller = Teller(self._bank, client, seed, transfer, self._tally)
                share = left // tellers + (number < left % tellers)
                tasks.create_task(teller.work(share, interval_s), name=f"teller {number}")
            for number in range(tellers, tellers + self._config.killed_clients):
                transfer = first + number * _TRANSFERS_PER_TELLER
                tasks.create_task(self._kill_a_client(coordinator, transfer), name="killed client")

    async def _kill_a_client(self, coordinator: str, transfer: int) -> None:
        """Let a client commit once, then kill it wherever it happens to be."""
        seed, delay_s = self._random.getrandbits(32), self._random.uniform(0.02, 0.2)
        arguments = [
            coordinator,
            self._config.client_kind,
            str(self._bank.accounts),
            str(seed),
            str(transfer),
        ]
        log = self._logs / "killed-clients.log"
        async with open_process("server.demo.workload", arguments, log) as process:
            assert process.stdout is not None
            if await process.stdout.readline():
                await asyncio.sleep(delay_s)
                process.kill()
                self._tally.killed_clients += 1
            elif not self._config.kills:
                # With kills, the death of the cluster may have ended it.
                raise ProcessFailedError(f"a client ended before it was killed; see {log}")

    async def _catch_up(self, ts: int) -> None:
        try:
            async with asyncio.timeout(_CATCH_UP_SECONDS):
                await self._job.wait_applied(ts)
        except TimeoutError:
            applied_ts = self._job.applied_ts
            behind_s = (physical_ms(ts) - physical_ms(applied_ts)) / 1000
            state = f"is {behind_s:.1f} s behind" if applied_ts else "has no cut yet"
            raise LagError(
                f"the lake {state} after {_CATCH_UP_SECONDS:.0f} s; see {self._logs}"
            ) from None


def _data_dir(config: DemoConfig) -> Path:
    data = Path(config.data_dir).resolve()
    (data / "logs").mkdir(parents=True, exist_ok=True)
    return data


async def split_regions(coordinator: str) -> None:
    """Give the bank several regions, as TiDB does for a table with SPLIT TABLE.

    Raises:
        RegionsNotSplitError: the store did not split them in time.
    """
    keys = [encode_bytes(key) for key in tables.REGION_STARTS]
    backoff = Backoffer(_SPLIT_SECONDS)
    async with PdClient.open(coordinator) as pd:
        # The coordinator asks the leader of a region, which it learns from the first heartbeat.
        while not await pd.split_regions(keys):
            await backoff.wait(RegionsNotSplitError("the bank's tables are not split into regions"))


def _tables() -> list[pb.Table]:
    return [
        pb.Table(schema_name=tables.SCHEMA, table_info_json=table.to_json())
        for table in tables.TABLES.values()
    ]


class Progress:
    """The line of progress, each second; on a terminal it overwrites itself."""

    def __init__(self, transactions: int, tally: Tally, job: Applied) -> None:
        self._transactions = transactions
        self._tally = tally
        self._job = job
        self.stage = "waiting for the lake's first cuts: Spark takes a while to start"
        """The current stage before and after the transfers; empty while transfers are made."""
        self._began = self._transfers_began = time.monotonic()

    def begin_transfers(self) -> None:
        """Show from now on how many are made."""
        self.stage = ""
        self._transfers_began = time.monotonic()

    async def run(self) -> None:
        """Print until cancelled."""
        end = "\033[K\r" if sys.stdout.isatty() else "\n"
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            print(self.line(), end=end, flush=True)

    def line(self) -> str:
        """Return the line that describes the demo's present progress."""
        done, job = self._tally.committed + self._tally.rolled_back, self._job
        elapsed = time.monotonic() - self._began
        if self.stage:
            return f"[{elapsed:5.1f} s] {self.stage}  rows in the lake {job.rows}  cuts {job.cuts}"
        transfers_s = time.monotonic() - self._transfers_began
        left_s = transfers_s / done * (self._transactions - done) if done else 0.0
        eta = f"ETA {left_s:3.0f} s" if done else "ETA   ? s"
        lag = (
            f"{time.time() - physical_ms(job.applied_ts) / 1000:5.1f} s"
            if job.applied_ts
            else "starting"
        )
        return (
            f"[{elapsed:5.1f} s] transactions {done}/{self._transactions} ({eta})  rows in "
            f"{self._tally.row_changes}"
            f"  rows in the lake {job.rows}  lag {lag}  checkpoint {job.applied_ts}  cuts "
            f"{job.cuts}"
        )


def summary(proof: Proof, tally: Tally, job: Applied, client: str) -> str:
    """The table at the end of the demo."""
    verdict = "EQUAL" if proof.equal else "DIFFERENT"
    rows = [
        ("client", client),
        (
            "transactions",
            (
                f"{tally.committed} committed, {tally.rolled_back} rolled back, {tally.retried} "
                "retried"
            ),
        ),
        ("clients killed", f"{tally.killed_clients} in the middle of their work"),
        (
            "row changes",
            f"{tally.row_changes} by the tellers" + (f", {job.rows} applied" if job.rows else ""),
        ),
        ("rows in the lake", ", ".join(f"{table} {count}" for table, count in proof.rows.items())),
        ("batches (cuts)", f"{proof.cuts}"),
        ("commit -> visible", f"p50 {proof.p50_seconds:.2f} s, p99 {proof.p99_seconds:.2f} s"),
        ("cut compared", f"{proof.cut_ts}"),
        (
            "bank total",
            f"{proof.expected_total} in {proof.balanced_cuts} of {len(proof.totals)} cuts read",
        ),
        ("lake = store", f"{verdict}{''.join(f'; {line}' for line in proof.differences[:5])}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
