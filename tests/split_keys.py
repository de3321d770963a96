"""Where the tests' clusters begin with a new region: at two tables, and inside the first."""

from typing import Final

from storage.codec import encode_i64
from storage.tidb.record import record_key

_KEYS: Final = (b"t" + encode_i64(101), record_key(101, 512), b"t" + encode_i64(102))
FIRST_REGIONS: Final = ("--split-keys", ",".join(key.hex() for key in _KEYS))
"""A flag of `tidemark store`; a later `--split-keys` takes its place."""
