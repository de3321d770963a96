"""What counts of a table's dump, and when."""

from server.dump.mysql.chunk import integer
from server.dump.progress import ChunkRead, Range, TableDump, TableProgress, TableState


def test_a_chunk_counts_only_once_the_checkpoint_has_reached_it_and_all_before_it() -> None:
    dump = TableDump(TableProgress("shop.t", 7, "j"))
    dump.begin((Range(),), 4)
    first, second = (
        ChunkRead(0, dump.unread(0)[1], (integer(number),), number == 2, 2, 20) for number in (1, 2)
    )
    dump.note_read(first)
    dump.note_read(second)
    assert dump.next_range() is None
    assert dump.count_chunk(first, 10)
    assert dump.count_chunk(second, 20)
    dump.settle(9)
    assert (dump.durable.rows, dump.durable.rows_read, dump.durable.ranges) == (0, 4, (Range(),))
    dump.settle(15)
    assert (dump.durable.rows, dump.durable.rows_read, dump.durable.ranges) == (
        2,
        4,
        (Range((integer(1),)),),
    )
    dump.set_state(TableState.DUMPING, "the log stands still")
    dump.settle(20)
    # What it waited for is not told of a table that is done.
    assert (dump.durable.rows, dump.durable.rows_read, dump.durable.state, dump.durable.error) == (
        4,
        4,
        TableState.DONE,
        "",
    )


def test_rows_read_are_less_again_when_a_chunk_is_read_again() -> None:
    dump = TableDump(TableProgress("shop.t", 7, "j"))
    dump.begin((Range(),), 4)
    first, second = (
        ChunkRead(0, dump.unread(0)[1], (integer(number),), False, 2, 20) for number in (1, 2)
    )
    for chunk in (first, second):
        dump.note_read(chunk)
    assert dump.count_chunk(first, 10)
    dump.set_back(second)
    dump.settle(5)
    assert (dump.durable.rows, dump.durable.rows_read) == (0, 2)
    begun_again = TableDump(dump.durable)
    begun_again.settle(5)
    assert begun_again.durable.rows_read == 0, "what a process had ahead goes with it"


def test_a_chunk_of_a_range_that_is_gone_when_it_has_been_read_counts_nowhere() -> None:
    dump = TableDump(TableProgress("s.t", 1, "j", ranges=(Range(), Range())))
    chunk = ChunkRead(1, dump.unread(1)[1], (integer(5),), ends=False, rows=5, bytes=50)
    dump.restart(1)
    dump.note_read(chunk)
    assert not dump.count_chunk(chunk, 10)
    assert not dump.set_back(chunk)
    dump.settle(20)
    assert (dump.durable.rows, dump.durable.rows_read, dump.unread(0)[0]) == (0, 0, Range())


def test_a_chunk_that_is_read_again_takes_those_behind_it_along() -> None:
    dump = TableDump(TableProgress("shop.t", 7, "j"))
    dump.begin((Range(),), 4)
    first, second = (
        ChunkRead(0, dump.unread(0)[1], (integer(number),), False, 2, 20) for number in (1, 2)
    )
    dump.note_read(first)
    dump.note_read(second)
    dump.set_back(first)
    assert dump.unread(0)[0] == Range()
    assert not dump.count_chunk(second, 20)
