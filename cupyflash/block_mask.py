"""Block masks: which blocks of queries and keys a call computes. Those that are hidden cost nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import checks, interop

TILE = checks.MASK_TILE
WORD = 32  # bits of a word of the kernels' bitmaps


class Bitmaps(NamedTuple):
    """What the kernels read: a bit for each tile of 128 x 128, that it is shown; then, that it is shown in part."""

    by_query: object  # uint32, (batch or 1, heads or 1, tiles of queries, 2, words)
    by_key: object  # the same, transposed: (batch or 1, heads or 1, tiles of keys, 2, words)


class BlockMask:
    """Which blocks of queries and keys attention computes: block-sparse attention [1]_.

    A block that is hidden costs nothing: its keys and values are not read, so that NaN in them does not matter. Make
    one once and give it to many calls, forward and backward: what the kernels read is made here.

    Parameters
    ----------
    blocks : array of bool, shape ([[batch,] heads_q,] blocks_q, blocks_k)
        True where a block is shown. ``batch`` and ``heads_q`` broadcast; ``blocks_q`` is
        ``ceil(seqlen_q / block_size[0])``, ``blocks_k`` likewise. An array of any library that `attention` takes.
    block_size : int or (int, int), default (128, 128)
        Queries and keys of a block: multiples of 128.
    full : array of bool, optional
        Broadcasts to ``blocks``. True where all of a block is shown: there ``mask`` is not read; without one, the
        ``mask_mod`` of a call is not asked, which would have to return true in all of the block. A call that has a
        ``mask`` of its own reads that everywhere, and may ask its ``mask_mod`` everywhere.
    mask : array of bool, optional
        True where a query may see a key, read in the blocks that are shown and not ``full``. It broadcasts to
        (batch, heads_q, seqlen_q, seqlen_k), and is not copied.

    Raises
    ------
    TypeError, ValueError
        An argument is not of these dtypes, shapes and sizes, or the arrays are not of one library and device.

    See Also
    --------
    BlockMask.from_mask, BlockMask.from_function : The blocks of a mask, and of a function.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
       arXiv:2205.14135, Algorithm 5.

    Examples
    --------
    Queries that see their own block of 128 keys and the first one:

    >>> import numpy as np
    >>> import cupyflash
    >>> blocks = np.eye(4, dtype=bool)
    >>> blocks[:, 0] = True
    >>> block_mask = cupyflash.BlockMask(blocks)
    >>> block_mask
    BlockMask(shape=(1, 1, 4, 4), block_size=(128, 128), density=0.438, in_part=0.000)
    >>> q = np.zeros((1, 500, 2, 8), np.float32)
    >>> out = cupyflash.attention(q, q, q, block_mask=block_mask)
    """

    def __init__(self, blocks, block_size=(TILE, TILE), full=None, mask=None):
        self.block_size = checks.block_size(block_size)
        arrays = {"blocks": blocks, "full": full, "mask": mask}
        arrays = {name: x for name, x in arrays.items() if x is not None}
        home = interop.home(arrays or {"blocks": blocks})
        with home.scope():
            views = home.views(arrays)
            checks.blocks(**views)
            xp = home.xp
            views = {name: x.reshape((1,) * (4 - x.ndim) + x.shape) for name, x in views.items()}
            self.gpu = home.index
            self.blocks = views["blocks"].copy()
            self.mask = views.get("mask")  # of the elements; a function of their indices could take its place
            self.full = None
            if full is not None or self.mask is not None:
                self.full = self.blocks & views.get("full", xp.zeros((1, 1, 1, 1), bool))
            # In part, for a mask or a MaskMod: every block unless it is said to be full.
            in_part = self.blocks if self.full is None else self._in_part()
            self.bitmaps = _bitmaps(xp, self.blocks, in_part, self.block_size)
            # Where a call has a mask of its own: every block is shown in part.
            self.bitmaps_under_mask = self.bitmaps
            if self.mask is None and self.full is not None:
                self.bitmaps_under_mask = _bitmaps(xp, self.blocks, self.blocks, self.block_size)

    @property
    def layout(self):
        """What a call checks: shape, block size, and the shape of the element mask."""
        return self.blocks.shape, self.block_size, None if self.mask is None else self.mask.shape

    def __repr__(self):
        shape, size = self.blocks.shape, self.block_size
        density, in_part = (float(x.mean()) if x.size else 0.0 for x in (self.blocks, self._in_part()))
        return f"BlockMask(shape={shape}, block_size={size}, density={density:.3f}, in_part={in_part:.3f})"

    @classmethod
    def from_mask(cls, mask, block_size=(TILE, TILE)):
        """The blocks in which ``mask`` shows something. Where it does not show all, its elements are read.

        Parameters
        ----------
        mask : array of bool, shape ([[batch,] heads_q,] seqlen_q, seqlen_k)
            True where a query may see a key. ``batch`` and ``heads_q`` broadcast. It is not copied.
        block_size : int or (int, int), default (128, 128)
            As of `BlockMask`.

        Returns
        -------
        BlockMask
            On the device of ``mask``.
        """
        size = checks.block_size(block_size)
        home = interop.home({"mask": mask})
        with home.scope():
            view = home.views({"mask": mask})["mask"]
            checks.blocks(view, name="mask")
            view = view.reshape((1,) * (4 - view.ndim) + view.shape)
            some, full = _summary(home.xp, lambda rows: view[:, :, rows], view.shape[2], view.shape[3], size)
            if not (some & ~full).any():
                return cls(some, size)
            return cls(some, size, full, view)

    @classmethod
    def from_function(cls, function, batch, heads, seqlen_q, seqlen_k, block_size=(TILE, TILE), xp=np, elements=True):
        """The blocks in which a function shows something.

        Parameters
        ----------
        function : callable
            ``function(b, h, i, j)`` is True where query ``i`` of batch ``b`` and query head ``h`` may see key ``j``. It
            is given integer arrays that broadcast, of the queries of one row of blocks at a time, and its result
            broadcasts to their shape: one that uses neither ``b`` nor ``h`` makes one mask for all.
        batch, heads, seqlen_q, seqlen_k : int
            Of the calls; ``heads`` are query heads.
        block_size : int or (int, int), default (128, 128)
            As of `BlockMask`.
        xp : module, default numpy
            `numpy` or `cupy`: where the mask is made.
        elements : bool, default True
            Whether to keep, if blocks are shown in part, a mask of all elements, a byte each. False: only which blocks
            are shown, and which are full, for calls whose ``mask_mod`` is the same function. It is then asked in the
            other blocks alone; a call without it shows them whole.

        Returns
        -------
        BlockMask
            On the current device of ``xp``.

        Examples
        --------
        Three documents, of which none sees another:

        >>> import numpy as np
        >>> import cupyflash
        >>> document = np.repeat([0, 1, 2], [128, 256, 128])
        >>> cupyflash.BlockMask.from_function(lambda b, h, i, j: document[i] == document[j], 1, 1, 512, 512)
        BlockMask(shape=(1, 1, 4, 4), block_size=(128, 128), density=0.375, in_part=0.000)

        A function that a call is given as well, and asks only where a block is shown in part:

        >>> def near(b, h, i, j):
        ...     return abs(i - j) <= 200
        >>> block_mask = cupyflash.BlockMask.from_function(near, 1, 1, 512, 512, elements=False)
        >>> block_mask
        BlockMask(shape=(1, 1, 4, 4), block_size=(128, 128), density=0.875, in_part=0.625)
        >>> options = {"mask_mod": cupyflash.MaskMod(near), "block_mask": block_mask}
        >>> q = np.zeros((1, 512, 2, 8), np.float32)
        >>> out = cupyflash.attention(q, q, q, **options)
        """
        size = checks.block_size(block_size)
        checks.array_module(xp)
        checks.flag("elements", elements)
        batch, heads, seqlen_q, seqlen_k = shape = checks.logits_shape(batch, heads, seqlen_q, seqlen_k)

        def shown(rows):
            b, h, i, j = (xp.arange(part.start, part.stop) for part in (slice(0, batch), slice(0, heads), rows, keys))
            result = xp.asarray(function(b[:, None, None, None], h[:, None, None], i[:, None], j))
            whole = (batch, heads, len(i), len(j))
            checks.shown_by_function(result, whole)
            result = result.reshape((1,) * (4 - result.ndim) + result.shape)
            return xp.broadcast_to(result, (*result.shape[:2], *whole[2:]))

        keys = slice(0, seqlen_k)
        some, full = _summary(xp, shown, *shape[2:], size)
        if not elements:
            return cls(some, size, full)
        if not (some & ~full).any():
            return cls(some, size)
        mask = xp.empty((*some.shape[:2], seqlen_q, seqlen_k), bool)
        for rows in _rows(seqlen_q, size[0]):
            mask[:, :, rows] = shown(rows)
        return cls(some, size, full, mask)

    def dense(self, seqlen_q, seqlen_k):
        """The mask of all elements that it stands for.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            Of the call.

        Returns
        -------
        numpy.ndarray or cupy.ndarray, shape (batch or 1, heads_q or 1, seqlen_q, seqlen_k)
            Boolean: True where a query may see a key.
        """
        whole = self.blocks if self.mask is None else self.mask
        outer = map(max, self.blocks.shape[:2], whole.shape[:2])
        checks.fits(self.layout, (*outer, seqlen_q, seqlen_k))

        shown = self._elements(self.blocks, seqlen_q, seqlen_k)
        return shown if self.mask is None else shown & (self._elements(self.full, seqlen_q, seqlen_k) | self.mask)

    @property
    def full_for_mod(self):
        """The blocks in which the `MaskMod` of a call is not asked; None if it is asked in all that are shown."""
        return self.full if self.mask is None else None

    def elements_for_mod(self, seqlen_q, seqlen_k):
        """The same by elements, or False."""
        return False if self.full_for_mod is None else self._elements(self.full, seqlen_q, seqlen_k)

    def _elements(self, blocks, seqlen_q, seqlen_k):
        wide = blocks.repeat(self.block_size[0], axis=2).repeat(self.block_size[1], axis=3)
        return wide[:, :, :seqlen_q, :seqlen_k]

    def _in_part(self):
        return self.blocks & ~(self.blocks if self.full is None else self.full)


def bitmaps_of(xp, mask):
    """The bitmaps of a boolean array, (batch or 1, heads or 1, seqlen_q, seqlen_k); nothing waits for the GPU."""
    *outer, seqlen_q, seqlen_k = mask.shape
    rows, columns = -(-seqlen_q // TILE), -(-seqlen_k // TILE)
    if seqlen_q % TILE or seqlen_k % TILE:
        padded = xp.zeros((*outer, rows * TILE, columns * TILE), bool)
        padded[:, :, :seqlen_q, :seqlen_k] = mask
        mask = padded
    shown = mask.reshape(*outer, rows, TILE, columns, TILE).sum(axis=(3, 5), dtype=np.int32)
    height, width = (
        xp.minimum(TILE, n - TILE * xp.arange(tiles)) for n, tiles in ((seqlen_q, rows), (seqlen_k, columns))
    )
    return _bitmaps(xp, shown > 0, (shown > 0) & (shown < height[:, None] * width), (TILE, TILE))


def _bitmaps(xp, blocks, in_part, block_size):
    planes = xp.stack([blocks, in_part])
    for axis, size in zip((3, 4), block_size):
        planes = planes.repeat(size // TILE, axis=axis)
    return Bitmaps(_packed(xp, planes), _packed(xp, planes.swapaxes(3, 4)))


def _packed(xp, planes):
    """(2, batch, heads, rows, columns) as (batch, heads, rows, 2, words): bit i of a word is column i of its 32."""
    *outer, columns = planes.shape
    words = -(-columns // WORD)
    bits = xp.zeros((*outer, words * WORD), np.uint32)
    bits[..., :columns] = planes
    bits = bits.reshape(*outer, words, WORD) << xp.arange(WORD, dtype=np.uint32)
    return xp.ascontiguousarray(xp.moveaxis(bits.sum(axis=-1, dtype=np.uint32), 0, 3))


def _rows(seqlen, size):
    return (slice(first, min(first + size, seqlen)) for first in range(0, seqlen, size))


def _summary(xp, shown, seqlen_q, seqlen_k, size):
    """Which blocks show something, and which all; ``shown(rows)`` is the mask of the queries of one row of blocks."""
    blocks_k = -(-seqlen_k // size[1])
    some, full = [], []
    for rows in _rows(seqlen_q, size[0]):
        part = shown(rows)
        for into, by_key, beyond in ((some, part.any(axis=2), False), (full, part.all(axis=2), True)):
            padded = xp.full((*by_key.shape[:2], blocks_k * size[1]), beyond)
            padded[..., :seqlen_k] = by_key
            padded = padded.reshape(*by_key.shape[:2], 1, blocks_k, size[1])
            into.append(padded.all(axis=-1) if beyond else padded.any(axis=-1))
    if not some:
        return (xp.zeros((1, 1, 0, blocks_k), bool),) * 2
    return xp.concatenate(some, axis=2), xp.concatenate(full, axis=2)
