"""Bytes as NumPy sees them: little-endian numbers gathered from any offsets, many at once,
no object per value.

Offsets are int64 and never negative; a gather beyond the end raises IndexError, which the callers
that read foreign bytes turn into CorruptError (`reading`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError

Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview

PAD_BYTES: Final = 8
"""How many readable bytes must follow the last value: numbers are read in words of eight."""


class Bytes:
    """A byte buffer that is followed by `PAD_BYTES` readable bytes of no meaning."""

    __slots__ = ("_u16", "_u32", "_u64", "u8s")

    def __init__(self, data: Buffer | npt.NDArray[np.uint8]) -> None:
        self.u8s = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if len(self.u8s) < PAD_BYTES:
            self.u8s = np.concatenate([self.u8s, np.zeros(PAD_BYTES, np.uint8)])
        self._u16, self._u32, self._u64 = (
            _unaligned(self.u8s, dtype) for dtype in ("<u2", "<u4", "<u8")
        )

    @classmethod
    def padded(cls, data: Buffer) -> "Bytes":
        """A copy of `data` with padding behind it."""
        return cls(bytes(data) + bytes(PAD_BYTES))

    def u8(self, at: Offsets) -> npt.NDArray[np.uint8]:
        """The byte at each offset."""
        values: npt.NDArray[np.uint8] = self.u8s[at]
        return values

    def u64(self, at: Offsets) -> npt.NDArray[np.uint64]:
        """The eight bytes at each offset."""
        values: npt.NDArray[np.uint64] = self._u64[at]
        return values

    def number(self, at: Offsets, width: int) -> npt.NDArray[Any]:
        """The unsigned little-endian number of `width` bytes (1 to 8) at each offset,
        in some unsigned dtype.
        """
        if width == 1:
            return self.u8s[at]
        if width == 2:
            return self._u16[at]
        if width <= 4:
            return self._u32[at] & np.uint32((1 << 8 * width) - 1) if width == 3 else self._u32[at]
        return self._u64[at] & np.uint64((1 << 8 * width) - 1)

    def number_be(self, at: Offsets, width: int) -> npt.NDArray[np.uint64]:
        """The unsigned big-endian number of `width` bytes (1 to 8) at each offset."""
        return self._u64[at].byteswap() >> np.uint64(64 - 8 * width)

    def matrix(self, at: Offsets, width: int) -> npt.NDArray[np.uint8]:
        """The `width` bytes at each offset, a line each."""
        windows: npt.NDArray[np.uint8] = np.ndarray(
            (max(len(self.u8s) - width + 1, 0), width), np.uint8, self.u8s, strides=(1, 1)
        )
        return windows[at]

    def slices(self, begin: Offsets, end: Offsets, present: Mask | None = None) -> pa.Array:
        """The bytes `[begin, end)` as a new binary array, null where not `present`.

        Arrow reads slices and the gaps between them as one array, and takes every second value of
        it, which is one memcpy per value; for that slices that do not ascend are put in order
        first. They must not overlap.
        """
        if present is not None:
            reach = np.maximum.accumulate(np.where(present, end, 0))
            begin, end = np.where(present, begin, reach), np.where(present, end, reach)
        if bool((begin[1:] < end[:-1]).any()):
            order = np.argsort(begin, kind="stable")
            rows = self.slices(
                begin[order], end[order], None if present is None else present[order]
            )
            return rows.take(pa.array(np.argsort(order)))
        bounds = np.empty(2 * len(begin) + 1, np.int32)
        bounds[0:-1:2] = begin
        bounds[1::2] = end
        bounds[-1] = bounds[-2] if len(begin) else 0
        both = pa.Array.from_buffers(
            pa.binary(), 2 * len(begin), [None, pa.py_buffer(bounds), pa.py_buffer(self.u8s)]
        )
        return both.take(
            pa.array(np.arange(0, 2 * len(begin), 2), mask=None if present is None else ~present)
        )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn a read beyond the end into CorruptError."""
    try:
        yield
    except IndexError as err:
        raise CorruptError(f"{what} reaches beyond its end") from err


def _unaligned(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    return np.ndarray((len(data) - np.dtype(dtype).itemsize + 1,), dtype, data, strides=(1,))
