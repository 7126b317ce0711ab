"""Merging attention over parts of the keys."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import merge_attention

DTYPES = ("float16", "bfloat16", "float32", "float64")
BF16 = np.dtype(ml_dtypes.bfloat16)


def part(keys, dtype="float32", seed=0, shape=(2, 5, 4, 8)):
    """A partial result and what it is of."""
    rng = np.random.default_rng(seed)
    q = np.random.default_rng(99).normal(size=shape).astype(dtype)
    k, v = (rng.normal(size=(*shape[:-3], keys, 2, shape[-1])).astype(dtype) for _ in range(2))
    return cupyflash.attention(q, k, v, return_lse=True), q, k, v


def assert_bits(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def empty_like(out, lse, garbage=0):
    return np.full_like(out, garbage), np.full_like(lse, -np.inf)


@pytest.mark.parametrize("shape", [(2, 5, 4, 8), (5, 4, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_parts_make_the_whole(shape, dtype, count):
    parts = [part(keys, dtype, keys, shape) for keys in range(1, count + 1)]
    k, v = (np.concatenate([x[i] for x in parts], axis=-3) for i in (2, 3))
    expected, expected_lse = cupyflash.attention(parts[0][1], k, v, return_lse=True)
    out, lse = merge_attention(*[x[0] for x in parts])
    tolerance = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance)
    assert out.dtype == lse.dtype == dtype


def test_drift():
    """zhuzilin/ring-flash-attention#22: 64 chunks of 64 keys in bfloat16, merged in float32, are as good as one."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 16, 2, 32)).astype(BF16)
    k, v = (rng.normal(size=(1, 4096, 1, 32)).astype(BF16) for _ in range(2))
    truth = cupyflash.attention(*[x.astype("f8") for x in (q, k, v)])
    wide = []
    for start in range(0, 4096, 64):
        keys = slice(start, start + 64)
        out = np.empty(q.shape, "f4")
        wide.append(cupyflash.attention(q, k[:, keys], v[:, keys], out=out, return_lse=True))

    def error(out):
        return abs(out.astype("f8") - truth).max()

    once = error(cupyflash.attention(q, k, v))
    wide_once = error(cupyflash.attention(q, k, v, out=np.empty(q.shape, "f4")))
    assert error(merge_attention(*wide)[0]) <= 2 * wide_once
    assert error(merge_attention(*wide, dtype=BF16)[0]) <= once + 2 * wide_once
    one_by_one = wide[0]
    for more in wide[1:]:
        one_by_one = merge_attention(one_by_one, more)
    assert (
        error(one_by_one[0])
        <= 16 * wide_once
        < error(merge_attention(*[(out.astype(BF16), lse) for out, lse in wide])[0])
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_parts(dtype):
    """flashinfer-ai/flashinfer#4051"""
    result, *_ = part(3, dtype)
    result[0][0, 0] = -0.0
    result[0][0, 1] = np.finfo("f2").smallest_subnormal if dtype == "float16" else 0
    empty, poisoned = empty_like(*result), empty_like(*result, np.nan)
    for parts in ([empty], [empty, empty], [poisoned, empty, poisoned]):
        assert_bits(merge_attention(*parts), empty)
    for parts in ([result], [empty, result], [result, empty], [empty, poisoned, result, empty]):
        assert_bits(merge_attention(*parts), result)


def test_rows_on_their_own():
    """Each row has its own empty parts, infinities and NaN."""
    (out1, lse1), *_ = part(3, seed=1)
    (out2, lse2), *_ = part(4, seed=2)
    expected, expected_lse = merge_attention((out1, lse1), (out2, lse2))
    lse1[0, 1, 2] = -np.inf
    out1[0, 2, 1] = np.nan
    lse2[1, 3, 4] = np.nan
    out2[1, 0, 2, 5] = np.nan
    out, lse = merge_attention((out1, lse1), (out2, lse2))
    untouched = np.ones(lse.shape, bool)
    untouched[0, 1, 2] = untouched[1, 3, 4] = False
    np.testing.assert_array_equal(lse[untouched], expected_lse[untouched])
    assert lse[0, 1, 2] == lse2[0, 1, 2] and np.isnan(lse[1, 3, 4])
    np.testing.assert_array_equal(out[0, 2, 1], out2[0, 2, 1])
    assert np.isnan(out[1, 4, 3]).all() and np.isnan(out[1, 0, 2, 5])
    rows = untouched.swapaxes(1, 2)[..., None] & np.ones(out.shape, bool)
    rows[1, 0, 2, 5] = False
    np.testing.assert_array_equal(out[rows], expected[rows])


def test_far_apart():
    """No overflow, whatever the size of lse; the weights stay a mean."""
    (out, lse), *_ = part(3)
    for shift in (-80000, -1e30, 200, 80000, 1e30):
        far = np.full_like(lse, shift)
        got, got_lse = merge_attention((out, far), (out, far), (out, far))
        np.testing.assert_allclose(got, out, rtol=1e-6)
        np.testing.assert_allclose(got_lse, np.float32(shift) + np.log(np.float32(3)), rtol=1e-6)
    assert_bits(merge_attention((out, lse), (out * 2, lse - 1e4)), (out, lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(dtype):
    result, *_ = part(3, "bfloat16")
    other, *_ = part(4, "bfloat16", 1)
    out, lse = merge_attention(result, other, dtype=dtype)
    assert out.dtype == np.dtype(dtype) and lse.dtype == np.float32
    exact, _ = merge_attention(result, other, dtype=np.float32)
    np.testing.assert_array_equal(out, exact.astype(dtype))
    assert merge_attention(result, other)[0].dtype == BF16


def test_torch():
    torch = pytest.importorskip("torch")
    result, *_ = part(3, "float16")
    other, *_ = part(4, "float16", 1)
    expected = merge_attention(result, other, dtype=BF16)
    theirs = [tuple(map(torch.from_numpy, x)) for x in (result, other)]
    out, lse = merge_attention(*theirs, dtype=torch.bfloat16)
    assert out.dtype is torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), expected[0].astype("f4"))
    np.testing.assert_array_equal(lse.numpy(), expected[1])


def test_jax():
    jax = pytest.importorskip("jax")
    result, *_ = part(3, "bfloat16")
    other, *_ = part(4, "bfloat16", 1)
    got = merge_attention(*[tuple(map(jax.numpy.asarray, x)) for x in (result, other)], dtype=jax.numpy.float32)
    assert all(isinstance(x, jax.Array) for x in got)
    assert_bits(map(np.asarray, got), merge_attention(result, other, dtype="float32"))


def test_inputs_are_kept():
    parts = [part(keys, seed=keys)[0] for keys in (1, 2)]
    before = [(out.copy(), lse.copy()) for out, lse in parts]
    merge_attention(*parts)
    for got, expected in zip(parts, before, strict=True):
        assert_bits(got, expected)


def test_memory():
    """A few arrays of the size of out, however many the parts."""
    out = np.ones((1, 256, 4, 64), "f4")
    lse = np.ones((1, 4, 256), "f4")
    parts = [(out, lse)] * 40
    tracemalloc.start()
    try:
        merge_attention(*parts)
        assert tracemalloc.get_traced_memory()[1] < 5 * out.nbytes
    finally:
        tracemalloc.stop()


OUT, LSE = np.ones((2, 5, 4, 8), "f4"), np.ones((2, 4, 5), "f4")


@pytest.mark.parametrize(
    "parts, error, words",
    [
        ([], TypeError, "got no part"),
        ([OUT], TypeError, "part 0 is a numpy.ndarray; allowed: a pair"),
        ([(OUT, LSE), None], TypeError, "part 1 is a NoneType"),
        ([(OUT, LSE, LSE)], TypeError, "part 0 is a tuple"),
        ([(OUT, LSE), (OUT, 1.0)], TypeError, "lse of part 1 is a float; allowed"),
        (
            [(OUT, LSE), (OUT[:, :4], LSE)],
            ValueError,
            r"out of part 1 has shape \(2, 4, 4, 8\); allowed: \(2, 5, 4, 8\)",
        ),
        (
            [(OUT, LSE), (OUT, LSE.swapaxes(1, 2))],
            ValueError,
            r"lse of part 1 has shape \(2, 5, 4\); allowed: \(2, 4, 5\)",
        ),
        ([(OUT, LSE), (OUT[0], LSE[0])], ValueError, "out of part 1 has shape"),
        ([(OUT[0, 0], LSE)], ValueError, "out of part 0 has shape"),
        (
            [(OUT, LSE), (OUT.astype("f2"), LSE)],
            TypeError,
            "out of part 0 has dtype float32, out of part 1 has dtype float16",
        ),
        ([(OUT.astype("i4"), LSE)], TypeError, "out of part 0 has dtype int32; allowed: float16"),
        (
            [(OUT, LSE), (OUT, LSE.astype("f8"))],
            TypeError,
            "lse of part 1 has dtype float64; allowed: float32",
        ),
        ([(OUT.astype("f8"), LSE)], TypeError, "lse of part 0 has dtype float32; allowed: float64"),
    ],
)
def test_wrong_parts(parts, error, words):
    with pytest.raises(error, match=words):
        merge_attention(*parts)


@pytest.mark.parametrize(
    "dtype", ["int32", "float8", "complex64", int, 3, object(), ">f4", "f4,(3", "f4,(", [1], {"a": 1}]
)
def test_wrong_dtype(dtype):
    with pytest.raises(TypeError, match="dtype is .*; allowed: None, float16, bfloat16, float32, float64"):
        merge_attention((OUT, LSE), dtype=dtype)
