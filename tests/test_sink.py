"""Attention sinks: one more logit of each query head in the softmax, without a key."""

import math

import numpy as np
import pytest
import tools
from test_score import HEAD_DIMS, LENGTHS, MASKS, changes
from tools import check, inputs

import cupyflash
from cupyflash import reference

option_backend, option_backend16 = tools.option_backend, tools.option_backend16


def sinks(backend, heads, seed=0, mean=1.0):
    """Of the size of a row's log-sum-exp, above and below it; the first one is none."""
    values = np.random.default_rng(seed).normal(mean, 3.0, heads)
    values[:1] = -math.inf
    return backend.array(values, backend.lse_dtype)


def one_key(backend, sink, logit, value=3.0):
    """Out, lse and gradients of one query and one key, whose logit and value are given; dout and dlse are 2 and 5."""
    q, k, v = (backend.array(np.full((1, 1, 1, 1), x)) for x in (1.0, logit, value))
    options = {"scale": 1.0, "sink": backend.array([sink], backend.lse_dtype)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dout, dlse = backend.array(np.full((1, 1, 1, 1), 2.0)), backend.array(np.full((1, 1, 1), 5.0), backend.lse_dtype)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return {name: backend.host(x).item() for name, x in {"out": out, "lse": lse, **tools.named(gradients)}.items()}


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(backend1, seqlen_q, seqlen_k, causal):
    """More queries than keys, and causal: some queries see no key."""
    x = inputs(backend1, seqlen_q, seqlen_k, heads_q=3, seed=1)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=causal, sink=sinks(backend1, 3))


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (65, 200), (200, 65), (300, 17)])
def test_masks(backend, options, seqlen_q, seqlen_k):
    x = inputs(backend, seqlen_q, seqlen_k, heads_q=4, heads_k=2, seed=2)
    check(backend, *x.qkv, x.dout, x.dlse, **options, sink=sinks(backend, 4))


@pytest.mark.parametrize("change", ["softcap", "alibi", "both"])
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
def test_changed_scores(backend, change, causal):
    """Neither softcap nor ALiBi changes a sink."""
    x = inputs(backend, 130, 90, heads_q=4, heads_k=2, seed=3)
    check(backend, *x.qkv, x.dout, x.dlse, causal=causal, sink=sinks(backend, 4), **changes(backend, 4)[change])


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale(backend, scale):
    """Neither does the scale."""
    x = inputs(backend, 70, 130, head_dim=16)
    check(backend, *x.qkv, x.dout, x.dlse, scale=scale, sink=sinks(backend, 2))


@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_head_dims(backend16, head_dim, head_dim_v, causal, deterministic):
    x = inputs(backend16, 130, 150, heads_q=4, heads_k=2, head_dim=head_dim, head_dim_v=head_dim_v, batch=1, seed=4)
    check(backend16, *x.qkv, x.dout, x.dlse, causal=causal, deterministic=deterministic, sink=sinks(backend16, 4))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1100, 1100), (300, 1100), (1100, 300)])
def test_long(backend1, seqlen_q, seqlen_k, head_dim):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, head_dim=head_dim, seed=5)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=True, sink=sinks(backend1, 2))


@pytest.mark.parametrize("heads_q, heads_k", [(3, 3), (6, 2), (16, 1), (40, 40)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 100), (2, 300), (5, 64), (130, 65)])
def test_groups_of_heads(backend, heads_q, heads_k, seqlen_q, seqlen_k):
    """Few queries too, of many heads: rows of one tile have sinks of their own."""
    x = inputs(backend, seqlen_q, seqlen_k, heads_q, heads_k, head_dim=32, seed=6)
    check(backend, *x.qkv, x.dout, x.dlse, causal=True, sink=sinks(backend, heads_q))


@pytest.mark.parametrize("seqlen, batch", [(1, 3000), (3, 700), (1023, 3), (1024, 2), (1025, 2), (5000, 1)])
def test_sums_of_many_rows(backend1, seqlen, batch):
    """Rows of one batch or of thousands in the block of 1024 threads that adds them."""
    x = inputs(backend1, seqlen, 3, heads_q=2, batch=batch, head_dim=16, seed=7)
    check(backend1, *x.qkv, x.dout, x.dlse, sink=sinks(backend1, 2, mean=0))


@pytest.mark.parametrize("layout", tools.LAYOUTS.values(), ids=tools.LAYOUTS)
def test_layouts(backend1, layout):
    x = inputs(backend1, 70, 65, heads_q=4, heads_k=2)
    q, k, v, dout = (tools.laid_out(backend1, array, layout) for array in (*x.qkv, x.dout))
    check(backend1, q, k, v, dout, x.dlse, causal=True, sink=sinks(backend1, 4))


def test_float32_out(backend16):
    x, sink = inputs(backend16, 65, 130), sinks(backend16, 2)
    buffer = tools.Guarded(backend16, x.q.shape, np.float32)
    out, lse = cupyflash.attention(*x.qkv, out=buffer.array, return_lse=True, sink=sink)
    buffer.check()
    right = tools.expectation(backend16, *x.qkv, x.dout, sink=sink)
    tools.assert_close("out", backend16.host(out), *right["out"])
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, sink=sink)
    for name, gradient in tools.named(gradients).items():
        tools.assert_close(name, backend16.host(gradient), *right[name])


def test_one_more_key(backend):
    """As a key whose logit is the sink and whose value is 0, with the gradient of that logit."""
    x = inputs(backend, 20, 33, heads_q=2, head_dim=16, seed=8)
    q, sink = x.q.copy(), np.array([0.5, -2.0])
    q[..., 0] = 1
    wide = [np.concatenate([backend.host(a), np.zeros((2, 1, 2, 16))], axis=1) for a in (x.k, x.v)]
    wide[0][:, -1, :, 0] = sink / 16**-0.5
    with_key = [backend.array(a) for a in wide]
    out, lse = cupyflash.attention(q, *with_key, return_lse=True)
    expected = cupyflash.attention_backward(x.dout, q, *with_key, out, lse, dlse=x.dlse)
    results = check(backend, q, x.k, x.v, x.dout, x.dlse, sink=backend.array(sink, backend.lse_dtype))
    for name, got, right in (
        ("out", results["out"], out),
        ("lse", results["lse"], lse),
        ("dq", results["dq"][..., 1:], expected.dq[..., 1:]),
        ("dk", results["dk"], expected.dk[:, :-1]),
        ("dv", results["dv"], expected.dv[:, :-1]),
    ):
        right = backend.host(right)
        tools.assert_close(name, backend.host(got), right, 8 * backend.eps * (1 + abs(right).max()))
    dsink = backend.host(expected.dk)[:, -1, :, 0].sum(axis=0) / 16**-0.5
    tools.assert_close("dsink", backend.host(results["dsink"]), dsink, 32 * backend.eps * abs(dsink).max())


# ---------------------------------------------------------------------------------------------- known values


@pytest.mark.parametrize("sink, logit, weight", [(0, 0, 1 / 2), (math.log(3), 0, 1 / 4), (-1, 1, 0.880797)])
def test_by_hand(backend, sink, logit, weight):
    results = one_key(backend, sink, logit)
    delta = 2 * 3 * weight - 5
    ds = weight * (2 * 3 - delta)
    right = {"out": 3 * weight, "lse": logit - math.log(weight), "dq": ds * logit, "dk": ds, "dv": 2 * weight}
    right["dsink"] = (weight - 1) * delta
    for name, result in results.items():
        assert abs(result - right[name]) <= 4 * backend.eps * (1 + abs(right[name])) + 2e-6, name


@pytest.mark.parametrize("sink", [1e3, 1e4, 1e30])
def test_far_above(backend, sink):
    """It leaves nothing to the key, and nothing overflows."""
    results = one_key(backend, sink, 1.0)
    assert results["lse"] == np.float32(sink) and results["dsink"] == 5
    assert not any(results[name] for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("sink", [-1e3, -1e4, -1e30])
def test_far_below(backend, sink):
    """It takes nothing from the key."""
    results = one_key(backend, sink, 1.0)
    assert results == one_key(backend, -math.inf, 1.0)
    assert results == {"out": 3, "lse": 1, "dq": 5, "dk": 5, "dv": 2, "dsink": 0}


@pytest.mark.parametrize("sink", [-1e30, float(np.finfo(np.float32).min)])
def test_the_least_sink_of_rows_without_keys(backend, sink):
    """Rows that see nothing else lie in a tile with others: no gradient of theirs is NaN, and none of the keys'."""
    x = inputs(backend, 100, 70, head_dim=128)
    many = backend.array(np.full(x.q.shape[2], sink), backend.lse_dtype)
    check(backend, *x.qkv, x.dout, causal=True, sink=many)


@pytest.mark.parametrize("above", [1, -1, 80, -80])
@pytest.mark.parametrize("logit", [8192, -8192])
def test_huge_logits(backend, logit, above):
    """What counts is the difference, in whichever size."""
    results = one_key(backend, logit + above, logit)
    weight = 1 / (1 + math.exp(above))
    np.testing.assert_allclose(results["out"], 3 * weight, rtol=4 * max(backend.eps, 1e-7 * abs(above)), atol=1e-7)
    np.testing.assert_allclose(results["lse"], logit + np.logaddexp(0, above), rtol=2e-7)
    right = (weight - 1) * (2 * 3 * weight - 5)
    np.testing.assert_allclose(results["dsink"], right, rtol=4 * max(backend.eps, 1e-3), atol=1e-30)


@pytest.mark.parametrize("options", [{"causal": "upper_left", "window": (3, None)}, {"causal": True}])
def test_rows_without_keys(backend, options):
    """Out is 0 and lse the sink, to the last bit; all that dlse has goes to the sink, or, without one, nowhere."""
    x, sink = inputs(backend, 90, 20, heads_q=3), sinks(backend, 3)
    rows = slice(23, 90) if "window" in options else slice(0, 70)
    results = check(backend, *x.qkv, x.dout, x.dlse, **options, sink=sink)
    out, lse, dq = (backend.host(results[name]) for name in ("out", "lse", "dq"))
    assert (lse[..., rows] == backend.host(sink)[:, None]).all()
    assert not out[:, rows].any() and not dq[:, rows].any()
    x.dlse[:, 0, rows] = np.nan  # of lse = -inf: what the derivative of any loss of it gives
    again = cupyflash.attention_backward(
        x.dout, *x.qkv, results["out"], results["lse"], dlse=x.dlse, **options, sink=sink
    )
    assert all(np.isfinite(backend.host(gradient)).all() for gradient in tools.named(again).values())
    assert backend.host(again.dsink)[0] == 0


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch, heads", [(4, 0, 2, 3), (0, 4, 2, 3), (3, 3, 0, 3), (3, 3, 2, 0)])
def test_empty(backend1, seqlen_q, seqlen_k, batch, heads):
    q, k, v = (backend1.normal((batch, n, heads, 16)) for n in (seqlen_q, seqlen_k, seqlen_k))
    sink, dlse = sinks(backend1, heads), backend1.normal((batch, heads, seqlen_q)).astype(backend1.lse_dtype)
    for at in (slice(None), 0) if batch else (slice(None),):  # also without the axis
        arrays = q[at], k[at], v[at]
        out, lse = cupyflash.attention(*arrays, return_lse=True, sink=sink)
        assert not backend1.host(out).any() and lse.shape == dlse[at].shape
        assert (backend1.host(lse) == backend1.host(sink)[:, None]).all()
        for given in (None, dlse[at]):
            gradients = cupyflash.attention_backward(out, *arrays, out, lse, dlse=given, sink=sink)
            assert not any(backend1.host(gradient).any() for gradient in gradients[:3])
            right = backend1.host(dlse[at]).sum(axis=1 if at == 0 else (0, 2))
            right *= given is not None
            right[:1] = 0  # of no sink
            np.testing.assert_allclose(backend1.host(gradients.dsink), right, rtol=1e-6)
            assert gradients.dsink.dtype == backend1.lse_dtype


def test_minus_infinity_is_none(backend):
    x = inputs(backend, 90, 70, heads_q=4, heads_k=2)
    results = []
    for options in ({}, {"sink": backend.array([-math.inf] * 4, backend.lse_dtype)}):
        options |= {"causal": True}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=True, **options)
        results.append((out, lse, *gradients[:3], gradients.dsink))
    assert all(map(tools.same_bits, results[0][:5], results[1][:5]))
    assert results[0][-1] is None and not backend.host(results[1][-1]).any()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(backend, value):
    """Infinite: all the weight. NaN: a head of NaN, but for what it does not enter. The other head knows nothing."""
    x = inputs(backend, 70, 50)
    results = []
    for first in (0.0, value):
        options = {"causal": True, "sink": backend.array([first, 0.5], backend.lse_dtype)}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=True, **options)
        results.append([backend.host(array) for array in (out, lse, *tools.named(gradients).values())])
    for finite, array, axis in zip(*results, (2, 1, 2, 2, 2, 0)):
        np.testing.assert_array_equal(finite.take(1, axis), array.take(1, axis))
    out, lse, *gradients, dsink = (array.take(0, axis) for array, axis in zip(results[1], (2, 1, 2, 2, 2, 0)))
    assert not out[:, :20].any()
    if math.isnan(value):
        assert np.isnan(out[:, 20:]).all() and np.isnan(lse).all() and np.isnan(dsink)
        assert all(np.isnan(gradient).all() for gradient in gradients[1:])
    else:
        assert not out.any() and np.isposinf(lse).all() and not any(gradient.any() for gradient in gradients)
        np.testing.assert_allclose(dsink, backend.host(x.dlse)[:, 0].sum(), rtol=1e-4)


def test_gradients_along_a_direction():
    """The public functions against finite differences."""
    backend, seed = tools.Backend("numpy", "float64"), 7
    x = inputs(backend, 33, 20, heads_q=4, heads_k=2, seed=seed)
    options = {"causal": True} | changes(backend, 4)["both"]
    point = [*x.qkv, sinks(backend, 5, seed)[1:]]

    def results(q, k, v, sink):
        return cupyflash.attention(q, k, v, return_lse=True, sink=sink, **options)

    def loss(*point):
        out, lse = results(*point)
        return (out * x.dout).sum() + (lse * x.dlse).sum()

    *qkv, sink = point
    gradients = cupyflash.attention_backward(x.dout, *qkv, *results(*point), dlse=x.dlse, sink=sink, **options)
    for i, gradient in enumerate(tools.named(gradients).values()):
        direction = [np.zeros_like(array) for array in point]
        direction[i] = np.random.default_rng(seed + i).standard_normal(gradient.shape)
        above, below = (loss(*(a + step * d for a, d in zip(point, direction))) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((above - below) / 2e-6, (gradient * direction[i]).sum(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------- how sinks are given


def bits(backend, x, sink, at=slice(None), **options):
    """All results, of one batch or of all."""
    q, k, v, dout, dlse = (array[at] for array in (*x.qkv, x.dout, x.dlse))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, sink=sink, **options)
    options |= {"sink": sink, "deterministic": True}
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return out, lse, *tools.named(gradients).values()


def test_strides(backend1):
    """Every layout of equal sinks gives the same bits."""
    x, plain = inputs(backend1, 65, 130, heads_q=6, heads_k=2), sinks(backend1, 6)
    gaps = backend1.xp.full(13, np.nan, plain.dtype)
    gaps[1::2] = plain
    expected = bits(backend1, x, plain)
    for same in (plain[::-1].copy()[::-1], gaps[1::2]):
        assert all(map(tools.same_bits, bits(backend1, x, same), expected))
    equal = backend1.xp.full(6, plain[1])
    expected = bits(backend1, x, equal)
    assert all(map(tools.same_bits, bits(backend1, x, backend1.xp.broadcast_to(equal[:1], (6,))), expected))


def test_without_batch(backend1):
    x, sink = inputs(backend1, 65, 70, heads_q=4, heads_k=2), sinks(backend1, 4)
    *together, dsink = bits(backend1, x, sink)
    parts = []
    for b in range(2):
        *alone, part = bits(backend1, x, sink, b)
        assert all(tools.same_bits(one, all_[b]) for one, all_ in zip(alone, together))
        parts.append(backend1.host(part))
    np.testing.assert_allclose(backend1.host(dsink), sum(parts), rtol=1e-5, atol=1e-5)


def test_sinks_are_not_written(backend1):
    x, sink = inputs(backend1, 65), sinks(backend1, 2)
    before = sink.copy()
    check(backend1, *x.qkv, x.dout, sink=sink)
    assert tools.same_bits(sink, before)


def test_other_sinks_in_the_same_call(backend1):
    """What is remembered of a call does not hold the sinks."""
    x = inputs(backend1, 65, heads_q=4)
    for seed in range(3):
        check(backend1, *x.qkv, x.dout, sink=sinks(backend1, 4, seed))
        check(backend1, *x.qkv, x.dout)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_same_bits_again(backend1, options):
    """Those of dsink, also where the other gradients are not asked to be the same."""
    x, sink = inputs(backend1, 700, 300, heads_q=4, heads_k=2), sinks(backend1, 4)
    first = check(backend1, *x.qkv, x.dout, x.dlse, sink=sink, **options)
    for deterministic in (False, False, True):
        again = check(backend1, *x.qkv, x.dout, x.dlse, sink=sink, deterministic=deterministic, **options)
        assert all(tools.same_bits(first[name], again[name]) for name in ("out", "lse", "dsink"))


def test_merged_halves(backend):
    """One of the parts has the sink."""
    x, sink = inputs(backend, 65, 130), sinks(backend, 2)
    parts = (slice(0, 60), sink), (slice(60, None), None)
    halves = [cupyflash.attention(x.q, x.k[:, s], x.v[:, s], sink=given, return_lse=True) for s, given in parts]
    out, lse = cupyflash.merge_attention(*halves)
    expected, expected_lse = reference.attention(*map(backend.host, x.qkv), sink=backend.host(sink), return_lse=True)
    tools.assert_close("out", backend.host(out), expected, 16 * backend.eps)
    tools.assert_close("lse", backend.host(lse), expected_lse, 1e-5)
