"""`tidemark cli metadata backup|restore`: the metadata of the changefeeds as a file.

A backup has the records of changefeeds, their checkpoints, schema histories and positions in logs,
of one moment. It is restored into metadata that have none of these records, while no capture owns
the changefeeds. Lakes may be further than a restored checkpoint: their jobs go on where the lake
ends. A changefeed of the cluster's own tables is restored into this cluster only: in another one
its timestamps and table ids mean something else.
"""

import argparse
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from server.changefeed import keys
from server.changefeed.captures import OtherClusterError
from server.changefeed.source import KINDS, scheme_of
from server.cli.arguments import add_yes, confirm
from server.cli.output import Output
from server.cli.remote import Remote
from storage.meta.backup import Backup
from storage.meta.meta import Meta, Put
from storage.model.errors import ConflictError, CorruptError, InvalidError
from storage.whole_file import create_private_file

_NAMES_SHOWN: Final = 20


class BackupFileError(InvalidError):
    """The file cannot be read or written."""

    code = "ErrBackupFileInvalid"


class MetadataNotEmptyError(ConflictError):
    """A restore would mix two states of the cluster."""

    code = "ErrMetadataNotEmpty"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `metadata`."""
    verbs = groups.add_parser("metadata").add_subparsers(required=True, metavar="VERB")
    backup = verbs.add_parser(
        "backup", help="write the records of all changefeeds into a file", parents=[shared]
    )
    backup.add_argument("file", metavar="FILE", help="the new file, which must not exist yet")
    backup.set_defaults(command=backup_metadata)
    restore = verbs.add_parser(
        "restore",
        help="restore a backup into empty metadata; stop all captures first",
        parents=[shared],
    )
    restore.add_argument("file", metavar="FILE", help="the backup's file")
    restore.add_argument(
        "--dry-run", action="store_true", help="change nothing; show what the backup holds"
    )
    restore.add_argument(
        *("-c", "--changefeed-id"),
        action="append",
        default=[],
        help="restore this changefeed only; repeat it for each (default: all)",
    )
    add_yes(restore)
    restore.set_defaults(command=restore_metadata)


async def backup_metadata(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Write a backup.

    Raises:
        BackupFileError: the file is there, or cannot be written.
    """
    async with remote.metadata() as meta:
        # One request, so that all is of one moment.
        pairs = [(each.key, each.value) for each in await meta.get_prefix(keys.CHANGEFEEDS)]
    async with remote.coordinator() as pd:
        cluster_id = pd.cluster_id
    time = datetime.now(UTC).isoformat(timespec="seconds")
    backup = Backup(keys.CHANGEFEEDS, time, pairs, cluster_id)
    _write(Path(arguments.file), backup.to_bytes())
    return Output({"file": arguments.file} | _summary(backup))


async def restore_metadata(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Restore a backup.

    Raises:
        BackupFileError: it cannot be read, or is damaged.
        MetadataNotEmptyError: there are records that it does not have, or a capture owns them.
        OtherClusterError: it has changefeeds of the tables of another cluster.
    """
    backup = _read(Path(arguments.file))
    if arguments.changefeed_id:
        backup = chosen(backup, arguments.changefeed_id)
    if arguments.dry_run:
        return Output({"dry_run": True} | _summary(backup))
    async with remote.coordinator() as pd:
        check_cluster(backup, pd.cluster_id)
    async with remote.metadata() as meta:
        await _check_empty(meta, backup)
        if not arguments.yes:
            confirm(
                f"Restore {len(backup.pairs)} records of {backup.time} into {await remote.coordinators()}?"
            )
        # Records of changefeeds come last: one without its history would be taken for damaged.
        ordered = sorted(backup.pairs, key=lambda pair: pair[0].startswith(keys.INFOS))
        await meta.write_all(Put(key, value) for key, value in ordered)
    return Output({"restored": True} | _summary(backup))


def chosen(backup: Backup, changefeeds: Collection[str]) -> Backup:
    """The same backup with the records of these changefeeds only.

    Raises:
        BackupFileError: it does not have one of them.
    """
    there = _sources(backup)
    missing = sorted(set(changefeeds) - there.keys())
    if missing:
        raise BackupFileError(
            f"the backup has no changefeed {', '.join(missing)}; it has {', '.join(there) or 'none'}"
        )
    pairs = [(key, value) for key, value in backup.pairs if _changefeed_of(key) in changefeeds]
    return replace(backup, pairs=pairs)


def check_cluster(backup: Backup, cluster_id: int) -> None:
    """Refuse changefeeds of another cluster's own tables.

    Raises:
        OtherClusterError: the backup has some.
    """
    if not backup.cluster_id or backup.cluster_id == cluster_id:
        return
    sources = _sources(backup)
    kinds = {name: KINDS.get(scheme_of(uri)) for name, uri in sources.items()}
    bound = [name for name, kind in kinds.items() if kind is None or kind.of_cluster]
    if bound:
        free = "".join(f" -c {name}" for name in kinds if name not in bound)
        advice = f", and restore the others, with{free}" if free else ""
        raise OtherClusterError(
            f"the backup is of the cluster {backup.cluster_id}, and this is the cluster {cluster_id}: "
            f"{', '.join(bound)} would take timestamps and tables of one for those of the other. "
            f"Create them anew{advice}"
        )


def _changefeed_of(key: bytes) -> str:
    """The changefeed whose record a key names: `…/KIND/ID` or `…/KIND/ID/…`."""
    return key.removeprefix(keys.CHANGEFEEDS).split(b"/")[1].decode(errors="replace")


def _sources(backup: Backup) -> dict[str, str]:
    """The source URIs of all changefeeds that the backup has, by their ids."""
    infos = {
        _changefeed_of(key): json.loads(value)
        for key, value in backup.pairs
        if key.startswith(keys.INFOS)
    }
    return {name: str(info.get("source_uri", "")) for name, info in sorted(infos.items())}


async def _check_empty(meta: Meta, backup: Backup) -> None:
    if await meta.get(keys.OWNER) is not None:
        raise MetadataNotEmptyError(
            "a capture owns the changefeeds, and would not see what is restored: stop all captures, "
            "and try again"
        )
    # What an earlier restore has brought before it was interrupted is the same.
    restored = dict(backup.pairs)
    others = [
        each.key.decode(errors="replace")
        for each in await meta.get_prefix(backup.prefix)
        if restored.get(each.key) != each.value
    ]
    if others:
        shown = ", ".join(others[:_NAMES_SHOWN])
        raise MetadataNotEmptyError(
            f"there are {len(others)} records that the backup does not have, or has otherwise: "
            f"{shown}. Remove the changefeeds, or restore into another etcd"
        )


def _summary(backup: Backup) -> dict[str, Any]:
    kinds = Counter(
        key.removeprefix(keys.CHANGEFEEDS).partition(b"/")[0].decode(errors="replace")
        for key, _ in backup.pairs
    )
    return {
        "time": backup.time,
        "cluster_id": backup.cluster_id,
        "changefeeds": list(_sources(backup)),
        "records": dict(sorted(kinds.items())),
    }


def _read(path: Path) -> Backup:
    try:
        return Backup.from_bytes(path.read_bytes())
    except OSError as err:
        raise BackupFileError(f"cannot read {path}: {err.strerror}") from err
    except CorruptError as err:
        raise BackupFileError(f"cannot use {path}: {err.message}") from None


def _write(path: Path, data: bytes) -> None:
    try:
        create_private_file(path, data)
    except FileExistsError:
        raise BackupFileError(f"{path} is there already; take another name") from None
    except OSError as err:
        raise BackupFileError(f"cannot write {path}: {err.strerror}") from err
