"""Attention over packed sequences: the public functions, as those of ``attention.py`` are for a batch of one length."""

from __future__ import annotations

from . import checks, interop, segments
from .attention import _gather, _Plan, _plan, _scattered, _slopes
from .reference import AttentionGradients


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
    max_seqlen_q=None,
    max_seqlen_k=None,
    validate=False,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sink=None,
    dropout=0.0,
    seed=None,
    out=None,
    return_lse=False,
):
    """Exact attention over sequences of different lengths, packed one after the other, without padding.

    Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` (exclusive) and the keys and values
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``. Its queries see its keys and no others: the result is that of
    `attention` for each sequence alone. A sequence may be empty, or have queries and no keys, or keys and no queries.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences. Arrays as in `attention`.
    k : array, shape (total_k, heads_k, head_dim)
        Keys of all sequences.
    v : array, shape (total_k, heads_k, head_dim_v)
        Values of all sequences.
    cu_seqlens_q, cu_seqlens_k : array of int32 or int64, shape (batch + 1,)
        Where the sequences begin, and where the last one ends: from 0, never falling, and at most ``total_q`` or
        ``total_k``. On the device of ``q``, or on the host, of any library then.
    seqused_q, seqused_k : array of int32 or int64, shape (batch,), optional
        How many of a sequence's rows are in use, from the first one on; the others are room to spare.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest length or more, as other libraries need it. No kernel here depends on it: what is too small is an
        error where the lengths are known, and changes nothing elsewhere.
    validate : bool, default False
        Check what ``cu_seqlens`` and ``seqused`` hold on the GPU as well, for which the call waits for the GPU. On
        the host they are always checked.
    causal, window, scale, softcap, dropout, seed, return_lse
        As in `attention`, of each sequence alone: the diagonal is that of its own lengths. `dropout_mask` shows what
        is kept, the number of the sequence being the batch.
    alibi_slopes : array, shape (heads_q,) or (batch, heads_q), optional
        As in `attention`.
    sink : array, shape (heads_q,), optional
        As in `attention`.
    out : array, shape (total_q, heads_q, head_dim_v), optional
        As in `attention`. All of it is written.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Of the library, device and dtype of ``q``. Rows of no sequence, and those beyond ``seqused_q``, are 0.
    lse : array, shape (heads_q, total_q)
        Only with ``return_lse``: as in `attention`. Rows of no sequence, and those beyond ``seqused_q``, are -inf, also
        with ``sink``.

    Raises
    ------
    TypeError, NotImplementedError, ImportError, RuntimeError
        As `attention`; the dtype of ``cu_seqlens`` or ``seqused`` is another.
    ValueError
        As `attention`; or what ``cu_seqlens``, ``seqused`` or ``max_seqlen`` hold is not as above. On the GPU, without
        ``validate``, the kernels limit it to the rows that there are: nothing else is read or written, but which rows
        then belong together is not defined.

    See Also
    --------
    attention_varlen_backward : The gradients.
    attention : What holds here as well: masks, order of the options, NaN, devices.
    padding.pack : Pack the rows that a mask shows.

    Notes
    -----
    There is no ``bias``, ``mask`` and ``block_mask``: their shape would be that of one sequence. ``score_mod``,
    ``mask_mod`` and ``precision`` are those of `attention` alone.

    *Dtypes.* On a GPU float16 and bfloat16: float32 and float64 are a NotImplementedError there. On the host, all of
    `attention`.

    *NaN and infinity.* Nothing in one sequence, or in rows of no sequence, reaches the results of another.

    *Waiting.* A call does not wait for the GPU, whatever is left out: how the work is divided is found on the GPU. Of
    ``cu_seqlens`` on the host, a copy is made for the GPU; a call that is captured in a CUDA graph needs them there.

    *Lengths.* ``total_q + total_k`` is less than 2**30.

    Examples
    --------
    Two sequences, of 2 and 3 tokens; equal keys share the weight equally:

    >>> import numpy as np
    >>> import cupyflash
    >>> q, v = np.zeros((5, 1, 8), np.float32), np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    >>> cu_seqlens = np.array([0, 2, 5])
    >>> out = cupyflash.attention_varlen(q, q, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    >>> out.ravel()
    array([0. , 0.5, 2. , 2.5, 3. ], dtype=float32)
    """
    dropout, seed = checks.dropout(dropout, seed)
    options = checks.options(causal, window, scale, softcap, dropout)
    checks.flag("return_lse", return_lse)
    packed = _Packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, validate)
    arrays = _given(q=q, k=k, v=v, out=out, alibi_slopes=alibi_slopes, sink=sink)
    home = packed.home(arrays)
    with home.scope():
        views = home.views(arrays)
        indices = packed.views(home, views)
        plan = _plan(_plan_forward, home.gpu, (options, segments.count(indices)), views)
        indices = packed.checked(home, plan.problem, indices)
        if out is None:
            out, views["out"] = home.empty(*plan.results["out"])
        else:
            checks.result_memory(home, **views)
        slopes, sinks = _slopes(home, plan, views), views.pop("sink", None)
        lse = views["lse"] = None
        if return_lse:
            lse, views["lse"] = home.empty(*plan.results["lse"])
        out_view = views["out"]
        _gather(home, plan, views)
        home.varlen.forward(plan.problem, indices, *views.values(), slopes, sinks, seed)
        if views["out"] is not out_view:
            out_view[...] = views["out"]
        return (home.give(out), home.give(lse)) if return_lse else home.give(out)


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
    max_seqlen_q=None,
    max_seqlen_k=None,
    validate=False,
    dlse=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sink=None,
    dropout=0.0,
    seed=None,
    deterministic=False,
):
    """Gradients of `attention_varlen`, those of `attention_backward` for each sequence alone.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of ``out``, with the dtype of ``q``.
    q, k, v : array
        As given to `attention_varlen`.
    out : array, shape (total_q, heads_q, head_dim_v)
        As `attention_varlen` returned it.
    lse : array, shape (heads_q, total_q)
        As `attention_varlen` returned it with ``return_lse=True``.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, validate
        As given to `attention_varlen`.
    dlse : array, shape (heads_q, total_q), optional
        Gradient of ``lse``, with the dtype of ``lse``; 0 when left out.
    causal, window, scale, softcap, alibi_slopes, sink, dropout, seed
        As given to `attention_varlen`.
    deterministic : bool, default False
        As in `attention_backward`.

    Returns
    -------
    AttentionGradients
        As of `attention_backward`; ``dbias`` is None. Gradients of rows of no sequence, and of those beyond
        ``seqused_q`` and ``seqused_k``, are 0, whatever ``dout``, ``out``, ``lse`` and ``dlse`` hold there; ``dsink``
        is the sum over all sequences.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As `attention_varlen`.

    See Also
    --------
    attention_varlen : The forward call; its notes hold here as well.

    Examples
    --------
    Sequences of one key each, whose weight is 1 whatever it is: only the values have a gradient.

    >>> import numpy as np
    >>> import cupyflash
    >>> q, k, v = np.ones((3, 2, 1, 4), np.float32)
    >>> packed = {"cu_seqlens_q": np.array([0, 1, 2]), "cu_seqlens_k": np.array([0, 1, 2])}
    >>> out, lse = cupyflash.attention_varlen(q, k, v, return_lse=True, **packed)
    >>> grads = cupyflash.attention_varlen_backward(np.full_like(out, 2), q, k, v, out, lse, **packed)
    >>> [x.sum().item() for x in grads[:3]]
    [0.0, 0.0, 16.0]
    """
    dropout, seed = checks.dropout(dropout, seed)
    options = checks.options(causal, window, scale, softcap, dropout)
    checks.flag("deterministic", deterministic)
    packed = _Packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, validate)
    arrays = _given(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, alibi_slopes=alibi_slopes, sink=sink)
    home = packed.home(arrays)
    with home.scope():
        views = home.views(arrays)
        indices = packed.views(home, views)
        plan = _plan(_plan_backward, home.gpu, (options, segments.count(indices)), views)
        indices = packed.checked(home, plan.problem, indices)
        slopes, sinks = _slopes(home, plan, views), views.pop("sink", None)
        views.setdefault("dlse")
        grads = {}
        for name, (shape, dtype) in plan.results.items():
            grads[name], views[name] = home.empty(shape, dtype)
        dsink = views.pop("dsink", None)
        _gather(home, plan, views)
        home.varlen.backward(plan.problem, indices, *views.values(), slopes, sinks, dsink, bool(deterministic), seed)
        return AttentionGradients(**{name: home.give(grad) for name, grad in grads.items()})


def _given(**arrays):
    required = ("dout", "q", "k", "v", "lse") + (("out",) if "dout" in arrays else ())
    return {name: x for name, x in arrays.items() if x is not None or name in required}


class _Packed:
    """The arguments that say where the sequences are."""

    def __init__(self, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, validate):
        checks.flag("validate", validate)
        self.validate = validate
        self.bounds = {"q": max_seqlen_q, "k": max_seqlen_k}
        for side, bound in self.bounds.items():
            segments.check_bound(f"max_seqlen_{side}", bound)
        given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        self.given = given | {n: x for n, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)) if x is not None}

    def home(self, arrays):
        """Home of the arrays and of what lies beside them."""
        home = interop.home(arrays)
        self.homes = {name: interop.home({name: x}) for name, x in self.given.items()}
        beside = {name: x for name, x in self.given.items() if self.homes[name].gpu or not home.gpu}
        return interop.home(arrays | beside)

    def views(self, home, arrays):
        """NumPy or CuPy arrays, by name."""
        return {name: self.homes[name].views({name: x})[name] for name, x in self.given.items()}

    def checked(self, home, problem, indices):
        """The arrays beside the others, their values checked where they are known."""
        on_gpu = {name for name in indices if self.homes[name].gpu}
        known = {n: x.get() if n in on_gpu else x for n, x in indices.items() if self.validate or n not in on_gpu}
        for side in "qk":
            names = [name for name in indices if name[-1] == side]
            if all(name in known for name in names):
                rows = problem.seqlen_q if side == "q" else problem.seqlen_k
                segments.check_values(
                    side, *(known.get(f"{name}_{side}") for name in ("cu_seqlens", "seqused")), rows, self.bounds[side]
                )
        if home.gpu:
            indices = {name: home.xp.ascontiguousarray(home.xp.asarray(x)) for name, x in indices.items()}
            home.backend.keep_for_graph(*indices.values())
        return indices


def _plan_forward(gpu, described, views):
    options, sequences = described
    problem = checks.forward(gpu, options, sequences=sequences, **views)
    total_q, heads_q, _ = views["q"].shape
    results = {
        "out": ((total_q, heads_q, problem.head_dim_v), checks.PLAIN_DTYPES[problem.dtype]),
        "lse": ((heads_q, total_q), checks.lse_dtype(problem.dtype)),
    }
    return _Plan(problem, False, False, _scattered(gpu, views), results)


def _plan_backward(gpu, described, views):
    options, sequences = described
    problem = checks.backward(gpu, options, sequences=sequences, **views)
    results = {f"d{name}": (views[name].shape, checks.PLAIN_DTYPES[problem.dtype]) for name in "qkv"}
    if problem.sink:
        results["dsink"] = ((problem.heads_q,), checks.lse_dtype(problem.dtype))
    return _Plan(problem, False, False, _scattered(gpu, views), results)
