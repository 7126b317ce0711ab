"""The forward pass over lengths, shapes and ways to call it."""

import numpy as np
import pytest
import tools
from tools import LENGTH_PAIRS, check, inputs

import cupyflash

every_backend = tools.every_backend


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTH_PAIRS)
def test_lengths(backend, seqlen_q, seqlen_k):
    x = inputs(backend, seqlen_q, seqlen_k, batch=1, seed=1)
    check(backend, *x.qkv)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_short_sequences(backend16, head_dim):
    """SHI-Labs/NATTEN#203: every length up to 33, before and after shared memory was filled with NaN."""
    for seqlen in range(1, 34):
        x = inputs(backend16, seqlen, batch=1, heads_q=1, head_dim=head_dim, seed=seqlen)
        first = cupyflash.attention(*x.qkv)
        assert tools.same_bits(first, check(backend16, *x.qkv)["out"])


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 9), (1001, 503), (17, 8)])
def test_lengths_of_reports(backend16, seqlen_q, seqlen_k):
    """SHI-Labs/NATTEN#203."""
    x = inputs(backend16, seqlen_q, seqlen_k, batch=1, head_dim=128)
    check(backend16, *x.qkv)


@pytest.mark.parametrize("seqlen_k", [37, 100, 129])
def test_nan_beyond_the_last_row(backend, seqlen_k):
    """Dao-AILab/flash-attention#1395: the rows after the last are NaN in memory."""
    x = inputs(backend, 40, seqlen_k, batch=1)
    clean = cupyflash.attention(*x.qkv)
    layout = tools.Layout()
    q, k, v = (tools.laid_out(backend, array, layout) for array in x.qkv)  # NaN before and after
    assert tools.same_bits(check(backend, q, k, v)["out"], clean)


def test_decode(backend):
    """pytorch/pytorch#144858: one query against many keys."""
    for seqlen_k in (1, 8, 100, 1000, 4097):
        x = inputs(backend, 1, seqlen_k, heads_q=8, heads_k=2)
        check(backend, *x.qkv, causal=True)


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch", [(7, 9, 65), (60, 70, 3)])
def test_many_small_heads(backend1, seqlen_q, seqlen_k, batch):
    x = inputs(backend1, seqlen_q, seqlen_k, heads_q=33, head_dim=16, batch=batch)
    check(backend1, *x.qkv, x.dout)


def test_lse_layout(backend):
    """Dao-AILab/flash-attention#876."""
    x = inputs(backend, 5, heads_q=3)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    assert out.shape == (2, 5, 3, 64) and out.dtype == backend.dtype
    assert lse.shape == (2, 3, 5) and lse.dtype == backend.lse_dtype


def test_without_lse(backend):
    x = inputs(backend, 100, 70)
    with_lse, _ = cupyflash.attention(*x.qkv, return_lse=True)
    assert tools.same_bits(cupyflash.attention(*x.qkv), with_lse)


def test_without_batch(backend1):
    x = inputs(backend1, 100, 70, heads_q=4, heads_k=2)
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, causal=True, deterministic=True)
    for b in range(2):
        alone = [array[b] for array in x.qkv]
        out_b, lse_b = cupyflash.attention(*alone, causal=True, return_lse=True)
        assert out_b.shape == (100, 4, 64) and lse_b.shape == (4, 100)
        assert tools.same_bits(out_b, out[b]) and tools.same_bits(lse_b, lse[b])
        gradients_b = cupyflash.attention_backward(
            x.dout[b], *alone, out_b, lse_b, dlse=x.dlse[b], causal=True, deterministic=True
        )
        for one, all_ in zip(gradients_b[:3], gradients[:3]):
            assert tools.same_bits(one, all_[b])


def test_float32_out(backend16):
    """Partial results that will be merged are not rounded to 16 bits."""
    x = inputs(backend16, 65, 130)
    buffer = tools.Guarded(backend16, x.q.shape, np.float32)
    out, lse = cupyflash.attention(*x.qkv, out=buffer.array, return_lse=True)
    buffer.check()
    rounded, rounded_lse = cupyflash.attention(*x.qkv, return_lse=True)
    assert tools.same_bits(out.astype(backend16.dtype), rounded) and tools.same_bits(lse, rounded_lse)
    expected, allowed = tools.expectation(backend16, *x.qkv)["out"]
    tools.assert_close("out", backend16.host(out), expected, allowed)
    assert not np.array_equal(backend16.host(out), backend16.host(rounded))


@pytest.mark.parametrize("layout", tools.LAYOUTS.values(), ids=tools.LAYOUTS)
def test_out_layouts(backend1, layout):
    """flagos-ai/FlagGems#5235: out= in any layout, and nothing around it written."""
    x = inputs(backend1, 70, 65, heads_q=3)
    guarded = tools.Guarded(backend1, x.q.shape, layout=layout)
    cupyflash.attention(*x.qkv, out=guarded.array)
    guarded.check()
    assert tools.same_bits(guarded.array.copy(order="C"), cupyflash.attention(*x.qkv))


def test_scale_forms(backend1):
    """cupy/cupy#8485: every kind of real number means the same number."""
    x = inputs(backend1, 20)
    for value, forms in {1: (1.0, 1, np.float64(1), np.float32(1), np.int64(1)), 0.5: (0.5, np.float16(0.5))}.items():
        expected = cupyflash.attention(*x.qkv, scale=float(value))
        for form in forms:
            assert tools.same_bits(cupyflash.attention(*x.qkv, scale=form), expected)
    with pytest.raises(TypeError):
        cupyflash.attention(*x.qkv, scale=backend1.xp.asarray(1.0))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}], ids=["full", "causal", "window"])
def test_no_rows_or_no_keys(backend1, seqlen_q, seqlen_k, options):
    """Dao-AILab/flash-attention#978, #2470."""
    x = inputs(backend1, seqlen_q, seqlen_k, heads_q=3)
    backend1.poison()
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    assert out.shape == x.q.shape and not backend1.host(out).any()
    assert lse.shape == (2, 3, seqlen_q) and np.isneginf(backend1.host(lse)).all()
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, **options)
    for gradient, array in zip(gradients, x.qkv):
        assert gradient.shape == array.shape and not backend1.host(gradient).any()


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0), (0, 0)])
def test_no_batch_or_no_heads(backend1, batch, heads):
    """pytorch/pytorch#141218."""
    arrays = [backend1.normal((batch, 4, heads, 64)) for _ in range(4)]
    out, lse = cupyflash.attention(*arrays[:3], return_lse=True)
    assert out.shape == (batch, 4, heads, 64) and lse.shape == (batch, heads, 4)
    for gradient in cupyflash.attention_backward(arrays[3], *arrays[:3], out, lse)[:3]:
        assert gradient.shape == (batch, 4, heads, 64)


@pytest.mark.parametrize("shapes", [((0,), (0,), (4,)), ((4,), (4,), (0,)), ((0,), (0,), (0,))])
def test_no_head_dim(backend1, shapes):
    """pytorch/pytorch#141218."""
    arrays = [backend1.normal((2, 5, 2, *shape)) for shape in shapes]
    with pytest.raises(ValueError, match="head_dim"):
        cupyflash.attention(*arrays)


def test_no_key_heads(backend1):
    """pytorch/pytorch#141218."""
    q, k = backend1.normal((2, 5, 4, 8)), backend1.normal((2, 5, 0, 8))
    with pytest.raises(ValueError):
        cupyflash.attention(q, k, k)
