"""The newest version of an Iceberg table in a directory of this machine, made durable.

Iceberg hands its files to the system, which writes them within half a minute. A cut's row in the
manifest is on disk at once, and what it says is acknowledged, so after a power cut the tables would
be older than the manifest. Data files are synced where they are written (`files`); here it is
Iceberg's own: the table's metadata, its list of manifests, and the manifests of the newest commit.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from pyspark_tidemark.lake.files import sync, sync_place, sync_with_checksum

_UUID_CHARACTERS: Final = 36
_GAP: Final = 16
"""Manifests are numbered; those that were merged while the commit was made are gone again."""


def settle(table: Path, manifest_list: Path | None) -> None:
    """Make the newest version of the table in a directory durable; `manifest_list` is that of its
    newest snapshot, if it has one.
    """
    metadata = table / "metadata"
    hint = metadata / "version-hint.text"
    files = [hint, _newest(metadata, hint)]
    if manifest_list is not None:
        files += [manifest_list, *_manifests(manifest_list)]
    for path in files:
        sync_with_checksum(path)
    # A new table's directories have new names, too: its own, and its database's.
    for directory in (metadata, table / "data", table):
        with suppress(FileNotFoundError):  # no rows yet
            sync(directory)
    sync_place(str(table))


def _newest(metadata: Path, hint: Path) -> Path:
    """The metadata of the newest version; the hint may be missing, as Iceberg looks then, too."""
    with suppress(FileNotFoundError, ValueError):
        hinted = metadata / f"v{int(hint.read_text(encoding='utf-8'))}.metadata.json"
        if hinted.exists():
            return hinted
    # With another compression a name is `vN.gz.metadata.json`.
    return max(metadata.glob("v*.metadata.json"), key=lambda path: int(path.name[1:].split(".")[0]))


def _manifests(manifest_list: Path) -> Iterator[Path]:
    """The manifests that were written with a list: `snap-ID-ATTEMPT-UUID.avro` and
    `UUID-mNUMBER.avro`.
    """
    commit, missing = manifest_list.stem[-_UUID_CHARACTERS:], 0
    for number in count():
        path = manifest_list.with_name(f"{commit}-m{number}.avro")
        missing = 0 if path.exists() else missing + 1
        if missing > _GAP:
            return
        if not missing:
            yield path
