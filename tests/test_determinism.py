"""The same call gives the same bits."""

import pytest
import tools
from tools import inputs

import cupyflash

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
}


def runs(backend):
    return 30 if backend.name == "cuda" else 3


def case(backend, heads_q, heads_k, head_dim=128):
    """The size of Dao-AILab/flash-attention#2244 on a GPU."""
    seqlen = 1024 if backend.name == "cuda" else 300
    return inputs(backend, seqlen, heads_q=heads_q, heads_k=heads_k, head_dim=head_dim)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads_q, heads_k, head_dim", [(4, 4, 128), (8, 2, 128), (12, 6, 256)])
def test_repeated(backend1, heads_q, heads_k, head_dim, options):
    """Dao-AILab/flash-attention#2244: forward, and backward when it is asked for."""
    x = case(backend1, heads_q, heads_k, head_dim)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=True, **options)
    for _ in range(runs(backend1)):
        again, lse_again = cupyflash.attention(*x.qkv, return_lse=True, **options)
        assert tools.same_bits(again, out) and tools.same_bits(lse_again, lse)
        repeated = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=True, **options)
        assert all(map(tools.same_bits, repeated[:3], gradients[:3]))


def test_not_deterministic_is_within_rounding(backend1):
    """Dao-AILab/flash-attention#2244: without the option, gradients differ by rounding only."""
    x = case(backend1, 8, 2)
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    right = tools.expectation(backend1, *x.qkv, x.dout, causal=True)
    for deterministic in (True, False, False, False):
        gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True, deterministic=deterministic)
        for name, gradient in tools.named(gradients).items():
            tools.assert_close(name, backend1.host(gradient), *right[name])


def test_other_requests_of_a_batch(backend1):
    """Dao-AILab/flash-attention#1570: a row of a batch is the same bits with other rows beside it."""
    x = inputs(backend1, 130, 200, heads_q=8, heads_k=2, batch=4)
    out = cupyflash.attention(*x.qkv, causal=True)
    x.q[0], x.k[0], x.v[0] = 3, -2, 1
    assert tools.same_bits(cupyflash.attention(*x.qkv, causal=True)[1:], out[1:])


@pytest.mark.parametrize("deterministic", [True, False])
def test_many_batches(cuda, deterministic):
    """Dao-AILab/flash-attention#359: a race would show in some of 50 runs."""
    x = inputs(cuda, 2048, 128, heads_q=1, head_dim=128, batch=300)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    first = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=deterministic)
    xp = cuda.xp
    for _ in range(50):
        again = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=deterministic)
        for a, b in zip(first[:3], again[:3]):
            if deterministic:
                assert bool((a.view("u2") == b.view("u2")).all())
            else:
                difference = float(xp.abs(a.astype("f4") - b.astype("f4")).max())
                assert difference <= 8 * cuda.eps * float(xp.abs(a.astype("f4")).max())
    right = tools.expectation(cuda, x.q[:4], x.k[:4], x.v[:4], x.dout[:4])
    for name, gradient in tools.named(first).items():
        tools.assert_close(name, cuda.host(gradient[:4]), *right[name])


def test_shared_memory_of_others(cuda):
    """What an earlier kernel left in shared memory changes no bit."""
    for seqlen, head_dim in ((1, 64), (40, 64), (130, 128), (37, 256)):
        x = inputs(cuda, seqlen, head_dim=head_dim)
        results = []
        for _ in range(2):
            out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
            gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True, deterministic=True)
            results.append((out, lse, *gradients[:3]))
            cuda.poison()
        assert all(map(tools.same_bits, *results))
