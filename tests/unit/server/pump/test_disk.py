from pathlib import Path

from structlog.testing import capture_logs

from server.pump.upkeep import DiskWatch
from tests.memory_fs import MemFS


async def test_a_disk_is_low_below_the_limit_and_says_so_once_each_way() -> None:
    fs = MemFS(available=100)
    disk = DiskWatch(fs, Path("/"), 100)
    assert not disk.is_low
    with capture_logs() as logs:
        for available in (99, 98, 100, 101):
            fs.available = available
            await disk.refresh()
            assert disk.is_low == (available < 100)
    assert [entry["event"] for entry in logs] == [
        "disk is low, binlogs are refused",
        "disk has room again",
    ]
