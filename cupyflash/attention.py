"""The public functions: adopt the arrays, describe the call, let a backend compute, give the results back."""

from __future__ import annotations

import math
from typing import NamedTuple

from . import checks, interop
from .mods import Given
from .problem import Problem
from .reference import AttentionGradients

_MAX_PLANS = 4096
_BY_ELEMENT = ("lse", "dlse", "alibi_slopes", "sink", "bias", "mask")  # what no kernel reads by whole rows
_plans: dict = {}  # signature of a call -> _Plan


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
    precision=None,
    out=None,
    return_lse=False,
):
    """Exact attention: ``softmax(scale * q @ k.T) @ v`` for each batch and head.

    The logits are never stored: keys are read tile by tile and each query keeps a running maximum and sum
    (online softmax [1]_, FlashAttention [2]_ [3]_), so memory grows with the length, not with its square.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries. Arrays of NumPy, CuPy, PyTorch and JAX, and of any other library with DLPack and the array
        API standard; all arrays of a call come from one library and lie on one device.
        ``batch`` may be left out, for all arrays together.
    k : array, shape (batch, seqlen_k, heads_k, head_dim)
        Keys. ``heads_k`` divides ``heads_q``: query head ``h`` uses key head
        ``h // (heads_q // heads_k)`` (grouped-query attention; ``heads_k = 1`` is multi-query attention).
    v : array, shape (batch, seqlen_k, heads_k, head_dim_v)
        Values. ``head_dim_v`` may differ from ``head_dim``.
    causal : {False, True, "lower_right", "upper_left"}, default False
        Hide the keys that come after a query. ``True`` is ``"lower_right"``: query i sees keys
        ``j <= i + seqlen_k - seqlen_q``, so that the last query sees every key. ``"upper_left"``:
        ``j <= i``, so that the first query sees the first key.
    window : (left, right), optional
        Hide the keys further than ``left`` before or ``right`` after the diagonal; both ends are inclusive,
        ``None`` is unlimited and 0 is a bound like any other. The diagonal is
        ``j = i + seqlen_k - seqlen_q``, or ``j = i`` with ``causal="upper_left"``. With ``causal``,
        ``right`` is 0.
    scale : float, default ``head_dim ** -0.5``
        Factor of the logits, at most 1e38 in magnitude; it may be 0 or negative.
    softcap : float, optional
        Bound of the logits: ``softcap * tanh(logit / softcap)`` takes the place of each scaled logit. From
        1e-30 to 1e30; ``None`` switches it off. Up to 31, in bfloat16 on Hopper, weights need no maximum, but values
        beyond 1e19 may overflow.
    bias : array, optional
        Added to the logits after ``softcap``, not scaled. It broadcasts, as in NumPy, to
        (batch, heads_q, seqlen_q, seqlen_k), or (heads_q, seqlen_q, seqlen_k) where ``batch`` is left out, and is
        float16, bfloat16 or float32, whatever the dtype of ``q``; also float64 where that is float64. -inf
        hides a key.
    mask : array of bool, optional
        True where a query may see a key; of what other masks hide, it shows nothing. It broadcasts as ``bias``.
    block_mask : BlockMask, optional
        The blocks of queries and keys that are computed; the others cost nothing. On the device of ``q``. One that
        holds a mask of elements does not go with ``mask``.
    alibi_slopes : array, shape (heads_q,) or (batch, heads_q), optional
        ALiBi [4]_: a logit loses ``slope`` times the distance of its key from the diagonal, that of
        ``window``: ``slope * abs(i + seqlen_k - seqlen_q - j)``, or ``slope * abs(i - j)`` with
        ``causal="upper_left"``. Of the dtype of ``lse`` and finite; slopes may be 0 or negative. Only (heads_q,)
        where ``batch`` is left out.
    sink : array, shape (heads_q,), optional
        Attention sink [5]_: one more logit in every row of a head, of no key and of no value, so that the
        weights of the keys add up to less than 1. It is as given: no scale, ``softcap``, ALiBi or mask
        changes it. Of the dtype of ``lse``, which includes it; -inf is no sink.
    score_mod : ScoreMod, optional
        A function of yours that changes the logits, after ``bias`` and before the masks.
    mask_mod : MaskMod, optional
        A function of yours that says whether a query sees a key; of what other masks hide, it shows nothing. A
        ``block_mask`` may say in which blocks it need not be asked: ``full`` of `BlockMask`.
    dropout : float, default 0
        Probability with which a weight becomes 0 after the softmax; those that are kept are divided by
        ``1 - dropout`` [6]_. From 0 to ``1 - 2**-32``, of which it is taken as the nearest multiple of
        ``2**-32``. ``lse`` is that without dropout. `dropout_mask` shows what is kept.
    seed : int, optional
        From 0 to ``2**64 - 1``; needed with ``dropout``. The same seed drops the same weights, in any call:
        give each call one of its own, and its gradients the same one.
    precision : {None, "highest", "tf32"}, default None
        Of float32 on a GPU. ``None`` is ``"highest"``: as exact as products in float32, by three products of TF32
        or, on Hopper, of float16 each [7]_. ``"tf32"`` allows one of TF32, from numbers rounded to 11 bits: an error
        of 1e-3 instead of 1e-6. Where Hopper's three are faster, from lengths of 512 on, it changes nothing. The host
        always computes in float32. Other dtypes take no ``"tf32"``.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v), optional
        Where to write the result, with the dtype of ``q``, or float32 when that is float16 or bfloat16
        (partial results to be merged by `merge_attention` then lose nothing). It must share no memory with
        the inputs. Arrays of JAX and of other DLPack libraries are refused: they may be immutable.
    return_lse : bool, default False
        Return ``lse`` as well.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Of the library, device and dtype of ``q``; the very object given as ``out``, if any.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural logarithm of the sum of the exponentials of a row's logits, float32
        (float64 for float64).

    Raises
    ------
    TypeError
        An argument is not an array, or the dtypes or the libraries differ, or an option has the wrong type.
    ValueError
        Shapes, devices or values do not fit together; a PyTorch tensor requires grad while grad mode is on;
        ``out`` is read-only, overlaps itself or shares memory with an input; a CuPy array is misaligned. Or
        the environment variable ``CUPYFLASH_PATH`` names no kernel path, or one that the GPU cannot take; or
        batch * heads * tiles exceeds 2**31 - 1, the blocks of a launch. `ModError`, one of its kind: the text of
        ``score_mod`` or ``mask_mod`` does not compile.
    NotImplementedError
        On a GPU: ``softcap``, ``alibi_slopes``, ``sink``, ``bias``, ``mask``, ``block_mask``, ``score_mod``,
        ``mask_mod`` or ``dropout`` of float32 or float64; any dtype but float16 below compute capability 8.0, or a
        head_dim that needs more shared memory than the GPU has.
    ImportError
        Arrays on a GPU without CuPy.
    RuntimeError
        NVRTC does not know the GPU, or the kernel does not compile; CUDA's own errors, as CuPy raises them.

    Whichever of these comes, nothing was written, unless CUDA itself failed. Errors in the arguments come
    before anything is allocated, compiled or launched. What depends on the GPU (its compiler, its shared
    memory, the dtype, ``CUPYFLASH_PATH``, too many tiles) is found when a call of a new shape is planned:
    results may be allocated by then, but no kernel was launched.

    See Also
    --------
    attention_backward : The gradients.
    BlockMask : The blocks that are computed.
    dropout_mask : The weights that dropout keeps.
    merge_attention : Combine the results for parts of the keys.

    Notes
    -----
    *Masks.* With ``causal`` a query sees the keys marked x; the queries go down, the keys go right::

                         seqlen_q < seqlen_k        seqlen_q > seqlen_k

        "lower_right"         x x x .                     . .
        (True)                x x x x                     . .
                                                          x .
                                                          x x

        "upper_left"          x . . .                     x .
                              x x . .                     x x
                                                          x x
                                                          x x

    A query sees the keys that ``causal``, ``window``, ``mask``, ``block_mask`` and ``mask_mod`` all show. One that sees
    no key has ``out = 0`` and ``lse = -inf``, and so have all queries without any key. With ``sink`` its ``lse`` is
    the sink.

    *Order.* First the scale, then ``softcap``, then ALiBi and ``bias``, then ``score_mod``, then the masks. With s the
    scaled product of query i and key j, ``lse`` is that of the logits
    ``softcap * tanh(s / softcap) - slope * abs(i + diagonal - j) + bias[i, j]``, changed by ``score_mod``, -inf where
    the key is hidden, and of ``sink``. Partial results that are merged count every sink that they were given: give it
    to one part.

    *Dropout.* Whether a weight is kept depends on the seed and on the batch, the query head, the query and the
    key that it belongs to, on nothing else: not on the backend, the dtype, the lengths or the other options.
    A call in a CUDA graph keeps its seed: each replay drops the same weights.

    *NaN and infinity.* NaN in a query makes its own row NaN and no other. Work is done in tiles of neighbouring
    queries and keys, and tiles in which ``causal``, ``window`` and ``block_mask`` show no query a key are
    skipped: NaN or infinity in their keys and values never reaches the result; ``bias`` and ``mask_mod`` skip
    no tile, ``mask`` may. From a tile that is computed, it may also reach queries of the tile that do not see
    that key: their weight is 0, and 0 times NaN is NaN. NaN or inf in ``bias`` makes the rows NaN that see the
    key; -inf added to a logit of NaN or inf does not hide it, as ``mask`` does; beyond 2.3e38, finite ones may
    count as 2.3e38 on a GPU. A sink of inf takes all the weight: ``out = 0``, ``lse = inf``. One of NaN makes
    ``lse`` of its head NaN, and ``out`` where a query sees a key.

    *Dtypes.* float16, bfloat16 (`ml_dtypes.bfloat16`), float32 and float64, all arrays alike: nothing is cast
    silently. Sums and statistics are float32 (float64 for float64). On the GPU, ``head_dim`` and ``head_dim_v``
    are 1 to 256, and the kernels are compiled with ``-ftz=true``: denormal float32 numbers, and with them denormal
    bfloat16 numbers, are taken as 0. Denormal float16 numbers are kept. Products of float32 take their factors
    apart on the GPU: an element may lose its last bit even where its weight is 1, those below 1e-34 keep 11 bits,
    and infinity becomes NaN. ``seqlen_q + seqlen_k`` is less than 2**30.

    *Float32 on Hopper.* Where ``head_dim`` and ``head_dim_v`` are at most 128 and both lengths at least 256, each
    input, in the backward ``dout`` as well, is split into two float16 of each number. They take as much memory as
    the inputs, padded to 64 or 128 columns, for the time of the call. An element may lose its last bit, and
    those below 2^-17 of the largest in their array are off by up to 2^-39 of it. Where that is so of all of a row of
    one head, or of a column in all rows and heads, kernels that do not split compute the call instead. So the last bits
    of a row depend on the numbers in all others, too.

    *16 bits on Hopper.* Where ``head_dim`` and ``head_dim_v`` are at most 128, a query may see 2048 keys or more and
    all of a call see 2^28 or more, the maximum of a row is looked for in its last keys only, up to the first whole
    tile. From there, in tiles that are seen in full, its place is taken by the sum of the row, which is needed
    anyway: no weight is far above 1, but the largest one, which would else have been 1, may be rounded as any other.
    That is with ``causal``, ``window``, ``scale``, ``sink``, ``dropout`` and packed sequences, in bfloat16 also with
    ``alibi_slopes`` and ``score_mod``, and above ``head_dim`` 64 with a ``softcap`` that is above 31 or beside these;
    with ``block_mask`` only where neither dropout nor a change of scores is beside it. Where a weight is beyond
    float32 before that shows, 88 above the others as a logit, or a logit beyond 11000, a sink 44 above the others, a
    sum of values beyond float32, or anything not finite, other kernels compute the whole call once more; with ALiBi,
    softcap or a ``score_mod`` also where all logits of a row are below -11, as of a query with few keys they may be.
    So the last bits of a row depend on the numbers in all others, too. A call takes 12 bytes for that.

    *Copies.* Arrays may have any strides. On the GPU, an input whose last axis is not contiguous is copied
    (and such an ``out`` written through a copy), and so is ``q`` of 16 bits where ``scale`` is negative;
    nothing else is. Results for JAX on the host are copied where JAX wants another alignment.

    *Devices and streams.* The call runs on the device of the arrays, which need not be the current one: on
    CuPy's current stream of that device, for PyTorch on PyTorch's. It returns before the GPU is done, except
    for JAX and other DLPack libraries: their allocators could use the memory of an input again, so the call
    waits. Once it ran, a call with the same shapes and options can be captured in a CUDA graph; what the
    graph needs besides the arrays then stays allocated until the process ends.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    .. [2] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
       arXiv:2205.14135.
    .. [3] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       arXiv:2307.08691.
    .. [4] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
       Length Extrapolation", arXiv:2108.12409.
    .. [5] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925.
    .. [6] N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15 (2014);
       of attention weights: A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.
    .. [7] H. Ootomo, R. Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
       theoretical peak performance", arXiv:2203.03341.

    Examples
    --------
    Equal keys share the weight equally, so that out is the mean of the values that a query sees:

    >>> import numpy as np
    >>> import cupyflash
    >>> q = np.zeros((1, 3, 1, 8), np.float32)  # batch, seqlen, heads, head_dim
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    >>> out, lse = cupyflash.attention(q, q, v, causal=True, return_lse=True)
    >>> out.ravel()
    array([0. , 0.5, 1. ], dtype=float32)
    >>> np.exp(lse).round(3)
    array([[[1., 2., 3.]]], dtype=float32)

    A sink of 0 has the weight of one more of these keys, with the value 0:

    >>> sink = np.zeros(1, np.float32)
    >>> out, lse = cupyflash.attention(q, q, v, causal=True, sink=sink, return_lse=True)
    >>> out.ravel().round(3)
    array([0.   , 0.333, 0.75 ], dtype=float32)
    >>> np.exp(lse).round(3)
    array([[[2., 3., 4.]]], dtype=float32)

    With dropout, some keys are left out and the others count for more:

    >>> mask = cupyflash.dropout_mask(1, 1, 3, 3, dropout=0.5, seed=7)
    >>> out = cupyflash.attention(q, q, v, dropout=0.5, seed=7)
    >>> np.allclose(out[0, :, 0], (mask[0, 0] / 3 / 0.5) @ v[0, :, 0])
    True
    """
    dropout, seed = checks.dropout(dropout, seed)
    layout, mods = getattr(block_mask, "layout", None), checks.mods(score_mod, mask_mod)
    options = checks.options(causal, window, scale, softcap, dropout, precision, layout, mods)
    checks.flag("return_lse", return_lse)
    arrays = {"q": q, "k": k, "v": v}
    arrays |= _present(out=out, alibi_slopes=alibi_slopes, sink=sink, bias=bias, mask=mask)
    home = _home(arrays, block_mask, score_mod, mask_mod)
    with home.scope():
        views = home.views(arrays)
        plan = _plan(_plan_forward, home.gpu, options, views)
        if out is None:
            out, views["out"] = home.empty(*plan.results["out"])
        else:
            checks.result_memory(home, **views)
        slopes, sinks = _slopes(home, plan, views), views.pop("sink", None)
        if block_mask is not None and block_mask.mask is not None:
            views["mask"] = block_mask.mask
        bias, mask = (_of_logits(home, plan, views, name) for name in ("bias", "mask"))
        given = _given(score_mod, mask_mod, views)
        lse = views["lse"] = None
        if return_lse:
            lse, views["lse"] = home.empty(*plan.results["lse"])
        if plan.empty:
            _fill({"out": 0, "lse": -math.inf if sinks is None else sinks[:, None]}, views)
        else:
            out_view = views["out"]
            _gather(home, plan, views)
            of_logits = bias, mask, block_mask, given
            home.backend.forward(plan.problem, *_batched(plan, views), slopes, sinks, seed, *of_logits)
            if views["out"] is not out_view:
                out_view[...] = views["out"]
        return (home.give(out), home.give(lse)) if return_lse else home.give(out)


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
    precision=None,
    bias_gradient=True,
    deterministic=False,
):
    """Gradients of `attention` with respect to ``q``, ``k``, ``v``, ``bias`` and ``sink``.

    The attention weights are computed again from ``lse``, tile by tile (FlashAttention-2 [1]_), so memory
    grows with the length, not with its square. With ``p = exp(scale * q @ k.T - lse)``:

    * ``dv = p.T @ dout``
    * ``ds = p * (dout @ v.T - sum(dout * out, axis=-1) + dlse)``
    * ``dq = scale * ds @ k`` and ``dk = scale * ds.T @ q``
    * ``dbias = ds``, summed over the axes along which the bias was broadcast
    * ``dsink = sum(exp(sink - lse) * (dlse - sum(dout * out, axis=-1)))``

    where ``dk`` and ``dv`` are summed over the query heads that share a key head, in float32, and ``dsink`` over
    the queries of all batches. With options, ``p = exp(logits - lse)`` of the logits of `attention`, and
    ``softcap`` multiplies the ``ds`` of ``dq`` and ``dk`` by the derivative
    ``1 - tanh(scale * q @ k.T / softcap)**2``. ``dropout`` acts on ``p`` in ``dv`` and on ``dout @ v.T``:
    elements become 0 or are divided by ``1 - dropout``.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of ``out``, with the dtype of ``q``.
    q, k, v : array
        As given to `attention`.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        As `attention` returned it.
    lse : array, shape (batch, heads_q, seqlen_q)
        As `attention` returned it with ``return_lse=True``.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of ``lse``, with the dtype of ``lse``; 0 when left out.
    causal, window, scale, softcap, bias, mask, block_mask, alibi_slopes, sink
        As given to `attention`. No gradient of ``alibi_slopes`` is computed.
    score_mod, mask_mod, dropout, seed, precision
        As given to `attention`. The derivative of ``score_mod`` multiplies ``ds`` where its result has a weight.
    bias_gradient : bool, default True
        Compute ``dbias``. False is for a bias that is constant: nothing is spent on its gradient. Without ``bias`` it
        changes nothing.
    deterministic : bool, default False
        Add everything in a fixed order, so that the same call always gives the same bits; slower on a GPU.
        ``dsink`` is always added so, and everything of float32 and float64. On a GPU, gradients of what ``score_mod``
        captured have no such order: NotImplementedError.

    Returns
    -------
    AttentionGradients
        Named tuple of ``dq``, ``dk``, ``dv``, ``dbias`` and ``dsink``: arrays with shape and dtype of ``q``,
        ``k``, ``v``, ``bias`` and ``sink``, of their library; ``dbias`` is None without ``bias`` and with
        ``bias_gradient=False``, ``dsink`` without ``sink``. Last comes ``dscore_mod``, a dict of the gradients that
        ``score_mod`` asks for, by name, each with shape and dtype of what was captured; None where it asks for none.
        ``dbias`` and these are summed in float32 (float64 for float64) and then rounded. Take them by name, or the
        first three by ``dq, dk, dv, *_``: more fields may follow. Gradients of a query that sees no key, and of a key
        that no query sees, are 0, and so is that of the bias of a key that is hidden.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As `attention`.

    See Also
    --------
    attention : The forward call; its notes hold here as well.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       arXiv:2307.08691.

    Examples
    --------
    One key has the weight 1 whatever it is, so that only its value has a gradient:

    >>> import numpy as np
    >>> import cupyflash
    >>> q, k, v = np.ones((3, 1, 1, 1, 4), np.float32)
    >>> out, lse = cupyflash.attention(q, k, v, return_lse=True)
    >>> grads = cupyflash.attention_backward(np.full_like(out, 2), q, k, v, out, lse)
    >>> [x.ravel().tolist() for x in grads[:3]]
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]

    A sink as large as its logit takes half of its weight, and has a gradient:

    >>> sink = np.array([2], np.float32)
    >>> out, lse = cupyflash.attention(q, k, v, sink=sink, return_lse=True)
    >>> grads = cupyflash.attention_backward(np.full_like(out, 2), q, k, v, out, lse, sink=sink)
    >>> grads.dv.ravel().tolist(), grads.dsink.tolist()
    ([1.0, 1.0, 1.0, 1.0], [-2.0])
    """
    dropout, seed = checks.dropout(dropout, seed)
    layout, mods = getattr(block_mask, "layout", None), checks.mods(score_mod, mask_mod, backward=True)
    options = checks.options(causal, window, scale, softcap, dropout, precision, layout, mods)
    checks.flag("bias_gradient", bias_gradient)
    checks.flag("deterministic", deterministic)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= _present(dlse=dlse, alibi_slopes=alibi_slopes, sink=sink, bias=bias, mask=mask)
    home = _home(arrays, block_mask, score_mod, mask_mod)
    with home.scope():
        views = home.views(arrays)
        plan = _plan(_plan_backward, home.gpu, (options, bias_gradient), views)
        if home.gpu and deterministic and plan.captured:
            raise NotImplementedError(
                f"deterministic is True and score_mod has gradients={score_mod.gradients}; allowed on the GPU: False, "
                "since it adds them in no fixed order"
            )
        slopes, sinks = _slopes(home, plan, views), views.pop("sink", None)
        if block_mask is not None and block_mask.mask is not None:
            views["mask"] = block_mask.mask
        bias, mask = (_of_logits(home, plan, views, name) for name in ("bias", "mask"))
        given = _given(score_mod, mask_mod, views)
        views.setdefault("dlse")
        grads = {}
        for name, (shape, dtype) in plan.results.items():
            grads[name], views[name] = home.empty(shape, dtype)
        dbias, dsink = views.pop("dbias", None), views.pop("dsink", None)
        captured = {name: views.pop(f"d{name}") for name in plan.captured}
        if plan.empty:
            _fill({"dq": 0, "dk": 0, "dv": 0}, views)
            if dbias is not None:
                dbias[...] = 0
            if dsink is not None:
                dsink[...] = _gradient_of_all_weight(home, plan, sinks, views["dlse"])
            for gradient in captured.values():
                gradient[...] = 0
        else:
            _gather(home, plan, views)
            if dbias is not None:
                dbias = dbias.reshape((1,) * (4 - dbias.ndim) + dbias.shape)
            arrays = *_batched(plan, views), slopes, sinks, dsink
            of_logits = bias, mask, dbias, block_mask, given, captured
            home.backend.backward(plan.problem, *arrays, bool(deterministic), seed, *of_logits)
        given_back = {name: home.give(grad) for name, grad in grads.items()}
        if captured:
            given_back["dscore_mod"] = {n.partition(".")[2]: given_back.pop(f"d{n}") for n in captured}
        return AttentionGradients(**given_back)


def _present(**arrays):
    return {name: x for name, x in arrays.items() if x is not None}


def _home(arrays, block_mask, *mods):
    """Where all that the call was given is; to `arrays` what the functions of the user captured is added."""
    for mod in mods:
        if mod is not None:
            arrays |= mod.arrays
    home = interop.home(arrays)
    if block_mask is not None:
        checks.block_mask(block_mask, home)
    return home


class _Plan(NamedTuple):
    """What the layout of the arrays and the options decide; calls that look alike share it."""

    problem: Problem
    empty: bool
    batched: bool  # four axes; the backends know no other number
    scattered: list  # names of the arrays whose rows, which the kernels read as a whole, are not contiguous
    results: dict  # name -> (shape, dtype)
    captured: tuple = ()  # names of the captured arrays that have gradients


def _plan(make, gpu, options, views):
    """Plan of a call, checked and made by `make` when none that looks alike came before."""
    signature = (make, gpu, options, *views, *[(x.shape, x.strides, x.dtype) for x in views.values()])
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[signature] = make(gpu, options, views)
    return plan


def _plan_forward(gpu, options, views):
    problem = checks.forward(gpu, options, **views)
    *batch, seqlen_q, heads_q, _ = views["q"].shape
    results = {
        "out": ((*batch, seqlen_q, heads_q, problem.head_dim_v), checks.PLAIN_DTYPES[problem.dtype]),
        "lse": ((*batch, heads_q, seqlen_q), checks.lse_dtype(problem.dtype)),
    }
    return _Plan(problem, problem.empty, bool(batch), _scattered(gpu, views), results)


def _plan_backward(gpu, described, views):
    options, bias_gradient = described
    problem = checks.backward(gpu, options, **views)
    results = {f"d{name}": (views[name].shape, checks.PLAIN_DTYPES[problem.dtype]) for name in "qkv"}
    if problem.bias and bias_gradient:
        results["dbias"] = (views["bias"].shape, checks.PLAIN_DTYPES[problem.bias])
    if problem.sink:
        results["dsink"] = ((problem.heads_q,), checks.lse_dtype(problem.dtype))
    captured = tuple(f"score_mod.{capture.name}" for capture in problem.mods.tracked) if problem.mods else ()
    results |= {f"d{name}": (views[name].shape, views[name].dtype) for name in captured}
    return _Plan(problem, problem.empty, views["q"].ndim == 4, _scattered(gpu, views), results, captured)


def _scattered(gpu, views):
    for name, x in views.items():
        if gpu and x is not None and any(stride % x.itemsize for stride in x.strides):
            raise ValueError(f"{name} has strides {x.strides}; allowed: multiples of its {x.itemsize} bytes an element")
    rows = {name: x for name, x in views.items() if gpu and name not in _BY_ELEMENT and "." not in name}
    return [name for name, x in rows.items() if x.shape[-1] > 1 and x.strides[-1] != x.itemsize]


def _gather(home, plan, views):
    for name in plan.scattered:
        views[name] = home.xp.ascontiguousarray(views[name])
        home.backend.keep_for_graph(views[name])


def _slopes(home, plan, views):
    """The slopes as (batch, heads_q), taken out of `views`: what is left has its batch in front."""
    slopes = views.pop("alibi_slopes", None)
    return None if slopes is None else home.xp.broadcast_to(slopes, (plan.problem.batch, plan.problem.heads_q))


def _of_logits(home, plan, views, name):
    """The array as (batch, heads_q, seqlen_q, seqlen_k), taken out of `views`, without a copy."""
    x, problem = views.pop(name, None), plan.problem
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    return None if x is None else home.xp.broadcast_to(x, shape)


def _given(score_mod, mask_mod, views):
    """The functions with what they captured, taken out of `views`; None without any."""
    if score_mod is mask_mod is None:
        return None
    return Given(score_mod, mask_mod, {name: views.pop(name) for name in [*views] if "." in name})


def _batched(plan, views):
    """The arrays with four axes, in the order of the backend's arguments, which is that of `views`."""
    arrays = views.values()
    return arrays if plan.batched else [x if x is None else x[None] for x in arrays]


def _fill(values, views):
    for name, value in values.items():
        if views[name] is not None:
            views[name][...] = value


def _gradient_of_all_weight(home, plan, sink, dlse):
    """Gradient of sinks beside which there is no key: lse is the sink, if there is one, and out is 0."""
    total = 0 if dlse is None else dlse.sum(axis=(0, 2) if plan.batched else 1)
    return home.xp.where(sink == -math.inf, 0, total)
