"""Logits that softcap and ALiBi change."""

import math

import numpy as np
import pytest
import tools
from tools import check, inputs

import cupyflash
from cupyflash import reference, structs

option_backend, option_backend16 = tools.option_backend, tools.option_backend16

LENGTHS = (1, 63, 64, 65, 130, 300)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window 5 3": {"window": (5, 3)},
    "causal window 33": {"causal": True, "window": (33, None)},
    "upper_left window 70": {"causal": "upper_left", "window": (70, 9)},
    "window left 0": {"window": (0, None)},
}
HEAD_DIMS = [(40, 40), (64, 64), (128, 128), (256, 256), (192, 128), (64, 40), (16, 256)]


def slopes(backend, *shape, seed=0):
    """Slopes of either sign, the first one 0."""
    values = np.random.default_rng(seed).normal(0.05, 0.2, shape)
    values[..., 0] = 0
    return backend.array(values, backend.lse_dtype)


def changes(backend, heads, batch=2):
    """Every option and both together."""
    return {
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": slopes(backend, heads)},
        "both": {"softcap": 2.0, "alibi_slopes": slopes(backend, batch, heads)},
    }


CHANGES = tuple(changes(tools.Backend("numpy", "float32"), 1))


@pytest.fixture(params=CHANGES)
def change(request):
    return request.param


def by_hand(backend, logits, **options):
    """Out and lse of one query whose scaled logits are given and whose values are one-hot."""
    q, k, v = np.zeros((1, 1, 1, 16)), np.zeros((1, len(logits), 1, 16)), np.eye(len(logits), 16)
    q[..., 0], k[0, :, 0, 0] = 1, logits
    q, k, v = backend.array(q), backend.array(k), backend.array(v[None, :, None])
    out, lse = cupyflash.attention(q, k, v, scale=1.0, return_lse=True, **options)
    return backend.host(out)[0, 0, 0, : len(logits)], backend.host(lse).item()


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("softcap", [1, 5, 30, 50])
@pytest.mark.parametrize("factor", [0.3, 1, 3, 8])
def test_softcap(backend, softcap, factor):
    """From logits that it hardly changes to logits of several hundred, beyond every cap."""
    x = inputs(backend, 70, 130, batch=1, factor=factor)
    check(backend, *x.qkv, x.dout, x.dlse, softcap=softcap)


@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=["heads", "batch and heads"])
@pytest.mark.parametrize("steepness", [0.01, 1, 8])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(70, 70), (70, 130), (130, 70)])
def test_alibi(backend, shape, steepness, seqlen_q, seqlen_k):
    x = inputs(backend, seqlen_q, seqlen_k, heads_q=6, heads_k=2)
    steep = slopes(backend, *shape) * backend.lse_dtype.type(steepness)
    check(backend, *x.qkv, x.dout, x.dlse, alibi_slopes=steep)


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(backend1, change, seqlen_q, seqlen_k, causal):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, seed=1)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=causal, **changes(backend1, 2, 1)[change])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1100, 1100), (300, 1100), (1100, 300)])
def test_long(backend1, change, seqlen_q, seqlen_k, head_dim):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, head_dim=head_dim, seed=2)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=True, **changes(backend1, 2, 1)[change])


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (65, 200), (200, 65), (300, 17)])
def test_masks(backend1, change, options, seqlen_q, seqlen_k):
    x = inputs(backend1, seqlen_q, seqlen_k, heads_q=4, heads_k=2, seed=3)
    check(backend1, *x.qkv, x.dout, x.dlse, **options, **changes(backend1, 4)[change])


@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_head_dims(backend16, change, head_dim, head_dim_v, causal, deterministic):
    x = inputs(backend16, 130, 150, heads_q=4, heads_k=2, head_dim=head_dim, head_dim_v=head_dim_v, batch=1, seed=4)
    options = changes(backend16, 4, 1)[change]
    check(backend16, *x.qkv, x.dout, x.dlse, causal=causal, deterministic=deterministic, **options)


@pytest.mark.parametrize("heads_q, heads_k", [(3, 3), (6, 2), (16, 1), (40, 40)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 100), (2, 300), (5, 64), (130, 65)])
def test_groups_of_heads(backend, change, heads_q, heads_k, seqlen_q, seqlen_k):
    """Few queries too, of many heads: rows of one tile have slopes of their own."""
    x = inputs(backend, seqlen_q, seqlen_k, heads_q, heads_k, head_dim=32, seed=5)
    check(backend, *x.qkv, x.dout, x.dlse, causal=True, **changes(backend, heads_q)[change])


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale_comes_first(backend1, change, scale):
    x = inputs(backend1, 70, 130, batch=1, head_dim=16)
    check(backend1, *x.qkv, x.dout, x.dlse, scale=scale, **changes(backend1, 2, 1)[change])


@pytest.mark.parametrize("layout", tools.LAYOUTS.values(), ids=tools.LAYOUTS)
def test_layouts(backend1, change, layout):
    x = inputs(backend1, 70, 65, heads_q=4, heads_k=2)
    q, k, v, dout = (tools.laid_out(backend1, array, layout) for array in (*x.qkv, x.dout))
    check(backend1, q, k, v, dout, x.dlse, causal=True, **changes(backend1, 4)[change])


def test_float32_out(backend16, change):
    x = inputs(backend16, 65, 130)
    options = changes(backend16, 2)[change]
    buffer = tools.Guarded(backend16, x.q.shape, np.float32)
    out, lse = cupyflash.attention(*x.qkv, out=buffer.array, return_lse=True, **options)
    buffer.check()
    right = tools.expectation(backend16, *x.qkv, x.dout, **options)
    tools.assert_close("out", backend16.host(out), *right["out"])
    for name, gradient in tools.named(cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **options)).items():
        tools.assert_close(name, backend16.host(gradient), *right[name])


# ---------------------------------------------------------------------------------------------- how slopes are given


@pytest.mark.parametrize("causal", [False, "upper_left"])
def test_strides_of_slopes(backend1, causal):
    """Every layout of equal slopes gives the same bits, and of one axis those of the same in each batch."""
    x = inputs(backend1, 65, 130, heads_q=6, heads_k=2, batch=3)
    xp, plain = backend1.xp, slopes(backend1, 6)

    def results(steep):
        options = {"causal": causal, "alibi_slopes": steep}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        return out, lse, *cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)[:3]

    gaps = xp.full((3, 13), np.nan, plain.dtype)
    gaps[:, 1::2] = plain
    expected = results(plain)
    for same in (
        plain[::-1].copy()[::-1],
        gaps[0, 1::2],
        gaps[:, 1::2],
        gaps[::-1, 1::2],
        xp.broadcast_to(plain, (3, 6)),
        xp.ascontiguousarray(xp.broadcast_to(plain[:, None], (6, 3))).T,
    ):
        assert all(map(tools.same_bits, results(same), expected))


def test_slopes_without_strides(backend1):
    x = inputs(backend1, 65, heads_q=3)
    check(backend1, *x.qkv, x.dout, alibi_slopes=backend1.xp.broadcast_to(slopes(backend1, 2)[1:], (2, 3)))


def test_slopes_of_a_batch(backend1):
    """Each batch by its own slopes, also in a call without the axis."""
    x = inputs(backend1, 65, 70, heads_q=4, heads_k=2)
    steep = slopes(backend1, 2, 4)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, alibi_slopes=steep)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, alibi_slopes=steep, deterministic=True)
    for b in range(2):
        alone, options = [array[b] for array in x.qkv], {"alibi_slopes": steep[b]}
        one, one_lse = cupyflash.attention(*alone, return_lse=True, **options)
        assert tools.same_bits(one, out[b]) and tools.same_bits(one_lse, lse[b])
        ones = cupyflash.attention_backward(x.dout[b], *alone, one, one_lse, deterministic=True, **options)
        assert all(tools.same_bits(one, all_[b]) for one, all_ in zip(ones[:3], gradients[:3]))


def test_slopes_are_not_written(backend1):
    x, steep = inputs(backend1, 65), slopes(backend1, 2)
    before = steep.copy()
    check(backend1, *x.qkv, x.dout, alibi_slopes=steep)
    assert tools.same_bits(steep, before)


def test_other_slopes_in_the_same_call(backend1):
    """What is remembered of a call holds neither the slopes nor the cap."""
    x = inputs(backend1, 65, heads_q=4)
    for seed in range(3):
        check(backend1, *x.qkv, x.dout, alibi_slopes=slopes(backend1, 4, seed=seed), softcap=1 + seed)
        check(backend1, *x.qkv, x.dout)


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch, heads", [(4, 0, 2, 3), (0, 4, 2, 3), (3, 3, 0, 3), (3, 3, 2, 0)])
def test_empty(backend1, seqlen_q, seqlen_k, batch, heads):
    shapes = ((batch, n, heads, 16) for n in (seqlen_q, seqlen_k, seqlen_k))
    q, k, v = (backend1.normal(shape) for shape in shapes)
    options = {"softcap": 2, "alibi_slopes": backend1.normal((batch, heads)).astype(backend1.lse_dtype)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert not backend1.host(out).any() and np.isneginf(backend1.host(lse)).all()
    for gradient in cupyflash.attention_backward(out, q, k, v, out, lse, **options)[:3]:
        assert not backend1.host(gradient).any()


# ---------------------------------------------------------------------------------------------- known values


def test_softcap_by_hand(backend):
    """Dao-AILab/flash-attention#2402, flashinfer-ai/flashinfer#1193: cap * tanh(logit / cap) of the scaled logits."""
    p, lse = by_hand(backend, [10, 0], softcap=5)
    np.testing.assert_allclose(p, [0.991999, 0.008001], rtol=backend.eps, atol=2e-6)
    np.testing.assert_allclose(lse, 4.828171, atol=3e-6)


def test_softcap_before_alibi(backend):
    """NVIDIA/TransformerEngine#3391, microsoft/onnxruntime#28370: 3.820138 beside 0, not 4.734030."""
    steep = backend.array([1.0], backend.lse_dtype)
    p, lse = by_hand(backend, [10, 0], softcap=5, alibi_slopes=steep)
    np.testing.assert_allclose(p[0], 0.978546, rtol=backend.eps, atol=2e-6)
    np.testing.assert_allclose(lse, 3.820138 - math.log(0.978546), atol=3e-6)


@pytest.mark.parametrize("softcap", [1e-30, 1.0, 20.0])
def test_mask_after_softcap(backend, softcap):
    """onnx/onnx#7865, Dao-AILab/flash-attention#1025: a hidden key has no weight, not that of -cap."""
    q, k = (backend.array(np.full((1, 4, 1, 16), x)) for x in (1.0, -1.0))
    v = backend.array(np.eye(4, 16)[None, :, None])
    out = backend.host(cupyflash.attention(q, k, v, causal=True, softcap=softcap))[0, :, 0, :4]
    np.testing.assert_allclose(out, np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None], rtol=backend.eps)
    assert out[0, 0] == 1 and not np.triu(out, 1).any()


@pytest.mark.parametrize("seqlen_k", [5, 9])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_alibi_by_hand(backend, seqlen_k, seqlen_q):
    """Dao-AILab/flash-attention#907: the distance is that of the keys of the call, not of the cache they lie in."""
    steep = 0.5 ** np.arange(1, 9)
    cache = backend.array(np.full((1, 16, 8, 16), np.nan))
    cache[:, :seqlen_k] = 0
    v = cache.copy()
    v[:, :seqlen_k] = backend.array(np.arange(seqlen_k)[None, :, None, None] * np.ones((1, 1, 8, 16)))
    q = backend.array(np.zeros((1, seqlen_q, 8, 16)))
    options = {"alibi_slopes": backend.array(steep, backend.lse_dtype)}
    out, lse = cupyflash.attention(q, cache[:, :seqlen_k], v[:, :seqlen_k], return_lse=True, **options)
    distance = abs(np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k))
    weights = np.exp(-steep[:, None, None] * distance)
    total = weights.sum(axis=-1)
    np.testing.assert_allclose(backend.host(lse)[0], np.log(total), atol=2e-6)
    mean = (weights @ np.arange(seqlen_k)) / total
    np.testing.assert_allclose(backend.host(out)[0, :, :, 0], mean.T, rtol=4 * backend.eps)


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_alibi_of_five_heads(backend, shape):
    """Dao-AILab/flash-attention#1585, #540."""
    x = inputs(backend, 55, heads_q=5, batch=3)
    check(backend, *x.qkv, x.dout, alibi_slopes=slopes(backend, *shape))
    with pytest.raises(ValueError, match=r"\(5,\), \(heads_q,\) or \(3, 5\), \(batch, heads_q\)"):
        cupyflash.attention(*x.qkv, alibi_slopes=slopes(backend, 5, 3))


# ---------------------------------------------------------------------------------------------- far values


@pytest.mark.parametrize("softcap", [10, 50])
def test_gradients_of_softcap(backend_bfloat16, softcap):
    """Dao-AILab/flash-attention#1065, #2466."""
    backend = backend_bfloat16
    x = inputs(backend, 1024, heads_q=32 if backend.name == "cuda" else 2, head_dim=128, factor=1.5)
    check(backend, *x.qkv, x.dout, causal=True, softcap=softcap)


@pytest.mark.parametrize("softcap", [1e4, 1e6, 1e12, 1e30])
def test_high_softcap_is_none(backend, softcap):
    """Dao-AILab/flash-attention#1065: values and gradients of no cap, at any size of cap."""
    x = inputs(backend, 65, 130, batch=1)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, softcap=softcap)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, softcap=softcap)
    right = tools.expectation(backend, *x.qkv, x.dout)
    if backend.dtype_name == "float64":  # an error of s**3 / (3 * softcap**2) is none of rounding
        right = {name: (expected, max(allowed, 1e6 / softcap**2)) for name, (expected, allowed) in right.items()}
    for name, got in {"out": out, "lse": lse, **tools.named(gradients)}.items():
        tools.assert_close(name, backend.host(got), *right[name])


@pytest.mark.parametrize("softcap", [1e-30, 1e-3])
def test_low_softcap_is_uniform(backend, softcap):
    """Logits of no size: the mean of the values, and no gradient of queries and keys beyond the cap."""
    x = inputs(backend, 65, 130, batch=1, factor=2)
    results = check(backend, *x.qkv, x.dout, softcap=softcap)
    mean = np.broadcast_to(backend.host(x.v).mean(axis=1, keepdims=True), x.q.shape)
    tools.assert_close("out", backend.host(results["out"]), mean, 4 * softcap + 8 * backend.eps)


def test_logits_beyond_every_cap(backend):
    """Where tanh is 1, softcap has no gradient; the weights are those of +-softcap, whatever overflows."""
    huge = 6e4 if backend.dtype_name == "float16" else 1e30
    sign = np.where(np.arange(70) % 3, 1.0, -1.0)
    q = backend.array(np.full((1, 20, 1, 64), huge))
    k = backend.array(huge * sign[None, :, None, None] * np.ones((1, 70, 1, 64)))
    v, dout = backend.normal((1, 70, 1, 64)), backend.normal((1, 20, 1, 64), seed=1)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, softcap=2.0)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, softcap=2.0)
    p = np.exp(2 * sign) / np.exp(2 * sign).sum()
    expected = np.broadcast_to((p @ backend.host(v)[0, :, 0])[None, None, None], q.shape)
    tools.assert_close("out", backend.host(out), expected, 8 * backend.eps)
    np.testing.assert_allclose(backend.host(lse), np.log(np.exp(2 * sign).sum()), rtol=1e-6)
    dv = np.broadcast_to(p[:, None], (70, 64)) * backend.host(dout)[0].sum(axis=0)
    tools.assert_close("dv", backend.host(gradients.dv)[0, :, 0], dv, 8 * backend.eps * abs(dv).max())
    assert not backend.host(gradients.dq).any() and not backend.host(gradients.dk).any()


@pytest.mark.parametrize("softcap", [0.25, 2.0])
def test_slopes_beyond_the_cap(backend, softcap):
    """The derivative of softcap where ALiBi takes from the logits many times what softcap leaves of them."""
    x = inputs(backend, 130, 200, batch=1, factor=1.5)
    check(backend, *x.qkv, x.dout, x.dlse, softcap=softcap, alibi_slopes=backend.array([1.0, 0.3], backend.lse_dtype))


def test_hidden_logits_beyond_every_cap(backend, change):
    """Keys that no query sees, in tiles with keys that some see: no weight and no gradient, however large."""
    x = inputs(backend, 70, 130)
    x.k[:, 70:] = 6e4
    options = {"causal": "upper_left", **changes(backend, 2)[change]}
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **options)
    x.k[:, 70:] = 0
    right = tools.expectation(backend, *x.qkv, x.dout, **options)
    for name, got in {"out": out, "lse": lse, **tools.named(gradients)}.items():
        tools.assert_close(name, backend.host(got), *right[name])
    assert not backend.host(gradients.dk)[:, 70:].any() and not backend.host(gradients.dv)[:, 70:].any()


@pytest.mark.parametrize("corner", [False, "upper_left"])
def test_diagonal_where_no_key_is_hidden(backend, corner):
    """Distances are those from the diagonal of the call, which hides nothing: one key, or a wide window."""
    x = inputs(backend, 70, 1)
    check(backend, *x.qkv, x.dout, x.dlse, causal=corner, alibi_slopes=slopes(backend, 2, 2))
    x = inputs(backend, 70, 130)
    slope = {"alibi_slopes": slopes(backend, 2)}
    check(backend, *x.qkv, x.dout, x.dlse, window=(200, 200), **slope)
    with_slopes, without = (tools.problem(backend, *x.qkv, causal=corner, **o) for o in (slope, {}))
    assert with_slopes.diagonal == (0 if corner else 60)
    assert (with_slopes.left, with_slopes.right) == (without.left, without.right)
    assert structs.sizes(with_slopes, 1) == structs.sizes(without, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_steep_slopes(backend, sign):
    """One key takes all the weight: that on the diagonal, or the one furthest from it."""
    x = inputs(backend, 70, batch=1)
    steep = backend.array(
        [1e4 if sign > 0 else -1e2] * 2, backend.lse_dtype
    )  # lse, up to 7e3, has four digits after it
    out = backend.host(check(backend, *x.qkv, x.dout, alibi_slopes=steep)["out"])
    furthest = np.where(np.arange(70) > 34, 0, 69)
    assert (out == backend.host(x.v)[:, np.arange(70) if sign > 0 else furthest]).all()


@pytest.mark.parametrize("options", [{"causal": "upper_left", "window": (3, None)}, {"causal": True}])
def test_rows_without_keys(backend, change, options):
    x = inputs(backend, 90, 20)
    options = options | changes(backend, 2)[change]
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    empty = np.isneginf(backend.host(lse)[0, 0])
    assert empty.sum() == (90 - 23 if "window" in options else 70)
    x.dlse[..., backend.xp.asarray(np.flatnonzero(empty))] = (
        np.nan
    )  # of lse = -inf: what the derivative of any loss of it gives
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, **options)
    assert not backend.host(out)[:, empty].any() and not backend.host(gradients.dq)[:, empty].any()
    assert all(np.isfinite(backend.host(gradient)).all() for gradient in gradients[:3])


@pytest.mark.parametrize("position", ["q", "k"])
def test_nan_is_not_hidden(backend, change, position):
    """NaN in a query is NaN in its row alone; in a key, in all rows that see it."""
    x = inputs(backend, 70, 130, batch=1)
    getattr(x, position)[0, 40, 0, 3] = np.nan
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **changes(backend, 2, 1)[change])
    rows = np.arange(70) == 40 if position == "q" else np.ones(70, bool)
    np.testing.assert_array_equal(np.isnan(backend.host(out)[0, :, 0, 0]), rows)
    np.testing.assert_array_equal(np.isnan(backend.host(lse)[0, 0]), rows)
    assert np.isfinite(backend.host(out)[0, :, 1]).all()
    dq = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **changes(backend, 2, 1)[change]).dq
    np.testing.assert_array_equal(np.isnan(backend.host(dq)[0, :, 0]).all(axis=-1), rows)
    np.testing.assert_array_equal(np.isnan(backend.host(dq)[0, :, 0]).any(axis=-1), rows)


@pytest.mark.parametrize("softcap", [10, 50])
def test_gradients_along_a_direction(softcap):
    """Dao-AILab/flash-attention#1065: the public functions against finite differences."""
    backend, seed = tools.Backend("numpy", "float64"), 7
    x = inputs(backend, 33, factor=3, seed=seed)
    options = {"causal": True, "softcap": softcap, "alibi_slopes": slopes(backend, 2)}

    def loss(*qkv):
        out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
        return (out * x.dout).sum() + (lse * x.dlse).sum()

    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, **options)
    for i, gradient in enumerate(gradients[:3]):
        direction = [np.zeros_like(array) for array in x.qkv]
        direction[i] = np.random.default_rng(seed + i).standard_normal(gradient.shape)
        above, below = (loss(*(a + step * d for a, d in zip(x.qkv, direction))) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((above - below) / 2e-6, (gradient * direction[i]).sum(), rtol=1e-5)


# ---------------------------------------------------------------------------------------------- repeatability


def test_same_bits_again(backend, change):
    x = inputs(backend, 200, 300, heads_q=4, heads_k=2)
    options = {"causal": True} | changes(backend, 4)[change]
    runs = [check(backend, *x.qkv, x.dout, x.dlse, deterministic=True, **options) for _ in range(2)]
    assert all(tools.same_bits(runs[0][name], runs[1][name]) for name in runs[0])


def test_zero_slopes_are_none(backend, change):
    """To rounding: a kernel of its own may add in another order."""
    x = inputs(backend, 65, 130)
    nothing = backend.array(np.zeros(2), backend.lse_dtype)
    softcap = changes(backend, 2)[change].get("softcap")
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, softcap=softcap, alibi_slopes=nothing)
    right = tools.expectation(backend, *x.qkv, softcap=softcap)
    tools.assert_close("out", backend.host(out), *right["out"])
    tools.assert_close("lse", backend.host(lse), *right["lse"])


def test_merged_halves(backend):
    """Softcap knows no position, so that parts of the keys merge exactly."""
    x = inputs(backend, 65, 130)
    parts = (slice(0, 60), slice(60, None))
    halves = [cupyflash.attention(x.q, x.k[:, s], x.v[:, s], softcap=2, return_lse=True) for s in parts]
    out, lse = cupyflash.merge_attention(*halves)
    expected, expected_lse = reference.attention(*map(backend.host, x.qkv), softcap=2, return_lse=True)
    tools.assert_close("out", backend.host(out), expected, 8 * backend.eps)
    tools.assert_close("lse", backend.host(lse), expected_lse, 1e-5)
