"""What a capture knows of a share moves forward only."""

from dataclasses import asdict

from tidemarkpb.v1 import changefeed_pb2, worker_pb2

from server.capture.processor import ProcessorStats
from server.capture.worker.remote import ShareStatus
from server.capture.worker.wire import span_message
from storage.model.span import Span

TABLE, MOVED = Span(7, b"a", b"b"), Span(7, b"a", b"c")
"""One table in two places, one after the other."""


def progress(resolved_ts, checkpoint_ts, *tables):
    spans = [
        worker_pb2.SpanProgress(span=span_message(span), resolved_ts=to, checkpoint_ts=at)
        for span, to, at in tables
    ]
    return worker_pb2.ShareProgress(
        resolved_ts=resolved_ts, checkpoint_ts=checkpoint_ts, spans=spans, regions=2
    )


def test_before_the_worker_speaks_all_stands_at_the_start():
    status = ShareStatus(100)
    assert (status.resolved_ts, status.checkpoint_ts, status.table(TABLE)) == (100, 100, (100, 100))
    assert status.stats.regions == 0


def test_a_message_that_an_acknowledgement_overtook_moves_nothing_back():
    status = ShareStatus(100)
    list(status.absorb_in_steps(progress(140, 100, (TABLE, 150, 100), (MOVED, 140, 100))))
    status.acknowledged(130)
    list(status.absorb_in_steps(progress(150, 110, (TABLE, 150, 120))))
    list(status.absorb_in_steps(progress(149, 110, (TABLE, 149, 110))))
    assert (status.resolved_ts, status.checkpoint_ts) == (150, 130)
    assert (status.table(TABLE), status.table(MOVED)) == ((150, 120), (140, 100))
    assert status.stats.regions == 2


def test_a_table_that_comes_takes_the_checkpoint_back_and_older_reports_do_not_raise_it_again():
    status = ShareStatus(100)
    empty = worker_pb2.ShareProgress(resolved_ts=900, checkpoint_ts=900)
    list(status.absorb_in_steps(empty))
    status.acknowledged(300, counts=1)
    list(status.absorb_in_steps(empty))
    status.acknowledged(890)
    assert status.checkpoint_ts == 300
    list(
        status.absorb_in_steps(
            worker_pb2.ShareProgress(resolved_ts=910, checkpoint_ts=290, counts=1)
        )
    )
    assert status.checkpoint_ts == 300
    list(
        status.absorb_in_steps(
            worker_pb2.ShareProgress(resolved_ts=910, checkpoint_ts=320, counts=2)
        )
    )
    assert (status.resolved_ts, status.checkpoint_ts) == (910, 320)


def test_how_far_a_share_is_pulled_and_sorted_is_as_told_last():
    status = ShareStatus(100)
    assert (status.stats.pulled_ts, status.stats.sorted_ts) == (0, 0)
    list(status.absorb_in_steps(worker_pb2.ShareProgress(pulled_ts=160, sorted_ts=150)))
    list(status.absorb_in_steps(worker_pb2.ShareProgress(pulled_ts=155, sorted_ts=151)))
    assert (status.stats.pulled_ts, status.stats.sorted_ts) == (155, 151)


def test_what_a_worker_holds_is_told_member_by_member():
    held = ProcessorStats(1, 2, 3, 4, "disk full", 5, 6, 7)
    status = ShareStatus(100)
    list(status.absorb_in_steps(worker_pb2.ShareProgress(**asdict(held))))
    assert status.stats == held
    assert changefeed_pb2.Holding(**asdict(held)).disk_error == "disk full"


def test_a_report_of_many_tables_is_taken_in_steps_and_the_share_is_never_beyond_a_table():
    status = ShareStatus(100)
    tables = [Span(number, b"%d" % number, b"") for number in range(5000)]
    message = progress(140, 110, *((span, 140, 110) for span in tables))
    steps = 0
    for _ in status.absorb_in_steps(message):
        steps += 1
        assert (status.resolved_ts, status.checkpoint_ts) == (100, 100)
    assert steps == 5
    assert (status.resolved_ts, status.checkpoint_ts) == (140, 110)
    assert {status.table(span) for span in tables} == {(140, 110)}
