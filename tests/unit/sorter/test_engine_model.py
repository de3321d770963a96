"""Any interleaving of calls on the sorter equals the in-memory model."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sorter import Sorter, SorterSettings, segment, store
from sorter.buffer import BATCH_BYTES
from sorter.errors import EventBatchError, TableExistsError, TableNotFoundError
from sorter.merge import RunLevels
from sorter.store import BlockStore
from storage.leveldb import DirectoryUnusableError, LevelDB
from storage.model.errors import TidemarkError
from storage.model.event import Position, raw_batch
from storage.model.span import Span
from storage.spill_codec import COMPRESSIONS, PLAIN, SpillCodec
from tests.unit.sorter.model import SorterModel

SPANS = [Span(7, b"t7", b"t8"), Span(-1, b"u", b""), Span(8, b"v", b"w")]
CODECS = [SpillCodec(name, encrypted=hide) for name in COMPRESSIONS for hide in (False, True)]
KEYS = [b"", b"a", b"ab", b"\xff"]

spans = st.sampled_from(SPANS)
steps = st.integers(0, 8)
row_shapes = st.tuples(
    st.integers(1, 10),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(KEYS),
    st.binary(max_size=40),
    st.none(),
)
positions = st.builds(Position, st.integers(0, 60), st.integers(0, 60))


class SorterMachine(RuleBasedStateMachine):
    @initialize(
        memory=st.sampled_from([0, 20_000, 1 << 20]),
        block=st.sampled_from([1, 200, 200_000]),  # of the last, tables share some
        fan_in=st.integers(2, 4),
        large=st.sampled_from([0, 2000, 1 << 20]),
        moved=st.sampled_from([0, 4]),  # 0: everything, whenever a segment is begun
        codec=st.sampled_from(CODECS),
    )
    def open(
        self,
        memory: int,
        block: int,
        fan_in: int = 2,
        large: int = 1 << 20,
        moved: int = 0,
        codec: SpillCodec = PLAIN,
    ) -> None:
        self.now_s = 0.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(RunLevels, "fan_in", fan_in)
        self.patch.setattr(RunLevels, "large_bytes", large)
        self.patch.setattr(RunLevels, "most_runs", 8)
        self.patch.setattr(segment, "_SPARSE_SHARE", moved)
        self.patch.setattr(store, "_SPARSE_SEGMENTS", 1)
        self.directory = Path(tempfile.mkdtemp())
        self.sorter = Sorter(
            self.directory,
            SorterSettings(
                memory_bytes=memory, block_bytes=block, segment_bytes=1000, shards=1, codec=codec
            ),
            clock=lambda: self.now_s,
        )
        self.meanwhile: list[Callable[[], None]] = []
        append_run = BlockStore.append_run

        def appended(*of_run: object) -> object:
            new = append_run(*of_run)
            while self.meanwhile:
                self.meanwhile.pop()()
            return new

        self.patch.setattr(BlockStore, "append_run", appended)
        self.model = SorterModel()
        self.resolved = dict.fromkeys(SPANS, 5)
        for span in SPANS:
            self.sorter.add_table(span, 5)
            self.model.add_table(span, 5)

    def teardown(self) -> None:
        if hasattr(self, "sorter"):
            self.sorter.close()
            self.patch.undo()
            shutil.rmtree(self.directory)

    def same(self, call, model) -> None:
        try:
            expected = model()
        except TidemarkError as err:
            with pytest.raises(type(err)):
                call()
        else:
            assert call() == expected

    def rows(self, span: Span, lower: Position, upper: Position) -> list[tuple]:
        batches = list(self.sorter.fetch(span, lower, upper))
        assert all(batch.num_rows for batch in batches)
        return [
            row
            for batch in batches
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        ]

    def add_rows(self, span: Span, rows: list[tuple]) -> None:
        batch = raw_batch(*(zip(*rows, strict=True) if rows else [[]] * 6))
        self.same(lambda: self.sorter.add(span, batch), lambda: self.model.add(span, rows))

    @rule(span=spans, shapes=st.lists(row_shapes, max_size=12))
    def add(self, span, shapes) -> None:
        self.add_rows(span, [(self.resolved[span] + offset, *rest) for offset, *rest in shapes])

    @rule(span=spans, value=st.binary(max_size=40), every=st.integers(1, 3))
    def add_again_what_is_not_resolved(self, span, value, every) -> None:
        self.add_rows(
            span, [(*row[:4], value, None) for row in self.model.unresolved(span)[::every]]
        )

    @rule(span=spans, shapes=st.lists(row_shapes, min_size=1, max_size=3))
    def add_too_late(self, span, shapes) -> None:
        self.add_rows(
            span, [(max(self.resolved[span] - offset + 2, 0), *rest) for offset, *rest in shapes]
        )

    @rule(span=spans, shapes=st.lists(row_shapes, min_size=1, max_size=3), column=st.integers(0, 3))
    def add_what_is_no_batch_of_rows(self, span, shapes, column) -> None:
        rows = [(self.resolved[span] + offset, *rest) for offset, *rest in shapes]
        batch = raw_batch(*zip(*rows, strict=True))
        name = batch.schema.names[column]
        nulls = batch.set_column(
            column, batch.schema.field(column), pa.nulls(len(rows), batch.schema.types[column])
        )
        with pytest.raises(EventBatchError, match=f"'{name}' holds nulls"):
            self.sorter.add(span, nulls)
        with pytest.raises(EventBatchError, match="rows need the schema"):
            self.sorter.add(span, batch.drop_columns([name]))

    @rule(span=spans)
    def call_for_the_wrong_table(self, span) -> None:
        with pytest.raises(TableExistsError):
            self.sorter.add_table(span, 0)
        other = Span(span.table_id, span.start_key, b"other")
        self.sorter.remove_table(other)
        for call in (
            lambda: self.sorter.add(other, raw_batch(*[[]] * 6)),
            lambda: self.sorter.resolve(other, 1 << 40),
            lambda: self.sorter.fetch(other, Position(1, 0), Position(2, 0)),
            lambda: self.sorter.clean(other, Position(2, 0)),
            lambda: self.sorter.extents(other, 1, 2),
            lambda: self.sorter.resolved_ts(other),
        ):
            with pytest.raises(TableNotFoundError):
                call()

    @rule(span=spans, step=st.integers(0, 8), back=steps)
    def resolve_and_clean_on_a_full_disk(self, span, step, back) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def refuse_index(*_: object, **__: object) -> None:
            raise DirectoryUnusableError("No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            patch.setattr(LevelDB, "write", refuse_index)
            self.resolve(span, step)
            self.clean(span, back, 0)
            self.everything_kept_is_sorted_and_whole()
        self.now_s += 1

    @rule(span=spans, step=st.integers(-1, 8))
    def resolve(self, span, step) -> None:
        ts = self.resolved[span] + step
        self.same(lambda: self.sorter.resolve(span, ts), lambda: self.model.resolve(span, ts))
        self.resolved[span] = max(ts, self.resolved[span])

    @rule(span=spans, lower=positions, upper=positions)
    def fetch(self, span, lower, upper) -> None:
        self.same(
            lambda: self.rows(span, lower, upper), lambda: self.model.fetch(span, lower, upper)
        )

    @rule(span=spans, back=steps, start_ts=st.integers(0, 60))
    def clean(self, span, back, start_ts) -> None:
        upper = Position(self.resolved[span] - back + 1, start_ts)
        self.same(lambda: self.sorter.clean(span, upper), lambda: self.model.clean(span, upper))

    @rule(span=spans, start_ts=st.integers(0, 60))
    def replace_table(self, span, start_ts) -> None:
        for engine in (self.sorter, self.model):
            engine.remove_table(span)
            engine.add_table(span, start_ts)
        self.resolved[span] = start_ts

    @rule(span=spans, back=steps, what=st.sampled_from(["clean", "replace", "move", "fetch"]))
    def do_something_while_the_next_runs_are_merged(self, span, back, what) -> None:
        actions = {
            "clean": lambda: self.clean(span, back, 0),
            "replace": lambda: self.replace_table(span, back),
            "move": lambda: self.sorter._compaction.run(
                self.sorter._stores[0], list(self.sorter._tables.values())
            ),
            "fetch": lambda: self.fetch(
                span, self.model.cleaned(span).next(), Position(self.resolved[span], 1 << 63)
            ),
        }
        self.meanwhile.append(actions[what])

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds) -> None:
        self.now_s += seconds

    @rule(span=spans, start=steps, length=steps)
    def extents_hold_the_rows(self, span, start, length) -> None:
        lower_ts = self.model.cleaned(span).commit_ts + 1 + start
        upper_ts = min(lower_ts + length, self.resolved[span])
        if lower_ts <= upper_ts:
            extents = self.sorter.extents(span, lower_ts, upper_ts)
            found = [
                int(ts)
                for extent in extents
                for ts in extent.commit_ts()
                if lower_ts <= ts <= upper_ts
            ]
            rows = self.model.fetch(span, Position(lower_ts, 0), Position(upper_ts, 1 << 63))
            assert set(found) == {row[0] for row in rows}
            assert len(found) >= len(rows)

    @invariant()
    def everything_kept_is_sorted_and_whole(self) -> None:
        for span in SPANS:
            lower = self.model.cleaned(span).next()
            upper = Position(self.resolved[span], 1 << 63)
            assert self.rows(span, lower, upper) == self.model.fetch(span, lower, upper)

    @invariant()
    def memory_is_bounded(self) -> None:
        stats = self.sorter.stats()
        # Splitting and sorting may round bitmaps and offsets up; a batch that is split counts as
        # two.
        assert (
            stats.memory_bytes
            <= self.sorter._spiller._memory_bytes * 3 // 2 + len(SPANS) * 2 * BATCH_BYTES
        )
        assert all(self.sorter.table_stats(span).runs <= 12 for span in SPANS)
        assert stats.memory_bytes == sum(
            table.memory_bytes for table in self.sorter._tables.values()
        )
        assert stats.live_blocks == sum(self.sorter.table_stats(span).blocks for span in SPANS)


TestSorterEqualsModel = SorterMachine.TestCase
TestSorterEqualsModel.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize(("block", "moved"), [(1, 4), (500, 0), (200_000, 0), (200_000, 4)])
@pytest.mark.parametrize("memory", [0, 20_000, 1 << 20])
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_dense_random_histories_equal_the_model(
    memory: int, block: int, moved: int, seed: int
) -> None:
    machine, rng = SorterMachine(), random.Random(seed)
    machine.open(memory, block, large=2000, moved=moved)
    try:
        for step in range(1, 26):
            span, base = rng.choice(SPANS), rng.randrange(1, 20)
            rows = [
                (
                    base + rng.randrange(9),
                    rng.randrange(3),
                    rng.randrange(1, 4),
                    rng.choice(KEYS),
                    rng.randbytes(9),
                    None,
                )
                for _ in range(rng.randrange(15))
            ]
            machine.add(span, rows)
            machine.add_again_what_is_not_resolved(span, rng.randbytes(5), rng.randrange(1, 4))
            machine.resolve(span, rng.choice([0, 0, 3, 20]))
            machine.fetch(
                span,
                Position(rng.randrange(200), 0),
                Position(rng.randrange(200), rng.randrange(4)),
            )
            machine.clean(span, rng.randrange(20), rng.randrange(4))
            machine.wait(rng.choice([1.0, 6.0]))
            what = rng.choice(["clean", "clean", "move", "move", "fetch", "replace"])
            machine.do_something_while_the_next_runs_are_merged(
                rng.choice(SPANS), rng.randrange(9), what
            )
            machine.memory_is_bounded()
            if not step % 5:  # what is lost stays lost, and cleaning takes a share of it only
                machine.everything_kept_is_sorted_and_whole()
    finally:
        machine.teardown()
