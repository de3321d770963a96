"""The right to write a lake in files, which one driver has at a time: `Lock` on a local or mounted
disk, `Claims` where several drivers can reach the lake.

`Lock` is a flock of the manifest's directory; the file `.begun` has the cut that was announced.

`Claims` need no clock and no lease. They are numbered files, `.claims/<number>`, each created
exclusively and never changed. A driver creates one when it takes the lake over, and one for every
cut before it writes a table, with the cut's end. It publishes the cut under a name that ends with
the claim's number. So a driver's next step is always to create one of two files: the next claim, or
the file of the cut that it has claimed. A driver that takes over creates both of them (the cut's
with no content). From then on only it can claim or publish: the former driver, however slow, finds
its next file existing, and fails.

Invariants:
1. Claims have no gap: the next one is created by the driver of the newest one, or by a driver that
   takes over.
2. A cut that was announced and not published is announced again with the same end. So both drivers
   write the same changes to a table, and the table's fence accepts one of them. With an earlier
   end, a table that has the cut already would be ahead of the others.
3. A claim that took over is never removed: it blocks the number with which the former driver would
   go on.
Design, and what this does not fence: docs/design/0028-remote-lakes.md.
"""

import dataclasses
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.files import Files, LocalFiles

CLAIMS = ".claims"
BEGUN = ".begun"
FORMAT = 1


class WriteRight(Protocol):
    """The right to write a lake in files."""

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """See `manifest.Manifest`."""

    def publish(self, end_ts: int, text: str) -> None:
        """Write the file of the announced cut."""

    def republish(self, start_ts: int, end_ts: int, text: str) -> None:
        """Write the file of the newest cut anew."""

    def tidy(self) -> None:
        """Remove files that are needed no more."""


class Lock:
    """The flock of a manifest's directory, held within `Lock.held`."""

    def __init__(self, files: LocalFiles) -> None:
        self._files = files
        self._begun: tuple[int, int] | None = None

    @classmethod
    @contextmanager
    def held(cls, directory: Path) -> Iterator["Lock"]:
        """The lock for the block; the directory is made if there is none.

        Raises:
            SourceError: ErrTargetUnusable, ErrTargetBusy.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise SourceError(
                "ErrTargetUnusable", f"cannot write to {directory}: {err.strerror}"
            ) from None
        try:
            _lock(descriptor, directory)
            # A driver with claims takes no lock, so both could write the lake at the same time.
            if (directory / CLAIMS).exists():
                raise SourceError(
                    "ErrTargetUnusable",
                    f"{directory.parent} is written through Hadoop, as FORMAT+SCHEME://…; go on "
                    "like that",
                )
            yield cls(LocalFiles(directory))
        finally:
            os.close(descriptor)

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """See `WriteRight`; durable when it returns.

        Raises:
            SourceError: ErrManifestCorrupt; ErrTargetFull.
        """
        begun = self._begun or self._read_begun()
        if begun is not None and begun[0] == start_ts and not moved:
            end_ts = begun[1]
        if begun != (start_ts, end_ts):
            cut = {"format": FORMAT, "start_ts": start_ts, "end_ts": end_ts}
            self._files.replace(BEGUN, json.dumps(cut) + "\n")
        self._begun = start_ts, end_ts
        return end_ts

    def _read_begun(self) -> tuple[int, int] | None:
        """The cut that was begun last, by whoever had the lock then."""
        try:
            text = self._files.read(BEGUN)
        except FileNotFoundError:
            return None
        try:
            cut: dict[str, Any] = json.loads(text)
            if cut["format"] == FORMAT:
                return int(cut["start_ts"]), int(cut["end_ts"])
        except (ValueError, KeyError, TypeError):
            pass
        raise SourceError(
            "ErrManifestCorrupt",
            f"{self._files.directory / BEGUN} cannot be read: {text[:80]!r}; if no job of a later "
            "version has written it, remove it",
        )

    def publish(self, end_ts: int, text: str) -> None:
        """See `WriteRight`."""
        self._files.replace(f"{end_ts:020d}.json", text)

    def republish(self, start_ts: int, end_ts: int, text: str) -> None:  # noqa: ARG002 - see `announce`
        """See `WriteRight`."""
        self.publish(end_ts, text)

    def tidy(self) -> None:
        """Do nothing: a lock leaves no files behind."""


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SourceError(
            "ErrTargetBusy", f"another job writes to {directory.parent}; stop it first"
        ) from None


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim: its driver's right to write, and the newest cut that was claimed."""

    number: int
    driver: str
    host: str
    taken: int
    """The number of the claim with which its driver took over."""
    start_ts: int | None = None
    end_ts: int | None = None
    cut: int | None = None
    """The claim under whose number that cut is published; None: no cut was claimed yet."""

    def to_json(self) -> str:
        """The document, in one line."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Claim":
        """Read a document.

        Raises:
            SourceError: ErrManifestCorrupt.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise SourceError(
                    "ErrManifestCorrupt", f"a claim has another format than {FORMAT}: {text[:80]}"
                )
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise SourceError(
                "ErrManifestCorrupt", f"a claim cannot be read: {err} in {text[:80]!r}"
            ) from None

    @property
    def published_as(self) -> str | None:
        """The file that publishes the cut."""
        return None if self.end_ts is None or self.cut is None else cut_name(self.end_ts, self.cut)


class Claims:
    """The claims of one lake, as one driver makes them."""

    def __init__(self, cuts: Files, claims: Files) -> None:
        self._cuts = cuts
        self._claims = claims
        self._driver = uuid.uuid4().hex
        self._host = socket.gethostname()
        self._mine: Claim | None = None
        self._unpublished = False

    def take(self) -> None:
        """Take the lake over from whoever had it; from when it returns,
        nobody else can claim or publish.

        Raises:
            SourceError: ErrTargetBusy, somebody was faster.
        """
        while True:
            numbers = [int(name) for name in self._claims.names()]
            try:
                last = Claim.from_json(self._claims.read(_name(numbers[-1]))) if numbers else None
            except FileNotFoundError:
                # Somebody else is taking over, and has removed it.
                continue
            number = 1 if last is None else last.number + 1
            begun = (None, None, None) if last is None else (last.start_ts, last.end_ts, last.cut)
            mine = Claim(number, self._driver, self._host, number, *begun)
            if self._create(mine):
                break
        # If this driver was slow after it read the claims, the number that it has created may have
        # been created and removed by others before: then a newer driver has the lake.
        if int(self._claims.names()[-1]) > number:
            raise self.taken_over()
        # The other file that the former driver could create next; from here on it can do nothing.
        if mine.published_as is not None:
            self._cuts.create(mine.published_as, "")
        if last is not None:
            self._claims.remove([_name(old) for old in numbers if last.taken < old <= last.number])

    def inherit(self, newest_ts: int | None) -> None:
        """Note whether the newest claimed cut was published, by the end of the newest published
        cut, which was read after `take`.
        """
        mine = self._current()
        self._unpublished = mine.end_ts is not None and (
            newest_ts is None or newest_ts < mine.end_ts
        )

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """Claim the cut that starts at `start_ts`; returns where it has to end: there,
        or where it was claimed before.

        A `moved` cut ends at `end_ts`, wherever it was claimed to end: the tables' fences refuse a
        driver that still writes the former one.

        Raises:
            SourceError: ErrTargetBusy, somebody has taken the lake over; ErrCutGap.
        """
        last = self._current()
        if self._unpublished:
            if last.start_ts != start_ts:
                raise SourceError(
                    "ErrCutGap",
                    f"a job has begun a cut at {last.start_ts}, and the next one starts at "
                    f"{start_ts}: "
                    "the changefeed's checkpoint was moved; start with a new changefeed and target",
                )
            assert last.end_ts is not None
            end_ts = end_ts if moved else last.end_ts
        number = last.number + 1
        claim = dataclasses.replace(
            last, number=number, start_ts=start_ts, end_ts=end_ts, cut=number
        )
        if not self._create(claim):
            raise self.taken_over()
        self._unpublished = True
        return end_ts

    def publish(self, end_ts: int, text: str) -> None:
        """Make the claimed cut visible, which ends there; durable when it returns.

        Raises:
            SourceError: ErrTargetBusy, somebody has taken the lake over.
        """
        mine = self._current()
        assert (mine.end_ts, mine.cut) == (end_ts, mine.number), (
            "a cut is claimed before it is published"
        )
        assert mine.published_as is not None
        if not created(self._cuts, mine.published_as, text):
            raise self.taken_over()
        self._unpublished = False

    def republish(self, start_ts: int, end_ts: int, text: str) -> None:
        """Write the newest cut anew.

        Raises:
            SourceError: ErrTargetBusy; ErrRepairUnsupported, a later cut was begun.
        """
        if self._unpublished:
            raise SourceError(
                "ErrRepairUnsupported",
                "a job has begun a cut and not ended it: start the lake's job, stop it when it "
                "has applied a cut, and try again",
            )
        self.announce(start_ts, end_ts)
        self.publish(end_ts, text)

    def tidy(self) -> None:
        """Remove the claims of this driver that are not needed: those between its first and its
        last.
        """
        mine = self._current()
        old = [int(name) for name in self._claims.names()]
        self._claims.remove([_name(number) for number in old if mine.taken < number < mine.number])

    def taken_over(self) -> SourceError:
        """The error for a driver that is no longer the newest."""
        return SourceError(
            "ErrTargetBusy",
            "another job has taken this lake over, and this one has stopped; the newest one goes "
            "on: see that only one is started",
        )

    def _create(self, claim: Claim) -> bool:
        """Create a claim's file; False if another driver has created that number."""
        if not created(self._claims, _name(claim.number), claim.to_json()):
            return False
        self._mine = claim
        return True

    def _current(self) -> Claim:
        assert self._mine is not None, "the lake is taken first"
        return self._mine


def check_idle(claims: Files, seconds: float) -> None:
    """Check that nobody claims anything for `seconds`.

    A courtesy to a job that runs: the claims themselves keep the lake whole.

    Raises:
        SourceError: ErrTargetBusy.
    """
    before = claims.names()[-1:] if seconds else []
    time.sleep(seconds)
    if seconds and claims.names()[-1:] != before:
        raise SourceError("ErrTargetBusy", "a job writes to this lake; stop it first")


def created(files: Files, name: str, text: str) -> bool:
    """Create a file; also true if it was created by a try whose answer was lost.

    `text` is this driver's alone.
    """
    if files.create(name, text):
        return True
    try:
        return files.read(name) == text
    except FileNotFoundError:
        # Somebody else's, who has ended and whose claims were removed.
        return False


def cut_name(end_ts: int, claim: int) -> str:
    """The file of a cut that was published under a claim."""
    return f"{end_ts:020d}_{claim:012d}.json"


def _name(number: int) -> str:
    return f"{number:012d}"
