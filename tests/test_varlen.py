"""Packed sequences: each gives what it gives alone, rows of none give nothing, and wrong arguments an error.

What belongs to no sequence is NaN in every input: it shows wherever it is read.
"""

import math
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import reference
from cupyflash.segments import segments

MIXED = ((1, 64, 0, 129, 300, 17, 0), (5, 64, 33, 0, 257, 130, 0))  # queries, keys
EQUAL = ((65, 130, 1, 200),) * 2
THREE_AXES = tools.Layout(order=(0, 1, 2))
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (40, 9)},
    "left window": {"window": (70, None), "causal": True},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "negative scale": {"scale": -0.3, "causal": True},
    "dropout": {"dropout": 0.3, "seed": 5},
    "causal dropout": {"dropout": 0.3, "seed": 5, "causal": True, "softcap": 3.0},
}


@dataclass
class Packed:
    """Arrays of packed sequences, all of a backend but the indices, which are NumPy's."""

    q: object
    k: object
    v: object
    dout: object
    dlse: object
    indices: dict
    on_host: bool = True
    segments: list = field(default_factory=list)

    @property
    def qkv(self):
        return self.q, self.k, self.v

    def where(self, backend):
        """The keywords that say where the sequences are."""
        move = (lambda x: x) if self.on_host else backend.xp.asarray
        return {name: move(x) for name, x in self.indices.items()}


def packed(
    backend,
    lengths_q,
    lengths_k,
    heads_q=2,
    heads_k=None,
    head_dim=64,
    head_dim_v=None,
    spare=(0, 0),
    used=None,
    dtype=np.int32,
    on_host=True,
    seed=0,
):
    """Random sequences, then `spare` rows of none; `used`: a pair of lists, of how many rows are in use."""
    indices = {"cu_seqlens_q": lengths_q, "cu_seqlens_k": lengths_k}
    indices = {name: np.cumsum([0, *lengths]).astype(dtype) for name, lengths in indices.items()}
    if used:
        indices |= {name: np.array(n, dtype) for name, n in zip(("seqused_q", "seqused_k"), used) if n is not None}
    heads_k, head_dim_v = heads_k or heads_q, head_dim_v or head_dim
    total_q, total_k = sum(lengths_q) + spare[0], sum(lengths_k) + spare[1]
    shapes = [(total_q, heads_q, head_dim), (total_k, heads_k, head_dim), (total_k, heads_k, head_dim_v)]
    shapes += [(total_q, heads_q, head_dim_v), (heads_q, total_q)]
    parts = segments(indices)
    arrays = []
    for i, shape in enumerate(shapes):
        x = np.random.default_rng(9 * seed + i).standard_normal(shape) + 0.5
        axis, side = (1, "q") if i == 4 else (0, "k" if i in (1, 2) else "q")
        unused = np.ones(shape[axis], bool)
        for part in parts:
            unused[getattr(part, side)] = False
        x[(slice(None),) * axis + (unused,)] = np.nan
        arrays.append(backend.array(x, backend.lse_dtype if i == 4 else None))
    return Packed(*arrays, indices, on_host, parts)


def run(backend, x, deterministic=False, backward=True, **options):
    """All results, by name; out is a guarded buffer of NaN, and free memory is NaN."""
    backend.poison()
    where = x.where(backend)
    guarded = tools.Guarded(backend, (*x.q.shape[:-1], x.v.shape[-1]), layout=THREE_AXES)
    out, lse = cupyflash.attention_varlen(*x.qkv, out=guarded.array, return_lse=True, **where, **options)
    guarded.check()
    assert out is guarded.array and lse.dtype == backend.lse_dtype
    if not backward:
        return {"out": out, "lse": lse}
    gradients = cupyflash.attention_varlen_backward(
        x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=deterministic, **where, **options
    )
    for gradient, like in zip(gradients, x.qkv):
        assert gradient.dtype == like.dtype and isinstance(gradient, type(like))
    return {"out": out, "lse": lse} | tools.named(gradients)


def check(backend, x, **options):
    """Compare all results of each sequence with the reference for it alone, and all others with what they must be."""
    results = run(backend, x, **options)
    options.pop("deterministic", None)
    host = {name: backend.host(result).copy() for name, result in results.items()}
    dsink, allowed = np.zeros(x.q.shape[1]), 0.0
    for b, part in enumerate(x.segments):
        right = expected(backend, x, b, **options)
        if "dsink" in right:
            (more, error) = right.pop("dsink")
            dsink, allowed = dsink + more, allowed + error
        for name, (values, error) in right.items():
            rows = getattr(part, "k" if name in ("dk", "dv") else "q")
            at = (slice(None), rows) if name == "lse" else (rows,)
            tools.assert_close(f"{name} of sequence {b}", host[name][at], values, error)
            host[name][at] = -math.inf if name == "lse" else 0
    if "dsink" in host:
        tools.assert_close("dsink", host.pop("dsink"), dsink, allowed)
    for name, rest in host.items():
        assert (rest == (-math.inf if name == "lse" else 0)).all(), f"{name} of rows of no sequence"
    return results


def expected(backend, x, b, alibi_slopes=None, sink=None, **options):
    """The yardstick of one sequence alone; where it is empty, what it must be."""
    part = x.segments[b]
    sides = (x.q, part.q), (x.k, part.k), (x.v, part.k), (x.dout, part.q)
    arrays = [backend.host(array[rows])[None] for array, rows in sides]
    dlse = backend.host(x.dlse[:, part.q])[None]
    sink = None if sink is None else backend.host(sink)
    slopes = None if alibi_slopes is None else backend.host(alibi_slopes)
    if 0 in (arrays[0].shape[1], arrays[1].shape[1]):
        q, k, v, dout = (array[0] for array in arrays)
        of_sink = np.full(q.shape[1], -math.inf) if sink is None else sink
        right = {"out": dout * 0, "lse": np.repeat(of_sink[:, None], len(q), axis=1), "dq": q * 0, "dk": k * 0}
        right = {name: (values, 0) for name, values in (right | {"dv": v * 0}).items()}
        if sink is not None:
            right["dsink"] = dlse[0].sum(axis=1), 1e-5 * (1 + abs(dlse).sum())
        return right
    if options.get("dropout"):  # whose batch is the number of the sequence: others before it, which do not matter
        arrays, dlse = ([np.concatenate([0 * a] * b + [a]) for a in group] for group in (arrays, [dlse]))
        dlse = dlse[0]
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[b]
    with np.errstate(invalid="ignore"):  # -inf - -inf, of rows without a key
        right = tools.yardstick(backend.dtype, *arrays, dlse, alibi_slopes=slopes, sink=sink, **options)
    return {name: (values if name == "dsink" else values[-1], error) for name, (values, error) in right.items()}


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [MIXED, EQUAL], ids=["mixed", "equal"])
def test_options(backend, lengths, options):
    check(backend, packed(backend, *lengths, heads_q=4, heads_k=2, spare=(3, 5)), **options)


@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128), (37, 21)]
)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_head_dims(backend16, head_dim, head_dim_v, options):
    for lengths in (MIXED, ((700, 5, 0), (700, 9, 200))):
        x = packed(backend16, *lengths, heads_q=3, heads_k=1, head_dim=head_dim, head_dim_v=head_dim_v)
        check(backend16, x, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 0)}], ids=["full", "causal", "window"])
def test_deterministic(backend1, head_dim, options):
    x = packed(backend1, *MIXED, heads_q=4, heads_k=2, head_dim=head_dim)
    first = check(backend1, x, deterministic=True, **options)
    again = run(backend1, x, deterministic=True, **options)
    assert all(tools.same_bits(first[name], again[name]) for name in first)


def test_forward_twice(backend1):
    """The same bits, and those of the sequences in another order."""
    x = packed(backend1, *EQUAL)
    first, again = (run(backend1, x, backward=False, causal=True) for _ in range(2))
    assert all(tools.same_bits(first[name], again[name]) for name in first)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "upper_left", "softcap": 3.0}])
def test_alibi(backend, by_sequence, options):
    x = packed(backend, *MIXED, heads_q=4, heads_k=2)
    shape = (len(x.segments), 4) if by_sequence else (4,)
    slopes = backend.array(np.random.default_rng(1).uniform(0.01, 0.5, shape), backend.lse_dtype)
    check(backend, x, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.25, "seed": 3}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_sink(backend, head_dim, options):
    if backend.name == "numpy" and head_dim > 64:
        pytest.skip("one head_dim is enough for NumPy")
    x = packed(backend, *MIXED, heads_q=4, heads_k=2, head_dim=head_dim, spare=(7, 0), used=(None, None))
    check(backend, x, sink=backend.array([0.5, -1.0, 2.0, 0.0], backend.lse_dtype), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 40)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_in_place_of_maxima(backend16, steady, head_dim, options):
    """In sequences of some tiles; and where that fails all are computed again."""
    lengths = (1, 640, 0, 129, 700, 17), (5, 600, 33, 0, 1300, 130)
    x = packed(backend16, *lengths, heads_q=4, heads_k=2, head_dim=head_dim, spare=(7, 3))
    check(backend16, x, **options)
    x.q[800, 2, 5] = np.inf  # of a row that has keys
    results = []
    for wanted in (True, False):
        steady(wanted)
        results.append(run(backend16, x, backward=False, **options))
    for name in results[0]:
        assert tools.same_bits(results[0][name], results[1][name]), name


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 30), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_room_to_spare(backend, which, options, on_host):
    """seqused: beyond it nothing is read, and results are 0."""
    used = ((1, 50, 0, 100, 300, 0, 0), (3, 64, 0, 0, 129, 100, 0))
    used = (used[0] if which != "k" else None, used[1] if which != "q" else None)
    sink = backend.array([0.5, -1.0], backend.lse_dtype)
    check(backend, packed(backend, *MIXED, used=used, spare=(2, 1), on_host=on_host), sink=sink, **options)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_where_the_lengths_are(backend1, on_host, dtype):
    check(backend1, packed(backend1, *MIXED, dtype=dtype, on_host=on_host), causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_sequences(backend1, head_dim, options):
    """More than the threads that look for them, most of them short or empty."""
    rng = np.random.default_rng(3)
    lengths_q, lengths_k = (rng.integers(0, 9, 1500) * rng.integers(0, 2, 1500) for _ in "qk")
    lengths_q[700], lengths_k[700] = 600, 900
    x = packed(backend1, lengths_q.tolist(), lengths_k.tolist(), heads_q=2, heads_k=1, head_dim=head_dim)
    where, xp = x.where(backend1), backend1.xp
    for deterministic in (False, True):
        results = run(backend1, x, deterministic=deterministic, **options)
        wide = [a.astype(np.float64) for a in (*x.qkv, x.dout, x.dlse)]
        wide = [backend1.host(a) for a in wide] if xp is not np else wide
        out, lse = reference.attention_varlen(*wide[:3], return_lse=True, **where, **options)
        right = reference.attention_varlen_backward(wide[3], *wide[:3], out, lse, dlse=wide[4], **where, **options)
        for name, values in ({"out": out, "lse": lse} | tools.named(right)).items():
            one = np.where(np.isfinite(values), abs(values), 0).max()
            tools.assert_close(name, backend1.host(results[name]), values, 8 * max(backend1.eps, 1e-6) * (1 + one))


def test_one_sequence_is_a_dense_call(backend):
    x = packed(backend, (130,), (257,), heads_q=4, heads_k=2)
    results = run(backend, x, causal=True, deterministic=True)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, causal=True)
    dense = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, causal=True, deterministic=True)
    for name, got in results.items():
        right = {"out": out, "lse": lse}.get(name)
        right = backend.host(getattr(dense, name) if right is None else right)
        tools.assert_close(name, backend.host(got), right, 4 * max(backend.eps, 1e-6) * (1 + abs(right).max()))


LAYOUTS = {
    "heads first": lambda backend, x: backend.xp.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "odd rows": lambda backend, x: tools.laid_out(backend, x[None], tools.LAYOUTS["padded by one"])[0],
    "wide rows": lambda backend, x: tools.laid_out(backend, x[None], tools.LAYOUTS["padded"])[0],
    "backwards": lambda backend, x: tools.laid_out(backend, x[None], tools.LAYOUTS["sequence backwards"])[0],
    "last axis slow": lambda backend, x: tools.laid_out(backend, x[None], tools.LAYOUTS["last axis slow"])[0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(backend1, layout):
    x = packed(backend1, *MIXED, heads_q=4, heads_k=2)
    for name in ("q", "k", "v", "dout"):
        setattr(x, name, layout(backend1, getattr(x, name)))
    check(backend1, x, causal=True)


def test_float32_out(backend16):
    x = packed(backend16, *MIXED, spare=(4, 0))
    buffer = tools.Guarded(backend16, x.q.shape, np.float32, THREE_AXES)
    out, lse = cupyflash.attention_varlen(*x.qkv, out=buffer.array, return_lse=True, **x.where(backend16))
    buffer.check()
    gradients = cupyflash.attention_varlen_backward(x.dout, *x.qkv, out, lse, **x.where(backend16))
    plain = cupyflash.attention_varlen(*x.qkv, **x.where(backend16))
    assert abs(backend16.host(out) - backend16.host(plain)).max() <= backend16.eps * abs(backend16.host(plain)).max()
    assert np.isfinite(backend16.host(gradients.dq)).all()


# ---------------------------------------------------------------------------------------------- known trouble of others


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_neighbours_do_not_leak(backend1, poison, head_dim, options):
    """Of two sequences beside each other in a tile, in either order: one is NaN or inf in all it has."""
    x = packed(backend1, (70, 90, 33), (75, 140, 64), head_dim=head_dim)
    clean = run(backend1, x, deterministic=True, **options)
    part = x.segments[1]
    for array, rows in ((x.q, part.q), (x.k, part.k), (x.v, part.k), (x.dout, part.q)):
        array[rows] = poison
    x.dlse[:, part.q] = poison
    for name, got in run(backend1, x, deterministic=True, **options).items():
        got, right = backend1.host(got), backend1.host(clean[name])
        rows = part.k if name in ("dk", "dv") else part.q
        at = (slice(None), rows) if name == "lse" else (rows,)
        got[at] = right[at] = 0
        np.testing.assert_array_equal(got, right, name)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_b025_keys_without_queries(backend1, head_dim, options):
    x = packed(backend1, (0, 3, 2, 0), (4, 5, 3, 8), heads_q=4, heads_k=1, head_dim=head_dim)
    results = check(backend1, x, **options)
    for name in ("dk", "dv"):
        rest = backend1.host(results[name])
        assert not rest[:4].any() and not rest[12:].any()


@pytest.mark.gpu
def test_b025_in_full(cuda):
    x = packed(cuda, (0, 1208, 840, 0), (2538, 1742, 840, 3072), heads_q=4, heads_k=1, head_dim=256)
    check(cuda, x)


def test_b027_leading_empty_sequences(backend_bfloat16):
    x = packed(backend_bfloat16, (0, 0, 1023), (0, 1, 2045), head_dim=128)
    results = check(backend_bfloat16, x)
    assert not backend_bfloat16.host(results["dk"])[0].any()


def test_b028_one_query_and_empty_sequences(backend1):
    check(backend1, packed(backend1, (0, 1, 0, 1), (0, 3, 0, 5), heads_q=9, heads_k=3))
    x = packed(backend1, (0, 0, 0, 1), (0, 0, 0, 1), heads_q=21, heads_k=7, head_dim=120)
    out = backend1.host(check(backend1, x)["out"])
    np.testing.assert_array_equal(out, backend1.host(x.v).repeat(3, axis=1))


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_b029_longest_length(backend1, on_host):
    x = packed(backend1, (3, 200), (3, 200), on_host=on_host)
    where = x.where(backend1)
    plain = cupyflash.attention_varlen(*x.qkv, **where)
    big = cupyflash.attention_varlen(*x.qkv, max_seqlen_q=10000, max_seqlen_k=10000, **where)
    assert tools.same_bits(plain, big)
    if on_host or backend1.name == "numpy":
        with pytest.raises(ValueError, match="max_seqlen_q is 100; allowed: at least 200, the longest length"):
            cupyflash.attention_varlen(*x.qkv, max_seqlen_q=100, **where)
    else:
        assert tools.same_bits(plain, cupyflash.attention_varlen(*x.qkv, max_seqlen_q=100, **where))
        with pytest.raises(ValueError, match="max_seqlen_q is 100"):
            cupyflash.attention_varlen(*x.qkv, max_seqlen_q=100, validate=True, **where)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_b030_rows_of_no_sequence(backend, on_host):
    check(backend, packed(backend, (3, 4), (3, 4), spare=(3, 3), on_host=on_host))


def test_b030_no_sequence_at_all(backend1):
    for spare in ((5, 3), (0, 3), (5, 0), (0, 0)):
        results = check(backend1, packed(backend1, (), (), spare=spare), sink=backend1.array([1, 2], np.float32))
        assert not backend1.host(results["dsink"]).any()


def test_no_key_at_all(backend1):
    check(backend1, packed(backend1, (5, 70), (0, 0)), sink=backend1.array([1, 2], np.float32))
    check(backend1, packed(backend1, (0, 0), (70, 3)), sink=backend1.array([1, 2], np.float32))
    check(backend1, packed(backend1, (5, 70), (0, 0), spare=(1, 0)))


def test_no_heads(backend1):
    q = backend1.array(np.zeros((5, 0, 8)))
    where = {"cu_seqlens_q": np.array([0, 5]), "cu_seqlens_k": np.array([0, 5])}
    out, lse = cupyflash.attention_varlen(q, q, q, return_lse=True, **where)
    gradients = cupyflash.attention_varlen_backward(out, q, q, q, out, lse, **where)
    assert out.shape == (5, 0, 8) and lse.shape == (0, 5) and gradients.dk.shape == (5, 0, 8)


WRONG = {
    "falls": ([0, 5, 3], "cu_seqlens_q falls from 5 to 3"),
    "late": ([1, 5, 10], "cu_seqlens_q begins with 1"),
    "long": ([0, 5, 11], "cu_seqlens_q ends with 11; allowed: at most 10"),
    "negative": ([0, -4, 10], "cu_seqlens_q falls from 0 to -4"),
    "huge": ([0, 2**40, 10], "cu_seqlens_q falls from 1099511627776 to 10"),
}


@pytest.mark.parametrize("values, message", WRONG.values(), ids=WRONG)
def test_b031_wrong_values(backend1, values, message):
    x = packed(backend1, (5, 5), (5, 5))
    where = {"cu_seqlens_q": np.array(values), "cu_seqlens_k": np.array([0, 5, 10])}
    with pytest.raises(ValueError, match=re.escape(message)):
        cupyflash.attention_varlen(*x.qkv, **where)
    with pytest.raises(ValueError, match=re.escape(message)):
        cupyflash.attention_varlen_backward(x.dout, *x.qkv, x.dout, x.dlse.astype(backend1.lse_dtype), **where)
    with pytest.raises(ValueError, match="seqused_k holds 6 for sequence 1; allowed: 0 to 5"):
        where["cu_seqlens_q"] = where["cu_seqlens_k"]
        cupyflash.attention_varlen(*x.qkv, seqused_k=np.array([5, 6]), **where)


@pytest.mark.parametrize("values, message", WRONG.values(), ids=WRONG)
def test_b031_wrong_values_on_the_device(cuda, values, message):
    """An error where it is asked for; elsewhere nothing beyond the arrays is read or written."""
    x = packed(cuda, (5, 5), (5, 5))
    right = cuda.xp.asarray([0, 5, 10])
    where = {"cu_seqlens_q": cuda.xp.asarray(values), "cu_seqlens_k": right, "seqused_k": cuda.xp.asarray([99, -7])}
    with pytest.raises(ValueError, match=re.escape(message)):
        cupyflash.attention_varlen(*x.qkv, validate=True, **where)
    for options in ({}, {"causal": True}):
        guarded = tools.Guarded(cuda, x.q.shape, layout=THREE_AXES)
        out, lse = cupyflash.attention_varlen(*x.qkv, out=guarded.array, return_lse=True, **where, **options)
        guarded.check()
        cupyflash.attention_varlen_backward(x.dout, *x.qkv, out, lse, **where, **options)
        cuda.xp.cuda.get_current_stream().synchronize()
    out, lse = run(cuda, x, backward=False).values()
    assert np.isfinite(cuda.host(out)).all()


def test_b031_arguments(backend1):
    x = packed(backend1, (5, 5), (5, 5))
    cu = np.array([0, 5, 10])
    both = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}

    def fails(error, message, *arrays, **keywords):
        with pytest.raises(error, match=re.escape(message)):
            cupyflash.attention_varlen(*(arrays or x.qkv), **keywords)

    fails(TypeError, "cu_seqlens_k", cu_seqlens_q=cu)
    fails(TypeError, "cu_seqlens_q is a list", **both | {"cu_seqlens_q": [0, 5, 10]})
    fails(TypeError, "cu_seqlens_k has dtype float64; allowed: int32, int64", **both | {"cu_seqlens_k": cu * 1.0})
    fails(
        ValueError,
        "cu_seqlens_k has shape (2,); allowed: (3,), that of cu_seqlens_q",
        **both | {"cu_seqlens_k": cu[:2]},
    )
    fails(ValueError, "cu_seqlens_q has shape (0,); allowed: (batch + 1,)", **both | {"cu_seqlens_q": cu[:0]})
    fails(ValueError, "seqused_q has shape (3,); allowed: (2,), (batch,)", seqused_q=cu, **both)
    fails(ValueError, "max_seqlen_k is -1", max_seqlen_k=-1, **both)
    fails(TypeError, "max_seqlen_q is 2.0", max_seqlen_q=2.0, **both)
    fails(TypeError, "validate is 1", validate=1, **both)
    fails(TypeError, "bias", bias=x.q, **both)
    fails(TypeError, "mask", mask=x.q, **both)
    fails(ValueError, "allowed: (total, heads, head_dim) for all", *(a[None] for a in x.qkv), **both)
    fails(
        ValueError,
        "alibi_slopes has shape (3, 2); allowed: (2,), (heads_q,) or (2, 2), (batch, heads_q)",
        alibi_slopes=backend1.array(np.ones((3, 2)), backend1.lse_dtype),
        **both,
    )
    fails(ValueError, "k has shape", x.q, x.k[:4], x.v, **both)
    fails(ValueError, "out has shape", out=x.q[:4], **both)


@pytest.mark.parametrize("length", [24, 125, 53, 28, 77, 96, 13, 114])
def test_b032_keys_beyond_a_length(backend_bfloat16, length):
    x = packed(backend_bfloat16, (128,), (128,), heads_q=4, head_dim=16, used=(None, (length,)))
    x.v[length:] = 100
    out = backend_bfloat16.host(check(backend_bfloat16, x)["out"])
    assert out.max() <= backend_bfloat16.host(x.v)[:length].max()


@pytest.mark.parametrize("length", [1, 100, 255, 257])
def test_b033_equal_keys(backend1, length):
    """Out is the mean of the values, and the sum of the exponentials their number."""
    x = packed(backend1, (1,) * 3, (length,) * 3, heads_q=8, head_dim=128)
    x.q[...] = 0
    out, lse = (backend1.host(a) for a in run(backend1, x, backward=False).values())
    mean = backend1.host(x.v).reshape(3, length, 8, 128).mean(axis=1)
    tools.assert_close("out", out, mean, 2 * backend1.eps * abs(backend1.host(x.v)).max())
    np.testing.assert_allclose(lse, math.log(length), atol=1e-5)


def test_b035_layout_of_lse(backend):
    x = packed(backend, (2, 5), (2, 5), heads_q=3)
    lse = run(backend, x, backward=False)["lse"]
    assert lse.shape == (3, 7) and lse.dtype == backend.lse_dtype
    dense = cupyflash.attention(*(a[None, 2:] for a in x.qkv), return_lse=True)[1]
    np.testing.assert_allclose(backend.host(lse[:, 2:]), backend.host(dense)[0], atol=1e-5)


def test_b036_gradient_of_lse(backend):
    x = packed(backend, (7, 3), (7, 5), heads_q=4, heads_k=2, head_dim=16)
    x.dout[...] = 0
    assert not backend.host(check(backend, x, causal=True)["dv"]).any()


def test_b061_alibi_of_real_lengths(backend1):
    """As many keys as there are, not as there is room for."""
    x = packed(backend1, (1, 1), (16, 16), heads_q=8, used=(None, (5, 9)))
    slopes = backend1.array(2.0 ** -np.arange(1, 9), backend1.lse_dtype)
    check(backend1, x, alibi_slopes=slopes)


def test_other_lengths_in_the_same_call(backend1):
    """What is remembered of a call does not hold the lengths."""
    for lengths in ((10, 60, 30), (60, 0, 40), (0, 99, 1)):
        check(backend1, packed(backend1, lengths, lengths, on_host=False), causal=True)


@pytest.mark.gpu
def test_in_a_graph(cuda):
    """With lengths on the device, which may be others when it is replayed."""
    x, other = (packed(cuda, n, n, on_host=False, seed=i) for i, n in enumerate(((40, 60), (70, 30))))
    where = x.where(cuda)
    right = run(cuda, other)
    run(cuda, x)
    stream = cuda.xp.cuda.Stream(non_blocking=True)

    def call():
        out, lse = cupyflash.attention_varlen(*x.qkv, return_lse=True, **where)
        return out, lse, cupyflash.attention_varlen_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, **where)

    with stream:
        warm = call(), call()  # leaves the pool as much memory as the capture needs
        del warm
        stream.begin_capture()
        out, lse, gradients = call()
        graph = stream.end_capture()
        for a, b in zip((*x.qkv, x.dout, x.dlse), (*other.qkv, other.dout, other.dlse)):
            a[...] = b
        for name, cu in other.indices.items():
            where[name].set(cu)
        graph.launch(stream)
        stream.synchronize()
    for name, got in ({"out": out, "lse": lse} | tools.named(gradients)).items():
        expected = cuda.host(right[name])
        tools.assert_close(name, cuda.host(got), expected, 4 * cuda.eps * abs(expected).max())


# ---------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("shape", [(3, 5), (3, 0), (0, 4), (1, 1)])
def test_packing(backend, shape):
    mask = np.random.default_rng(0).random(shape) < 0.6
    x = np.random.default_rng(1).standard_normal((*shape, 2, 4))
    found = cupyflash.padding.packing(backend.xp.asarray(mask))
    assert found.max_seqlen == max([*mask.sum(axis=1), 0]) and found.shape == shape
    assert found.cu_seqlens.dtype == np.int32
    np.testing.assert_array_equal(backend.host(found.cu_seqlens), np.cumsum([0, *mask.sum(axis=1)]))
    rows = cupyflash.padding.pack(backend.array(x), found)
    x = backend.host(backend.array(x))
    np.testing.assert_array_equal(backend.host(rows), x[mask])
    again = cupyflash.padding.unpack(rows, found)
    assert again.dtype == rows.dtype == backend.dtype
    np.testing.assert_array_equal(backend.host(again), np.where(mask[..., None, None], x, 0))


def test_packed_from_a_mask(backend1):
    """A padded batch, packed, gives what it gives with the mask."""
    mask = np.arange(70) < np.array([70, 3, 40])[:, None]
    q, k, v = (backend1.normal((3, 70, 2, 16), i) for i in range(3))
    found = cupyflash.padding.packing(backend1.xp.asarray(mask))
    rows = [cupyflash.padding.pack(x, found) for x in (q, k, v)]
    out = cupyflash.attention_varlen(
        *rows, cu_seqlens_q=found.cu_seqlens, cu_seqlens_k=found.cu_seqlens, max_seqlen_q=found.max_seqlen
    )
    out = backend1.host(cupyflash.padding.unpack(out, found))
    right = reference.attention(*map(backend1.host, (q, k, v)), mask=mask[:, None, None])
    tools.assert_close("out", out, np.where(mask[..., None, None], right, 0), 4 * backend1.eps * abs(right).max())


def test_packing_arguments():
    with pytest.raises(TypeError, match="mask has dtype int64; allowed: bool"):
        cupyflash.padding.packing(np.ones((2, 3), np.int64))
    with pytest.raises(ValueError, match=re.escape("mask has shape (2,); allowed: (batch, seqlen)")):
        cupyflash.padding.packing(np.ones(2, bool))
    found = cupyflash.padding.packing(np.ones((2, 3), bool))
    with pytest.raises(ValueError, match=re.escape("x has shape (3, 3); allowed: (2, 3)")):
        cupyflash.padding.pack(np.ones((3, 3)), found)
    with pytest.raises(ValueError, match=re.escape("x has shape (5,); allowed: (6,)")):
        cupyflash.padding.unpack(np.ones(5), found)
    with pytest.raises(TypeError, match="x has dtype int64"):
        cupyflash.padding.pack(np.ones((2, 3), np.int64), found)
