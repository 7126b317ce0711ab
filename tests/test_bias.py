"""A bias that is added to the logits, and a boolean mask, both of any shape that broadcasts."""

import math

import numpy as np
import pytest
import tools
from test_score import MASKS, changes
from test_sink import sinks
from tools import check, inputs

import cupyflash
from cupyflash import reference

option_backend, option_backend16 = tools.option_backend, tools.option_backend16

# Of two batches, four query heads, 70 queries and 130 keys.
SHAPES = [
    (2, 4, 70, 130),
    (1, 4, 70, 130),
    (2, 1, 70, 130),
    (2, 4, 1, 130),
    (2, 4, 70, 1),
    (2, 1, 1, 130),
    (2, 4, 1, 1),
    (1, 1, 1, 1),
    (4, 70, 130),
    (4, 70, 1),
    (4, 1, 1),
    (70, 130),
    (70, 1),
    (1, 130),
    (130,),
    (1,),
    (),
]
BIAS_DTYPES = ("float16", "bfloat16", "float32")


def biases(backend, shape, seed=0, dtype=None, hidden=0.0):
    """Of the size of the logits; each is -inf with the probability `hidden`."""
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.normal(0.3, 1.5, shape))
    return backend.array(np.where(rng.random(shape) < hidden, -math.inf, values), dtype).reshape(shape)


def masks(backend, shape, seed=0, seen=0.7):
    return backend.xp.asarray(np.asarray(np.random.default_rng(seed).random(shape) < seen))


def case(backend, seqlen_q=70, seqlen_k=130, **how):
    return inputs(backend, seqlen_q, seqlen_k, **({"heads_q": 4, "heads_k": 2, "head_dim": 16} | how))


def bits(backend, x, at=slice(None), **options):
    """All results, of one batch or of all."""
    q, k, v, dout, dlse = (array[at] for array in (*x.qkv, x.dout, x.dlse))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    options["deterministic"] = True
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return {"out": out, "lse": lse, **tools.named(gradients)}


def assert_same_bits(got, expected, without=()):
    assert [*got] == [*expected]
    for name, result in got.items():
        assert name in without or tools.same_bits(result, expected[name]), name


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias(backend, shape):
    x, bias = case(backend), biases(backend, shape)
    results = check(backend, *x.qkv, x.dout, x.dlse, bias=bias)
    assert results["dbias"].shape == shape and results["dbias"].dtype == bias.dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mask(backend, shape):
    x = case(backend)
    for seed in range(2 if math.prod(shape) == 1 else 1):
        results = check(backend, *x.qkv, x.dout, x.dlse, mask=masks(backend, shape, seed, 0.5))
        assert "dbias" not in results


@pytest.mark.parametrize("dtype", BIAS_DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 70, 130), (4, 70, 1), (130,)], ids=str)
def test_dtypes(backend, dtype, shape):
    """That of a bias need not be that of the others; its gradient has it."""
    x, bias = case(backend), biases(backend, shape, dtype=tools.DTYPES[dtype])
    results = check(backend, *x.qkv, x.dout, x.dlse, bias=bias, causal=True)
    assert results["dbias"].dtype == tools.DTYPES[dtype]


@pytest.mark.parametrize("seqlen_q", (1, 63, 65, 300))
@pytest.mark.parametrize("seqlen_k", (1, 43, 77, 513, 1100))
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(backend1, seqlen_q, seqlen_k, causal):
    """Rows of a bias of every alignment, and several tiles of keys and of queries."""
    x = case(backend1, seqlen_q, seqlen_k)
    bias, mask = biases(backend1, (4, seqlen_q, seqlen_k), hidden=0.1), masks(backend1, (2, 1, seqlen_q, seqlen_k))
    check(backend1, *x.qkv, x.dout, x.dlse, causal=causal, bias=bias, mask=mask)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (65, 200), (200, 65), (300, 17)])
def test_masks(backend1, options, seqlen_q, seqlen_k):
    """A key is seen where all masks show it; every other option at once."""
    x = case(backend1, seqlen_q, seqlen_k, seed=3)
    options = options | {"sink": sinks(backend1, 4), **changes(backend1, 4)["both"]}
    bias, mask = biases(backend1, (2, 1, seqlen_q, seqlen_k)), masks(backend1, (4, seqlen_q, 1))
    for more in ({"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask, "dropout": 0.3, "seed": 5}):
        check(backend1, *x.qkv, x.dout, x.dlse, **options, **more)


@pytest.mark.parametrize("change", ["softcap", "alibi", "both"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3, "seed": 7}])
def test_options(backend, change, with_sink, dropout):
    x, options = case(backend), changes(backend, 4)[change] | dropout
    if with_sink:
        options["sink"] = sinks(backend, 4)
    bias, mask = biases(backend, (4, 70, 130)), masks(backend, (2, 1, 1, 130))
    check(backend, *x.qkv, x.dout, x.dlse, bias=bias, mask=mask, causal=True, **options)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale(backend1, scale):
    x, bias = case(backend1), biases(backend1, (70, 130))
    check(backend1, *x.qkv, x.dout, x.dlse, scale=scale, bias=bias)


@pytest.mark.parametrize("heads_q, heads_k", [(3, 3), (6, 2), (16, 1), (40, 40)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 100), (2, 300), (130, 65)])
def test_groups_of_heads(backend1, heads_q, heads_k, seqlen_q, seqlen_k):
    """More heads than one stack of the host takes: each has a bias and a mask of its own."""
    x = case(backend1, seqlen_q, seqlen_k, heads_q=heads_q, heads_k=heads_k, batch=3)
    for shape in ((3, heads_q, seqlen_q, seqlen_k), (heads_q, 1, 1), (3, 1, 1, seqlen_k)):
        bias, mask = biases(backend1, shape), masks(backend1, (3, heads_q, seqlen_q, seqlen_k))
        check(backend1, *x.qkv, x.dout, x.dlse, bias=bias, mask=mask)


def assert_same_without_dbias(backend, x, bias, same_kernels, **options):
    """The other gradients are right, twice the same, and the same as beside dbias where the same kernels run."""
    out, lse = cupyflash.attention(*x.qkv, bias=bias, return_lse=True, **options)

    def gradients(wanted):
        arrays = x.dout, *x.qkv, out, lse
        options_ = options | {"bias": bias, "bias_gradient": wanted, "deterministic": True}
        return tools.named(cupyflash.attention_backward(*arrays, dlse=x.dlse, **options_))

    both, alone, again = gradients(True), gradients(False), gradients(False)
    assert_same_bits(again, alone)
    assert both.pop("dbias").shape == bias.shape and [*alone] == [*both]
    right = tools.expectation(backend, *x.qkv, x.dout, x.dlse, bias=bias, **options)
    for name, gradient in alone.items():
        tools.assert_close(name, backend.host(gradient), *right[name])
        assert not same_kernels or tools.same_bits(gradient, both[name]), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_constant(backend, shape, with_sink):
    """The kernel of dq that writes a dbias without sums, too, is another than that without it."""
    options = {"sink": sinks(backend, 4)} if with_sink else {}
    same_kernels = backend.name == "numpy" or shape != (2, 4, 70, 130)
    assert_same_without_dbias(backend, case(backend), biases(backend, shape), same_kernels, causal=True, **options)


@pytest.mark.parametrize("shape", [(2, 4, 300, 600), (4, 300, 600), (300, 600), (600,)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "causal": True}], ids=["none", "softcap"])
def test_constant_of_wider_heads(backend16, head_dim, shape, options):
    x, bias = case(backend16, 300, 600, head_dim=head_dim), biases(backend16, shape)
    assert_same_without_dbias(backend16, x, bias, backend16.name == "numpy" or len(shape) < 4, **options)


@pytest.mark.parametrize("gradients", [(), ("slope",)])
def test_constant_beside_a_function(gradients):
    """Gradients of what a function captured are another question."""
    backend = tools.Backend("numpy", "float32")
    x, bias, slope = case(backend), biases(backend, (4, 1, 130)), backend.array(np.linspace(0.1, 0.4, 4))
    mod = cupyflash.ScoreMod(
        lambda score, b, h, i, j, slope: score - slope[h] * abs(i - j), slope=slope, gradients=gradients
    )
    out, lse = cupyflash.attention(*x.qkv, bias=bias, score_mod=mod, return_lse=True)
    both, alone = (
        cupyflash.attention_backward(x.dout, *x.qkv, out, lse, bias=bias, score_mod=mod, bias_gradient=wanted)
        for wanted in (True, False)
    )
    assert both.dbias.shape == bias.shape and alone.dbias is None
    assert all(tools.same_bits(one, other) for one, other in zip(alone[:3], both[:3], strict=True))
    if gradients:
        assert tools.same_bits(alone.dscore_mod["slope"], both.dscore_mod["slope"])
    else:
        assert alone.dscore_mod is both.dscore_mod is None


def test_sums_over_much(backend16):
    """The gradient of one number: a sum of 2 * 4 * 700 * 700 terms, in float32, of a bias of 16 bits."""
    x = case(backend16, 700, 700, head_dim=8)
    for shape in ((), (1, 4, 1, 1), (700,)):
        check(backend16, *x.qkv, x.dout, x.dlse, bias=biases(backend16, shape), sink=sinks(backend16, 4))


@pytest.mark.parametrize("shape", [(1, 4, 300, 300), (4, 1, 1), (2, 1, 300, 1), (300,)], ids=str)
def test_equal_calls_give_equal_bits(backend16, shape):
    """Also without `deterministic`: no order of the sums is left to chance."""
    x, bias = case(backend16, 300, 300), biases(backend16, shape)
    out, lse = cupyflash.attention(*x.qkv, bias=bias, return_lse=True)
    one, two = (cupyflash.attention_backward(x.dout, *x.qkv, out, lse, bias=bias).dbias for _ in range(2))
    assert tools.same_bits(one, two)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_rounded_once(dtype):
    """Of positive terms, so that a sum in 16 bits would lose more and more of them."""
    backend = tools.Backend("numpy", "float32")
    x = case(backend, 5000, 32, head_dim=8)
    x.dlse[...], x.dout[...] = 1, 0
    bias = biases(backend, (1,), dtype=tools.DTYPES[dtype])
    check(backend, *x.qkv, x.dout, x.dlse, bias=bias, sink=backend.array(np.full(4, 4.0)))


# ---------------------------------------------------------------------------------------------- how they are given


def test_strides(backend1):
    """Every layout of equal numbers gives the same bits, without a copy in full."""
    x = case(backend1)
    bias, mask = biases(backend1, (2, 4, 70, 130), hidden=0.1), masks(backend1, (2, 4, 70, 130))
    expected = bits(backend1, x, bias=bias, mask=mask)
    for name, layout in tools.LAYOUTS.items():
        given = layout.place(backend1.xp.ones(layout.size(mask.shape), bool), mask.shape)
        given[...] = mask
        assert_same_bits(bits(backend1, x, bias=tools.laid_out(backend1, bias, layout), mask=given), expected)
        assert name == "contiguous" or given.strides != mask.strides or "off" in name or "backwards" in name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast_is_the_copy_in_full(backend1, shape):
    """Of the same bits, also by strides of 0, but for the gradient, which is that of the copy, summed.

    Rows that are not multiples of 16 bytes take the portable kernels, for which a bias of one row is none on Hopper.
    """
    x, bias, mask = case(backend1), biases(backend1, shape, dtype=np.float32), masks(backend1, shape)
    whole = (2, 4, 70, 130)
    got = bits(backend1, x, bias=bias, mask=mask)
    wide = [backend1.xp.broadcast_to(array, whole) for array in (bias, mask)]
    full = bits(backend1, x, bias=wide[0].copy(), mask=wide[1].copy())
    views = bits(backend1, x, bias=wide[0], mask=wide[1])
    if backend1.path == "sm90":
        for result, expected in ((result[name], full[name]) for result in (views, got) for name in full):
            if result.shape == expected.shape:
                result, expected = backend1.host(result), backend1.host(expected)
                np.testing.assert_allclose(result, expected, rtol=0, atol=4 * backend1.eps * abs(expected).max())
    else:
        assert_same_bits(views, full)
        assert_same_bits(got, full, without=("dbias",))
    assert full["dbias"].shape == whole and got["dbias"].shape == shape
    in_full = (1,) * (4 - len(shape)) + shape
    summed = backend1.host(full["dbias"]).sum(axis=tuple(i for i in range(4) if in_full[i] == 1))
    atol = 4 * backend1.eps * abs(summed).max() if backend1.path == "sm90" else 1e-4  # as above: out differs, and delta
    np.testing.assert_allclose(backend1.host(got["dbias"]).ravel(), summed.ravel(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("shape", [(4, 70, 130), (1, 70, 1), (130,), ()], ids=str)
def test_without_batch(backend1, shape):
    x = case(backend1)
    bias, mask = biases(backend1, shape, dtype=np.float32), masks(backend1, shape)
    together = bits(backend1, x, bias=bias, mask=mask)
    alone = [bits(backend1, x, b, bias=bias, mask=mask) for b in range(2)]
    for b in range(2):
        for name, result in alone[b].items():
            assert name == "dbias" or tools.same_bits(result, together[name][b])
    whole, *parts = (backend1.host(results["dbias"]) for results in (together, *alone))
    np.testing.assert_allclose(whole, parts[0] + parts[1], rtol=1e-4, atol=1e-4)


def test_neither_is_written(backend1):
    x, bias, mask = case(backend1), biases(backend1, (70, 130)), masks(backend1, (70, 130))
    before = bias.copy(), mask.copy()
    for array in (bias, mask) if backend1.name == "numpy" else ():
        array.flags.writeable = False
    check(backend1, *x.qkv, x.dout, bias=bias, mask=mask)
    assert tools.same_bits(bias, before[0]) and tools.same_bits(mask, before[1])


def test_others_in_the_same_call(backend1):
    """What is remembered of a call holds neither of them."""
    x = case(backend1)
    for seed in range(3):
        check(backend1, *x.qkv, x.dout, bias=biases(backend1, (70, 130), seed), mask=masks(backend1, (70, 130), seed))
        check(backend1, *x.qkv, x.dout)
        check(backend1, *x.qkv, x.dout, mask=masks(backend1, (4, 1, 1), seed))


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch, heads", [(4, 0, 2, 3), (0, 4, 2, 3), (3, 3, 0, 3), (3, 3, 2, 0)])
def test_empty(backend1, seqlen_q, seqlen_k, batch, heads):
    q, k, v = (backend1.normal((batch, n, heads, 16)) for n in (seqlen_q, seqlen_k, seqlen_k))
    for shape in ((batch, heads, seqlen_q, seqlen_k), (1, 1, 1, 1), (heads, 1, 1), (seqlen_k,), ()):
        options = {"bias": biases(backend1, shape), "mask": masks(backend1, shape)}
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        assert not out.any() and backend1.xp.isneginf(lse).all()
        gradients = cupyflash.attention_backward(out, q, k, v, out, lse, **options)
        assert gradients.dbias.shape == shape
        assert not any(gradient.any() for gradient in tools.named(gradients).values())


# ---------------------------------------------------------------------------------------------- hidden keys


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("how", ["mask", "bias", "both"])
def test_rows_without_keys(backend, how, with_sink):
    """pytorch/pytorch#103963, #103749: out 0, lse -inf or the sink, gradients 0, never NaN."""
    x, rows = case(backend, 130, 600), [0, 3, 64, 129]
    seen = np.random.default_rng(4).random((130, 600)) < 0.5
    seen[rows], seen[:, 17], seen[5, :512], seen[6, 512:] = False, False, False, False
    bias = backend.array(np.where(seen, 0, -math.inf))
    mask = backend.xp.asarray(seen)
    options = {"mask": {"mask": mask}, "bias": {"bias": bias}, "both": {"mask": mask, "bias": bias}}[how]
    if with_sink:
        options["sink"] = sinks(backend, 4)
    results = check(backend, *x.qkv, x.dout, x.dlse, **options)
    lse = backend.host(results["lse"])[:, :, rows]
    assert (lse == (backend.host(options["sink"])[:, None] if with_sink else -math.inf)).all()
    assert not results["out"][:, rows].any() and not results["dq"][:, rows].any()
    assert not results["dk"][:, 17].any() and not results["dv"][:, 17].any()
    if "dbias" in results:
        assert not backend.host(results["dbias"])[~seen].any()


def test_hidden_by_either(backend1):
    """By True and False, by 0 and -inf and by `causal` the same but for rounding."""
    x = case(backend1, 130, 130)
    seen = np.tril(np.ones((130, 130), bool))
    bias = backend1.array(np.where(seen, 0, -math.inf))
    causal = tools.expectation(backend1, *x.qkv, x.dout, x.dlse, causal=True)
    for options in ({"mask": backend1.xp.asarray(seen)}, {"bias": bias}):
        results = bits(backend1, x, **options)
        results.pop("dbias", None)
        for name, result in results.items():
            tools.assert_close(name, backend1.host(result), *causal[name])


def test_mask_shows_nothing_that_others_hide(backend1):
    x, banded = case(backend1), {"causal": True, "window": (20, None)}
    expected = tools.expectation(backend1, *x.qkv, x.dout, x.dlse, **banded)
    for name, result in bits(backend1, x, mask=backend1.xp.ones((), bool), **banded).items():
        tools.assert_close(name, backend1.host(result), *expected[name])


def test_no_bias_is_0(backend):
    x = case(backend)
    expected = tools.expectation(backend, *x.qkv, x.dout, x.dlse)
    got = bits(backend, x, bias=backend.array(np.zeros((4, 1, 130))))
    got.pop("dbias")
    for name, result in got.items():
        tools.assert_close(name, backend.host(result), *expected[name])


@pytest.mark.parametrize("value", [-1e9, -1e30, float(np.finfo(np.float32).min), -65504.0, -200.0, 1e4, 1e30])
@pytest.mark.parametrize("seqlen_k", [16, 65, 600])
def test_finite_numbers_hide_nothing(backend, value, seqlen_k):
    """pytorch/pytorch#109517: a row of the least number is a shift, from 1e9 on one that leaves the mean of the values.

    Its gradients have as many digits as lse, which is a float32 number of that size.
    """
    x = case(backend, 16, seqlen_k, head_dim=32)
    bias = backend.xp.zeros((16, seqlen_k), np.float32)
    bias[5] = value
    if backend.name == "numpy" or abs(value) < 2e38:
        check(backend, *x.qkv, x.dout if abs(value) < 1e3 else None, bias=bias)
    else:  # the portable kernels have logits in base 2, where 2**128 * ln(2) is the end
        lse = backend.host(cupyflash.attention(*x.qkv, bias=bias, return_lse=True)[1])[:, :, 5]
        assert (np.sign(value) * lse > 2.3e38).all() and np.isfinite(lse).all()
    shifted, plain = (backend.host(cupyflash.attention(*x.qkv, **o)) for o in ({"bias": bias}, {}))
    if abs(value) < 1e5:
        np.testing.assert_allclose(shifted[:, 5], plain[:, 5], atol=8 * backend.eps + 0.01)
    elif backend.dtype_name != "float64" or abs(value) > 1e20:
        mean = np.repeat(backend.host(x.v).mean(axis=1), 2, axis=1)
        np.testing.assert_allclose(shifted[:, 5], mean, atol=8 * backend.eps + 1e-6)


@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_padding(backend16, value, head_dim):
    """A row of the least number, whose result nobody uses, changes no gradient but its own: nothing there overflows."""
    x = case(backend16, 70, 130, head_dim=head_dim)
    bias = backend16.xp.zeros((70, 130), np.float32)
    bias[5] = value
    dout = x.dout.copy()
    dout[:, 5] = 0
    out, lse = cupyflash.attention(*x.qkv, bias=bias, return_lse=True)
    got = tools.named(cupyflash.attention_backward(dout, *x.qkv, out, lse, bias=bias))
    right = tools.expectation(backend16, *x.qkv, dout, bias=bias)
    for name, gradient in got.items():
        tools.assert_close(name, backend16.host(gradient), *right[name])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(backend, value):
    """Its row is NaN, as the formula says, and no other; where the key is hidden it counts for nothing."""
    x = case(backend)
    bias = backend.xp.zeros((4, 70, 130), np.float32)
    bias[1, 7, 3] = value
    out, lse = (backend.host(a) for a in cupyflash.attention(*x.qkv, bias=bias, return_lse=True))
    wrong = np.zeros(out.shape, bool)
    wrong[:, 7, 1] = True
    np.testing.assert_array_equal(np.isnan(out), wrong)
    np.testing.assert_array_equal(np.isnan(lse), wrong[..., 0].swapaxes(1, 2))
    check(backend, *x.qkv, bias=bias)
    expected = bits(backend, x, mask=bias == 0, bias=backend.xp.zeros((), np.float32))
    expected.pop("dbias")
    got = bits(backend, x, mask=bias == 0, bias=bias)
    assert backend.xp.isfinite(got.pop("dbias")).all()
    assert_same_bits(got, expected)
    banded = {"causal": True, "window": (3, None)}
    expected = bits(backend, x, bias=backend.xp.zeros_like(bias), **banded)
    hidden = backend.array(np.where(reference.visible(np, 70, 130, **banded), 0, value), np.float32)
    assert_same_bits(bits(backend, x, bias=hidden, **banded), expected, ["dbias"])


# ---------------------------------------------------------------------------------------------- gradients, memory, GPU


@pytest.mark.parametrize("shape", [(2, 4, 33, 20), (2, 1, 1, 20), (4, 33, 1), ()], ids=str)
def test_gradients_along_a_direction(shape):
    """The public functions against finite differences, with every option."""
    backend = tools.Backend("numpy", "float64")
    x = inputs(backend, 33, 20, heads_q=4, heads_k=2, seed=7)
    options = {"causal": True, "window": (15, None), "dropout": 0.2, "seed": 3, "mask": masks(backend, (4, 33, 20))}
    options |= {"sink": sinks(backend, 5)[1:], **changes(backend, 4)["both"]}
    bias = biases(backend, shape)

    def results(bias):
        return cupyflash.attention(*x.qkv, return_lse=True, bias=bias, **options)

    def loss(bias):
        out, lse = results(bias)
        return (out * x.dout).sum() + (np.where(np.isneginf(lse), 0, lse) * x.dlse).sum()

    dbias = cupyflash.attention_backward(x.dout, *x.qkv, *results(bias), dlse=x.dlse, bias=bias, **options).dbias
    for seed in range(3):
        direction = np.asarray(np.random.default_rng(seed).standard_normal(shape))
        above, below = (loss(np.asarray(bias + step * direction)) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((above - below) / 2e-6, (dbias * direction).sum(), rtol=1e-6)


def test_bias_of_zero_size_is_not_read_beyond():
    """facebookresearch/xformers#854: of two batches, not of as many as the keys have; memory around it is NaN."""
    backend = tools.Backend("numpy", "float32")
    x = case(backend, 5, 7, heads_q=3, heads_k=3, batch=4)
    for shape in [(1, 3, 5, 7), (4, 1, 5, 7), (4, 1, 1, 7), (1, 1, 1, 7), (1, 3, 5, 1)]:
        bias = tools.laid_out(backend, biases(backend, shape), tools.LAYOUTS["padded by one"])
        check(backend, *x.qkv, x.dout, x.dlse, bias=bias)
