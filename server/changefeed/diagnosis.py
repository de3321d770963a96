"""Findings of `tidemark cli doctor`: what is slow, stuck or about to fail at each stage, and the
remedy. Pure.

A row passes the source, the sorter and the lake job before the checkpoint moves over it. Each stage
has a timestamp up to which it is done, so the stage that is to blame is the first one that is far
behind the stage before it: all later ones wait for it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from server.changefeed.view import NOBODY_READS, duration
from storage.model.ts import physical_ms

LAG_S_MAX: Final = 60.0
"""A stage that is further behind the one before it, in seconds, is worth a look."""
GC_HELD_S_MAX: Final = 3600
"""History that one blocker alone may keep, in seconds, before it is worth a look."""

READER_S_MAX: Final = 600
"""A named reader that needs history kept for longer than this, in seconds, is reported."""

_HISTORY_GONE: Final = frozenset(
    f"TM:{code}"
    for code in (
        *("ErrBinlogPurged", "ErrGCTTLExceeded", "ErrMySQLGtidNotOnServer", "ErrMySQLLogDamaged"),
        *("ErrMySQLLogPurged", "ErrSnapshotLostByGC"),
    )
)
"""Errors after which no resume alone helps."""

Document = Mapping[str, Any]


class Level(IntEnum):
    """The severity of a finding; the worst one decides the exit status."""

    NOTE = 0
    """Worth knowing; nothing is wrong."""
    WARNING = 1
    """Slow, or not as it should be, but rows arrive or soon will."""
    PROBLEM = 2
    """Nothing continues until somebody acts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    level: Level
    where: str
    """Such as `changefeed orders, lake job`."""
    what: str
    do: str = ""
    """The recommended action; empty: none is needed."""

    def document(self) -> dict[str, str]:
        """The finding as a JSON object."""
        return {
            "level": self.level.name.lower(),
            "where": self.where,
            "what": self.what,
            "do": self.do,
        }


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a changefeed, and how far it is behind the present, in seconds."""

    name: str
    lag_s: float


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in the order in which they are shown."""
    return sorted(findings, key=lambda finding: (-finding.level, finding.where))


def stages(changefeed: Document, now_ms: int) -> list[Stage]:
    """Return how far each stage of a changefeed is, in the order that rows pass them.

    Args:
        changefeed: what `changefeed query --json` shows.
        now_ms: the present, in Unix milliseconds, by the clock that gives timestamps.
    """
    holding = changefeed["holding"]
    job_tso = (changefeed["lake_job"] or {}).get("cut_tso")
    checkpoint_tso = changefeed["checkpoint_tso"]
    reached = {
        "source": holding["pulled_ts"],
        "sorter": holding["sorted_ts"],
        # it reports every few seconds only, and the checkpoint moves with each cut that it has made
        "lake job": job_tso and max(job_tso, checkpoint_tso),
        "checkpoint": checkpoint_tso,
    }
    return [
        Stage(name, max(0.0, (now_ms - physical_ms(ts)) / 1000))
        for name, ts in reached.items()
        if ts
    ]


def diagnose_changefeed(
    changefeed: Document, dump: Document | None, now_ms: int
) -> Iterator[Finding]:
    """The findings about one changefeed.

    Args:
        changefeed: what `changefeed query --json` shows.
        dump: what `changefeed dumpstatus --json` shows; None: it has no dump.
        now_ms: as of `stages`.
    """
    name = changefeed["id"]
    where = f"changefeed {name}"
    yield from _state(changefeed, where)
    if changefeed["state"] in ("normal", "warning") and not changefeed["maintainer"]:
        yield Finding(
            Level.PROBLEM,
            where,
            "no capture runs it at this moment",
            "another capture takes it within some 15 s; if this stays, see whether the captures "
            "reach the metadata and the owner (their logs say so)",
        )
    elif changefeed["state"] in ("normal", "warning"):
        yield from _slowest_stage(changefeed, where, now_ms)
    yield from _sorter(changefeed, where)
    yield from _lake_job(changefeed, where)
    yield from _tables(changefeed, where)
    yield from _readers(changefeed, now_ms)
    if dump is not None:
        yield from _dump(dump, name)
    if "filter_update" in changefeed:
        yield Finding(
            Level.NOTE,
            where,
            f"an update waits: {changefeed['filter_update']['waits_for']}",
            "`tidemark cli changefeed list` shows whether its lake comes near",
        )
    for warning in changefeed.get("warnings", ()):
        yield Finding(Level.WARNING, where, warning)
    for skipped in changefeed["skipped"]:
        yield Finding(
            Level.NOTE,
            where,
            f"no target has the changes from {skipped['start_time']} to {skipped['end_time']}: "
            f"they were given up by resume --overwrite-checkpoint-ts at {skipped['asked']}",
            f"`tidemark cli verify -c {name} --repair` brings the rows to the lake",
        )


def diagnose_captures(captures: Sequence[Document]) -> Iterator[Finding]:
    """The findings about the captures together.

    Args:
        captures: what `capture list --json` shows.
    """
    if not any(each["is-owner"] for each in captures):
        yield Finding(
            Level.PROBLEM,
            "captures",
            "no capture owns the changefeeds: none can be made, and those of TiKV stand still",
            "an election takes some 10 s; if this stays, see whether the captures reach the "
            "metadata (their logs say so)",
        )
    versions = sorted({each["version"] for each in captures})
    if len(versions) > 1:
        yield Finding(
            Level.WARNING,
            "captures",
            f"they are of different versions, {', '.join(versions)}; only those of the owner's "
            "version are given tables",
            "upgrade all captures to one version",
        )


def diagnose_gc(explained: Document) -> Iterator[Finding]:
    """Return findings about the blockers of garbage collection.

    Args:
        explained: what `gc explain --json` shows.
    """
    for blocker in explained["blockers"]:
        links = blocker["chain"]
        held_s = max((link["holds_back_seconds"] for link in links), default=0)
        if not blocker["blocks"] or held_s < GC_HELD_S_MAX:
            continue
        cause = links[-1]
        commands = [command for link in reversed(links) for command in link["commands"]]
        yield Finding(
            Level.WARNING,
            "garbage collection",
            f"{blocker['id']} alone keeps {duration(held_s)} of history: {cause['reason']}",
            f"`{commands[0]}`" if commands else "`tidemark cli gc explain` shows the whole chain",
        )
    for problem in explained["problems"]:
        yield Finding(Level.NOTE, "garbage collection", f"not known: {problem}")


def diagnose_members(health: Sequence[Document]) -> Iterator[Finding]:
    """Coordinators that do not answer.

    Args:
        health: what `tidemark cli health --json` shows.
    """
    for member in health:
        if not member["health"]:
            urls = member["client_urls"]
            yield Finding(
                Level.WARNING,
                f"coordinator {member['name']}",
                f"it does not answer at {', '.join(urls) if isinstance(urls, list) else urls}",
                "start it again, or see its log; the others go on as long as one leads",
            )


def _state(changefeed: Document, where: str) -> Iterator[Finding]:
    name, state, error = changefeed["id"], changefeed["state"], changefeed["error"]
    said = f"[{error['code']}] {error['message']}" if error else ""
    resume = f"`tidemark cli changefeed resume -c {name}`"
    if state == "failed":
        way_on = f"mend the cause, then {resume}"
        if error and error["code"] in _HISTORY_GONE:
            way_on = (
                "the source no longer has the changes that come next: create another changefeed "
                f"with --dump, or `tidemark cli changefeed resume -c {name} "
                f"--overwrite-checkpoint-ts now` and `tidemark cli changefeed dumpstart -c {name}`"
            )
        yield Finding(Level.PROBLEM, where, f"it has failed: {said}", way_on)
    elif state == "warning" and said:
        yield Finding(Level.WARNING, where, said, "it is tried again by itself")
    elif state == "stopped":
        yield Finding(
            Level.NOTE,
            where,
            f"it is paused at {changefeed['checkpoint_time']}, and the source must keep its "
            "history from there on",
            f"{resume}, or `tidemark cli changefeed remove -c {name}`",
        )
    elif state == "finished":
        yield Finding(Level.NOTE, where, "it is finished: everything up to its target_ts is there")
    elif state == "removed":
        yield Finding(Level.NOTE, where, "its removal has begun")


def _slowest_stage(changefeed: Document, where: str, now_ms: int) -> Iterator[Finding]:
    """The first stage that is far behind the one before it."""
    name = changefeed["id"]
    advice = {
        "source": "`tidemark cli gc explain` names locks, regions or pumps that hold it back; other "
        "causes are a first copy, a full disk and a slow server",
        "sorter": "see the capture's CPU and disk",
        "lake job": "the lake is slower than the source: give its job more cores (`--master`), or "
        "larger cuts (`--max-rows-per-trigger`)",
        "checkpoint": "no lake job and no other reader has acknowledged the rows: `tidemark cli "
        f"changefeed query -c {name}` shows who reads",
    }
    if "rereads" in changefeed:
        tables = ", ".join(each["table"] for each in changefeed["rereads"]["tables"])
        yield Finding(
            Level.NOTE,
            where,
            f"cuts wait at {changefeed['rereads']['since']} until {tables} has been read again, as "
            "a DDL changed its rows",
            f"`tidemark cli changefeed dumpstatus -c {name}` shows the progress",
        )
        return
    before_s, before = 0.0, "present"
    for stage in stages(changefeed, now_ms):
        behind_s = stage.lag_s - before_s
        if behind_s > LAG_S_MAX:
            if stage.name == "checkpoint" and _has_reader_trouble(changefeed):
                return  # another finding says so already
            yield Finding(
                Level.WARNING,
                f"{where}, {stage.name}",
                f"{duration(int(behind_s))} behind the {before}",
                advice[stage.name],
            )
            return
        before_s, before = stage.lag_s, stage.name


def _has_reader_trouble(changefeed: Document) -> bool:
    """Whether nobody reads the changefeed, or its lake job does not work."""
    job = changefeed["lake_job"]
    return (job is not None and job["state"] != "ready") or any(
        each.startswith(NOBODY_READS) for each in changefeed.get("warnings", ())
    )


def _sorter(changefeed: Document, where: str) -> Iterator[Finding]:
    holding = changefeed["holding"]
    if holding["disk_error"]:
        yield Finding(
            Level.PROBLEM,
            f"{where}, sorter",
            f"it cannot write to its disk: {holding['disk_error']}; {holding['waiting']} writers wait",
            "free space at the capture's --data-dir; it goes on by itself",
        )


def _lake_job(changefeed: Document, where: str) -> Iterator[Finding]:
    job = changefeed["lake_job"]
    if job is None:
        return
    error = job["error"]
    said = f": [{error['code']}] {error['message']}" if error else ""
    where = f"{where}, lake job"
    if job["state"] == "failed" and changefeed["state"] != "failed":
        yield Finding(
            Level.PROBLEM,
            where,
            f"it has given up{said}",
            f"mend the cause, then `tidemark cli changefeed resume -c {changefeed['id']}`",
        )
    elif job["state"] == "retrying":
        # The changefeed is in `warning` for it, and says the error itself.
        shown = changefeed["error"] if changefeed["state"] == "warning" else None
        is_shown = error and shown and shown | {"time": ""} == error | {"time": ""}
        again = "" if is_shown else said
        yield Finding(Level.WARNING, where, f"it failed and is started again{again}")
    elif job["state"] == "silent" and changefeed["state"] in ("normal", "warning"):
        yield Finding(
            Level.WARNING,
            where,
            f"it has not reported since {job['reported']}",
            "see whether `tidemark spark keep` (or `spark run`) runs, and its log",
        )


def _tables(changefeed: Document, where: str) -> Iterator[Finding]:
    repaired = [each["table"] for each in changefeed["tables"] if each["state"] == "repairing"]
    if repaired:
        yield Finding(
            Level.WARNING,
            f"{where}, sorter",
            f"rows of {', '.join(repaired)} were damaged on the capture's disk, and are pulled "
            "again",
            "if it comes again, check the disk",
        )
    ignored = changefeed["ignored_tables"]
    if ignored:
        more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
        yield Finding(
            Level.NOTE,
            where,
            f"tables that match its filter are left out: {', '.join(ignored[:5])}{more}",
            "`changefeed create --dry-run` with the same filter says why",
        )


def _readers(changefeed: Document, now_ms: int) -> Iterator[Finding]:
    for reader in changefeed.get("readers", ()):
        if reader["state"] != "holding":
            yield Finding(
                Level.WARNING,
                f"changefeed {changefeed['id']}, reader {reader['name']}",
                f"it is {reader['state']}: it has been silent for "
                f"{duration(reader['silent_seconds'])}, and its changes are no longer kept for it",
                "start its query; if that is refused, add the reader again. If you do not need it "
                f"any more: `tidemark cli changefeed remove-reader -c {changefeed['id']} --reader "
                f"{reader['name']}`",
            )
            continue
        behind_s = (now_ms - physical_ms(reader["checkpoint_tso"])) / 1000
        if behind_s <= READER_S_MAX:
            continue
        yield Finding(
            Level.WARNING,
            f"changefeed {changefeed['id']}, reader {reader['name']}",
            f"it is {duration(int(behind_s))} behind; all changes since then are kept for it, on the "
            "captures' disks and in the source",
            "start its query. If you do not need it any more: `tidemark cli changefeed "
            f"remove-reader -c {changefeed['id']} --reader {reader['name']}`",
        )


def _dump(dump: Document, name: str) -> Iterator[Finding]:
    where = f"changefeed {name}, dump"
    for table in dump["status"]:
        if table["state"] == "failed":
            yield Finding(
                Level.PROBLEM,
                where,
                f"{table['table']}: {table['error']}",
                f"mend the cause, then `tidemark cli changefeed dumpresume -c {name}`",
            )
    if dump["state"] == "paused":
        yield Finding(
            Level.NOTE,
            where,
            f"it is paused at {dump['progress_percent']:.0f} %",
            f"`tidemark cli changefeed dumpresume -c {name}`",
        )
    elif dump["state"] == "running":
        eta = f", {duration(dump['eta_seconds'])} to go" if dump["eta_seconds"] >= 0 else ""
        waits = f"; {dump['waits_for']}" if dump["waits_for"] else ""
        yield Finding(
            Level.NOTE,
            where,
            f"{dump['tables_done']} of {dump['tables_known']} tables are copied, "
            f"{dump['progress_percent']:.0f} %{eta}{waits}",
        )
