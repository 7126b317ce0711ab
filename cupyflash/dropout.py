"""Which weights dropout keeps: random bits that depend on seed, batch, head, query and key alone.

They come from Philox 4x32 [1]_, a block cipher of a counter: no state, so that the backward finds them again tile by
tile, in any order. ``kernels/core/dropout.cuh`` computes the same.

* The counter is ``(query group, key group, head, batch)`` and the key is the seed, its lower 32 bits first.
* Group ``8 * n + m`` (m < 8) of the queries holds the queries ``16 * n + m`` and ``16 * n + m + 8``; the same of the
  keys. So a counter names 2 x 2 weights: those that one lane holds in the tensor cores' fragments of S and of its
  transpose alike. Word ``2 * a + b`` of the result is that of the query ``16 * n + m + 8 * a`` and key number b.
* A weight is kept where its word is at least ``dropout * 2**32``.

7 rounds are the fewest with which Philox 4x32 passes all of TestU01's BigCrush [1]_; 10, its authors' default and that
of most libraries, add a margin that no statistic of a mask can tell, and cost two fifths more.

.. [1] J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np

from . import checks

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 2**32


def dropout_mask(batch, heads, seqlen_q, seqlen_k, /, *, dropout, seed, xp=np):
    """Weights that `attention` keeps with this ``dropout`` and ``seed``.

    Parameters
    ----------
    batch, heads, seqlen_q, seqlen_k : int
        Of the call. The mask of fewer is the first part of that of more.
    dropout : float
        As given to `attention`.
    seed : int
        As given to `attention`; it may be ``None`` where ``dropout`` is 0.
    xp : module, default numpy
        `numpy` or `cupy`: where the mask is made.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, shape (batch, heads, seqlen_q, seqlen_k)
        Boolean: True where the weight of a key is kept, for each query head.

    Notes
    -----
    Each weight is kept by a 32-bit random number of its own, from Philox 4x32 with 7 rounds [1]_.

    References
    ----------
    .. [1] J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Examples
    --------
    >>> import cupyflash
    >>> mask = cupyflash.dropout_mask(2, 8, 256, 256, dropout=0.1, seed=42)
    >>> float(mask.mean().round(3))
    0.9
    """
    shape = checks.mask_shape(batch, heads, seqlen_q, seqlen_k)
    checks.array_module(xp)
    dropout, seed = checks.dropout(dropout, seed)
    return kept(xp, dropout, seed, *map(range, shape)) if dropout else xp.ones(shape, bool)


def kept(xp, dropout, seed, batch, heads, queries, keys):
    """The mask of these ranges."""
    blocks = [range(r.start // 16, -(-r.stop // 16)) for r in (queries, keys)]  # of 16: of 8 groups
    groups = (range(8 * r.start, 8 * r.stop) for r in blocks)
    batch, heads, query, key = (xp.arange(r.start, r.stop, dtype=xp.uint64) for r in (batch, heads, *groups))
    counter = (query[:, None], key, heads[:, None, None], batch[:, None, None, None])
    shape = (len(batch), len(heads), len(blocks[0]), 8, len(blocks[1]), 8)
    mask = xp.empty((*shape[:3], 2, 8, shape[4], 2, 8), bool)
    for i, word in enumerate(philox(counter, (seed % WORD, seed // WORD))):
        mask[:, :, :, i // 2, :, :, i % 2] = (word >= int(dropout * WORD)).reshape(shape)
    rows, columns = (slice(r.start - 16 * b.start, r.stop - 16 * b.start) for r, b in zip((queries, keys), blocks))
    return mask.reshape(len(batch), len(heads), 2 * len(query), 2 * len(key))[:, :, rows, columns]


def philox(counter, key, rounds=ROUNDS):
    """Philox 4x32 of four arrays that broadcast and of two integers: four arrays of uint64 with 32 random bits each."""
    a, b, c, d = counter
    for i in range(rounds):
        left, right = (k + i * step & WORD - 1 for k, step in zip(key, KEY_STEPS))
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = high >> 32 ^ b ^ left, high & WORD - 1, low >> 32 ^ d ^ right, low & WORD - 1
    return a, b, c, d
