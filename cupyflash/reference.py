"""Standard attention in float64: the definition of right, on NumPy or CuPy arrays.

Every matrix is formed in full, so memory grows with the square of the length. Results are float64.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from . import checks
from .dropout import kept
from .dual import add_gradients, score_and_tangent
from .segments import segments


class AttentionGradients(NamedTuple):
    """Gradients of the inputs of an attention call; `None` of those that it did not have."""

    dq: object
    dk: object
    dv: object
    dbias: object = None
    dsink: object = None
    dscore_mod: object = None


def attention(
    q,
    k,
    v,
    /,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    bias=None,
    mask=None,
    block_mask=None,
    alibi_slopes=None,
    sink=None,
    score_mod=None,
    mask_mod=None,
    dropout=0.0,
    seed=None,
    return_lse=False,
    _first_batch=0,
):
    """Standard attention in float64.

    Takes the arguments of `cupyflash.attention`, except `out` and `precision`.

    Parameters
    ----------
    q, k, v : numpy.ndarray or cupy.ndarray
        `(batch, seqlen, heads, head_dim)`, or the same without `batch`.
    causal, window, scale, softcap, bias, mask, block_mask, alibi_slopes, sink, dropout, seed, return_lse
        As in `cupyflash.attention`.
    score_mod, mask_mod
        The same, with Python functions, of NumPy arrays.

    Returns
    -------
    out : ndarray
        `(batch, seqlen_q, heads_q, head_dim_v)`, float64. A row that sees no key is 0.
    lse : ndarray
        Only with `return_lse`: natural logarithm of the sum of the exponentials,
        `(batch, heads_q, seqlen_q)`, float64. A row that sees no key is its sink, or -inf.
    """
    xp = _namespace(q)
    heads_k = k.shape[-2]
    options = softcap, bias, mask, block_mask, alibi_slopes, score_mod, mask_mod
    logits, *_ = _logits(xp, q, k, causal, window, scale, *options)
    sink = xp.broadcast_to(_sink(xp, sink, heads_k), (*logits.shape[:-1], 1))
    highest = xp.concatenate([logits, sink], axis=-1).max(axis=-1, keepdims=True)
    highest = xp.where((highest == -math.inf) | (sink == math.inf), 0.0, highest)
    weights = xp.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True) + xp.exp(sink - highest)
    empty = (logits == -math.inf).all(axis=-1, keepdims=True)
    p = xp.where(empty, 0.0, weights / xp.where(empty, 1.0, total))
    out = _join(xp, _dropper(xp, p, dropout, seed, _first_batch)(p) @ _split(xp, v, heads_k))
    if not return_lse:
        return out
    lse = xp.where(empty, sink, highest + xp.log(xp.where(empty, 1.0, total)))
    return out, lse.reshape(*q.shape[:-3], q.shape[-2], q.shape[-3])


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    /,
    *,
    dlse=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    bias=None,
    mask=None,
    block_mask=None,
    alibi_slopes=None,
    sink=None,
    score_mod=None,
    mask_mod=None,
    dropout=0.0,
    seed=None,
    bias_gradient=True,
    _first_batch=0,
):
    """Gradients of standard attention in float64, from their formulas.

    Takes the arguments of `cupyflash.attention_backward`, except `deterministic` and `precision`.

    Parameters
    ----------
    dout : numpy.ndarray or cupy.ndarray
        Gradient of `out`.
    q, k, v, causal, window, scale, softcap, bias, mask, block_mask, alibi_slopes, sink
        As given to `attention`.
    score_mod, mask_mod, dropout, seed
        As given to `attention`.
    out, lse : ndarray
        What `attention` returned for them.
    dlse : ndarray, optional
        Gradient of `lse`.
    bias_gradient : bool, default True
        As in `cupyflash.attention_backward`.

    Returns
    -------
    AttentionGradients
        `dq`, `dk`, `dv` and, with `bias` and `sink`, `dbias` and `dsink` in float64, shaped like these.
    """
    xp = _namespace(q)
    heads_k = k.shape[-2]
    by_head = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    scale = _scale(q, scale)
    options = softcap, bias, mask, block_mask, alibi_slopes, score_mod, mask_mod
    logits, derivative, before, tangent = _logits(xp, q, k, causal, window, scale, *options)
    dout, q, k, v, out = (_split(xp, x, heads_k) for x in (dout, q, k, v, out))
    lse = lse.astype(xp.float64).reshape(*logits.shape[:-1], 1)
    dlse = 0.0 if dlse is None else dlse.astype(xp.float64).reshape(lse.shape)

    p = xp.where(lse == -math.inf, 0.0, xp.exp(logits - xp.where(lse == -math.inf, 0.0, lse)))
    drop = _dropper(xp, p, dropout, seed, _first_batch)
    dp = drop(dout @ v.swapaxes(-1, -2))
    delta = (dout * out).sum(axis=-1, keepdims=True)
    to_all = xp.where(lse == -math.inf, 0.0, dlse - delta)  # a row without keys has no weight to move
    ds = p * (dp + to_all)
    dscore_mod = None
    if score_mod is not None:
        if score_mod.gradients:
            captured = _captured(xp, score_mod)
            dscore_mod = {name: xp.zeros(captured[name].shape) for name in score_mod.gradients}
            add_gradients(dscore_mod, score_mod.function, before, _places(xp, before), captured, ds)
        ds = xp.where(p == 0, 0.0, ds * tangent)
    dbias = None if bias is None or not bias_gradient else _summed(ds.reshape(by_head), bias.shape)
    ds = derivative * ds
    dq = scale * ds @ k
    dk = scale * ds.swapaxes(-1, -2) @ q
    dv = drop(p).swapaxes(-1, -2) @ dout
    dk, dv = (x.sum(axis=-3, keepdims=True) for x in (dk, dv))  # over the query heads that share a key head
    dsink = None
    if sink is not None:
        logit = _sink(xp, sink, heads_k)
        alone = lse == logit  # all the weight is the sink's, also where the difference of two infinities is NaN
        weight = xp.exp(xp.where(alone, 0.0, logit) - xp.where(alone, 0.0, lse))
        sums = (weight * to_all).sum(axis=(-2, -1))
        dsink = sums.reshape(math.prod(sums.shape[:-2]), sink.size).sum(axis=0)
    return AttentionGradients(*(_join(xp, x) for x in (dq, dk, dv)), dbias, dsink, dscore_mod)


def attention_varlen(
    q,
    k,
    v,
    /,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q=None,
    seqused_k=None,
    alibi_slopes=None,
    return_lse=False,
    **options,
):
    """Standard attention of each of packed sequences, in float64.

    Takes the arguments of `cupyflash.attention_varlen`, except `out`, `validate` and the longest lengths.

    Parameters
    ----------
    q, k, v : numpy.ndarray or cupy.ndarray
        `(total, heads, head_dim)`.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k : numpy.ndarray
        As in `cupyflash.attention_varlen`.
    alibi_slopes, return_lse, **options
        As in `attention`.

    Returns
    -------
    out : ndarray
        `(total_q, heads_q, head_dim_v)`, float64. A row of no sequence is 0.
    lse : ndarray
        Only with `return_lse`: `(heads_q, total_q)`, float64. That of a row of no sequence is -inf.
    """
    xp = _namespace(q)
    out = xp.zeros((*q.shape[:2], v.shape[-1]))
    lse = xp.full(q.shape[1::-1], -math.inf)
    for b, at in enumerate(_segments(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        more = options | {"alibi_slopes": _slopes_of(alibi_slopes, b), "_first_batch": b}
        out[at.q], lse[:, at.q] = attention(q[at.q], k[at.k], v[at.k], return_lse=True, **more)
    return (out, lse) if return_lse else out


def attention_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    /,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q=None,
    seqused_k=None,
    dlse=None,
    alibi_slopes=None,
    **options,
):
    """Gradients of standard attention of each of packed sequences, in float64.

    Takes the arguments of `cupyflash.attention_varlen_backward`, except `deterministic`, `validate` and the longest
    lengths.

    Parameters
    ----------
    dout : numpy.ndarray or cupy.ndarray
        Gradient of `out`.
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, **options
        As given to `attention_varlen`.
    out, lse : ndarray
        What `attention_varlen` returned for them.
    dlse : ndarray, optional
        Gradient of `lse`.

    Returns
    -------
    AttentionGradients
        `dq`, `dk`, `dv` and, with `sink`, `dsink` in float64, shaped like these.
    """
    xp = _namespace(q)
    dq, dk, dv = (xp.zeros(x.shape) for x in (q, k, v))
    dsink = None if options.get("sink") is None else xp.zeros(options["sink"].shape)
    for b, at in enumerate(_segments(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        more = options | {"alibi_slopes": _slopes_of(alibi_slopes, b), "_first_batch": b}
        more["dlse"] = None if dlse is None else dlse[:, at.q]
        arrays = dout[at.q], q[at.q], k[at.k], v[at.k], out[at.q], lse[:, at.q]
        part = attention_backward(*arrays, **more)
        dq[at.q], dk[at.k], dv[at.k] = part.dq, part.dk, part.dv
        if dsink is not None:
            dsink += part.dsink
    return AttentionGradients(dq, dk, dv, None, dsink)


def _segments(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    indices = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return segments(indices | {"seqused_q": seqused_q, "seqused_k": seqused_k})


def _slopes_of(slopes, b):
    return slopes if slopes is None or slopes.ndim == 1 else slopes[b]


def visible(xp, seqlen_q, seqlen_k, causal=False, window=None):
    """Which keys each query sees: boolean, `(seqlen_q, seqlen_k)`."""
    _, left, right, *_ = checks.options(causal, window, None)
    ahead = _ahead(xp, seqlen_q, seqlen_k, causal)
    seen = xp.ones((seqlen_q, seqlen_k), dtype=bool)
    if right is not None:
        seen &= ahead <= min(right, seqlen_q + seqlen_k)
    if left is not None:
        seen &= ahead >= -min(left, seqlen_q + seqlen_k)
    return seen


def _ahead(xp, seqlen_q, seqlen_k, causal):
    """How far each key lies after the diagonal of each query, `(seqlen_q, seqlen_k)`."""
    diagonal = 0 if causal == "upper_left" else seqlen_k - seqlen_q
    return xp.arange(seqlen_k) - (xp.arange(seqlen_q)[:, None] + diagonal)


def _namespace(x):
    return sys.modules[type(x).__module__.partition(".")[0]]


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _logits(xp, q, k, causal, window, scale, softcap, bias, mask, block_mask, alibi_slopes, score_mod, mask_mod):
    """`(..., heads_k, group, seqlen_q, seqlen_k)`, -inf where the key is hidden; and the derivative of softcap.

    And what `score_mod` was given, and its derivative.
    """
    softcap = checks.options(causal, window, None, softcap).softcap
    heads_k, lengths = k.shape[-2], (q.shape[-3], k.shape[-3])
    logits, derivative = _scale(q, scale) * (_split(xp, q, heads_k) @ _split(xp, k, heads_k).swapaxes(-1, -2)), 1.0
    if softcap is not None:
        tanh = xp.tanh(logits / softcap)
        logits, derivative = softcap * tanh, 1 - tanh**2
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(xp.float64).reshape(*alibi_slopes.shape[:-1], *logits.shape[-4:-2], 1, 1)
        logits = logits - slopes * abs(_ahead(xp, *lengths, causal))
    if bias is not None:
        logits = logits + _by_head(xp, bias.astype(xp.float64), logits)
    before, tangent = logits, 1.0
    if score_mod is not None:
        captured = _captured(xp, score_mod)
        logits, tangent = score_and_tangent(score_mod.function, before, _places(xp, before), captured)
    seen = visible(xp, *lengths, causal, window)
    if mask is not None:
        seen = seen & _by_head(xp, mask, before)
    if block_mask is not None:
        seen = seen & _by_head(xp, block_mask.dense(*lengths), before)
    if mask_mod is not None:
        shown = mask_mod.function(*_places(xp, before), **_captured(xp, mask_mod))
        if block_mask is not None:
            full = xp.asarray(block_mask.elements_for_mod(*lengths))
            shown = shown | _by_head(xp, full, before)
        seen = seen & shown
    return xp.where(seen, logits, -math.inf), derivative, before, tangent


def _captured(xp, mod):
    """Arrays of floating-point numbers in float64."""
    wide = {name: xp.asarray(x) for name, x in mod.captures.items() if f"{mod.argument}.{name}" in mod.arrays}
    return mod.captures | {n: x if x.dtype.kind in "biu" else x.astype(xp.float64) for n, x in wide.items()}


def _places(xp, logits):
    """Batch, query head, query and key of logits: they broadcast to their shape."""
    *batch, heads_k, group, seqlen_q, seqlen_k = logits.shape
    batches = xp.arange(*(batch or [1])).reshape(*batch, 1, 1, 1, 1)
    heads = xp.arange(heads_k * group).reshape(heads_k, group, 1, 1)
    return batches, heads, xp.arange(seqlen_q)[:, None], xp.arange(seqlen_k)


def _by_head(xp, x, logits):
    """What broadcasts to `(..., heads_q, seqlen_q, seqlen_k)`, in the shape of `logits`."""
    *batch, heads_k, group, seqlen_q, seqlen_k = logits.shape
    if not batch and x.ndim == 4:  # of a block mask
        x = x[0]
    return xp.broadcast_to(x, (*batch, heads_k * group, seqlen_q, seqlen_k)).reshape(logits.shape)


def _summed(x, shape):
    """Sum of `x` over the axes along which `shape` was broadcast to its shape."""
    shape_in_full = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(axis=tuple(i for i, n in enumerate(shape_in_full) if n == 1), keepdims=True).reshape(shape)


def _sink(xp, sink, heads_k):
    """`(heads_k, group, 1, 1)`, or -inf."""
    if sink is None:
        return xp.asarray(-math.inf)
    return sink.astype(xp.float64).reshape(heads_k, sink.size // max(1, heads_k), 1, 1)


def _dropper(xp, p, dropout, seed, first_batch):
    """The function that drops of a matrix like `p`, `(..., heads_k, group, seqlen_q, seqlen_k)`."""
    dropout, seed = checks.dropout(dropout, seed)
    if not dropout:
        return lambda x: x
    *batch, heads_k, group, seqlen_q, seqlen_k = p.shape
    batches = range(first_batch, first_batch + (batch or [1])[0])
    mask = kept(xp, dropout, seed, batches, *map(range, (heads_k * group, seqlen_q, seqlen_k))).reshape(p.shape)
    return lambda x: xp.where(mask, x / (1 - dropout), 0.0)


def _split(xp, x, heads_k):
    """`(..., seqlen, heads, width)` to `(..., heads_k, group, seqlen, width)`; the group of keys is 1."""
    group = x.shape[-2] // max(1, heads_k)
    x = x.astype(xp.float64).reshape(*x.shape[:-2], heads_k, group, x.shape[-1])
    return xp.moveaxis(x, -4, -2)


def _join(xp, x):
    """The inverse of `_split`."""
    x = xp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
