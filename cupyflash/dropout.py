"""Which weights dropout keeps: random numbers that depend on seed, batch, head, query and key alone.

They come from Philox 4x32 [1]_, a block cipher of a counter: no state, so that the backward finds them again tile by
tile, in any order. ``kernels/any/dropout.cuh`` computes the same.

* Each weight has a number of 32 bits, and is kept where it is at least the threshold, ``dropout * 2**32``.
* The numbers of 32 weights are made together and from the top: word n of a stream tells of all of them whether bit
  ``31 - n`` differs from the threshold's. The first one that does decides. After 12 words or so most have, and the
  other words are not needed: a third of the random bits decides as exactly as all would.
* A block of 16 x 16 weights has 8 streams. Bits 2 and 1 of the query and bit 2 of the key are the bits of the number
  of the stream. Bit 3 of the query and bit 3 of the key say the byte of a word, then bit 1 of the key, bit 0 of the
  query and bit 0 of the key the bit, from the highest one down: a lane of the tensor cores' fragments finds its 8
  weights of a block in one word, in those of S and of its transpose alike.
* The counter is ``(query // 16, 8 * (8 * (key // 16) + stream) + call, head, batch)`` and the key is the seed, its
  lower 32 bits first. Each call makes 4 words of a stream. All that differs between the calls of some queries is in
  the second word, on which a third of the arithmetic does not depend.

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
    blocks = [range(r.start // 16, -(-r.stop // 16)) for r in (queries, keys)]
    streams = range(8 * blocks[1].start, 8 * blocks[1].stop)
    axes = (xp.arange(r.start, r.stop, dtype=xp.uint64) for r in (batch, heads, blocks[0], streams))
    batch, head, query, stream = (axis.reshape(-1, *(1,) * i) for axis, i in zip(axes, (3, 2, 1, 0)))
    shape = (len(batch), len(head), len(query), len(stream))
    dropped, undecided = xp.zeros(shape, xp.uint64), xp.full(shape, WORD - 1, xp.uint64)
    threshold = int(dropout * WORD)
    for n in range(32):
        if not threshold << n & WORD - 1 or n % 4 == 0 and not undecided.any():
            break  # what is undecided is kept: it is not less in bits that are 0
        if n % 16 == 0:  # four calls at once: NumPy is slow at small arrays
            call = xp.arange(n // 4, n // 4 + 4, dtype=xp.uint64).reshape(-1, 1, 1, 1, 1)
            words = philox((query, 8 * stream + call, head, batch), (seed % WORD, seed // WORD))
        word = words[n % 4][n // 4 % 4]
        if threshold >> 31 - n & 1:
            dropped |= undecided & word
        undecided &= ~word
    mask = xp.unpackbits((~dropped).astype("<u4").view(xp.uint8)).reshape(*shape[:3], len(stream) // 8, *(2,) * 8)
    #  bits of the weights' places, as in `mask`: q2 q1 k2, q3 k3, k1 q0 k0
    mask = mask.transpose(0, 1, 2, 7, 4, 5, 10, 3, 8, 6, 9, 11).reshape(*shape[:2], 16 * len(query), 2 * len(stream))
    rows, columns = (slice(r.start - 16 * b.start, r.stop - 16 * b.start) for r, b in zip((queries, keys), blocks))
    return mask[:, :, rows, columns].astype(bool)


def philox(counter, key, rounds=ROUNDS):
    """Philox 4x32 of four arrays that broadcast and of two integers: four arrays of uint64 with 32 random bits each."""
    a, b, c, d = counter
    for left, right in round_keys(key[0] | key[1] << 32, rounds):
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = high >> 32 ^ b ^ left, high & WORD - 1, low >> 32 ^ d ^ right, low & WORD - 1
    return a, b, c, d


def round_keys(seed, rounds=ROUNDS):
    """Two words of 32 bits for each round."""
    words = (seed % WORD, seed // WORD)
    return [tuple(word + i * step & WORD - 1 for word, step in zip(words, KEY_STEPS)) for i in range(rounds)]
