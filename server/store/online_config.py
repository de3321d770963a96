"""Settings that change while the store runs, under TiKV's names; what was set is kept,
and goes before the flags.

`tikv-ctl modify-tikv-config -m server -n gc.max_write_bytes_per_sec -v 10MB` does it, as does
grpcurl on debugpb.Debug.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import structlog

from storage.kv import Reader
from storage.model.errors import InvalidError
from storage.mvcc.engine import Draft
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.record import META_COLUMN, encode_document, reading_document

SETTINGS_KEY: Final = META_COLUMN + b"settings"
_FORMAT: Final = 1
_UNITS: Final = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_log = structlog.get_logger(__name__)


class UnknownSettingError(InvalidError):
    """No such setting can be changed online."""

    code = "ErrUnknownSetting"


class BadSizeError(InvalidError):
    """A size that nobody can read."""

    code = "ErrBadSize"


def parse_size(text: str) -> int:
    """Bytes of TiKV's readable sizes: `10MB` and `10MiB` are both 10 * 2^20.

    Raises:
        BadSizeError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadSizeError(
            f"{text!r} is no size; write bytes, or a number with KB, MB or GB, such as 10MB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


class OnlineConfig:
    """Sizes by name, and who follows each."""

    def __init__(
        self, reader: Reader, group: GroupCommit, followers: Mapping[str, Callable[[int], None]]
    ) -> None:
        """`followers` are called at once with what was set before this start."""
        self._group = group
        self._followers = followers
        self._set = _stored(reader)
        for name, value in self._set.items():
            if name in followers:
                followers[name](value)

    async def set(self, name: str, text: str) -> int:
        """Change one setting; durable and in force when it returns.

        Raises:
            UnknownSettingError, BadSizeError: the request is wrong; nothing changed.
        """
        setting = name.strip().replace("_", "-")
        if setting not in self._followers:
            raise UnknownSettingError(
                f"{name!r} cannot be changed online; these can: "
                f"{', '.join(sorted(self._followers))}"
            )
        value = parse_size(text)
        self._set[setting] = value
        await self._group.submit([partial(_put, data=encode_document(_FORMAT, sizes=self._set))])
        self._followers[setting](value)
        _log.info("setting changed", name=setting, value=value)
        return value


def _put(draft: Draft, data: bytes) -> None:
    draft.put(SETTINGS_KEY, data)


def _stored(reader: Reader) -> dict[str, int]:
    data = reader.get(SETTINGS_KEY)
    if data is None:
        return {}
    with reading_document(data, _FORMAT, "the record of settings") as document:
        return {str(name): int(value) for name, value in document["sizes"].items()}
