"""From padded batches to the packed sequences of `attention_varlen`, and back."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import checks, interop


class Packing(NamedTuple):
    """Where the rows of packed sequences are in a padded batch.

    Attributes
    ----------
    rows : array of int64, shape (total,)
        Of each packed row the place in the padded batch, of batch * seqlen rows.
    cu_seqlens : array of int32, shape (batch + 1,)
        Where each sequence begins among the packed rows, and where the last one ends.
    max_seqlen : int
        The longest length.
    shape : tuple of int
        (batch, seqlen)
    """

    rows: object
    cu_seqlens: object
    max_seqlen: int
    shape: tuple[int, int]


def packing(mask):
    """Find the rows that a mask shows.

    Parameters
    ----------
    mask : array of bool, shape (batch, seqlen)
        True where a row belongs to its sequence: of NumPy, CuPy, PyTorch or JAX. On a GPU the call waits for it, since
        nobody else knows how many there are.

    Returns
    -------
    Packing
        With arrays of the library and device of `mask`.

    Raises
    ------
    TypeError, ValueError
        `mask` is no array, not of bool, or has another number of axes.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import padding
    >>> found = padding.packing(np.array([[True, True, False], [True, False, False]]))
    >>> found.rows, found.cu_seqlens, found.max_seqlen
    (array([0, 1, 3]), array([0, 2, 3], dtype=int32), 2)
    """
    home = interop.home({"mask": mask})
    with home.scope():
        view = home.views({"mask": mask})["mask"]
        if view.dtype != bool:
            raise TypeError(f"mask has dtype {view.dtype}; allowed: bool, True where a row belongs to its sequence")
        if view.ndim != 2:
            raise ValueError(f"mask has shape {view.shape}; allowed: (batch, seqlen)")
        lengths, found = view.sum(axis=1), home.xp.flatnonzero(view)
        rows, rows_view = home.empty(found.shape, np.dtype(np.int64))
        cu_seqlens, cu_view = home.empty((len(view) + 1,), np.dtype(np.int32))
        rows_view[...] = found
        cu_view[:1] = 0
        cu_view[1:] = lengths.cumsum()
        longest = int(lengths.max()) if len(view) else 0
        return Packing(home.give(rows), home.give(cu_seqlens), longest, view.shape)


def pack(x, /, packing):
    """Rows of a padded batch, packed one after the other.

    Parameters
    ----------
    x : array, shape (batch, seqlen, ...)
        Of a dtype that `attention` takes. The gradient of what comes out, unpacked, is that of `x`.
    packing : Packing
        As `packing` found it in the library and on the device of `x`.

    Returns
    -------
    array, shape (total, ...)
        Of the library, device and dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        An argument is no array or not of one library, device and shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import padding
    >>> found = padding.packing(np.array([[True, True, False], [True, False, False]]))
    >>> padding.pack(np.arange(6.0).reshape(2, 3), found)
    array([0., 1., 3.])
    """
    home = interop.home({"x": x, "rows": packing.rows})
    with home.scope():
        views = home.views({"x": x, "rows": packing.rows})
        values, rows = views["x"], views["rows"]
        _check(values, packing.shape, "(batch, seqlen) of the packing and more axes")
        result, view = home.empty((rows.size, *values.shape[2:]), _plain(values.dtype))
        if view.size:
            _bits(view)[...] = _bits(values.reshape(-1, *values.shape[2:]))[rows]
        return home.give(result)


def unpack(x, /, packing):
    """Packed rows, back in a padded batch; what belongs to no sequence is 0.

    Parameters
    ----------
    x : array, shape (total, ...)
        Of a dtype that `attention` takes. The gradient of what comes out, packed, is that of `x`.
    packing : Packing
        As `packing` found it in the library and on the device of `x`.

    Returns
    -------
    array, shape (batch, seqlen, ...)
        Of the library, device and dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        An argument is no array or not of one library, device and shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import padding
    >>> found = padding.packing(np.array([[True, True, False], [True, False, False]]))
    >>> padding.unpack(np.array([1.0, 2.0, 3.0]), found)
    array([[1., 2., 0.],
           [3., 0., 0.]])
    """
    home = interop.home({"x": x, "rows": packing.rows})
    with home.scope():
        views = home.views({"x": x, "rows": packing.rows})
        values, rows = views["x"], views["rows"]
        _check(values, rows.shape, "(total,) of the packing and more axes")
        result, view = home.empty((*packing.shape, *values.shape[1:]), _plain(values.dtype))
        view[...] = 0
        if values.size:
            _bits(view).reshape(math.prod(packing.shape), *values.shape[1:])[rows] = _bits(values)
        return home.give(result)


def _check(x, shape, meaning):
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; allowed: {', '.join(checks.DTYPES.values())}")
    if x.shape[: len(shape)] != tuple(shape):
        raise ValueError(f"x has shape {x.shape}; allowed: {tuple(shape)}, {meaning}")


def _plain(dtype):
    return checks.PLAIN_DTYPES[checks.DTYPES[dtype]]


def _bits(x):
    """The same as integers, which are copied whatever CuPy knows of the dtype."""
    return x.view(f"u{x.itemsize}")
