"""What a capture knows of a share moves forward only."""

from dataclasses import asdict

from tidemarkpb.v1 import changefeed_pb2, worker_pb2

from server.capture.processor import ProcessorStats
from server.capture.worker.remote import Mirror
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
    mirror = Mirror(100)
    assert (mirror.resolved_ts, mirror.checkpoint_ts, mirror.table(TABLE)) == (100, 100, (100, 100))
    assert mirror.stats.regions == 0


def test_a_message_that_an_acknowledgement_overtook_moves_nothing_back():
    mirror = Mirror(100)
    mirror.absorb(progress(140, 100, (TABLE, 150, 100), (MOVED, 140, 100)))
    mirror.acknowledged(130)
    mirror.absorb(progress(150, 110, (TABLE, 150, 120)))
    mirror.absorb(progress(149, 110, (TABLE, 149, 110)))
    assert (mirror.resolved_ts, mirror.checkpoint_ts) == (150, 130)
    assert (mirror.table(TABLE), mirror.table(MOVED)) == ((150, 120), (140, 100))
    assert mirror.stats.regions == 2


def test_a_table_that_comes_takes_the_checkpoint_back_and_older_reports_do_not_raise_it_again():
    mirror = Mirror(100)
    empty = worker_pb2.ShareProgress(resolved_ts=900, checkpoint_ts=900)
    mirror.absorb(empty)
    mirror.acknowledged(300, counts=1)
    mirror.absorb(empty)
    mirror.acknowledged(890)
    assert mirror.checkpoint_ts == 300
    mirror.absorb(worker_pb2.ShareProgress(resolved_ts=910, checkpoint_ts=290, counts=1))
    assert mirror.checkpoint_ts == 300
    mirror.absorb(worker_pb2.ShareProgress(resolved_ts=910, checkpoint_ts=320, counts=2))
    assert (mirror.resolved_ts, mirror.checkpoint_ts) == (910, 320)


def test_how_far_a_share_is_pulled_and_sorted_is_as_told_last():
    mirror = Mirror(100)
    assert (mirror.stats.pulled_ts, mirror.stats.sorted_ts) == (0, 0)
    mirror.absorb(worker_pb2.ShareProgress(pulled_ts=160, sorted_ts=150))
    mirror.absorb(worker_pb2.ShareProgress(pulled_ts=155, sorted_ts=151))
    assert (mirror.stats.pulled_ts, mirror.stats.sorted_ts) == (155, 151)


def test_what_a_worker_holds_is_told_member_by_member():
    held = ProcessorStats(1, 2, 3, 4, "disk full", 5, 6, 7)
    mirror = Mirror(100)
    mirror.absorb(worker_pb2.ShareProgress(**asdict(held)))
    assert mirror.stats == held
    assert changefeed_pb2.Holding(**asdict(held)).disk_error == "disk full"


def test_a_report_of_many_tables_is_taken_in_steps_and_the_share_is_never_beyond_a_table():
    mirror = Mirror(100)
    tables = [Span(number, b"%d" % number, b"") for number in range(5000)]
    message = progress(140, 110, *((span, 140, 110) for span in tables))
    steps = 0
    for _ in mirror.absorbing(message):
        steps += 1
        assert (mirror.resolved_ts, mirror.checkpoint_ts) == (100, 100)
    assert steps == 5
    assert (mirror.resolved_ts, mirror.checkpoint_ts) == (140, 110)
    assert {mirror.table(span) for span in tables} == {(140, 110)}
