"""`tidemark cli changefeed VERB`: look at, pause, resume and remove changefeeds, and their readers;
`create` and `update` have modules of their own.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
from pyspark_tidemark.sink_uri import READERS
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.changefeed.view import (
    SYNCED_CHECK_S,
    SYNCED_CHECKPOINT_S,
    detail,
    history,
    reader_rows,
    statistics,
    stuck_warnings,
    summary,
    synced,
    table_status,
)
from server.cli import changefeed_create, changefeed_update, dump
from server.cli.arguments import (
    add_flag,
    add_namespace,
    add_yes,
    confirm,
    count,
    period,
    seconds,
    timestamp,
)
from server.cli.output import Output, add_verbose, add_watch, confirmed, table
from server.cli.remote import CALL_S, Remote, make_change
from server.exit_status import EXIT_ERROR, EXIT_OK
from sink.flight.feeds import TableNotExistsError
from storage.model.ts import physical_s

_COLUMNS = (
    ("ID", "id"),
    ("STATE", "summary.state"),
    ("LAG S", "summary.lag_seconds"),
    ("LAKE JOB", "summary.lake_job"),
    ("READ", "summary.last_read"),
    ("CHECKPOINT", "summary.checkpoint"),
    ("TSO", "summary.tso"),
    ("TARGET", "summary.sink_uri"),
    ("ERROR", "summary.error.code"),
    ("READ AGAIN", "summary.rereads"),
)
_READER_COLUMNS = (
    ("READER", "name"),
    ("STATE", "state"),
    ("LAG S", "lag_seconds"),
    ("SILENT S", "silent_seconds"),
    ("CHECKPOINT", "checkpoint_time"),
    ("TSO", "checkpoint_tso"),
)
_HISTORY_COLUMNS = (("TIME", "time"), ("EVENT", "event"), ("WHAT", "what"))
_STATISTICS_COLUMNS = tuple(
    (name.upper().replace("_", " "), name)
    for name in ("state", "ops", "count", "sink_gap", "replication_gap", "staged_bytes")
)
_STATISTICS_S = 10.0
_SYNCED_LOOK_S = 1.0
_SIMPLE = ("id", "namespace", "state", "checkpoint_tso", "checkpoint_time", "error")
"""What `query --simple` shows, as in `cdc cli`."""
_MOVE_S = 660.0
"""A little longer than the capture waits for the table to catch up."""
_MOVE_SHOWN_S = 3.0
_NOW = "now"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `changefeed`."""
    group = groups.add_parser("changefeed")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    changefeed_create.add_verb(verbs, shared)
    dump.add_verbs(verbs, shared)
    _add_list(verbs, shared)
    _add_verbs_of_one(verbs, shared)
    _add_progress(verbs, shared)


def _add_progress(verbs: Any, shared: argparse.ArgumentParser) -> None:
    counted = verbs.add_parser(
        "statistics",
        help="show how many rows a second the readers take, and how far they are behind",
        parents=[shared],
    )
    dump.add_changefeed_id(counted)
    counted.add_argument(
        "-I",
        "--interval",
        type=seconds,
        default=_STATISTICS_S,
        metavar="SECONDS",
        help=f"over how long rows are counted (default: {_STATISTICS_S:g})",
    )
    add_watch(counted)
    counted.set_defaults(command=show_statistics)
    synced = verbs.add_parser(
        "synced",
        help="check whether the target has everything that the source has; exit status 1 if not",
        parents=[shared],
    )
    dump.add_changefeed_id(synced)
    synced.add_argument(
        "--wait",
        type=period,
        default=0,
        metavar="DURATION",
        help="wait until it has, for at most this long",
    )
    synced.add_argument(
        "--synced-check-interval",
        type=period,
        default=SYNCED_CHECK_S,
        metavar="DURATION",
        help="the source must have had no row change and no DDL for this long (default: 5m)",
    )
    synced.add_argument(
        "--checkpoint-interval",
        type=period,
        default=SYNCED_CHECKPOINT_S,
        metavar="DURATION",
        help="the checkpoint may be at most this far behind (default: 15s)",
    )
    synced.set_defaults(command=show_synced)


def _add_list(verbs: Any, shared: argparse.ArgumentParser) -> None:
    listed = verbs.add_parser(
        "list", help="list all changefeeds: state, lag, lake job, target, error", parents=[shared]
    )
    add_flag(
        listed,
        *("-a", "--all"),
        text="no effect, as all are shown anyway; accepted because `cdc cli` has it",
    )
    add_namespace(listed)
    add_watch(listed)
    listed.set_defaults(command=list_changefeeds)


def _add_verbs_of_one(verbs: Any, shared: argparse.ArgumentParser) -> None:
    def add(
        name: str, command: Callable[..., Any], text: str, **settings: Any
    ) -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs.add_parser(
            name, help=text, parents=[shared], **settings
        )
        dump.add_changefeed_id(verb)
        verb.set_defaults(command=command)
        return verb

    query = add("query", query_changefeed, "show one changefeed in detail")
    add_flag(query, "-s", "--simple", text="only state, checkpoint and error")
    add_watch(query)
    add(
        "history",
        show_history,
        "show what happened to a changefeed: schema changes, parts of the log that were skipped, "
        "errors",
    )
    pause = add(
        "pause",
        pause_changefeed,
        "pause a changefeed: nothing is read until `resume`, and GC waits for it for one more day",
    )
    add_verbose(pause)
    _add_resume(add("resume", resume_changefeed, "resume a changefeed from its checkpoint"))
    update = add(
        "update",
        changefeed_update.update_changefeed,
        "change a changefeed's filter, sink URI, audit, retention or --on-unclear-ddl",
    )
    changefeed_update.add_arguments(update)
    add_verbose(update)
    _add_move(
        add(
            "move-table",
            move_table,
            "move one table of a changefeed, with all its parts, to another capture",
            aliases=["move-split-table"],
        )
    )
    _add_table(
        add(
            "split-table",
            partial(split_table, put_together=False),
            "divide one table among all captures, however small it is",
            aliases=["split-table-by-region-count"],
        )
    )
    _add_table(
        add(
            "merge-table",
            partial(split_table, put_together=True),
            "put a table together that is divided among captures, until captures come or go",
        )
    )
    readers = add(
        "list-readers",
        list_readers,
        "list the named readers of a changefeed, and how far each is behind",
    )
    add_watch(readers)
    _add_reader(
        add(
            "add-reader",
            add_reader,
            "add a named reader, which has a position of its own in the changes",
        )
    )
    gone_reader = add(
        "remove-reader", remove_reader, "remove a named reader: changes are no longer kept for it"
    )
    _add_reader_name(gone_reader)
    add_yes(gone_reader)
    add_verbose(gone_reader)
    remove = add(
        "remove",
        remove_changefeed,
        "remove a changefeed: GC no longer waits for it, and the target stays as it is",
    )
    add_verbose(remove)
    add_yes(remove)
    remove.add_argument(
        "--dry-run", action="store_true", help="change nothing; show what would be removed"
    )


def _add_resume(resume: argparse.ArgumentParser) -> None:
    add_verbose(resume)
    add_yes(resume)
    resume.add_argument(
        "--overwrite-checkpoint-ts",
        type=ts_or_now,
        metavar="TS|now",
        help=(
            "go on from this timestamp instead of the checkpoint: a later one skips changes, an "
            "earlier one delivers them twice"
        ),
    )


def _add_move(move: argparse.ArgumentParser) -> None:
    _add_table(move)
    move.add_argument(
        *("-d", "--to", "--target-node-id"),
        required=True,
        metavar="CAPTURE",
        help="id of the capture, as in `capture list`",
    )
    add_flag(
        move, "--wait", text="no effect, as it always waits; accepted because `cdc cli` has it"
    )


def _add_table(verb: argparse.ArgumentParser) -> None:
    table_of = verb.add_mutually_exclusive_group(required=True)
    table_of.add_argument(
        "--table", metavar="SCHEMA.TABLE", help="the table, by its name in the source"
    )
    table_of.add_argument("-t", "--table-id", type=count, help="the table, by its id")
    verb.add_argument(
        "--mode", choices=("0",), help="accepted because `cdc cli` has it; there is no redo log"
    )
    verb.add_argument(
        "--give-up-history",
        action="store_true",
        help="do it even if history is kept (--retain), which then begins at the checkpoint",
    )


def _add_reader(new_reader: argparse.ArgumentParser) -> None:
    _add_reader_name(new_reader)
    new_reader.add_argument(
        "--start-ts",
        type=timestamp,
        default=0,
        metavar="TSO",
        help=(
            "the reader gets the changes committed after this timestamp (default: the oldest "
            "that are kept; without --retain, those after the checkpoint)"
        ),
    )
    add_verbose(new_reader)


def _add_reader_name(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--reader",
        required=True,
        metavar="NAME",
        help="the name that the reader's Spark query gives as its option `reader`",
    )


async def list_changefeeds(remote: Remote, _: argparse.Namespace) -> Output:
    """All changefeeds, in short."""
    async with remote.capture() as channel:
        answer = await ChangefeedServiceStub(channel).ListChangefeeds(
            pb.ListChangefeedsRequest(), timeout=CALL_S
        )
    rows = [summary(changefeed, time.time()) for changefeed in answer.changefeeds]
    warnings = [
        f"{each.id}: {warning}" for each in answer.changefeeds for warning in stuck_warnings(each)
    ]
    return Output(rows, _COLUMNS, shown="\n".join([table(rows, _COLUMNS), *warnings]))


async def query_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """One changefeed."""
    shown = await _shown(remote, arguments)
    return Output({name: shown[name] for name in _SIMPLE} if arguments.simple else shown)


async def _shown(remote: Remote, arguments: argparse.Namespace) -> dict[str, Any]:
    return detail(await _queried(remote, arguments.changefeed_id))


async def show_history(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the events of a changefeed's life, the oldest first."""
    return Output(history(await _shown(remote, arguments)), _HISTORY_COLUMNS)


async def show_statistics(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the rates at which readers take a changefeed's rows."""
    before = await _queried(remote, arguments.changefeed_id)
    began_s = time.monotonic()
    await asyncio.sleep(arguments.interval)
    after = await _queried(remote, arguments.changefeed_id)
    document = statistics(before, after, time.time(), time.monotonic() - began_s)
    return Output(document, shown=table([document], _STATISTICS_COLUMNS))


async def show_synced(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show whether the target has everything; the exit status is 0 only then."""
    until_s = time.monotonic() + arguments.wait
    while True:
        changefeed = await _queried(remote, arguments.changefeed_id)
        document = synced(
            changefeed, time.time(), arguments.synced_check_interval, arguments.checkpoint_interval
        )
        if document["synced"] or time.monotonic() >= until_s:
            break
        await asyncio.sleep(_SYNCED_LOOK_S)
    word = "synced" if document["synced"] else "not synced"
    return Output(
        document,
        shown=f"{word}: {document['info']}",
        status=EXIT_OK if document["synced"] else EXIT_ERROR,
    )


async def _queried(remote: Remote, changefeed: str) -> pb.Changefeed:
    async with remote.capture() as channel:
        answer = await ChangefeedServiceStub(channel).QueryChangefeed(
            pb.QueryChangefeedRequest(id=changefeed), timeout=CALL_S
        )
    return answer.changefeed


async def pause_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Stop pulling."""
    request = pb.PauseChangefeedRequest(id=arguments.changefeed_id)
    async with remote.capture() as channel:
        answer = await make_change(ChangefeedServiceStub(channel).PauseChangefeed, request)
    shown = detail(answer.changefeed)
    return confirmed(
        arguments,
        shown,
        f"changefeed {shown['id']} is paused at {shown['checkpoint_time']}",
        f"to go on from there: tidemark cli changefeed resume -c {shown['id']}",
    )


async def move_table(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Let another capture have a table; waits until it has caught up."""
    name = await _table_name(remote, arguments)
    request = pb.MoveTableRequest(
        id=arguments.changefeed_id,
        table=name,
        capture=arguments.to,
        give_up_history=arguments.give_up_history,
    )
    async with remote.capture() as channel:
        service = ChangefeedServiceStub(channel)
        async with asyncio.TaskGroup() as tasks:
            moving = tasks.create_task(_moved(service, request))
            while not moving.done():
                await asyncio.wait([moving], timeout=_MOVE_SHOWN_S)
                if sys.stderr.isatty() and not moving.done():
                    await _show_on_its_way(service, arguments.changefeed_id, name)
        answer = moving.result()
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer  # within `capture`, which tells it as the daemon's own error
    return Output(table_status(answer.table))


async def split_table(
    remote: Remote, arguments: argparse.Namespace, *, put_together: bool
) -> Output:
    """Divide a table among all captures, or put it together; waits until that is done."""
    request = pb.SplitTableRequest(
        id=arguments.changefeed_id,
        table=await _table_name(remote, arguments),
        put_together=put_together,
        give_up_history=arguments.give_up_history,
    )
    async with remote.capture() as channel:
        answer = await ChangefeedServiceStub(channel).SplitTable(request, timeout=_MOVE_S)
    return Output(table_status(answer.table))


async def _table_name(remote: Remote, arguments: argparse.Namespace) -> str:
    """The name of the table that the arguments name.

    Raises:
        TableNotExistsError: the changefeed has no table of that id.
    """
    if arguments.table is not None:
        name: str = arguments.table
        return name
    changefeed = await _queried(remote, arguments.changefeed_id)
    for table_of in changefeed.tables:
        if table_of.table_id == arguments.table_id:
            return str(table_of.name)
    raise TableNotExistsError(
        f"changefeed {changefeed.id} has no table with the id {arguments.table_id}; see `tidemark "
        f"cli changefeed query -c {changefeed.id}`"
    )


async def list_readers(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The readers that have a name."""
    changefeed = await _queried(remote, arguments.changefeed_id)
    return Output(reader_rows(changefeed, time.time()), _READER_COLUMNS)


async def _moved(
    service: Any, request: pb.MoveTableRequest
) -> pb.MoveTableResponse | grpc.aio.AioRpcError:
    """The answer, or the refusal: raised in a task it would come in a group."""
    try:
        answer: pb.MoveTableResponse = await service.MoveTable(request, timeout=_MOVE_S)
    except grpc.aio.AioRpcError as err:
        return err
    return answer


async def _show_on_its_way(service: Any, changefeed: str, name: str) -> None:
    """Tell on a terminal how far a table that moves is."""
    try:
        answer = await service.QueryChangefeed(
            pb.QueryChangefeedRequest(id=changefeed), timeout=CALL_S
        )
    except grpc.aio.AioRpcError:
        return  # the move itself tells what is wrong
    for each in answer.changefeed.tables:
        if each.name == name and each.moving_to:
            behind_s = max(0.0, time.time() - physical_s(each.moving_resolved_ts))
            print(f"{name}: {each.moving_to} is {behind_s:.0f} s behind", file=sys.stderr)


async def add_reader(remote: Remote, arguments: argparse.Namespace) -> Output:
    """One more reader, with a position of its own."""
    request = pb.AddReaderRequest(
        id=arguments.changefeed_id, name=arguments.reader, start_ts=arguments.start_ts
    )
    async with remote.capture() as channel:
        answer = await make_change(ChangefeedServiceStub(channel).AddReader, request)
    shown = detail(answer.changefeed)
    (begin,) = (each for each in shown["readers"] if each["name"] == arguments.reader)
    return confirmed(
        arguments,
        shown,
        f"reader {arguments.reader} of changefeed {shown['id']} begins at "
        f"{begin['checkpoint_time']}",
    )


async def remove_reader(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Stop keeping history for a reader; changes that it has not taken may be gone for good."""
    if not arguments.yes:
        confirm(
            f"Remove reader {arguments.reader} of {arguments.changefeed_id}? Changes that it has "
            "not taken are no longer kept for it."
        )
    request = pb.RemoveReaderRequest(id=arguments.changefeed_id, name=arguments.reader)
    async with remote.capture() as channel:
        answer = await make_change(ChangefeedServiceStub(channel).RemoveReader, request)
    shown = detail(answer.changefeed)
    said = f"reader {arguments.reader} of changefeed {shown['id']} is removed"
    return confirmed(arguments, shown, said)


async def resume_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Start pulling again; overwriting the checkpoint skips or repeats rows, so it must be
    confirmed.
    """
    overwrite_ts: int | str | None = arguments.overwrite_checkpoint_ts
    if overwrite_ts is not None and not arguments.yes:
        confirm(
            f"Continue from {overwrite_ts}, whatever the checkpoint is? Rows may be skipped or "
            "repeated."
        )
    with_now = overwrite_ts == _NOW
    if with_now:
        async with remote.coordinator() as pd:
            # for captures that do not ask the source
            overwrite_ts = await pd.tso()
    request = pb.ResumeChangefeedRequest(
        id=arguments.changefeed_id,
        overwrite_checkpoint_ts=int(overwrite_ts or 0),
        overwrite_with_now=with_now,
    )
    async with remote.capture() as channel:
        answer = await make_change(ChangefeedServiceStub(channel).ResumeChangefeed, request)
    shown = detail(answer.changefeed)
    return confirmed(
        arguments,
        shown,
        f"changefeed {shown['id']} is {shown['state']}, and goes on from "
        f"{shown['checkpoint_time']}",
    )


async def remove_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Forget a changefeed after asking; with --dry-run only show it."""
    shown = await _shown(remote, arguments)
    if arguments.dry_run:
        return Output({"dry_run": True} | shown)
    if not arguments.yes:
        confirm(
            f"Remove changefeed {arguments.changefeed_id} at checkpoint {shown['checkpoint_tso']}?"
        )
    request = pb.RemoveChangefeedRequest(id=arguments.changefeed_id)
    async with remote.capture() as channel:
        answer = await make_change(ChangefeedServiceStub(channel).RemoveChangefeed, request)
    # The answer to a removal that was repeated has the id alone.
    is_whole = bool(answer.changefeed.sink_uri)
    removed = {"removed": True} | (detail(answer.changefeed) if is_whole else shown)
    uri = removed["sink_uri"]
    stays = "" if uri.partition(":")[0] in READERS else f"; the tables at {uri} stay as they are"
    return confirmed(arguments, removed, f"changefeed {removed['id']} is removed{stays}")


def ts_or_now(text: str) -> int | str:
    """A timestamp, or `now`; raises ArgumentTypeError."""
    return _NOW if text == _NOW else timestamp(text)
