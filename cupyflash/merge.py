"""Exact merge of attention over parts of the keys, for NumPy and CuPy arrays alike."""

from __future__ import annotations

from functools import reduce

import numpy as np

from . import checks, interop


def merge_attention(*parts, dtype=None):
    """Attention over all keys from attention over parts of them.

    With ``lse = log(sum(exp(lse_i)))`` the result is ``out = sum(exp(lse_i - lse) * out_i)``: what one call
    over the joined keys gives, up to rounding. It is the step of online softmax (arXiv:1805.02867), between
    parts instead of tiles. The parts are added up one after the other, never stacked.

    Parameters
    ----------
    *parts : (out, lse)
        One or more pairs, as `attention` with ``return_lse=True`` returns them, for the same queries and any
        keys. ``out`` has the shape (batch, seqlen_q, heads_q, head_dim_v) and ``lse`` the shape
        (batch, heads_q, seqlen_q), or all without ``batch``. ``out`` may be float16, bfloat16, float32 or
        float64, also on the GPU; ``lse`` is float32 (float64 for float64).
    dtype : dtype, optional
        Dtype of the merged ``out``; default that of the parts. Merging 16-bit results again and again adds up
        their rounding: float32, here and as ``out`` of `attention`, avoids it.

    Returns
    -------
    out, lse : array
        Of the library, device and shape of the parts.

    Raises
    ------
    TypeError
        No part; a part that is not a pair; not arrays; dtypes or libraries that differ or are not allowed.
    ValueError
        Shapes or devices that differ.

    Notes
    -----
    A query that sees no key in a part (``lse = -inf``) takes nothing from it, whatever its ``out`` holds.
    Without a key in any part, ``out = 0`` and ``lse = -inf``; with keys in one part only, the result is that
    part's, bit for bit. The arithmetic is float32 (float64 for float64); CuPy's kernels take denormal float32
    and bfloat16 numbers as 0. NaN stays in the row, or the element, where it is.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 8))
    >>> first = cupyflash.attention(q, k[:, :2], v[:, :2], return_lse=True)
    >>> second = cupyflash.attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> out, lse = cupyflash.merge_attention(first, second)
    >>> np.allclose(out, cupyflash.attention(q, k, v))
    True
    """
    if not parts:
        raise TypeError("merge_attention got no part; allowed: one or more pairs (out, lse)")
    arrays = {}
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise TypeError(f"part {i} is a {checks.type_name(part)}; allowed: a pair (out, lse)")
        arrays[f"out of part {i}"], arrays[f"lse of part {i}"] = part
    home = interop.home(arrays)
    with home.scope():
        views = list(home.views(arrays).values())
        outs, lses = views[::2], views[1::2]
        dtype = checks.parts(outs, lses, dtype)
        out, out_view = home.empty(outs[0].shape, dtype)
        lse, lse_view = home.empty(lses[0].shape, checks.lse_dtype(checks.DTYPES[outs[0].dtype]))
        with np.errstate(all="ignore"):
            _merge(home.xp, outs, lses, out_view, lse_view)
        return home.give(out), home.give(lse)


def _merge(xp, outs, lses, out, lse):
    highest = xp.maximum(reduce(xp.maximum, lses), np.finfo(lse.dtype).min)  # finite: -inf - -inf is NaN
    weights = [xp.exp(x - highest) for x in lses]
    total = sum(weights)  # 1 or more, or 0 without a key
    lse[...] = highest + xp.log(total)
    # -0.0 is what changes no bit of a number that it is added to.
    merged = out if out.dtype == lse.dtype else xp.ndarray(out.shape, lse.dtype)
    merged[...] = xp.where(_rows(total) == 0, 0.0, -0.0)
    for part, weight in zip(outs, weights, strict=True):
        weight = _rows(weight / xp.maximum(total, 1))
        merged += xp.where(weight == 0, -0.0, part.astype(lse.dtype, copy=False) * weight)
    if merged is not out:
        out[...] = merged


def _rows(x):
    """One number for each row of out, from the shape of lse."""
    return x.swapaxes(-1, -2)[..., None]
