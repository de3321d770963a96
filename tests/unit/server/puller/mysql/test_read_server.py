"""When a server's log counts as begun anew while it is read."""

import pytest

from server.puller.mysql.log.read_server import LOOK_EVERY_S, ReadServer, StandstillCheck, _differ
from server.puller.mysql.session.errors import MySqlStatementError, MySqlUnavailableError
from server.puller.mysql.transaction.scanner import Place
from storage.model.errors import CorruptError


class Server:
    """Its clock and the end of its log."""

    def __init__(self) -> None:
        self.now = 0.0
        self.end: Place = ("binlog.000001", 500)
        self.looks = 0
        self.refuses = False

    async def log_end(self) -> Place:
        self.looks += 1
        if self.refuses:
            raise MySqlStatementError("no")
        return self.end


async def test_a_log_that_goes_on_while_nothing_comes_is_opened_again() -> None:
    server = Server()
    check = StandstillCheck(lambda: server.now)
    for end in (500, 700):
        server.now += LOOK_EVERY_S
        server.end = ("binlog.000001", end)
        await check.look(server.log_end)
    await check.look(server.log_end)  # what was written just now may be on its way
    server.now += LOOK_EVERY_S
    with pytest.raises(MySqlUnavailableError, match="RESET MASTER"):
        await check.look(server.log_end)
    assert server.looks == 2


async def test_a_log_that_stands_still_or_comes_is_no_other_one() -> None:
    server = Server()
    check = StandstillCheck(lambda: server.now)
    for _ in range(10):
        server.now += LOOK_EVERY_S
        await check.look(server.log_end)
    assert server.looks == 10
    server.end = ("binlog.000001", 900)
    server.now += LOOK_EVERY_S
    await check.look(server.log_end)
    check.note_arrival()
    for _ in range(3):
        server.now += LOOK_EVERY_S
        await check.look(server.log_end)


async def test_nobody_asks_before_it_is_quiet_for_a_while_nor_where_it_may_not() -> None:
    server = Server()
    check = StandstillCheck(lambda: server.now)
    server.now += LOOK_EVERY_S / 2
    await check.look(server.log_end)
    assert not server.looks
    server.refuses = True
    for size in range(4):
        server.end = ("binlog.000001", size)
        server.now += LOOK_EVERY_S
        await check.look(server.log_end)


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [
        ("0-1-5", "0-1-5", False),
        ("0-1-5", "0-1-4", True),
        ("0-1-5", "0-1-6", True),
        ("0-1-5", "0-2-5", True),
        ("0-1-5,3-1-9", "0-1-5", False),
        ("0-1-5", "0-1-5,3-1-9", False),
        ("0-1-5,3-1-9", "0-1-5,3-1-8", True),
        ("", "0-1-5", False),
    ],
)
def test_gtids_of_a_place_are_those_that_were_read(mine: str, theirs: str, differ: bool) -> None:
    assert _differ(mine, theirs) is differ


def test_the_record_of_a_server_is_read_as_it_was_written() -> None:
    read = ReadServer("1@h:3306", 7)
    assert ReadServer.from_json(read.to_json()) == read
    with pytest.raises(CorruptError):
        ReadServer.from_json(b'{"who": 1}')
