"""Tensor maps: how Hopper's copy engine is told the layout of an array, encoded by the driver through ctypes."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

ELEMENT_TYPES = {"bool": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
SWIZZLE_128B, PROMOTE_L2_256B = 3, 3
BOX_BYTES = 128  # of a row of one box: the span of the swizzle
WORDS = 16
MAPPED_ROWS = 1 << 30  # kMappedRows: more than any packed array has
MOST_PLACES = 0x7FFF0000
WRAP = 1 << 35  # bytes: MAPPED_ROWS of them are a multiple of 2^64, which is 0 to the engine


def possible(x) -> bool:
    """Whether the copy engine can read `x`: strides of a multiple of 16 bytes, positive and below 2^40."""
    if address_word() is None:
        return False
    return x.data.ptr % 16 == 0 and all(0 < s < 1 << 40 and s % 16 == 0 for n, s in _strides(x) if n > 1)


def encode(
    x, dtype: str, rows: int, heads: int = 1, pointer: int | None = None, packed: bool = False
) -> np.ndarray | None:
    """Map of (head_dim, heads, seqlen, batch) of `x` in boxes of 128 bytes, `heads` and `rows`, as 64-bit words.

    `packed`: of the rows of sequences, which take the place of (seqlen, batch) with three axes: row `r` of `count` from
    `first` on is at (MAPPED_ROWS - count + r, first + count, MAPPED_ROWS). The steps of the last two make up for what
    the first has too much, in 64 bits; and what is beyond the count is outside of the first axis, whatever comes next
    in memory. (The ragged descriptors of Triton do the same.) None where the driver refuses the layout.
    """
    axes = [(n, s if n > 1 else 16) for n, s in _strides(x)]
    if packed:
        step, axes = axes[1][1], axes[:1]
        axes += [(MAPPED_ROWS, step), (MOST_PLACES, step), (MOST_PLACES, WRAP - step)]
    rank = 1 + len(axes)
    sizes = (ctypes.c_uint64 * rank)(x.shape[3], *(n for n, _ in axes))
    strides = (ctypes.c_uint64 * (rank - 1))(*(s for _, s in axes))
    box = (ctypes.c_uint32 * rank)(BOX_BYTES // x.itemsize, heads, rows, *[1] * (rank - 3))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    buffer = np.zeros(2 * WORDS, np.uint64)
    words = buffer[-buffer.ctypes.data % 64 // 8 :][:WORDS]  # aligned to 64 bytes
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data), ELEMENT_TYPES[dtype], rank, ctypes.c_void_p(pointer or x.data.ptr),
        sizes, strides, box, ones, 0, SWIZZLE_128B, PROMOTE_L2_256B, 0,
    )  # fmt: skip
    return None if status else words


@functools.cache
def address_word() -> int | None:
    """Return the word of a map that is the address and nothing else, None if this driver keeps it otherwise.

    A warm call writes its pointers into the maps of its plan, which costs nothing; encoding takes microseconds.
    """

    class Probe:
        shape, strides, itemsize = (1, 64, 1, 64), (8192, 128, 128, 2), 2

    a, b = (encode(Probe, "float16", 64, pointer=pointer) for pointer in (1 << 20, 0x7F1234567890))
    if a is None or b is None:
        return None
    changed = np.flatnonzero(a != b)
    return (
        int(changed[0]) if len(changed) == 1 and a[changed[0]] == 1 << 20 and b[changed[0]] == 0x7F1234567890 else None
    )


def _strides(x) -> tuple:
    (batch, seqlen, heads, _), strides = x.shape, x.strides
    return (heads, strides[2]), (seqlen, strides[1]), (batch, strides[0])


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")
