"""An Arrow binary array as NumPy sees it: one byte buffer, and where each value begins and ends.

Fixed-width numbers are gathered from any byte offset through unaligned views: no Python object per
value.
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
        offsets, self.data = _buffers(array)
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
        """Copy `data[begin:end]` of each value into a new binary array, null where not `present`.

        The slices must be ascending and must not overlap: Arrow then reads slices and gaps as one
        array and takes every second value of it, which is one memcpy per value.
        """
        bounds = np.empty(2 * len(begin) + 1, np.int32)
        bounds[0:-1:2] = begin
        bounds[1::2] = end
        bounds[-1] = bounds[-2] if len(begin) else 0
        both = pa.Array.from_buffers(
            pa.binary(), 2 * len(begin), [None, pa.py_buffer(bounds), pa.py_buffer(self.data)]
        )
        return both.take(pa.array(np.arange(0, 2 * len(begin), 2), mask=~present))

    def _view(self, dtype: str) -> npt.NDArray[Any]:
        width = np.dtype(dtype).itemsize
        return np.ndarray((len(self.data) - width + 1,), dtype, self.data, strides=(1,))


def _buffers(array: pa.Array) -> tuple[Offsets, npt.NDArray[np.uint8]]:
    """The offsets of `array`, and its bytes followed by at least `_PAD` readable ones;
    copies only if they are not.
    """
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(_PAD, np.uint8)
    offsets = np.frombuffer(offsets_buffer, np.int32)[
        array.offset : array.offset + len(array) + 1
    ].astype(np.int64)
    data = (
        np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    )
    if len(data) - offsets[-1] >= _PAD:
        return offsets, data
    used = data[offsets[0] : offsets[-1]]
    return offsets - offsets[0], np.concatenate([used, np.zeros(_PAD, np.uint8)])
