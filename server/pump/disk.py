"""Whether there is room for more binlogs."""

import asyncio
from pathlib import Path

import structlog

from storage.vfs import FS

_INTERVAL_SECONDS = 3.0

_log = structlog.get_logger(__name__)


class DiskWatch:
    """The space left where the binlogs are, read again every few seconds."""

    def __init__(self, fs: FS, directory: Path, stop_write_at_bytes: int) -> None:
        self.stop_write_at_bytes = stop_write_at_bytes
        self.available_bytes = fs.available_bytes(directory)
        self._fs = fs
        self._directory = directory

    @property
    def is_low(self) -> bool:
        """Whether binlogs are to be refused."""
        return self.available_bytes < self.stop_write_at_bytes

    async def run(self) -> None:
        """Keep reading until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the space again; a change of mind is logged,
        a file system that does not answer is taken as before.
        """
        was_low = self.is_low
        try:
            self.available_bytes = await asyncio.to_thread(
                self._fs.available_bytes, self._directory
            )
        except OSError as err:
            _log.warning("disk space not known", error=err.strerror)
        if self.is_low != was_low:
            phrase = "disk is low, binlogs are refused" if self.is_low else "disk has room again"
            _log.warning(
                phrase, available=self.available_bytes, stop_write_at=self.stop_write_at_bytes
            )
