"""What counts of a table's dump, and when."""

from server.dump.mysql.chunk import integer
from server.dump.progress import Range, Read, TableDump, TableProgress, TableState


def test_a_chunk_counts_only_once_the_checkpoint_has_reached_it_and_all_before_it() -> None:
    dump = TableDump(TableProgress("shop.t", 7, "j"))
    dump.planned((Range(),), 4)
    first, second = (
        Read(0, dump.ahead(0)[1], (integer(number),), number == 2, 2, 20) for number in (1, 2)
    )
    dump.read(first)
    dump.read(second)
    assert dump.next_range() is None
    assert dump.closed(first, 10)
    assert dump.closed(second, 20)
    dump.settle(9)
    assert (dump.durable.rows, dump.durable.rows_read, dump.durable.ranges) == (0, 4, (Range(),))
    dump.settle(15)
    assert (dump.durable.rows, dump.durable.rows_read, dump.durable.ranges) == (
        2,
        4,
        (Range((integer(1),)),),
    )
    dump.moved_to(TableState.DUMPING, "the log stands still")
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
    dump.planned((Range(),), 4)
    first, second = (
        Read(0, dump.ahead(0)[1], (integer(number),), False, 2, 20) for number in (1, 2)
    )
    for chunk in (first, second):
        dump.read(chunk)
    assert dump.closed(first, 10)
    dump.again(second)
    dump.settle(5)
    assert (dump.durable.rows, dump.durable.rows_read) == (0, 2)
    begun_again = TableDump(dump.durable)
    begun_again.settle(5)
    assert begun_again.durable.rows_read == 0, "what a process had ahead goes with it"


def test_a_chunk_of_a_range_that_is_gone_when_it_has_been_read_counts_nowhere() -> None:
    dump = TableDump(TableProgress("s.t", 1, "j", ranges=(Range(), Range())))
    chunk = Read(1, dump.ahead(1)[1], (integer(5),), ends=False, rows=5, bytes=50)
    dump.restart(1)
    dump.read(chunk)
    assert not dump.closed(chunk, 10)
    assert not dump.again(chunk)
    dump.settle(20)
    assert (dump.durable.rows, dump.durable.rows_read, dump.ahead(0)[0]) == (0, 0, Range())


def test_a_chunk_that_is_read_again_takes_those_behind_it_along() -> None:
    dump = TableDump(TableProgress("shop.t", 7, "j"))
    dump.planned((Range(),), 4)
    first, second = (
        Read(0, dump.ahead(0)[1], (integer(number),), False, 2, 20) for number in (1, 2)
    )
    dump.read(first)
    dump.read(second)
    dump.again(first)
    assert dump.ahead(0)[0] == Range()
    assert not dump.closed(second, 20)
