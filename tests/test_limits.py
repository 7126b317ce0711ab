"""Offsets beyond 32 bits and grids beyond their limits."""

import numpy as np
import pytest
import tools
from tools import check, inputs

import cupyflash


def needs(backend, gigabytes):
    free, _ = backend.xp.cuda.runtime.memGetInfo()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free / 2**30:.0f} GiB are free")


def one_key(backend, batch, heads, head_dim):
    """Inputs with one query and one key: out = v, dv = dout, dq = dk = 0 but for rounding."""
    return [backend.normal((batch, 1, heads, head_dim), seed) for seed in range(4)]


def check_one_key(backend, q, k, v, dout, **options):
    xp = backend.xp
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert bool((out == v).all())
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    assert bool((gradients.dv == dout).all())
    for gradient in gradients[:2]:
        assert float(xp.abs(gradient.astype("f4")).max()) < 1e-3


@pytest.mark.parametrize(
    "batch, heads, seqlen, head_dim", [(300, 3, 1, 16), (70, 1, 10, 16), (1, 500, 10, 16), (1000, 1, 1, 8)]
)
def test_many_batches_or_heads(backend1, batch, heads, seqlen, head_dim):
    x = inputs(backend1, seqlen, heads_q=heads, batch=batch, head_dim=head_dim)
    check(backend1, *x.qkv, x.dout)


@pytest.mark.parametrize("batch, seqlen, heads", [(65536, 1, 1), (65537, 10, 1), (1, 10, 65536), (3, 2, 70001)])
def test_grids(cuda, batch, seqlen, heads):
    """pytorch/pytorch#142228."""
    x = inputs(cuda, seqlen, heads_q=heads, batch=batch, head_dim=16)
    check(cuda, *x.qkv, x.dout)


def test_decode_of_many_requests(cuda):
    """pytorch/pytorch#142228, flashinfer-ai/flashinfer#3125: v is the number of the request."""
    for batch in (65536, 70000):
        q, k, _, _ = one_key(cuda, batch, 1, 64)
        bits = cuda.xp.arange(batch, dtype="u4")
        v = cuda.xp.stack([bits & 255, bits >> 8], axis=-1).astype("f4").astype(cuda.dtype)
        v = cuda.xp.tile(v, 32).reshape(batch, 1, 1, 64)
        assert bool((cupyflash.attention(q, k, v, causal=True) == v).all())


@pytest.mark.large
@pytest.mark.parametrize("head_dim", [128, 16])
def test_scratch_of_many_short_sequences(cuda, head_dim):
    """Dao-AILab/flash-attention#2260: scratch memory rounded up to tiles passes 2^31 elements."""
    needs(cuda, 30)
    check_one_key(cuda, *one_key(cuda, 8300 * (128 // head_dim), 16, head_dim))


@pytest.mark.large
def test_sequence_major_keys(cuda):
    """pytorch/pytorch#190857: position times stride passes 2^31 elements."""
    needs(cuda, 40)
    xp, seqlen, batch = cuda.xp, 24000, 700
    copies = seqlen * batch // 1009 + 1  # 1009 is prime: every position and batch starts somewhere else in the rows
    k, v = (
        xp.tile(cuda.normal((1009, 128)).view("u2"), (copies, 1))[: seqlen * batch]
        .view(cuda.dtype)
        .reshape(seqlen, batch, 1, 128)
        .transpose(1, 0, 2, 3)
        for _ in range(2)
    )
    x = inputs(cuda, 4, 1, heads_q=1, batch=batch, head_dim=128)
    out, lse = cupyflash.attention(x.q, k, v, return_lse=True)
    gradients = cupyflash.attention_backward(x.dout, x.q, k, v, out, lse)
    for b in (0, 1, 350, 698, 699):
        one = slice(b, b + 1)
        right = tools.expectation(cuda, x.q[one], k[one], v[one], x.dout[one])
        for name, result in {"out": out, "lse": lse, **tools.named(gradients)}.items():
            tools.assert_close(name, cuda.host(result[one]), *right[name])


@pytest.mark.large
def test_long_strides_of_results(cuda):
    """Every array spans more than 2^32 bytes, the results too."""
    needs(cuda, 50)
    xp, seqlen, far = cuda.xp, 300, 1 << 23
    x = inputs(cuda, seqlen, heads_q=1, batch=1)
    memory = xp.empty((seqlen, far), cuda.dtype)  # one row of it for each position: 5 GB
    at = iter(range(0, 1 << 20, 64))

    def spread(array=None):
        view = memory[None, :, None, (start := next(at)) : start + 64]
        if array is not None:
            view[...] = array
        return view

    q, k, v, dout = map(spread, (*x.qkv, x.dout))
    out, lse = spread(), xp.empty((1, 1, seqlen), "f4")
    gradients = [spread() for _ in range(3)]
    problem = tools.problem(cuda, q, k, v, causal=True)
    cuda.module.forward(problem, q, k, v, out, lse, None, None)
    cuda.module.backward(problem, dout, q, k, v, out, lse, None, *gradients, None, None, None, False)
    right = tools.expectation(cuda, *x.qkv, x.dout, causal=True)
    for name, result in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)):
        tools.assert_close(name, cuda.host(result), *right[name])


@pytest.mark.large
def test_more_than_2_to_the_31_elements(cuda):
    """Batch times stride passes 2^31 elements in every array."""
    needs(cuda, 70)
    batch, seqlen, heads, head_dim = 9, 16400, 128, 128
    xp = cuda.xp
    rows = cuda.normal((batch, 1, heads, head_dim))
    v = xp.empty((batch, seqlen, heads, head_dim), cuda.dtype)
    v[...] = rows  # all values of a head are equal: so is out
    assert v.size > 2**31
    out = cupyflash.attention(v, v, v, window=(0, 0))
    assert bool((out[-1] == v[-1]).all()) and bool((out[0] == v[0]).all())
    out, lse = cupyflash.attention(v, v, v, window=(70, 0), out=out, return_lse=True)
    assert float(xp.abs(out[-1, -300:].astype("f4") - v[-1, -300:].astype("f4")).max()) < 0.05
    dout = xp.ones_like(v)
    dv = cupyflash.attention_backward(dout, v, v, v, out, lse, window=(70, 0)).dv
    assert float(xp.abs(dv[-1, 100:-100].astype("f4") - 1).max()) < 0.02  # each key is seen with 1/71 by 71 rows


@pytest.mark.large
def test_long_sequence(cuda):
    """2^20 keys and a length that fills no tile, by counting."""
    seqlen = (1 << 20) + 3
    xp = cuda.xp
    q, k = xp.zeros((1, seqlen, 1, 16), cuda.dtype), xp.zeros((1, seqlen, 1, 16), cuda.dtype)
    v = xp.ones((1, seqlen, 1, 16), cuda.dtype)
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert float(xp.abs(out.astype("f4") - 1).max()) < 0.01
    expected = xp.log(xp.arange(1, seqlen + 1, dtype="f8"))
    assert float(xp.abs(lse[0, 0] - expected).max()) < 1e-4


def test_memory_grows_with_the_length(backend1):
    """No matrix of logits: four times the length is about four times the memory."""
    if backend1.name == "numpy":
        import tracemalloc

        peaks = []
        for seqlen in (800, 3200):
            x = inputs(backend1, seqlen, batch=1, heads_q=1, head_dim=16)
            tracemalloc.start()
            out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
            cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[1] < 2.5 * peaks[0] and peaks[1] < 3200 * 3200
        return
    pool = backend1.xp.get_default_memory_pool()
    seqlen, rows, row = 65536, 65536 * 2, 64
    x = inputs(backend1, seqlen, batch=1, heads_q=2, head_dim=row)
    cupyflash.attention(x.q[:, :64], x.k, x.v)  # what a first call keeps
    pool.free_all_blocks()
    before = pool.total_bytes()
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    assert pool.total_bytes() - before <= rows * (2 * row + 4) + 4096, "forward: more than out and lse"
    before = pool.total_bytes()
    cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True)
    gradients, dq_sum, delta = 3 * 2 * row * rows, 4 * row * rows, 4 * rows
    lse2 = 4 * rows if backend1.path == "sm90" else 0  # beside delta, where the copy engine takes both at once
    allowed = gradients + dq_sum + delta + lse2 + 4096
    assert pool.total_bytes() - before <= allowed, "backward: more than results, dq sum and statistics"
    assert np.isfinite(backend1.host(out)).all()
