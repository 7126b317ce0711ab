"""The backward pass over lengths, shapes and options."""

import numpy as np
import pytest
import tools
from tools import LENGTH_PAIRS, check, inputs

import cupyflash

every_backend = tools.every_backend


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTH_PAIRS)
def test_lengths(backend, seqlen_q, seqlen_k):
    x = inputs(backend, seqlen_q, seqlen_k, batch=1, seed=2)
    check(backend, *x.qkv, x.dout)


@pytest.mark.parametrize("head_dim, head_dim_v", [(256, 256), (192, 128)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTH_PAIRS)
def test_lengths_of_wide_heads(cuda, seqlen_q, seqlen_k, head_dim, head_dim_v):
    x = inputs(cuda, seqlen_q, seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, batch=1, seed=3)
    check(cuda, *x.qkv, x.dout, x.dlse, causal=seqlen_q % 2 == 1)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 192])
def test_short_sequences(backend16, head_dim):
    """SHI-Labs/NATTEN#203: every length up to 33, after shared memory was filled with NaN."""
    for seqlen in range(1, 34):
        x = inputs(backend16, seqlen, batch=1, heads_q=1, head_dim=head_dim, seed=seqlen)
        check(backend16, *x.qkv, x.dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_q, heads_k", [(4, 4), (4, 2), (6, 1)])
def test_options(backend, heads_q, heads_k, causal, deterministic):
    x = inputs(backend, 150, 200, heads_q, heads_k)
    check(backend, *x.qkv, x.dout, x.dlse, causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 192])
def test_gradient_of_lse_alone(backend, head_dim):
    """Dao-AILab/flash-attention#1137: a loss of the LSE only."""
    x = inputs(backend, 7, heads_q=4, heads_k=2, head_dim=head_dim)
    ones = backend.xp.ones_like(x.dlse)
    results = check(backend, *x.qkv, backend.xp.zeros_like(x.dout), ones, causal=True)
    assert not backend.host(results["dv"]).any()
    assert backend.host(results["dq"]).any() and backend.host(results["dk"]).any()


def test_lse_gradient_is_not_ignored(backend1):
    x = inputs(backend1, 20)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    with_dlse = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse)
    without = cupyflash.attention_backward(x.dout, *x.qkv, out, lse)
    assert not tools.same_bits(with_dlse.dq, without.dq) and not tools.same_bits(with_dlse.dk, without.dk)
    zeros = backend1.xp.zeros_like(x.dlse)
    of_zeros = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=zeros, deterministic=True)
    without = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True)
    assert all(map(tools.same_bits, of_zeros[:3], without[:3]))


@pytest.mark.parametrize("head_dim", [64, 192])
def test_float32_out(backend16, head_dim):
    """Gradients of the exact partial result."""
    x = inputs(backend16, 65, 70, head_dim=head_dim)
    out = backend16.xp.empty(x.q.shape, np.float32)
    out, lse = cupyflash.attention(*x.qkv, out=out, return_lse=True)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse)
    right = tools.expectation(backend16, *x.qkv, x.dout)
    for name, gradient in tools.named(gradients).items():
        tools.assert_close(name, backend16.host(gradient), *right[name])


def test_inputs_are_not_written(backend):
    x = inputs(backend, 33, 40, heads_q=1)
    arrays = [*x.qkv, x.dout, x.dlse]
    before = [array.copy() for array in arrays]
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    kept = out.copy(), lse.copy()
    cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, causal=True)
    assert all(map(tools.same_bits, [*arrays, out, lse], [*before, *kept]))


def test_gradient_of_rows_of_one_head(backend1):
    """One row of dout: dq has that row only, and dk and dv its head only."""
    x = inputs(backend1, 130, heads_q=4, heads_k=2)
    dout = backend1.xp.zeros_like(x.dout)
    dout[1, 70, 3] = x.dout[1, 70, 3]
    results = {name: backend1.host(array) for name, array in check(backend1, *x.qkv, dout).items()}
    assert results["dq"][1, 70, 3].any()
    results["dq"][1, 70, 3] = 0
    assert not results["dq"].any()
    for name in ("dk", "dv"):
        assert results[name][1, :, 1].any(axis=-1).all()
        results[name][1, :, 1] = 0
        assert not results[name].any()
