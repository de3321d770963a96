"""An Arrow binary array as NumPy sees it: one byte buffer, and where each value begins and ends.

Fixed-width numbers are gathered from any byte offset through unaligned views: no Python object per
value. `storage.mysql.buffer` reads logs and rows of MySQL by the same means.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
_PAD = 8  # the widest number a view reads at the last byte of the last value


class BinaryColumn:
    """The values of a `pa.binary()` array; `begin` and `end` are offsets into `data`,
    nulls may hold anything.
    """

    __slots__ = ("begin", "data", "end", "valid")

    def __init__(self, array: pa.Array) -> None:
        self.valid = np.asarray(array.is_valid())
        self.data, offsets = content(array, _PAD)
        self.begin: Offsets = offsets[:-1]
        self.end: Offsets = offsets[1:]

    def __len__(self) -> int:
        return len(self.begin)

    def u8(self, at: Offsets) -> npt.NDArray[np.uint8]:
        """The byte at each offset."""
        return self.data[at]

    def u16(self, at: Offsets) -> npt.NDArray[np.uint16]:
        """The little-endian 16-bit number at each offset."""
        return self._view("<u2")[at]

    def u32(self, at: Offsets) -> npt.NDArray[np.uint32]:
        """The little-endian 32-bit number at each offset."""
        return self._view("<u4")[at]

    def u64(self, at: Offsets) -> npt.NDArray[np.uint64]:
        """The eight bytes at each offset as a little-endian number;
        up to `_PAD` bytes past the end read as padding.
        """
        return self._view("<u8")[at]

    def u64_be(self, at: Offsets) -> npt.NDArray[np.uint64]:
        """The eight bytes at each offset as a big-endian number."""
        return self.u64(at).byteswap()

    def slices(self, begin: Offsets, end: Offsets, present: Mask) -> pa.Array:
        """Copy `data[begin:end]` of each value into a new binary array, null where not `present`;
        see `slices_of`.
        """
        return slices_of(self.data, begin, end, ~present)

    def _view(self, dtype: str) -> npt.NDArray[Any]:
        return unaligned(self.data, dtype)


def unaligned(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """The number that begins at each byte."""
    return np.ndarray((len(data) - np.dtype(dtype).itemsize + 1,), dtype, data, strides=(1,))


def slices_of(
    data: npt.NDArray[np.uint8], begin: Offsets, end: Offsets, absent: Mask | None
) -> pa.Array:
    """Copy the bytes `[begin, end)` of `data` into a new binary array, null where `absent`.

    The slices must be ascending and must not overlap: Arrow then reads slices and the gaps between
    them as one array and takes every second value of it, which is one memcpy per value.

    Raises:
        pa.ArrowInvalid: they are not in `data`.
    """
    bounds = np.empty(2 * len(begin) + 1, np.int32)
    bounds[0:-1:2] = begin
    bounds[1::2] = end
    bounds[-1] = bounds[-2] if len(begin) else 0
    both = pa.Array.from_buffers(
        pa.binary(), 2 * len(begin), [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    return both.take(pa.array(np.arange(0, 2 * len(begin), 2), mask=absent))


def content(array: pa.Array, pad: int) -> tuple[npt.NDArray[np.uint8], Offsets]:
    """The bytes of a binary array, followed by at least `pad` readable ones, and where each value
    begins; a last offset is the end. Copies only if too few bytes follow.
    """
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return np.zeros(pad, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int32)[
        array.offset : array.offset + len(array) + 1
    ].astype(np.int64)
    data = (
        np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    )
    if len(data) - offsets[-1] >= pad:
        return data, offsets
    used = data[offsets[0] : offsets[-1]]
    return np.concatenate([used, np.zeros(pad, np.uint8)]), offsets - offsets[0]
