"""Strides, alignment, head dims and groups of heads."""

import numpy as np
import pytest
import tools
from tools import LAYOUTS, check, inputs, laid_out

import cupyflash

every_backend = tools.every_backend

ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def both_passes(backend, x, **options):
    """Results of a case, deterministic so that they can be compared bit for bit."""
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=True, **options)
    return {"out": out, "lse": lse, **tools.named(gradients)}


@ALL_LAYOUTS
def test_all_arrays_in_a_layout(backend1, layout):
    """pytorch/pytorch#183484, Dao-AILab/flash-attention#2777, cupy/cupy#10172.

    The same layout for everything; memory next to each row is NaN.
    """
    x = inputs(backend1, 70, 65, heads_q=4, heads_k=2)
    q, k, v, dout = (laid_out(backend1, array, layout) for array in (*x.qkv, x.dout))
    check(backend1, q, k, v, dout, x.dlse, causal=True)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", [LAYOUTS["heads first"], LAYOUTS["last axis slow"]], ids=["heads", "last axis"])
def test_one_array_in_another_layout(backend1, layout, head_dim, name):
    """flagos-ai/FlagGems#5896."""
    x = inputs(backend1, 65, 40, heads_q=2, head_dim=head_dim)
    arrays = {"q": x.q, "k": x.k, "v": x.v}
    arrays[name] = laid_out(backend1, arrays[name], layout)
    check(backend1, *arrays.values(), x.dout)


@ALL_LAYOUTS
def test_results_of_a_backend_in_a_layout(backend1, layout):
    """Every result in any layout, written in full, and nothing around it: the backends themselves."""
    if backend1.name == "cuda" and not tools.rows_are_contiguous(laid_out(backend1, inputs(backend1, 2).q, layout)):
        pytest.skip("the kernels write whole rows; attention.py copies what has none")
    x = inputs(backend1, 70, 65, heads_q=4, heads_k=2)
    problem = tools.problem(backend1, *x.qkv, causal=True)
    lse_layout = tools.Layout(tuple(axis for axis in layout.order if axis != 3), layout.offset, layout.padding)
    guards = {
        "out": tools.Guarded(backend1, x.dout.shape, layout=layout),
        "lse": tools.Guarded(backend1, x.dlse.shape, backend1.lse_dtype, lse_layout),
        "dq": tools.Guarded(backend1, x.q.shape, layout=layout),
        "dk": tools.Guarded(backend1, x.k.shape, layout=layout),
        "dv": tools.Guarded(backend1, x.v.shape, layout=layout),
    }
    out, lse, *gradients = (guard.array for guard in guards.values())
    dlse = tools.Guarded(backend1, x.dlse.shape, backend1.lse_dtype, lse_layout).array
    dlse[...] = x.dlse
    backend1.module.forward(problem, *x.qkv, out, lse, None, None)
    backend1.module.backward(problem, x.dout, *x.qkv, out, lse, dlse, *gradients, None, None, None, True)
    right = tools.expectation(backend1, *x.qkv, x.dout, x.dlse, causal=True)
    for name, guard in guards.items():
        guard.check()
        tools.assert_close(name, backend1.host(guard.array), *right[name])


def test_odd_offsets_of_each_array(backend):
    """pytorch/pytorch#183484: rows of 64 elements that start 1, 2, 3 and 4 elements after an aligned address."""
    x = inputs(backend, 64, heads_q=4, batch=6)
    expected = both_passes(backend, x)
    arrays = [laid_out(backend, a, tools.Layout(offset=i)) for i, a in enumerate((*x.qkv, x.dout), start=1)]
    results = both_passes(backend, tools.Inputs(*arrays, x.dlse))
    for name, result in results.items():
        tools.assert_close(name, backend.host(result), backend.host(expected[name]), 8 * backend.eps)


@pytest.mark.parametrize("float32_out", [False, True])
def test_one_offset_after_another(backend16, float32_out):
    """pytorch/pytorch#183484: each array alone off by 2, 4 and 8 bytes, in calls that differ in nothing else."""
    x = inputs(backend16, 64, heads_q=1, batch=1)
    dtype = np.float32 if float32_out else backend16.dtype
    names = ("dout", "q", "k", "v", "out")
    arrays = dict(zip(names, (x.dout, *x.qkv, backend16.xp.empty(x.q.shape, dtype))))
    right = tools.expectation(backend16, *x.qkv, x.dout)

    def moved(array, offset):
        return laid_out(backend16, array, tools.Layout(offset=offset // array.itemsize))

    for offset in (4, 8):
        for name in (*names, *reversed(names)):
            case = arrays | {name: moved(arrays[name], offset)}
            dout, q, k, v, out = case.values()
            _, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
            gradients = cupyflash.attention_backward(dout, q, k, v, out, lse)
            for key, result in {"out": out, "lse": lse, **tools.named(gradients)}.items():
                tools.assert_close(key, backend16.host(result), *right[key])


def test_broadcast_dout(backend1):
    """Dao-AILab/flash-attention#355: dout with every stride 0, transposed, and a slice."""
    x = inputs(backend1, 5, batch=1, heads_q=2, head_dim=8)
    ones = backend1.xp.ones_like(x.dout)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    broadcast = backend1.xp.broadcast_to(ones[:1, :1, :1, :1], ones.shape)
    expected = cupyflash.attention_backward(ones, *x.qkv, out, lse, deterministic=True)
    got = cupyflash.attention_backward(broadcast, *x.qkv, out, lse, deterministic=True)
    assert all(map(tools.same_bits, got[:3], expected[:3]))
    expected = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True)
    joined = backend1.xp.concatenate([ones, x.dout, ones], axis=3)
    for dout in (laid_out(backend1, x.dout, LAYOUTS["last axis slow"]), joined[..., 8:16]):
        got = cupyflash.attention_backward(dout, *x.qkv, out, lse, deterministic=True)
        assert all(map(tools.same_bits, got[:3], expected[:3]))


def test_broadcast_inputs(backend1):
    """One key and value for all positions and heads."""
    x = inputs(backend1, 20, heads_q=4, heads_k=4)
    k, v = (backend1.xp.broadcast_to(array[:, :1, :1], array.shape) for array in (x.k, x.v))
    check(backend1, x.q, k, v, x.dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slices_of_one_projection(backend1, head_dim):
    """flagos-ai/FlagGems#5896: q, k and v are thirds of the last axis of one array."""
    joined = backend1.normal((2, 65, 3 * 2 * head_dim))
    q, k, v = (part.reshape(2, 65, 2, head_dim) for part in backend1.xp.split(joined, 3, axis=2))
    dout = backend1.normal(q.shape, seed=1)
    check(backend1, q, k, v, dout, causal=True)


@pytest.mark.parametrize("shape", [(1, 33, 2, 64), (2, 33, 1, 64), (2, 1, 2, 64), (1, 1, 1, 64)])
@pytest.mark.parametrize("stride", [0, 1, 3, 10**12])
def test_strides_of_axes_of_length_one(backend1, shape, stride):
    """pytorch/pytorch#99803: they mean nothing."""

    def strange(array):
        strides = [stride * array.itemsize if n == 1 else s for n, s in zip(array.shape, array.strides)]
        return backend1.xp.lib.stride_tricks.as_strided(array, array.shape, strides)

    arrays = [backend1.normal(shape, seed) for seed in range(4)]
    dlse = backend1.xp.ones((shape[0], shape[2], shape[1]), backend1.lse_dtype)
    expected = both_passes(backend1, tools.Inputs(*arrays, dlse))
    results = both_passes(backend1, tools.Inputs(*map(strange, arrays), strange(dlse)))
    assert all(tools.same_bits(results[name], expected[name]) for name in expected)


@pytest.mark.parametrize("first", range(1, 257, 16))
def test_every_head_dim(backend1, first):
    """Each size from 1 to 256, and NaN in memory next to the rows."""
    for head_dim in range(first, first + 16):
        lengths = tools.LENGTH_PAIRS[head_dim % len(tools.LENGTH_PAIRS)]
        seqlen_q, seqlen_k = (min(n, 203) for n in lengths)
        x = inputs(backend1, seqlen_q, seqlen_k, batch=1, head_dim=head_dim, seed=head_dim)
        q, k, v = (laid_out(backend1, array, tools.Layout(padding=head_dim % 3)) for array in x.qkv)
        check(backend1, q, k, v, causal=head_dim % 2 == 0)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 24, 40, 59, 72, 80, 88, 96, 112, 120, 128, 160, 192, 224, 256])
def test_head_dims_backward(backend1, head_dim):
    """Dao-AILab/flash-attention#1347: padding changes neither the scale nor the sums."""
    x = inputs(backend1, 70, 65, batch=1, head_dim=head_dim, seed=head_dim)
    q, k, v, dout = (laid_out(backend1, array, tools.Layout(padding=3)) for array in (*x.qkv, x.dout))
    check(backend1, q, k, v, dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims_in_every_dtype(backend, head_dim):
    """Dao-AILab/flash-attention#1347."""
    x = inputs(backend, 130, 150, batch=1, head_dim=head_dim)
    check(backend, *x.qkv, x.dout, causal=True)


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 128), (192, 128), (128, 64), (40, 72), (1, 256), (256, 1)])
def test_value_head_dim(backend1, head_dim, head_dim_v):
    x = inputs(backend1, 70, 65, batch=1, head_dim=head_dim, head_dim_v=head_dim_v)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=True)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 256])
def test_last_channel(backend1, head_dim):
    """triton-lang/triton#621: all of the signal in the last channel, as much as in the first."""
    x = inputs(backend1, 40, 50, batch=1, head_dim=head_dim)
    masked = []
    for array in (*x.qkv, x.dout):
        array = array.copy()
        array[..., :-1] = 0
        masked.append(array)
    results, right = check(backend1, *masked[:3], masked[3]), tools.expectation(backend1, *masked)
    assert backend1.host(results["dq"])[..., -1].any()
    swapped = [backend1.xp.ascontiguousarray(array[..., ::-1]) for array in masked]
    mirrored = check(backend1, *swapped[:3], swapped[3])
    for name in ("out", "dq", "dk", "dv"):
        a, b = backend1.host(results[name])[..., ::-1], backend1.host(mirrored[name])
        tools.assert_close(name, a, b, 2 * right[name][1])


@pytest.mark.parametrize(
    "heads_q, heads_k", [(5, 1), (6, 3), (12, 2), (21, 3), (24, 4), (28, 4), (64, 4), (64, 1), (71, 1)]
)
def test_groups_of_heads(backend1, heads_q, heads_k):
    """flashinfer-ai/flashinfer#996: query head i uses key head i // (heads_q // heads_k)."""
    x = inputs(backend1, 33, 40, heads_q=heads_q, heads_k=heads_k, batch=1)
    v = x.v.copy()
    for head in range(heads_k):
        v[:, :, head] = head
    out = backend1.host(cupyflash.attention(x.q, x.k, v))
    expected = np.arange(heads_q) // (heads_q // heads_k)
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), rtol=8 * backend1.eps)
    check(backend1, *x.qkv, x.dout)
    check(backend1, x.q[:, -1:], x.k, x.v, causal=True)  # decode


@pytest.mark.parametrize("heads_q, heads_k", [(5, 2), (2, 4), (7, 3)])
def test_heads_that_do_not_divide(backend1, heads_q, heads_k):
    """flashinfer-ai/flashinfer#996."""
    x = inputs(backend1, 5, heads_q=heads_q, heads_k=heads_k)
    with pytest.raises(ValueError, match="heads"):
        cupyflash.attention(*x.qkv)
