"""Where in a log we stand, and the commit_ts there, which is computed
from all transactions before it. Pure.

    commit_ts(n) = max(commit_ts(n - 1) + 2, physical time of transaction n in TSO layout)

over all transactions of the log in its order, whatever tables they touch. The commit_ts before each
one, which no transaction has, belongs to schema changes: a transaction may bring one and rows above
it (CREATE TABLE … SELECT). The time is one that replicas repeat, so that they give the same one:
with MariaDB the second of the GTID event; with MySQL the millisecond of the commit on the server
that ran it, as a replica's event has the second of the last statement. A saved position is a place
and its commit_ts: whoever goes on from one gives all later transactions the same commit_ts.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError
from storage.model.ts import LOGICAL_BITS
from storage.mysql.control import MariaGtid, MysqlGtid
from storage.mysql.gtid import MariaGtidSet, MysqlGtidSet

STEP: Final = 2


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """A place between two transactions, as the metadata keeps it (key `anchor/…`): everything of
    the log before it has a commit_ts at or below `ts`.
    """

    ts: int
    gtids: str
    """The GTIDs read, as the server writes them; empty where it has none."""
    file: str = ""
    """With `position` the place in the log of the server that was read;
    another server has another one.
    """
    position: int = 4

    def to_json(self) -> bytes:
        """The JSON that the metadata keeps."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            return cls(**json.loads(value))
        except (ValueError, TypeError) as err:
            raise CorruptError(
                f"a saved position of a MySQL source in the metadata cannot be read: {err!r}"
            ) from err

    @property
    def domains(self) -> int:
        """How many replication domains MariaDB's GTIDs are of."""
        return 0 if self.is_mysql else len(MariaGtidSet.parse(self.gtids).positions)

    @property
    def is_mysql(self) -> bool:
        """Whether the GTIDs are MySQL's, which hold a colon, not MariaDB's."""
        return ":" in self.gtids

    @property
    def gtid_block(self) -> bytes:
        """MySQL's GTIDs in binary form."""
        return MysqlGtidSet.parse(self.gtids).encode() if self.is_mysql else b""


def commit_timestamps(previous_ts: int, physical: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The commit_ts of transactions that follow `previous_ts`, by each one's time in ms."""
    steps = STEP * np.arange(1, len(physical) + 1, dtype=np.int64)
    at_least = np.maximum((physical << LOGICAL_BITS) - steps, previous_ts)
    commit_ts: npt.NDArray[np.int64] = np.maximum.accumulate(at_least) + steps
    return commit_ts


class LogPosition:
    """The place after the last complete transaction; moved by `Transactions` alone."""

    def __init__(self, saved_position: SavedPosition) -> None:
        self.ts = saved_position.ts
        self.file = saved_position.file
        self.position = saved_position.position
        self._gtids: MariaGtidSet | MysqlGtidSet
        self._gtids = (
            MysqlGtidSet.parse(saved_position.gtids)
            if saved_position.is_mysql
            else MariaGtidSet.parse(saved_position.gtids)
        )

    @property
    def snapshot(self) -> SavedPosition:
        """The position now, as a value that can be saved."""
        return SavedPosition(self.ts, str(self._gtids), self.file, self.position)

    @property
    def has_gtids(self) -> bool:
        """Whether any GTID is known."""
        return bool(str(self._gtids))

    def begin_with(self, gtids: str) -> None:
        """Set the GTIDs that a log file says were before it; for a log read by file and offset."""
        if not self.has_gtids:
            self._gtids = MysqlGtidSet.parse(gtids) if ":" in gtids else MariaGtidSet.parse(gtids)

    def passed(
        self, gtid: MariaGtid | MysqlGtid | None, ts: int, next_position: int, first_gno: int = 0
    ) -> None:
        """Move behind a complete transaction; with `first_gno` behind all of MySQL's from it on."""
        self.ts = ts
        self.position = next_position or self.position
        if isinstance(gtid, MariaGtid):
            maria = self._gtids if isinstance(self._gtids, MariaGtidSet) else MariaGtidSet()
            self._gtids = maria.add(gtid.domain, gtid.server, gtid.seq)
        elif gtid is not None and gtid.gno:
            mysql = self._gtids if isinstance(self._gtids, MysqlGtidSet) else MysqlGtidSet()
            self._gtids = mysql.add(gtid.server, gtid.gno, gtid.tag, first=first_gno)

    def moved_to_file(self, file: str, position: int) -> None:
        """Move to where the log goes on after a ROTATE."""
        self.file, self.position = file, position
