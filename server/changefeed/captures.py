"""The captures of a cluster as the metadata has them: one record each, which lives as long as the
capture's lease, and the key that names the owner of the changefeeds.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

from tidemarkpb.v1 import worker_pb2

from server.changefeed import keys
from server.version import VERSION
from storage.meta.meta import Meta
from storage.model.errors import CorruptError, InvalidError

_CONTRACT: Final = hashlib.sha256(worker_pb2.DESCRIPTOR.serialized_pb).hexdigest()[:8]
"""Tells the contract that the captures of a build have with each other: builds of one version may
have different ones.
"""


class OtherClusterError(InvalidError):
    """Two things that were named, or a backup and the place it goes to, are of different
    clusters.
    """

    code = "ErrOtherCluster"

    @classmethod
    def of_capture(cls, capture: str, coordinator: str, option: str) -> Self:
        """No capture at the address `capture` is registered at `coordinator`; `option` names
        coordinators.
        """
        return cls(
            f"the capture at {capture} does not belong to the cluster of the coordinator at "
            f"{coordinator}; name the capture's coordinator with {option}"
        )


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One capture as the metadata holds it."""

    id: str
    address: str
    flight_address: str
    version: str = f"{VERSION}+{_CONTRACT}"
    started: str = ""
    """The time at which it started, RFC 3339; empty for captures of earlier versions."""

    def to_json(self) -> bytes:
        """The record's value in the metadata."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read a record; members that a later version has are left out.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            texts = {member.name: doc[member.name] for member in fields(cls) if member.name in doc}
            texts.setdefault("version", "")  # not this one's
            return cls(**{name: str(text) for name, text in texts.items()})
        except (ValueError, TypeError, KeyError, RecursionError) as err:
            raise CorruptError(
                f"a capture's record in the metadata cannot be read: {err!r}"
            ) from err


@dataclass(frozen=True, slots=True)
class LivingCaptures:
    """All captures whose lease lives."""

    records: list[CaptureRecord]
    unreadable: dict[str, CorruptError]
    """Captures whose record cannot be read, by the id in its key."""
    owner: str
    """The id of the capture that owns the changefeeds; empty: none does at this moment."""


async def living_captures(meta: Meta) -> LivingCaptures:
    """Read the records of all captures, and who owns the changefeeds."""
    owner = await meta.get(keys.OWNER)
    records: list[CaptureRecord] = []
    unreadable: dict[str, CorruptError] = {}
    for pair in await meta.get_prefix(keys.CAPTURES):
        try:
            records.append(CaptureRecord.from_json(pair.value))
        except CorruptError as err:
            unreadable[pair.key.removeprefix(keys.CAPTURES).decode(errors="replace")] = err
    return LivingCaptures(
        records, unreadable, owner.value.decode(errors="replace") if owner else ""
    )


async def registered_captures(meta: Meta) -> dict[str, str]:
    """Return the addresses of the registered captures by their ids, the owner's first; without
    those whose record cannot be read.
    """
    captures = await living_captures(meta)
    owner_first = sorted(captures.records, key=lambda record: record.id != captures.owner)
    return {record.id: record.address for record in owner_first}
