"""Huge, tiny, equal and special numbers, and the size of rounding errors."""

import math

import numpy as np
import pytest
import tools
from tools import check, inputs

import cupyflash
from cupyflash import checks, reference

every_backend = tools.every_backend


@pytest.mark.parametrize("seqlen_k", [37, 200])
@pytest.mark.parametrize("one_row", [False, True])
def test_very_negative_logits(backend, seqlen_k, one_row):
    """flashinfer-ai/flashinfer#4267: every logit of a row is -80000."""
    x = inputs(backend, 40, seqlen_k, batch=1, seed=1)
    q = x.q.copy()
    q[:, slice(7, 8) if one_row else slice(None)] = 100
    k = backend.array(np.full(x.k.shape, -100.0))
    out, lse = cupyflash.attention(q, k, x.v, return_lse=True)
    out, lse = backend.host(out), backend.host(lse)
    mean = backend.host(x.v).mean(axis=1)
    np.testing.assert_allclose(out[:, 7], mean, atol=4 * backend.eps)
    np.testing.assert_allclose(lse[..., 7], -80000 + math.log(seqlen_k), rtol=2e-7)
    assert np.isfinite(out).all()


def test_huge_equal_logits(backend_bfloat16):
    """pytorch/pytorch#121558: the maximum minus itself is 0, however it is scaled."""
    value = 133120.0
    for seqlen_k in (1, 5, 70):
        q, k = (backend_bfloat16.array(np.full((1, n, 1, 64), value)) for n in (1, seqlen_k))
        v = backend_bfloat16.normal((1, seqlen_k, 1, 64)) if seqlen_k > 1 else q
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        mean = backend_bfloat16.host(v).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(backend_bfloat16.host(out), mean, rtol=0 if seqlen_k == 1 else 0.01, atol=0.004)
        np.testing.assert_allclose(backend_bfloat16.host(lse), value**2 * 8, rtol=1e-6)


@pytest.mark.parametrize("scale", [None, 0.1, -0.3, 1 / 3])
def test_huge_equal_logits_float32(scale):
    """pytorch/pytorch#121558."""
    for dtype, value in ((np.float32, 1e15), (np.float64, 1e150)):
        q, k = np.full((1, 3, 1, 64), value, dtype), np.full((1, 5, 1, 64), value, dtype)
        v = np.random.default_rng(0).standard_normal((1, 5, 1, 64)).astype(dtype)
        out = cupyflash.attention(q, k, v, scale=scale)
        mean = np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape)
        np.testing.assert_allclose(out, mean, rtol=1e-5, atol=1e-6)


def test_one_key_backward(backend):
    """Dao-AILab/flash-attention#334: P is 1, whatever the numbers."""
    for seed in range(20):
        x = inputs(backend, 1, batch=1, heads_q=1, head_dim=16, seed=seed, factor=3)
        dout = backend.xp.ones_like(x.dout)
        out, lse = cupyflash.attention(*x.qkv, return_lse=True)
        tools.assert_copied(backend, out, x.v)
        dq, dk, dv, *_ = cupyflash.attention_backward(dout, *x.qkv, out, lse)
        tools.assert_copied(backend, dv, dout)
        # 0 but for the rounding of two sums of the same 16 products
        most = 16 * np.finfo(backend.lse_dtype).eps * np.abs(backend.host(x.v)).sum()
        assert np.abs(backend.host(dq)).max() <= most * np.abs(backend.host(x.k)).max()
        assert np.abs(backend.host(dk)).max() <= most * np.abs(backend.host(x.q)).max()


@pytest.mark.parametrize("factor", [3, 10])
def test_spiky_softmax(backend16, factor):
    """Dao-AILab/flash-attention#1052."""
    x = inputs(backend16, 1024, batch=1, heads_q=1, head_dim=128, factor=factor)
    check(backend16, *x.qkv, x.dout, causal=True)


@pytest.mark.parametrize("seqlen", [65, 97, 192, 704])
@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_shifted_logits(backend16, seqlen, shift):
    """pytorch/pytorch#196678: a constant in every logit changes nothing but LSE, also where a tile has a tail."""
    x = inputs(backend16, seqlen, batch=1)
    x.q[..., 0], x.k[..., 0] = 40, shift / 5  # 40 * shift / 5 / sqrt(64)
    results = check(backend16, *x.qkv, x.dout)
    lse = backend16.host(results["lse"])
    assert (np.sign(lse) == np.sign(shift)).all() and np.abs(lse).min() > 170
    for name in ("dq", "dk"):
        assert np.isfinite(backend16.host(results[name])).all()


def test_float32_is_not_rounded():
    """triton-lang/triton#1671."""
    backend = tools.Backend("numpy", "float32")
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 128, 1, 32), np.float32) for _ in range(4))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    right = tools.expectation(backend, q, k, v, dout, causal=True)
    for name, got, most in zip(("out", "dq", "dk", "dv"), (out, *gradients[:3]), (2e-6, 1e-5, 1e-5, 1e-5)):
        tools.assert_close(name, got, right[name][0], most)


@pytest.mark.parametrize("seqlen, causal", [(256, False), (1024, True)])
def test_error_and_bias(backend16, seqlen, causal):
    """Dao-AILab/flash-attention#1071: errors no larger than rounding, and no drift to one side."""
    x = inputs(backend16, seqlen)
    results = check(backend16, *x.qkv, x.dout, causal=causal)
    right = tools.expectation(backend16, *x.qkv, x.dout, causal=causal)
    for name in ("out", "dv"):  # in dq and dk, the rounding of a row of out is shared by the row
        error = backend16.host(results[name]) - right[name][0]
        assert abs(error.mean()) < 6 * error.std() / math.sqrt(error.size) + 0.02 * error.std(), name


def test_group_sums_are_exact(backend_bfloat16):
    """xlite-dev/ffpa-attn#301: 48 query heads add up to 48 exactly."""
    x = inputs(backend_bfloat16, 100, heads_q=48, heads_k=1, head_dim=32, batch=1)
    q, dout = backend_bfloat16.xp.zeros_like(x.q), backend_bfloat16.xp.ones_like(x.dout)
    out, lse = cupyflash.attention(q, x.k, x.v, return_lse=True)
    dv = cupyflash.attention_backward(dout, q, x.k, x.v, out, lse).dv
    np.testing.assert_allclose(backend_bfloat16.host(dv), 48, rtol=backend_bfloat16.eps)


def test_group_sums_are_float32(backend_bfloat16):
    """xlite-dev/ffpa-attn#301."""
    x = inputs(backend_bfloat16, 100, heads_q=64, heads_k=1, head_dim=32, batch=1)
    check(backend_bfloat16, *x.qkv, x.dout)


@pytest.mark.parametrize("denormal", [True, False])
def test_small_numbers_survive(backend, denormal):
    """cupy/cupy#9576: float16 denormals always; the GPU flushes those of bfloat16 and float32, as documented."""
    info = {
        "float16": (2.0**-24, 2.0**-14),
        "bfloat16": (2.0**-130, 2.0**-126),
        "float32": (2.0**-140, 2.0**-126),
        "float64": (2.0**-1070, 2.0**-1022),
    }
    value = info[backend.dtype_name][0 if denormal else 1]
    x = inputs(backend, 3, 1, batch=1)
    v = backend.array(np.full(x.v.shape, value))
    out, lse = cupyflash.attention(x.q, x.k, v, return_lse=True)
    dout = backend.array(np.full(x.dout.shape, value))
    dv = cupyflash.attention_backward(dout, x.q, x.k, v, out, lse).dv
    out, dv = backend.host(out), backend.host(dv)
    if backend.name == "cuda" and denormal and backend.dtype_name in ("bfloat16", "float32"):
        assert np.isin(out, (0, value)).all() and np.isin(dv, (0, value, 3 * value)).all()
    else:
        assert (out == value).all()
        np.testing.assert_allclose(dv, 3 * value, rtol=backend.other_rounding)  # the passes round the logits otherwise


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_query_stays_in_its_row(backend, bad):
    """NaN in q is NaN in that row of out, lse and dq, and in no other."""
    x = inputs(backend, 150, 130)
    clean, clean_lse = cupyflash.attention(*x.qkv, return_lse=True)
    q = x.q.copy()
    q[1, 70, 1, 5] = bad
    out, lse = cupyflash.attention(q, x.k, x.v, return_lse=True)
    dq = cupyflash.attention_backward(x.dout, q, x.k, x.v, out, lse).dq
    others = np.ones((2, 150, 2), bool)
    others[1, 70, 1] = False
    out, clean, dq = (backend.host(array) for array in (out, clean, dq))
    lse, clean_lse = (backend.host(array).transpose(0, 2, 1) for array in (lse, clean_lse))
    assert np.isnan(out[1, 70, 1]).all() and np.isnan(lse[1, 70, 1])
    for a, b in ((out, clean), (lse, clean_lse)):
        np.testing.assert_allclose(a[others], b[others], rtol=backend.other_rounding, atol=backend.other_rounding)
    assert np.isnan(dq[1, 70, 1]).all() and np.isfinite(dq[others]).all()


def test_nan_in_a_visible_key(backend):
    """It is NaN in every row that sees it: an error is never hidden."""
    x = inputs(backend, 70, 130, batch=1)
    x.k[0, 100, 0, 3] = np.nan
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    assert np.isnan(backend.host(out)[:, :, 0]).all() and np.isnan(backend.host(lse)[:, 0]).all()
    assert np.isfinite(backend.host(out)[:, :, 1]).all()


def test_negative_zero_is_no_negative_scale():
    """Plans are kept by value, and -0.0 equals 0.0; the kernels look at the sign."""
    scale = checks.options(False, None, -0.0).scale
    assert scale == 0 and math.copysign(1, scale) == 1


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.2, 1.0, 1e-4, -1, 2.5])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(backend, scale, causal):
    """Zero gives the mean; with a negative scale the maximum is that of the scaled logits."""
    x = inputs(backend, 130, 150, batch=1, head_dim=32)
    results = check(backend, *x.qkv, x.dout, causal=causal, scale=scale)
    if scale == 0:
        assert not backend.host(results["dq"]).any() and not backend.host(results["dk"]).any()
        if not causal:
            expected = np.broadcast_to(backend.host(x.v).mean(axis=1, keepdims=True), x.q.shape)
            tools.assert_close("out", backend.host(results["out"]), expected, 8 * backend.eps)


@pytest.mark.parametrize("scale", [1e-39, -1e-50])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_that_float32_flushes(backend, scale, causal):
    """The weights are those of scale 0; gradients are as small as the scale, or 0 where denormals are flushed."""
    x = inputs(backend, 130, 150, batch=1, head_dim=32)
    options = {"causal": causal, "scale": scale}
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    right = tools.expectation(backend, *x.qkv, causal=causal, scale=0.0)
    tools.assert_close("out", backend.host(out), *right["out"])
    tools.assert_close("lse", backend.host(lse), *right["lse"])
    dq, dk, dv, *_ = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **options)
    right = tools.expectation(backend, *x.qkv, x.dout, causal=causal, scale=0.0)
    tools.assert_close("dv", backend.host(dv), *right["dv"])
    assert max(np.abs(backend.host(x)).max() for x in (dq, dk)) <= 100 * abs(scale)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "dtype, scale, q, k",
    [
        ("float32", 1e-46, 1e30, 1e16),  # float32 has no number for the scale
        ("float32", 1e-40, 1e25, 1e15),  # nor a normal one
        ("bfloat16", 1e-46, 1e30, 1e16),
        ("float64", 1e-310, 1e155, 1e152),
        ("float32", 1e37, 100, 1e-38),  # scale * q is infinite
        ("float32", 1e38, 1e-19, 1e-19),  # the product without the scale is denormal
        ("float32", 30, 2e37, 1.5e-38),
        ("bfloat16", 1e37, 100, 1e-38),
        ("float16", 1e38, 6e4, 0),
        ("float64", 1e38, 1e275, 1e-313),
    ],
)
def test_scales_far_from_one(dtype, sign, scale, q, k):
    """A product with the scale overflows, or is 0, only where the logit is."""
    backend, rng = tools.Backend("numpy", dtype), np.random.default_rng(0)
    q = backend.array(q * rng.uniform(0.5, 1, (1, 40, 2, 4)))
    k = backend.array(k * rng.uniform(-1, 1, (1, 70, 1, 4)))
    v, dout = backend.normal((1, 70, 1, 4)), backend.normal((1, 40, 2, 4), seed=1)
    options = {"scale": sign * scale, "causal": True}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    wide = [backend.host(x) for x in (dout, q, k, v, out, lse)]
    right, right_lse = reference.attention(*wide[1:4], return_lse=True, **options)
    np.testing.assert_allclose(backend.host(out), right, rtol=4 * backend.eps, atol=max(1e-5, backend.eps))
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)
    with np.errstate(all="ignore"):
        rights = reference.attention_backward(*wide, **options)
    for name, got, right in zip(gradients._fields, map(backend.host, gradients[:3]), rights):
        fits = np.abs(right) < float(np.finfo("f8" if dtype == "float64" else "f4").max) / 1000  # scale * q may not
        atol = max(1e-5, 2 * backend.eps) * np.abs(right[np.isfinite(right)]).max(initial=0)
        got, right = (np.where(fits, x, 0) for x in (got, right))
        np.testing.assert_allclose(got, right, rtol=4 * backend.eps, atol=atol, err_msg=name)


def test_one_query_whose_scale_overflows_alone():
    """A row far from the others in its block changes nothing but their rounding."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 40, 1, 8)).astype("float32")
    expected = cupyflash.attention(q, k, k, scale=20)
    q[0, 3] = 3e38
    np.testing.assert_allclose(cupyflash.attention(q, k, k, scale=20)[0, 4:], expected[0, 4:], rtol=1e-4, atol=1e-5)


def test_negative_scale_of_spiky_logits(backend):
    x = inputs(backend, 65, batch=1, factor=3)
    check(backend, *x.qkv, x.dout, scale=-1.0)


def test_weights_that_underflow(backend):
    """One key far above the others: its value, exactly."""
    q, k = backend.array(np.full((1, 70, 1, 64), 8.0)), np.full((1, 300, 1, 64), -8.0)
    k[0, 257] = 8
    v = backend.normal((1, 300, 1, 64))
    out, lse = cupyflash.attention(q, backend.array(k), v, return_lse=True)
    tools.assert_copied(backend, out, backend.xp.broadcast_to(v[:, 257:258], out.shape))
    np.testing.assert_allclose(backend.host(lse), 512, rtol=1e-6)


@pytest.mark.parametrize("rising", [True, False])
def test_maximum_that_moves(backend, rising):
    """The running maximum grows with every key, or never after the first."""
    steps = np.linspace(-30, 30, 600)
    if backend.splits:  # one product alone makes each logit, and plain float32 would make it exactly
        steps = np.round(16 * steps) / 16
    k = np.zeros((1, 600, 1, 64))
    k[0, :, 0, 0] = steps if rising else steps[::-1]
    q = np.zeros((1, 40, 1, 64))
    q[..., 0] = 8
    q, k = backend.array(q), backend.array(k)
    v, dout = backend.normal((1, 600, 1, 64)), backend.normal((1, 40, 1, 64), seed=1)
    check(backend, q, k, v, dout)
