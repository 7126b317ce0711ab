"""Backend for NumPy arrays: tiled attention whose memory grows with the length, not with its square.

A tile is a block of keys times a block of queries, for a stack of heads at once, small enough for the
cache; BLAS multiplies. The queries of the heads that share a key head lie side by side in one tile, so
that a key is read once for all of them. Keys come first in a tile: its maximum and sum over the keys then
run along whole rows of memory, which NumPy does several times faster than along the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .block_mask import BlockMask
from .dropout import kept
from .dual import add_gradients, score_and_tangent
from .mods import Given
from .problem import Problem

# The fastest of those measured: smaller tiles show Python's overhead, larger ones fall out of the cache.
TILE_KEYS = 512
TILE_ROWS = 256


def forward(
    problem,
    q,
    k,
    v,
    out,
    lse,
    slopes,
    sink,
    seed=None,
    bias=None,
    mask=None,
    block_mask=None,
    given=None,
    first_batch=0,
):
    """Write attention to `out`, and its log-sum-exp to `lse` unless that is `None`.

    `first_batch`: what dropout counts the batches from.
    """
    with np.errstate(all="ignore"):
        for stack in _stacks(problem, slopes, sink, seed, first_batch, bias, mask, given, block_mask):
            keys, values = stack.fold(k), stack.fold(v)
            for rows in stack.row_blocks():
                tile_out, tile_lse = _forward_rows(stack, rows, stack.fold_queries(q, rows), keys, values)
                stack.unfold(tile_out, out, rows)
                if lse is not None:
                    stack.unfold(tile_lse, _by_row(lse), rows)


def _forward_rows(stack, rows, queries, keys, values):
    """Attention of one block of queries, and its log-sum-exp, by online softmax."""
    highest = np.full(queries.folded.shape[:-1], -np.inf, stack.dtype)
    total = np.zeros_like(highest)
    weighted = np.zeros((*highest.shape, values.shape[-1]), stack.dtype)
    for tile in stack.key_blocks(rows):
        p, _ = stack.logits(stack.products(queries, keys, tile), rows, tile)
        previous, highest = highest, np.maximum(highest, p.max(axis=-2))
        shift = np.where(highest == -np.inf, 0, highest)  # no key seen yet: -inf - 0 is -inf, not NaN
        p -= shift[..., None, :]
        np.exp(p, out=p)
        rescale = np.exp(previous - shift)
        total *= rescale
        total += p.sum(axis=-2)
        weighted *= rescale[..., None]
        p = stack.drop(p, stack.kept(rows, tile))
        weighted += p.swapaxes(-1, -2) @ values[..., tile, :]
    sink = stack.sinks(rows)
    weighted /= np.where(total == 0, 1, total + np.exp(sink - highest))[..., None]
    return weighted, np.logaddexp(highest + np.log(total), sink)[..., None]


def backward(
    problem,
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse,
    dq,
    dk,
    dv,
    slopes,
    sink,
    dsink,
    deterministic,
    seed=None,
    bias=None,
    mask=None,
    dbias=None,
    block_mask=None,
    given=None,
    captured=None,
    first_batch=0,
):
    """Write `dq`, `dk`, `dv` and, unless they are `None`, `dsink` and `dbias`: four axes, of 1 where it was broadcast.

    And `captured`, gradients of what the functions `given` captured, by name. The order of the sums never varies,
    `deterministic` or not.
    """
    dbias_sum = None if dbias is None else np.zeros(dbias.shape, _work_dtype(problem))
    captured_sums = {name: np.zeros(x.shape, _work_dtype(problem)) for name, x in (captured or {}).items()}
    if dsink is not None:
        dsink[...] = 0
    with np.errstate(all="ignore"):
        for stack in _stacks(problem, slopes, sink, seed, first_batch, bias, mask, given, block_mask):
            keys, values = stack.fold(k), stack.fold(v)
            dkeys, dvalues = np.zeros_like(keys), np.zeros_like(values)
            for rows in stack.row_blocks():
                queries, douts = stack.fold_queries(q, rows), stack.fold(dout, rows)
                row_lse = stack.fold(_by_row(lse), rows)[..., 0]
                delta = (douts * stack.fold(out, rows)).sum(axis=-1)
                if dlse is not None:
                    delta -= stack.fold(_by_row(dlse), rows)[..., 0]
                delta[row_lse == -np.inf] = 0  # no weight is left that dlse could move
                if dsink is not None:
                    stack.add_sink_gradient(dsink, rows, row_lse, delta)
                sums = dkeys, dvalues, dbias_sum, captured_sums
                dqueries = _backward_rows(stack, rows, queries, keys, values, douts, row_lse, delta, sums)
                stack.unfold(dqueries, dq, rows)
            stack.unfold(dkeys, dk)
            stack.unfold(dvalues, dv)
        if dbias is not None:
            dbias[...] = dbias_sum
        for name, total in captured_sums.items():
            captured[name][...] = total


def _backward_rows(stack, rows, queries, keys, values, douts, lse, delta, sums):
    """Gradient of one block of queries; adds their part to the `sums`, of keys, values, bias and what is captured."""
    dkeys, dvalues, dbias, captured = sums
    dqueries = np.zeros_like(queries.folded)
    lse = np.where(lse == -np.inf, np.inf, lse)  # a row without keys: weights 0, not exp(-inf + inf)
    for tile in stack.key_blocks(rows):
        products = stack.products(queries, keys, tile)
        p, modified = stack.logits(products, rows, tile, backward=True)
        p -= lse[..., None, :]
        np.exp(p, out=p)
        kept = stack.kept(rows, tile)
        dvalues[..., tile, :] += stack.drop(p, kept) @ douts
        ds = stack.drop(values[..., tile, :] @ douts.swapaxes(-1, -2), kept)
        ds -= delta[..., None, :]
        ds *= p
        if modified is not None:
            if captured:
                stack.add_captured_gradients(captured, modified, rows, tile, ds)
            _by_head(ds, rows)[...] = np.where(_by_head(p, rows) == 0, 0, _by_head(ds, rows) * modified.tangent)
        if dbias is not None:
            stack.add_bias_gradient(dbias, rows, tile, ds)
        if stack.problem.softcap is not None:
            ds *= np.subtract(1, np.square(products, out=products), out=products)
        dkeys[..., tile, :] += queries.complete(ds @ queries.folded)
        dqueries += ds.swapaxes(-1, -2) @ keys[..., tile, :]
    return _times(dqueries, stack.problem.scale)


def _work_dtype(problem):
    """What is computed in: 16-bit inputs are widened."""
    return np.float64 if problem.dtype == "float64" else np.float32


def _times(x, scale):
    """``scale * x``, also where the scale is too small for a normal number of the dtype of `x`."""
    if 0 < abs(scale) < np.finfo(x.dtype).tiny:
        return np.multiply(x, scale, dtype=np.float64).astype(x.dtype)
    return x * x.dtype.type(scale)


def _by_row(lse):
    """`(batch, heads, seqlen)` with the axes of q: `(batch, seqlen, heads, 1)`."""
    return lse.swapaxes(1, 2)[..., None]


def _stacks(problem, *arrays):
    """Every range of batch and key heads; short sequences are stacked until they fill a tile.

    What has blocks of its own is not stacked: one might read, with the weight 0, what it does not see.
    """
    rows = max(1, min(problem.seqlen_q, TILE_ROWS // problem.group))
    heads = TILE_ROWS * TILE_KEYS // (rows * problem.group * min(problem.seqlen_k, TILE_KEYS))
    heads_k = max(1, min(problem.heads_k, heads))
    if problem.blocks and arrays[-1].blocks.shape[1] > 1:
        heads_k = 1
    batch = max(1, min(problem.batch, heads // heads_k))
    if problem.blocks and arrays[-1].blocks.shape[0] > 1:
        batch = 1
    for b in range(0, problem.batch, batch):
        for h in range(0, problem.heads_k, heads_k):
            yield _Stack(problem, slice(b, b + batch), slice(h, h + heads_k), rows, *arrays)


class _Modified(NamedTuple):
    """What a `score_mod` did to a tile, by head."""

    before: np.ndarray
    tangent: np.ndarray


class _Queries(NamedTuple):
    """One block of queries of a stack."""

    folded: np.ndarray  # (batch, heads_k, group * rows, head_dim)
    scale: float | None  # that products with them still lack

    def complete(self, product):
        return product if self.scale is None else _times(product, self.scale)


@dataclass(frozen=True)
class _Stack:
    """The heads that are worked on together, and the number of queries of a block."""

    problem: Problem
    batch: slice
    heads_k: slice
    rows: int
    slopes: np.ndarray | None  # (batch, heads_q), of all heads
    sink: np.ndarray | None  # (heads_q,), of all heads
    seed: int | None
    first_batch: int  # what dropout counts from
    bias: np.ndarray | None  # (batch, heads_q, seqlen_q, seqlen_k), of all heads
    mask: np.ndarray | None  # the same
    given: Given | None  # functions of the user
    block_mask: BlockMask | None

    @property
    def dtype(self):
        return _work_dtype(self.problem)

    def row_blocks(self):
        """The blocks of queries."""
        size = None if self.block_mask is None else self.block_mask.block_size[0]
        return _blocks(0, self.problem.seqlen_q, self.rows, size)

    def key_blocks(self, rows):
        """The blocks of the keys that some query of `rows` sees."""
        size = None if self.block_mask is None else self.block_mask.block_size[1]
        tiles = _blocks(*self.problem.key_range(rows.start, rows.stop), TILE_KEYS, size)
        return (tile for tile in tiles if self._shows(rows, tile))

    def _shows(self, rows, tile):
        if self.block_mask is not None and not self._block(self.block_mask.blocks, rows, tile).any():
            return False
        return self.mask is None or self._tile_of(self.mask, rows, tile).any()

    def _block(self, blocks, rows, tile):
        """What the one that a tile lies in has of these heads: `(batch, heads_k, 1, group, 1)`, each maybe 1."""
        batch, heads, *_ = blocks.shape
        query, key = (part.start // size for part, size in zip((rows, tile), self.block_mask.block_size))
        block = blocks[self.batch if batch > 1 else slice(None), :, query, key]
        if heads == 1:
            return block[:, :, None, None, None]
        return block.reshape(len(block), self.problem.heads_k, 1, -1, 1)[:, self.heads_k]

    def fold(self, x, rows=slice(None)):
        """These heads of `(batch, seqlen, heads, width)`, as `(batch, heads_k, group * seqlen, width)`."""
        x = np.asarray(self._grouped(x, rows).transpose(0, 2, 3, 1, 4), self.dtype)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def fold_queries(self, q, rows):
        """Folded and scaled, unless a number overflows that the keys may make small again."""
        queries, scale = self.fold(q, rows), self.problem.scale
        scaled = _times(queries, scale)
        if abs(scale) > 1 and (np.isinf(scaled) & np.isfinite(queries)).any():
            return _Queries(queries, scale)
        return _Queries(scaled, None)

    def unfold(self, folded, x, rows=slice(None)):
        """Write to `x` what `fold` would read from it."""
        x = self._grouped(x, rows).transpose(0, 2, 3, 1, 4)
        x[...] = folded.reshape(x.shape)

    def _grouped(self, x, rows):
        x = x[self.batch, rows]
        return x.reshape(*x.shape[:2], self.problem.heads_k, -1, x.shape[-1])[:, :, self.heads_k]

    def products(self, queries, keys, tile):
        """Keys by queries of one tile: their scaled products; with softcap, the tanh that it multiplies."""
        products = queries.complete(keys[..., tile, :] @ queries.folded.swapaxes(-1, -2))
        if self.problem.softcap is not None:
            products /= self.dtype(self.problem.softcap)
            np.tanh(products, out=products)
        return products

    def logits(self, products, rows, tile, backward=False):
        """What the softmax is of, -inf where the key is hidden, and what `backward` needs of a `score_mod`.

        In the memory of `products`, but for softcap.
        """
        problem = self.problem
        logits = products if problem.softcap is None else products * self.dtype(problem.softcap)
        low, high = problem.unmasked_range(rows.start, rows.stop)
        masked = tile.start < low or tile.stop > high
        by_head = _by_head(logits, rows)
        if masked or problem.alibi:
            diagonal = np.arange(rows.start, rows.stop, dtype=np.int32) + problem.diagonal
            ahead = np.arange(tile.start, tile.stop, dtype=np.int32)[:, None] - diagonal
        if problem.alibi:
            by_head -= self._slopes() * np.abs(ahead).astype(self.dtype)[:, None, :]
        if self.bias is not None:
            by_head += self._tile_of(self.bias, rows, tile).astype(self.dtype)
        modified = None
        if self.given is not None and self.given.score is not None:
            modified = self._modified(by_head, rows, tile, backward)
        if masked:
            np.copyto(by_head, -np.inf, where=self._hidden(ahead)[:, None, :])
        if self.mask is not None:
            shown = self._tile_of(self.mask, rows, tile)
            if self.block_mask is not None and self.block_mask.mask is not None:
                shown = shown | self._block(self.block_mask.full, rows, tile)
            np.copyto(by_head, -np.inf, where=~shown)
        if self.block_mask is not None:
            np.copyto(by_head, -np.inf, where=~self._block(self.block_mask.blocks, rows, tile))
        if self.given is not None and self.given.mask is not None:
            mod = self.given.mask
            seen = mod.function(*self._places(rows, tile), **self.given.keywords(mod, self.dtype))
            seen = np.asarray(seen, bool)
            if self.block_mask is not None and self.block_mask.full_for_mod is not None:
                seen = seen | self._block(self.block_mask.full, rows, tile)
            np.copyto(by_head, -np.inf, where=~seen)
        return logits, modified

    def _modified(self, by_head, rows, tile, backward):
        """Give the scores to the user's function, in place; return those before and the derivative."""
        function, places = self.given.score.function, self._places(rows, tile)
        captured = self.given.keywords(self.given.score, self.dtype)
        if not backward:
            by_head[...] = function(by_head.copy(), *places, **captured)
            return None
        before = by_head.copy()
        by_head[...], tangent = score_and_tangent(function, before, places, captured)
        return _Modified(before, tangent)

    def _places(self, rows, tile):
        """Batch, query head, query and key of the scores of a tile, by head: they broadcast to its shape."""
        group, size = self.problem.group, (self.problem.batch, self.problem.heads_k)
        batch, heads_k = (np.arange(*part.indices(n)) for part, n in zip((self.batch, self.heads_k), size))
        heads = (heads_k[:, None] * group + np.arange(group))[None, :, None, :, None]
        queries, keys = (np.arange(part.start, part.stop) for part in (rows, tile))
        return batch.reshape(-1, 1, 1, 1, 1), heads, queries, keys.reshape(-1, 1, 1)

    def add_captured_gradients(self, sums, modified, rows, tile, ds):
        """Add to `sums`, by name, the part of one tile."""
        mod, captured = self.given.score, self.given.keywords(self.given.score, self.dtype)
        by_name = {name.partition(".")[2]: total for name, total in sums.items()}
        places = self._places(rows, tile)
        add_gradients(by_name, mod.function, modified.before, places, captured, _by_head(ds, rows))

    def kept(self, rows, tile):
        """Keys by queries of one tile: the weights that dropout keeps; without dropout, `None`."""
        if not self.problem.dropout:
            return None
        group, size = self.problem.group, (self.problem.batch, self.problem.heads_k)
        batch, heads_k = (range(*part.indices(n)) for part, n in zip((self.batch, self.heads_k), size))
        batch = range(batch.start + self.first_batch, batch.stop + self.first_batch)
        queries, keys = (range(part.start, part.stop) for part in (rows, tile))
        heads = range(heads_k.start * group, heads_k.stop * group)
        mask = kept(np, self.problem.dropout, self.seed, batch, heads, queries, keys)
        by_head = mask.reshape(len(batch), len(heads_k), group, len(queries), len(keys)).transpose(0, 1, 4, 2, 3)
        return by_head.reshape(*by_head.shape[:3], -1)

    def drop(self, x, kept):
        """`x` where it is kept, as much larger as there are fewer; without dropout, all of it."""
        return x if kept is None else np.where(kept, x / self.dtype(1 - self.problem.dropout), self.dtype(0))

    def _slopes(self):
        """Those of these heads: `(batch, heads_k, 1, group, 1)`."""
        slopes = self.slopes[self.batch]
        return slopes.reshape(len(slopes), self.problem.heads_k, 1, -1, 1)[:, self.heads_k]

    def _tile_of(self, x, rows, tile):
        """Keys by queries of one tile, by head, of `(batch, heads_q, seqlen_q, seqlen_k)`."""
        x = x[self.batch, :, rows, tile]
        x = x.reshape(len(x), self.problem.heads_k, -1, *x.shape[2:])[:, self.heads_k]
        return x.transpose(0, 1, 4, 2, 3)

    def add_bias_gradient(self, dbias, rows, tile, ds):
        """Add to `dbias`, of all heads, the part of one tile, summed over the axes that were broadcast."""
        by_query = _by_head(ds, rows).transpose(0, 1, 3, 4, 2)
        by_query = by_query.reshape(len(ds), -1, *by_query.shape[-2:])
        heads = slice(self.heads_k.start * self.problem.group, self.heads_k.stop * self.problem.group)
        parts = zip(dbias.shape, (self.batch, heads, rows, tile))
        at = tuple(slice(None) if size == 1 else part for size, part in parts)
        dbias[at] += by_query.sum(axis=tuple(i for i, size in enumerate(dbias.shape) if size == 1), keepdims=True)

    def sinks(self, rows):
        """Those of the rows of a block: `(heads_k, group * rows)`; -inf where there are none."""
        if self.sink is None:
            return -np.inf
        by_head = self.sink.reshape(self.problem.heads_k, -1)[self.heads_k]
        return np.repeat(by_head, rows.stop - rows.start, axis=-1)

    def add_sink_gradient(self, dsink, rows, lse, delta):
        """Add to `dsink`, of all heads, the part of one block of queries."""
        sink = self.sinks(rows)
        # The sink has all the weight where lse is it, infinite ones included, whose difference is NaN.
        part = np.where(lse == sink, 1, np.exp(sink - lse)) * delta
        by_head = dsink.reshape(self.problem.heads_k, -1)[self.heads_k]
        by_head -= part.reshape(*part.shape[:2], -1, rows.stop - rows.start).sum(axis=(0, 3))

    def _hidden(self, ahead):
        hidden = np.zeros(ahead.shape, bool)
        if self.problem.right is not None:
            hidden |= ahead > self.problem.right
        if self.problem.left is not None:
            hidden |= ahead < -self.problem.left
        return hidden


def _by_head(x, rows):
    """Of keys by queries of one tile, a view with an axis of the heads that share a key head: the last but one."""
    return x.reshape(*x.shape[:-1], -1, rows.stop - rows.start)


def _blocks(first, last, size, within=None):
    """Slices of at most `size` that fill a range; none of them crosses a multiple of `within`."""
    while first < last:
        end = min(first + size, last, first - first % within + within if within else last)
        yield slice(first, end)
        first = end
