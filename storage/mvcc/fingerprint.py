"""FarmHash's Fingerprint64, by which clients recognize keys in a deadlock's wait chain. Pure.

Source: the public FarmHash (farmhashna::Hash64), whose result is fixed for all time;
kvrpcpb.Deadlock.
Written here because the library for it, pyfarmhash, has wheels for x86-64 only, and images are
built without a compiler. A deadlock is rare, so its speed does not matter.
"""

import struct

_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81
_WORD = struct.Struct("<Q")
_HALF = struct.Struct("<I")
_BLOCK = 64

_Pair = tuple[int, int]


def fingerprint64(data: bytes) -> int:
    """The 64-bit fingerprint of `data`."""
    size = len(data)
    if size <= 16:
        return _up_to_16(data, size)
    if size <= 32:
        return _up_to_32(data, size)
    if size <= _BLOCK:
        return _up_to_64(data, size)
    return _long(data, size)


def _word(data: bytes, at: int) -> int:
    value: int = _WORD.unpack_from(data, at)[0]
    return value


def _rotate(value: int, by: int) -> int:
    value &= _MASK
    return (value >> by | value << (64 - by)) & _MASK


def _fold(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _mix(left: int, right: int, mul: int) -> int:
    first = _fold((left ^ right) * mul)
    return _fold((right & _MASK ^ first) * mul) * mul & _MASK


def _up_to_16(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    if size >= 8:
        first, last = _word(data, 0) + _K2, _word(data, size - 8)
        return _mix(
            _rotate(last, 37) * mul + first & _MASK, (_rotate(first, 25) + last) * mul & _MASK, mul
        )
    if size >= 4:
        return _mix(
            size + (_HALF.unpack_from(data)[0] << 3), _HALF.unpack_from(data, size - 4)[0], mul
        )
    if size:
        low, high = data[0] + (data[size >> 1] << 8), size + (data[-1] << 2)
        return _fold(low * _K2 & _MASK ^ high * _K0 & _MASK) * _K2 & _MASK
    return _K2


def _halves(data: bytes, size: int, factor: int) -> tuple[int, int, int]:
    """Both sums over the first and the last 16 bytes, and the first product."""
    mul = _K2 + size * 2
    a, b = _word(data, 0) * factor & _MASK, _word(data, 8)
    c, d = _word(data, size - 8) * mul & _MASK, _word(data, size - 16) * _K2
    return _rotate(a + b, 43) + _rotate(c, 30) + d & _MASK, a + _rotate(b + _K2, 18) + c & _MASK, a


def _up_to_32(data: bytes, size: int) -> int:
    left, right, _ = _halves(data, size, _K1)
    return _mix(left, right, _K2 + size * 2)


def _up_to_64(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    y, right, a = _halves(data, size, _K2)
    z = _mix(y, right, mul)
    e, f = _word(data, 16) * mul & _MASK, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * mul & _MASK, (z + _word(data, size - 24)) * mul & _MASK
    return _mix(
        _rotate(e + f, 43) + _rotate(g, 30) + h & _MASK, e + _rotate(f + a, 18) + g & _MASK, mul
    )


def _weak(data: bytes, at: int, a: int, b: int) -> _Pair:
    w, x, y, z = struct.unpack_from("<4Q", data, at)
    a += w
    b = _rotate(b + a + z, 21)
    total = a + x + y
    return total + z & _MASK, b + _rotate(total, 44) + a & _MASK


def _step(
    data: bytes, at: int, state: tuple[int, int, int, _Pair, _Pair], mul: int, nine: int
) -> tuple[int, int, int, _Pair, _Pair]:
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + _word(data, at + 8), 37) * mul
    y = _rotate(y + v[1] + _word(data, at + 48), 42) * mul
    x = (x ^ w[1] * nine) & _MASK
    y = y + v[0] * nine + _word(data, at + 40) & _MASK
    z = _rotate(z + w[0], 33) * mul & _MASK
    v = _weak(data, at, v[1] * mul, x + w[0])
    w = _weak(data, at + 32, z + w[1], y + _word(data, at + 16))
    return z, y, x, v, w


def _long(data: bytes, size: int) -> int:
    y = _SEED * _K1 + 113 & _MASK
    z = _fold(y * _K2 + 113) * _K2 & _MASK
    state: tuple[int, int, int, _Pair, _Pair] = (
        _SEED * _K2 + _word(data, 0) & _MASK,
        y,
        z,
        (0, 0),
        (0, 0),
    )
    blocks, rest = divmod(size - 1, _BLOCK)
    for block in range(blocks):
        state = _step(data, block * _BLOCK, state, _K1, 1)
    x, y, z, v, w = state
    mul = _K1 + ((z & 0xFF) << 1)
    w0 = w[0] + rest
    v0 = v[0] + w0
    x, y, z, v, w = _step(data, size - _BLOCK, (x, y, z, (v0, v[1]), (w0 + v0, w[1])), mul, 9)
    return _mix(
        _mix(v[0], w[0], mul) + _fold(y) * _K0 + z & _MASK,
        _mix(v[1], w[1], mul) + x & _MASK,
        mul,
    )
