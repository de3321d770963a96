"""Masks: what readers are shown instead of a column's values. Pure.

    mask.hash.SHA-256       a text of 64 hexadecimal digits, by HMAC-SHA-256 with a secret salt
    mask.with.N.chars       N asterisks, whatever the value is
    truncate.to.N.chars     the first N characters of a text

The names are those of Debezium's options (`column.mask.hash.v2.…`, `column.mask.with.…`,
`column.truncate.to.…`). Null stays null. The column becomes a text.

1. Two values have one hash only if they are one value, so a hash may take the place of a key. The
   two others show different values as one: rows of a key would run into one another.
2. Equal values have equal hashes, in every table and at every time, as long as the salt stays. What
   is hashed is the value's text: an integer's or decimal's digits, a text's UTF-8, the bytes of a
   binary value, a date or time as ISO 8601 has it with six digits of a second.
3. Whoever knows the salt can try values one after the other. So the salt is a secret.
"""

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.json_text import time_texts

from storage.model.errors import InvalidError

HASH: Final = "mask.hash.SHA-256"
LENGTH_MAX: Final = 65_535
_LENGTH: Final = re.compile(r"(mask\.with|truncate\.to)\.(\d{1,6})\.chars", re.IGNORECASE)
_FORMS: Final = f"{HASH}, mask.with.N.chars and truncate.to.N.chars"
Secret: TypeAlias = Callable[[], bytes]
"""Gives the salt; raises InvalidError or UnavailableError where it cannot be had."""


class MaskError(InvalidError):
    """A column cannot be masked like that."""

    code = "ErrMaskRuleInvalid"


def _no_salt() -> bytes:
    raise MaskError(f"{HASH} needs a salt: name a file with one by --salt-file")


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one column."""

    text: str
    """As it is written in a rule."""
    length: int | None = None
    """Of asterisks, or of the text that is left; None: it is hashed."""
    default: str | None = field(default=None, compare=False)
    """What rows are shown that are older than the column, as `shown` gives it."""
    salt: Secret = field(default=_no_salt, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, *, default: str | None = None, salt: Secret | None = None) -> "Mask":
        """Read one; raises MaskError."""
        if text.lower() == HASH.lower():
            return cls(HASH, None, default, salt or _no_salt)
        match = _LENGTH.fullmatch(text)
        if match is None:
            raise MaskError(f"{text!r} is no mask: there are {_FORMS}")
        length = int(match[2])
        if length > LENGTH_MAX:
            raise MaskError(f"{text!r}: a mask has at most {LENGTH_MAX} characters")
        mask = cls(f"{match[1].lower()}.{length}.chars", length, default)
        if mask.truncates and not length:
            raise MaskError(f"{text!r} leaves nothing of a text; write mask.with.0.chars")
        return mask

    @property
    def is_hash(self) -> bool:
        """Whether different values stay different ones."""
        return self.length is None

    @property
    def truncates(self) -> bool:
        """Whether a part of the value is shown."""
        return self.text.startswith("truncate")

    def check(self, column: str, kind: pa.DataType, *, is_key: bool) -> None:
        """See that it can be put on a column.

        Raises:
            MaskError: it shows keys as one, or is not made for such values.
        """
        if is_key and not self.is_hash:
            raise MaskError(
                f"{column} tells rows apart, which {self.text} would show as one row; a key may "
                f"be masked by {HASH}"
            )
        if self.truncates and not pa.types.is_string(kind):
            raise MaskError(f"{column} is no text but {kind}, which {self.text} cannot shorten")
        if self.is_hash and not _has_one_text(kind):
            # How many digits of a floating-point number are written is each library's choice.
            raise MaskError(
                f"{column} is {kind}, whose values have no one text to be hashed: leave it out by "
                "!COLUMN of --columns, or mask it by mask.with.N.chars"
            )

    def shown(self, values: pa.Array) -> pa.Array:
        """The masked values, as texts; raises what `salt` raises."""
        if self.is_hash:
            return _hashed(values, self.salt)
        if self.truncates:
            return pc.utf8_slice_codeunits(values, 0, self.length)
        stars = pa.scalar("*" * (self.length or 0), pa.string())
        return pc.if_else(values.is_valid(), stars, pa.scalar(None, pa.string()))


def _hashed(values: pa.Array, salt: Secret) -> pa.Array:
    # The same values come again and again; each is hashed once a batch.
    distinct = _texts(values).dictionary_encode()
    secret = salt() if len(distinct.dictionary) else b""
    hashes = [hmac.digest(secret, text, "sha256").hex() for text in distinct.dictionary.to_pylist()]
    return pa.array(hashes, pa.string()).take(distinct.indices)


def _texts(values: pa.Array) -> pa.Array:
    """The bytes of each value that are hashed."""
    if pa.types.is_binary(values.type):
        return values
    is_time = pa.types.is_timestamp(values.type)
    return (time_texts(values) if is_time else values.cast(pa.string())).cast(pa.binary())


def _has_one_text(kind: pa.DataType) -> bool:
    checks = (
        pa.types.is_string,
        pa.types.is_binary,
        pa.types.is_integer,
        pa.types.is_decimal,
        pa.types.is_date32,
        pa.types.is_timestamp,
    )
    return any(check(kind) for check in checks)
