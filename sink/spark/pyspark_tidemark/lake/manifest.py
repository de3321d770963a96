"""The manifest of a lake: its list of committed cuts, which makes a cut of all tables visible.

`Manifest` is the protocol; `FileManifest` keeps a lake's cuts in files under
`<root>/_tidemark_cuts`, one JSON line a cut. `iceberg.manifest`, `databases.manifest` and
`kafka.manifest` have those of other targets.

Invariants:
1. A cut is announced before a table is written, committed after every table has it, and
   acknowledged to the changefeed after that.
2. Cuts follow each other without gap or overlap: each starts where the one before it ended.
3. One writer, the job that has the right to write (`Lock` on a disk or a mount, `Claims` behind
   Hadoop's file systems). A job that has lost it can neither announce nor commit.
4. A roll-up (one file with the lines of many) is written before the files that it replaces are
   removed; a reader that sees a cut in both counts it once.
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
        """Record which cut comes next, before anything of it is written; returns where it has to
        end. Durable when it returns.

        The end differs from `end_ts` where an earlier job announced a cut from `start_ts` and did
        not commit it: tables may have it up to there. With `moved` that end is given up, since the
        captures do not offer it any more.

        Raises:
            SourceError: ErrTargetBusy, somebody else has the right to write.
        """

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns.

        Raises:
            SourceError: ErrCutGap, the cut does not start where the last one ended; ErrTargetBusy.
        """

    def note_moved(self, ts: int) -> None:
        """Note that of the renames of tables that swap names at the DDL at `ts`, only those from
        temporary names are left (`Barrier._rename`). Durable when it returns.
        """

    def moved_at(self, ts: int) -> bool:
        """Whether `note_moved` was called for that DDL, by this job or an earlier one."""

    def cuts(self) -> list[CutRecord]:
        """All kept cuts."""

    def each_cut(self) -> Iterator[CutRecord]:
        """All kept cuts in order, without all of them in memory; one that was repaired may come
        twice, the repaired record last.
        """

    def shown(self) -> dict[str, Shown]:
        """The version of each table at the newest cut; reads few cuts, however many are kept."""

    def tidy(self, horizon: datetime) -> None:
        """Keep the manifest small; call it after each cut, most calls do nothing.

        Cuts that were applied before `horizon` may be dropped, but for the last of them, which is
        what readers see at that time.
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
        """The manifest in a directory that other machines can reach, too; takes the right to write
        away from the job that has it.

        Raises:
            SourceError: ErrTargetForeign, ErrTargetMode, ErrManifestCorrupt, or one of the
                directory. The first three leave the right where it is.
        """
        # Before the takeover, which stops the job that writes: a job of another changefeed or mode
        # must not stop it.
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
        # Empty files stay: each takes the name under which a predecessor would publish.
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
        """Drop roll-ups of cuts that were all applied before a time, but for the last of them,
        which has the cut that readers see at that time.
        """
        outdated: list[CutFile] = []
        listed = _listed(self._files)
        for file in (file for file in listed if not file.single):
            if datetime.fromisoformat(_read(self._files, [file])[-1].applied_at) >= before:
                break
            outdated.append(file)
        if outdated[:-1]:
            last_ts = outdated[-2].last_ts
            self._files.remove([file.name for file in listed if file.last_ts <= last_ts])


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
    """The file that notes `Manifest.note_moved`, hidden from readers; never removed, as few DDLs
    swap names.
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
