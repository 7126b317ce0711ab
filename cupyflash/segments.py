"""Packed sequences: where each one begins and how long it is, from the arrays that say so."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import checks

DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class Segment(NamedTuple):
    """One of the packed sequences: its rows of q and of k."""

    q: slice
    k: slice


def count(indices) -> int:
    """Number of sequences, from arrays by name, NumPy's or CuPy's, whose dtype and shape are checked."""
    for name, x in indices.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: int32, int64")
    first = indices["cu_seqlens_q"]
    if first.ndim != 1 or first.size == 0:
        raise ValueError(f"cu_seqlens_q has shape {first.shape}; allowed: (batch + 1,)")
    batch = first.size - 1
    for name, x in indices.items():
        shape, meaning = ((batch + 1,), "that of cu_seqlens_q") if name[:2] == "cu" else ((batch,), "(batch,)")
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; allowed: {shape}, {meaning}")
    return batch


def check_bound(name, value):
    """Check a bound of the lengths; None is no bound."""
    if value is not None:
        checks.integer(name, value, 0)


def check_values(side, cu, used, total, bound):
    """Check what NumPy arrays hold: `cu` and, unless it is None, `used`, of `total` rows of q or k, which is `side`."""
    rooms = np.diff(cu.astype(np.int64))
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens_{side} begins with {cu[0]}; allowed: 0")
    if (rooms < 0).any():
        at = int(np.argmax(rooms < 0))
        raise ValueError(f"cu_seqlens_{side} falls from {cu[at]} to {cu[at + 1]}; allowed: no less than before")
    if cu[-1] > total:
        raise ValueError(f"cu_seqlens_{side} ends with {cu[-1]}; allowed: at most {total}, the rows of {side}")
    lengths = rooms if used is None else used
    wrong = (lengths < 0) | (lengths > rooms)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"seqused_{side} holds {used[at]} for sequence {at}; allowed: 0 to {rooms[at]}, its room")
    if bound is not None and lengths.size and lengths.max() > bound:
        raise ValueError(f"max_seqlen_{side} is {bound}; allowed: at least {lengths.max()}, the longest length")


def segments(indices) -> list[Segment]:
    """All of them, from NumPy arrays whose values were checked."""
    sides = []
    for side in "qk":
        cu, used = indices[f"cu_seqlens_{side}"], indices.get(f"seqused_{side}")
        firsts = cu[:-1].tolist()
        lasts = cu[1:].tolist() if used is None else [first + int(n) for first, n in zip(firsts, used)]
        sides.append(map(slice, firsts, lasts))
    return list(map(Segment, *sides))
