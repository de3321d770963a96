"""The manifest of a lake in files, `<root>/_tidemark_cuts`: one JSON line a cut;
a cut is visible when it stands there.

Invariants:
1. A cut is announced before a table is written, committed after every table holds it, and before it
   is acknowledged to the changefeed.
2. Cuts follow each other without gap or overlap: each starts where the one before it ended.
3. One writer: whoever has the right (`Lock` on a disk or a mount, `Claims` behind Hadoop's file
   systems). A writer that has lost it can announce and commit nothing.
4. A roll-up is written before the files that it replaces are removed; readers take a cut that they
   see twice once.
Format: docs/format/lake-manifest.md.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord, Shown, records, rolled, shown_by
from pyspark_tidemark.lake.fencing import Claims, Lock, WriteRight
from pyspark_tidemark.lake.files import Files, LocalFiles

DIRECTORY = "_tidemark_cuts"
ROLL_UP_FILES = 256
_TRIES = 3
WHOLE_CUTS, SINGLE_TABLES = "cut", "table"
_T = TypeVar("_T")
_NAME = re.compile(r"(?:(?P<first>\d+)-)?(?P<last>\d+)(?:_(?P<claim>\d+))?\.json")


class Manifest(Protocol):
    """The cuts of one target, in order, and the right to write to it."""

    last: CutRecord | None

    @property
    def commits(self) -> str:
        """What becomes visible in one step: `WHOLE_CUTS`, or `SINGLE_TABLES`, and the manifest says
        which versions of the tables belong together.
        """

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """Say which cut comes next, before anything of it is written; returns where it has to end.

        That is elsewhere than `end_ts` where another job has begun the cut and not committed it;
        not if it is `moved`, as the captures offer the other one no more.

        Raises:
            SourceError: ErrTargetBusy, somebody else has the right to write.
        """

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns.

        Raises:
            SourceError: ErrCutGap, the cut does not start where the last one ended; ErrTargetBusy.
        """

    def note_moved(self, ts: int) -> None:
        """Note that of the tables which change places at the DDL at `ts`,
        only the last steps are left to do.
        """

    def moved_at(self, ts: int) -> bool:
        """Whether that was noted."""

    def cuts(self) -> list[CutRecord]:
        """All kept cuts."""

    def each_cut(self) -> Iterator[CutRecord]:
        """All kept cuts, in order, of which not all are in memory at a time; one that was repaired
        may come twice, at last as it is now.
        """

    def shown(self) -> dict[str, Shown]:
        """What the newest cut shows of each table; few cuts are read for it, however many are
        kept.
        """

    def tidy(self, horizon: datetime) -> None:
        """Now and then: keep it small.

        Cuts from before `horizon` may go, but never the one that shows that time.
        """


class FileManifest:
    """The manifest of a lake that is a directory."""

    commits = SINGLE_TABLES

    def __init__(self, files: Files, right: WriteRight, last: CutRecord | None) -> None:
        self._files = files
        self._right = right
        # An earlier run of the job may have left files that are due.
        self._since_tidied = ROLL_UP_FILES
        self.last = last

    @classmethod
    @contextmanager
    def opened(cls, root: str, changefeed: str) -> Iterator["FileManifest"]:
        """The manifest under a directory of this machine for the block, created if there is none.

        Raises:
            SourceError: ErrTargetUnusable, ErrTargetBusy, ErrTargetForeign or ErrManifestCorrupt.
        """
        directory = Path(root) / DIRECTORY
        with Lock.held(directory) as lock:
            files = LocalFiles(directory)
            yield cls(files, lock, _own(_steady(lambda: _newest(files)), changefeed, root))

    @classmethod
    def taken(
        cls, files: Files, claims: Files, changefeed: str, root: str, *, mode: str | None = None
    ) -> "FileManifest":
        """The manifest in a directory that others can reach, too;
        whoever had it before has lost it.

        Raises:
            SourceError: ErrTargetForeign, ErrTargetMode, ErrManifestCorrupt, or one of the
                directory; then nobody has.
        """
        # Before the takeover, which stops the job that writes: one that may not write stops nobody.
        check_mode(_own(_steady(lambda: _newest(files)), changefeed, root), mode)
        right = Claims(files, claims)
        right.take()
        # Read after the takeover: until then the predecessor could publish one more cut.
        last = _steady(lambda: _newest(files))
        right.inherit(None if last is None else last.end_ts)
        return cls(files, right, last)

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """See `Manifest`."""
        return self._right.announce(start_ts, end_ts, moved=moved)

    def commit(self, record: CutRecord) -> None:
        """See `Manifest`."""
        check_follows(self.last, record)
        self._right.publish(record.end_ts, _text([record]))
        self.last = record

    def note_moved(self, ts: int) -> None:
        """See `Manifest`."""
        self._files.create(_moved(ts), "")

    def moved_at(self, ts: int) -> bool:
        """See `Manifest`."""
        with suppress(FileNotFoundError):
            self._files.read(_moved(ts))
            return True
        return False

    def replace(self, record: CutRecord) -> None:
        """Write the newest cut anew, its tables repaired; durable when it returns."""
        assert self.last is not None
        assert record.end_ts == self.last.end_ts, "a cut is never taken back"
        self._right.republish(record.start_ts, record.end_ts, _text([record]))
        self.last = record

    def cuts(self) -> list[CutRecord]:
        """See `Manifest`."""
        return cuts_in(self._files)

    def each_cut(self) -> Iterator[CutRecord]:
        """See `Manifest`; also while files are rolled up."""
        newest_ts = -1
        for _ in range(_TRIES):
            try:
                for file in _listed(self._files):
                    # A cut may stand in two files: a roll-up that a crash came behind.
                    for cut in _read(self._files, [file]):
                        if cut.end_ts >= newest_ts:
                            newest_ts = cut.end_ts
                            yield cut
            except FileNotFoundError:
                continue
            return
        raise _too_fast()

    def shown(self) -> dict[str, Shown]:
        """See `Manifest`."""

        def read() -> list[CutRecord]:
            listed = _listed(self._files)
            # The first cut of a roll-up names all tables.
            rolled_up = [place for place, file in enumerate(listed) if not file.single]
            return _read(self._files, listed[rolled_up[-1] if rolled_up else 0 :])

        return shown_by(_steady(read))

    def tidy(self, horizon: datetime) -> None:
        """Once in `ROLL_UP_FILES` cuts, roll their files up, and forget whole roll-ups from before
        `horizon`.
        """
        self._since_tidied += 1
        if self._since_tidied >= ROLL_UP_FILES:
            self._since_tidied = 0
            # A predecessor that does not know yet that it was overtaken may do the same.
            with suppress(FileNotFoundError):
                self.roll_up()
                self.forget(horizon)
            self._right.tidy()

    def roll_up(self) -> None:
        """Put the files of many cuts into one, when there are many; a crash repeats it."""
        listed = _listed(self._files)
        single = [file.name for file in listed if file.single]
        if len(single) < ROLL_UP_FILES:
            return
        # Empty files stay: they stand where a predecessor would publish.
        texts = {name: text for name in single if (text := self._files.read(name))}
        chosen = list(texts)[:ROLL_UP_FILES]
        if len(chosen) < ROLL_UP_FILES:
            return
        new = records(line for name in chosen for line in texts[name].splitlines())
        before = self._before(listed, new[0].end_ts)
        name = f"{new[0].end_ts:020d}-{new[-1].end_ts:020d}.json"
        # In this order: readers may see a cut twice, and never miss one.
        self._files.create(name, _text(rolled(before, new)))
        self._files.remove(chosen)

    def _before(self, listed: Sequence["CutFile"], end_ts: int) -> list[CutRecord]:
        """Cuts below `end_ts` that know every table: of the newest roll-up that has some, as its
        first cut names all tables (`rolled`).
        """
        for file in reversed([file for file in listed if not file.single]):
            cuts = [cut for cut in _read(self._files, [file]) if cut.end_ts < end_ts]
            if cuts:
                return cuts
        return []

    def forget(self, before: datetime) -> None:
        """Drop roll-ups of cuts that were all applied before a time, but for the last of these:
        it shows that time.
        """
        gone: list[CutFile] = []
        listed = _listed(self._files)
        for file in (file for file in listed if not file.single):
            if datetime.fromisoformat(_read(self._files, [file])[-1].applied_at) >= before:
                break
            gone.append(file)
        if gone[:-1]:
            self._files.remove([file.name for file in listed if file.last_ts <= gone[-2].last_ts])


@dataclasses.dataclass(frozen=True, order=True)
class CutFile:
    """A file of the manifest, by its name; in order,
    so that of files that show the same cut the newer one is later.
    """

    last_ts: int
    claim: int
    """With which claim it was published, where several drivers can reach the lake; -1 elsewhere."""
    single: bool
    name: str

    @classmethod
    def parse(cls, name: str) -> "CutFile | None":
        """By its name; None if it is no file of cuts."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match["last"]), int(match["claim"] or -1), match["first"] is None, name)


def read_cuts(directory: Path) -> list[CutRecord]:
    """All cuts of a manifest's directory on this machine; see `cuts_in`."""
    return cuts_in(LocalFiles(directory))


def cuts_in(files: Files) -> list[CutRecord]:
    """All cuts of a manifest, also while it is being written.

    Raises:
        SourceError: ErrManifestCorrupt.
    """
    return _steady(lambda: _read(files, _listed(files)))


def check_follows(last: CutRecord | None, record: CutRecord) -> None:
    """Check that a cut starts where the last one ended.

    Raises:
        SourceError: ErrCutGap.
    """
    if last is not None and record.start_ts != last.end_ts:
        raise SourceError(
            "ErrCutGap",
            f"the lake ends at {last.end_ts}, but the next cut starts at {record.start_ts}",
        )


def check_mode(last: CutRecord | None, mode: str | None) -> None:
    """Check that a lake is kept in a mode (None: any): tables of one mode are not those of another.

    Raises:
        SourceError: ErrTargetMode.
    """
    if last is not None and mode is not None and last.mode not in (None, mode):
        raise SourceError(
            "ErrTargetMode",
            f"this lake is kept with --mode {last.mode}, not {mode}: start its job with --mode "
            f"{last.mode}. For the other mode create another changefeed with another --sink-uri, "
            "and copy its tables by `tidemark cli changefeed dumpstart`",
        )


def _listed(files: Files) -> list[CutFile]:
    return sorted(file for name in files.names() if (file := CutFile.parse(name)) is not None)


def _read(files: Files, listed: Sequence[CutFile]) -> list[CutRecord]:
    return records(line for file in listed for line in files.read(file.name).splitlines())


def _moved(ts: int) -> str:
    """The file of a note, hidden from readers; there are as few as there are tables that change
    places.
    """
    return f".moved-{ts:020d}"


def _text(cuts: Sequence[CutRecord]) -> str:
    return "".join(cut.to_json() + "\n" for cut in cuts)


def _steady(read: Callable[[], _T]) -> _T:
    """The result of `read`, called again if files were rolled up amid it."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return read()
    raise _too_fast()


def _too_fast() -> SourceError:
    return SourceError(
        "ErrManifestCorrupt", "the manifest changes too fast to be read; try again", retryable=True
    )


def _newest(files: Files) -> CutRecord | None:
    """The newest cut: the last line of the newest file, its own before that of a roll-up."""
    for file in reversed(_listed(files)):
        cuts = _read(files, [file])
        if cuts:
            return cuts[-1]
        # One with a claim is empty where a successor took the cut over (`fencing`).
        if file.claim < 0:
            raise SourceError(
                "ErrManifestCorrupt",
                f"{file.name} is empty; remove it if the cut before is the newest",
            )
    return None


def _own(last: CutRecord | None, changefeed: str, root: str) -> CutRecord | None:
    if last is not None and last.changefeed != changefeed:
        raise SourceError(
            "ErrTargetForeign",
            f"{root} is the lake of changefeed {last.changefeed!r}; choose another --target",
        )
    return last
