"""The encoding of rows that are spilled to disk: plain, compressed, encrypted, or both.

Spilled files are a cache of one process: they are removed when the next one begins. So the key is
made here, at random, is never written anywhere, and is gone with the process: what a stolen disk
or a backup holds of such files cannot be read by anybody.

Compression is LZ4 and goes before the encryption. Both are done with the lock of Python released.
Measured on one core: 1.4 GB/s to encrypt; docs/benchmarks.md has what a row costs.
"""

import struct
from hashlib import blake2b
from typing import Final

import nacl.exceptions
import pyarrow as pa
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
    crypto_aead_xchacha20poly1305_ietf_KEYBYTES,
    crypto_aead_xchacha20poly1305_ietf_NPUBBYTES,
)
from nacl.utils import random

from storage.model.errors import CorruptError

LZ4: Final = "lz4"
NO_COMPRESSION: Final = "none"
COMPRESSIONS: Final = (NO_COMPRESSION, LZ4)

_CODEC: Final = "lz4_raw"
_SIZE: Final = struct.Struct("<Q")
_NONCE_BYTES: Final = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES
_NAME_KEY_BYTES: Final = 32
_NAME_BYTES: Final = 16
# More than anything that is spilled: a damaged length must not ask for all memory.
_MOST_BYTES: Final = 1 << 40


class SpillDamagedError(CorruptError):
    """Spilled bytes are not those that were written."""

    code = "ErrSpillDamaged"


class SpillCodec:
    """Encodes and decodes the spilled data of one process; thread-safe.

    Its `repr` does not show the key.
    """

    def __init__(self, compression: str = NO_COMPRESSION, *, encrypted: bool = False) -> None:
        """`compression` is one of `COMPRESSIONS`."""
        assert compression in COMPRESSIONS, f"{compression!r} is one of {COMPRESSIONS}"
        self._compressed = compression == LZ4
        self._key = random(crypto_aead_xchacha20poly1305_ietf_KEYBYTES) if encrypted else b""
        self._names_key = random(_NAME_KEY_BYTES) if encrypted else b""

    def __repr__(self) -> str:
        compression = LZ4 if self._compressed else NO_COMPRESSION
        return f"SpillCodec({compression!r}, encrypted={self.hides})"

    @property
    def is_plain(self) -> bool:
        """Whether bytes are stored as they are."""
        return not self._compressed and not self._key

    @property
    def hides(self) -> bool:
        """Whether stored bytes are encrypted."""
        return bool(self._key)

    def name_of(self, key: bytes) -> bytes:
        """The name of an entry on disk: `key` itself, or 16 bytes that tell nothing of it."""
        if not self._names_key:
            return key
        return blake2b(key, digest_size=_NAME_BYTES, key=self._names_key).digest()

    def encode(self, data: bytes) -> bytes:
        """The stored form of `data`: [size, LZ4 of it], and of that [nonce, ciphertext, tag]."""
        if self._compressed:
            data = _SIZE.pack(len(data)) + pa.compress(data, _CODEC, asbytes=True)
        if not self._key:
            return data
        # 24 random bytes never come twice, however much is spilled.
        nonce = random(_NONCE_BYTES)
        return nonce + crypto_aead_xchacha20poly1305_ietf_encrypt(data, None, nonce, self._key)

    def decode(self, stored: bytes) -> pa.Buffer:
        """The data that `stored` was made of.

        Raises:
            SpillDamagedError: it was made of none; or, compressed and not encrypted, cannot be
                unpacked (where it can, another sum must find the damage).
        """
        if self._key:
            try:
                stored = crypto_aead_xchacha20poly1305_ietf_decrypt(
                    stored[_NONCE_BYTES:], None, stored[:_NONCE_BYTES], self._key
                )
            except (nacl.exceptions.CryptoError, ValueError) as err:
                raise _damaged(stored, "it does not have the seal of this process") from err
        return self._unpacked(stored) if self._compressed else pa.py_buffer(stored)

    def _unpacked(self, stored: bytes) -> pa.Buffer:
        if len(stored) < _SIZE.size:
            raise _damaged(stored, "it ends within its length")
        (size,) = _SIZE.unpack_from(stored)
        # LZ4 makes at most 255 bytes of one.
        if size > min(_MOST_BYTES, 255 * len(stored)):
            raise _damaged(stored, f"its length says {size}")
        try:
            packed = pa.py_buffer(stored).slice(_SIZE.size)
            data = pa.decompress(packed, decompressed_size=size, codec=_CODEC)
        except (pa.ArrowInvalid, OSError) as err:
            raise _damaged(stored, "it cannot be unpacked") from err
        return data


PLAIN: Final = SpillCodec()
"""Stores bytes as they are."""


def _damaged(stored: bytes, reason: str) -> SpillDamagedError:
    return SpillDamagedError(
        f"{len(stored)} spilled bytes are damaged: {reason}; check the disk of the data directory"
    )
