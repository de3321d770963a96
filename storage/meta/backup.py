"""A backup of some of the metadata's pairs, as lines of JSON. Pure.

    {"format": "tidemark-metadata", "version": 1, "time": "…", "cluster_id": 7,
     "prefix": "/tidemark/", "pairs": 2}
    {"key": "<base64>", "value": "<base64>"}
    {"key": "<base64>", "value": "<base64>"}
    {"crc32c": 305419896}

The first line is broken here, not in the file.
Pairs are those of one moment, in the order of their keys. The last line is the CRC-32C of all bytes
before it: a file that was cut off, or changed, is refused. `cluster_id` came later: files without
it are of a cluster that is not known.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import google_crc32c

from storage.model.errors import CorruptError

FORMAT: Final = "tidemark-metadata"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup's content, and its time: RFC 3339."""

    prefix: bytes
    time: str
    pairs: Sequence[tuple[bytes, bytes]]
    cluster_id: int = 0
    """PD's id of the cluster that they are of; 0: not known."""

    def to_bytes(self) -> bytes:
        """The file."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "time": self.time,
            "cluster_id": self.cluster_id,
            "prefix": self.prefix.decode(),
            "pairs": len(self.pairs),
        }
        body = _lines(
            [head, *({"key": _text(key), "value": _text(value)} for key, value in self.pairs)]
        )
        return body + _lines([{"crc32c": google_crc32c.value(body)}])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Backup":
        """Read a file.

        Raises:
            CorruptError: it is none, of a later version, cut off, or changed.
        """
        body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
        try:
            if json.loads(last) != {"crc32c": google_crc32c.value(body + b"\n")}:
                raise CorruptError("the backup of the metadata is damaged: its checksum is another")
            head, *documents = map(json.loads, body.splitlines())
            if (head["format"], head["version"]) != (FORMAT, VERSION):
                raise CorruptError(
                    f"the backup of the metadata is of the format {head['format']!r}, version "
                    f"{head['version']!r}; this version reads {FORMAT!r}, {VERSION}"
                )
            pairs = [(_bytes(each["key"]), _bytes(each["value"])) for each in documents]
            cluster_id = int(head.get("cluster_id", 0))
            return cls(str(head["prefix"]).encode(), str(head["time"]), pairs, cluster_id)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CorruptError(
                "this is no backup of Tidemark's metadata, or it is cut off"
            ) from None


def _lines(documents: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in documents)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as err:
        raise ValueError(str(err)) from None
