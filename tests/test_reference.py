"""The reference against finite differences, PyTorch and values known by hand."""

import math

import numpy as np
import pytest
import tools

from cupyflash import reference

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window": {"window": (1, 2)},
    "window_causal": {"window": (2, None), "causal": True},
    "window_upper_left": {"window": (2, 1), "causal": "upper_left"},
    "right_only": {"window": (None, 1), "scale": -0.7},
    "alibi": {"alibi_slopes": np.array([0.5, 0, -0.3, 1.1])},
    "alibi_upper_left": {"alibi_slopes": np.arange(8.0).reshape(2, 4) / 4 - 1, "causal": "upper_left"},
    "alibi_window": {"alibi_slopes": np.array([0.5, 0, -0.3, 1.1]), "window": (2, 1)},
}
SOFTCAPS = {
    "softcap": {"softcap": 1.5},
    "softcap_causal": {"softcap": 0.3, "causal": True, "scale": -0.7},
    "softcap_alibi": {"softcap": 2, "window": (2, 2), "alibi_slopes": np.arange(8.0).reshape(2, 4) / 4 - 1},
}

SINKS = {
    "sink": {"sink": np.array([0.5, -2.0, 3.0, 0.0])},
    "sink_causal": {"sink": np.array([0.5, -2.0, 3.0, 0.0]), "causal": True, "scale": -0.7},
    "sink_softcap_alibi": SOFTCAPS["softcap_alibi"] | {"sink": np.array([0.5, -2.0, 3.0, 0.0]), "window": (1, 0)},
}


SOME = np.random.default_rng(9)
BIASES = {
    "bias": {"bias": SOME.standard_normal((2, 4, 1, 1))},
    "bias_of_heads_softcap": SOFTCAPS["softcap_causal"] | {"bias": SOME.standard_normal((4, 1, 1))},
    "bias_alibi_sink": SINKS["sink_softcap_alibi"] | {"bias": np.asarray(0.7)},
    "bias_dropout": {"bias": SOME.standard_normal((2, 1, 1, 1)), "dropout": 0.3, "seed": 5, "causal": True},
    "mask": {"mask": np.array([True, True, False, True])[:, None, None]},
    "mask_sink": SINKS["sink_causal"]
    | {"mask": np.array([[True], [False]])[:, None, None], "bias": np.ones((4, 1, 1))},
}


def arrays(seqlen_q, seqlen_k, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2, batch=(2,), seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*batch, seqlen_q, heads_q, head_dim)) + 0.5
    k = rng.standard_normal((*batch, seqlen_k, heads_k, head_dim)) + 0.5
    v = rng.standard_normal((*batch, seqlen_k, heads_k, head_dim_v)) + 0.5
    dout = rng.standard_normal((*batch, seqlen_q, heads_q, head_dim_v))
    dlse = rng.standard_normal((*batch, heads_q, seqlen_q))
    return q, k, v, dout, dlse


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 4), (2, 5), (5, 2), (1, 1)])
@pytest.mark.parametrize(
    "options", (OPTIONS | SOFTCAPS | SINKS | BIASES).values(), ids=OPTIONS | SOFTCAPS | SINKS | BIASES
)
def test_gradients_are_finite_differences(options, seqlen_q, seqlen_k):
    q, k, v, dout, dlse = arrays(seqlen_q, seqlen_k)

    def loss(*qkv):
        out, lse = reference.attention(*qkv, return_lse=True, **options)
        return (out * dout).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()

    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    gradients = tools.named(reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))
    given = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("bias", "sink") if name in options}
    assert [*gradients] == [f"d{name}" for name in given]
    for (name, gradient), x in zip(gradients.items(), given.values()):
        differences = np.empty_like(x)
        for at in np.ndindex(x.shape):
            x[at] += 1e-6
            above = loss(q, k, v)
            x[at] -= 2e-6
            below = loss(q, k, v)
            x[at] += 1e-6
            differences[at] = (above - below) / 2e-6
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(33, 33), (17, 40), (40, 17)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_pytorch(options, seqlen_q, seqlen_k):
    torch = pytest.importorskip("torch")
    q, k, v, dout, _ = arrays(seqlen_q, seqlen_k, head_dim=16, head_dim_v=8)
    mask = reference.visible(np, seqlen_q, seqlen_k, options.get("causal", False), options.get("window"))
    some_key = mask.any(axis=1)  # PyTorch has another rule for the other rows
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    diagonal = i if options.get("causal") == "upper_left" else i + seqlen_k - seqlen_q
    slopes = options.get("alibi_slopes", np.zeros(4))[..., None, None]
    bias = np.where(mask | ~some_key[:, None], -slopes * abs(diagonal - j), -np.inf)
    dout[:, ~some_key] = 0
    tq, tk, tv = (torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch_out = torch.nn.functional.scaled_dot_product_attention(
        tq,
        tk.repeat_interleave(2, dim=1),
        tv.repeat_interleave(2, dim=1),
        attn_mask=torch.from_numpy(bias).expand(2, 4, seqlen_q, seqlen_k),
        scale=options.get("scale"),
    )
    torch_out.backward(torch.from_numpy(dout).transpose(1, 2))

    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, **options)
    np.testing.assert_allclose(
        out[:, some_key], torch_out.detach().transpose(1, 2).numpy()[:, some_key], rtol=1e-12, atol=1e-13
    )
    assert not out[:, ~some_key].any() and np.isneginf(lse[:, :, ~some_key]).all()
    for gradient, x in zip(gradients, (tq, tk, tv)):
        np.testing.assert_allclose(gradient, x.grad.transpose(1, 2).numpy(), rtol=1e-11, atol=1e-13)


def test_known_values():
    q, k = np.zeros((1, 5, 1, 4)), np.zeros((1, 5, 1, 4))
    v = np.arange(5.0).reshape(1, 5, 1, 1)
    out, lse = reference.attention(q, k, v, window=(2, 0), return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 1, 2, 3])
    np.testing.assert_allclose(lse.ravel(), np.log([1, 2, 3, 3, 3]))
    out, lse = reference.attention(q, k[:, :2], v[:, :2], causal=True, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0, 0, 0, 0, 0.5])
    np.testing.assert_allclose(lse.ravel(), [-math.inf] * 3 + [0, math.log(2)])
    out = reference.attention(q, k[:, :2], v[:, :2], causal="upper_left")
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 0.5, 0.5, 0.5])


def test_known_scores():
    """Scale, then softcap, then ALiBi, then masks."""
    q, k, v = np.ones((1, 1, 1)), np.array([5.0, 0]).reshape(2, 1, 1), np.eye(2)[:, None]
    for slope, p, lse in ((0, 0.991999, 4.828171), (1, 0.978546, 3.820138 - math.log(0.978546))):
        slopes = np.array([slope])
        got, got_lse = reference.attention(q, k, v, scale=2, softcap=5, alibi_slopes=slopes, return_lse=True)
        np.testing.assert_allclose(got.ravel(), [p, 1 - p], atol=1e-6)
        np.testing.assert_allclose(got_lse.ravel(), lse, atol=1e-6)
    q = np.zeros((2, 1, 1))
    _, lse = reference.attention(q, k, v, causal=True, softcap=1, alibi_slopes=np.array([math.log(2)]), return_lse=True)
    np.testing.assert_allclose(lse.ravel(), [0, math.log(1.5)], atol=1e-15)


def test_known_sinks():
    """One more key, of the value 0; lse of a row without keys."""
    q, k, v = np.zeros((5, 1, 1)), np.zeros((2, 1, 1)), np.array([2.0, 4.0]).reshape(2, 1, 1)
    sink = np.log([3.0])
    out, lse = reference.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0, 0, 0, 2 / 4, 6 / 5])
    np.testing.assert_allclose(lse.ravel(), np.log([3, 3, 3, 4, 5]))
    gradients = reference.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True, sink=sink)
    np.testing.assert_allclose(gradients.dsink, [-3 / 4 * 2 / 4 - 3 / 5 * 6 / 5])
    np.testing.assert_allclose(gradients.dv.ravel(), [1 / 4 + 1 / 5, 1 / 5])
    ones = np.ones_like(lse)
    gradients = reference.attention_backward(0 * out, q, k, v, out, lse, dlse=ones, causal=True, sink=sink)
    np.testing.assert_allclose(gradients.dsink, [3 + 3 / 4 + 3 / 5])


@pytest.mark.parametrize(
    "value, first_out, first_lse, dsink", [(-math.inf, 3, math.log(2), 0), (math.inf, 0, math.inf, 3)]
)
def test_infinite_sinks(value, first_out, first_lse, dsink):
    q, k, v = np.zeros((3, 2, 1)), np.zeros((2, 2, 1)), np.array([2.0, 2.0, 4.0, 4.0]).reshape(2, 2, 1)
    sink = np.array([value, 0])
    out, lse = reference.attention(q, k, v, sink=sink, return_lse=True)
    np.testing.assert_allclose(out[..., 0], [[first_out, 2]] * 3)
    np.testing.assert_allclose(lse, [[first_lse] * 3, [math.log(3)] * 3])
    gradients = reference.attention_backward(np.ones_like(out), q, k, v, out, lse, dlse=np.ones_like(lse), sink=sink)
    np.testing.assert_allclose(gradients.dsink, [dsink, 3 * (1 - 2) / 3])
    assert all(np.isfinite(gradient).all() for gradient in tools.named(gradients).values())


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 3, 1), (2, 1, 1, 5), (4, 1, 5), (3, 1), (1, 5), (5,), (1,), ()])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 1.5, "sink": np.array([0.5, -2.0, 3.0, 0.0])}])
def test_gradient_of_bias(options, shape):
    """Of each shape that broadcasts, by finite differences; and that of the copy in full, summed."""
    q, k, v, dout, dlse = arrays(3, 5)
    bias = np.asarray(np.random.default_rng(1).standard_normal(shape))

    def loss(bias):
        out, lse = reference.attention(q, k, v, return_lse=True, bias=bias, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    def gradient(bias):
        out, lse = reference.attention(q, k, v, return_lse=True, bias=bias, **options)
        return reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, bias=bias, **options).dbias

    got = gradient(bias)
    assert got.shape == shape
    for at in np.ndindex(shape):
        step = np.zeros(shape)
        step[at] = 1e-6
        np.testing.assert_allclose(got[at], (loss(bias + step) - loss(bias - step)) / 2e-6, rtol=1e-6, atol=1e-7)
    full = gradient(np.broadcast_to(bias, (2, 4, 3, 5)))
    assert full.shape == (2, 4, 3, 5)
    axes = tuple(i for i in range(4) if (1, 1, 1, 1, *shape)[len(shape) + i] == 1)
    np.testing.assert_allclose(full.sum(axis=axes).ravel(), got.ravel(), rtol=1e-12, atol=1e-14)


def test_known_biases():
    """Not scaled, after softcap; -inf and a mask hide a key, and a row without keys is empty."""
    q, k, v = np.ones((1, 1, 1)), np.array([5.0, 0]).reshape(2, 1, 1), np.eye(2)[:, None]
    bias = np.array([-1.0, 0])
    got, lse = reference.attention(q, k, v, scale=2, softcap=5, bias=bias, return_lse=True)
    np.testing.assert_allclose(got.ravel(), [0.978546, 1 - 0.978546], atol=1e-6)
    np.testing.assert_allclose(lse.ravel(), 3.820138 - math.log(0.978546), atol=1e-6)
    mask = np.array([[True, False], [False, False], [False, True]])
    for options in ({"mask": mask}, {"bias": np.where(mask, 0, -math.inf)}):
        out, lse = reference.attention(np.ones((3, 1, 1)), k, v, scale=1, return_lse=True, **options)
        np.testing.assert_array_equal(out[:, 0], [[1, 0], [0, 0], [0, 1]])
        np.testing.assert_array_equal(lse.ravel(), [5, -math.inf, 0])
        gradients = reference.attention_backward(
            np.ones((3, 1, 2)), np.ones((3, 1, 1)), k, v, out, lse, scale=1, dlse=np.array([[1.0, 2, 3]]), **options
        )
        np.testing.assert_array_equal(gradients.dv[:, 0], [[1, 1], [1, 1]])
        np.testing.assert_array_equal(gradients.dq.ravel(), [5, 0, 0])
        if "bias" in options:
            np.testing.assert_array_equal(gradients.dbias, [[1, 0], [0, 0], [0, 3]])


def test_softcap_of_huge_logits():
    q, k = np.full((1, 1, 1, 1), 1e200), np.array([1e200, -1e200, 1e150]).reshape(1, 3, 1, 1)
    v = np.arange(3.0).reshape(1, 3, 1, 1)
    with np.errstate(over="ignore"):
        out, lse = reference.attention(q, k, v, softcap=3, return_lse=True)
        gradients = reference.attention_backward(np.ones_like(out), q, k, v, out, lse, softcap=3)
    np.testing.assert_allclose(lse.item(), math.log(2 * math.exp(3) + math.exp(-3)))
    assert not gradients.dq.any() and not gradients.dk.any() and np.isfinite(gradients.dv).all()


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8, np.int64, int])
def test_window_sides_of_any_integer(kind):
    expected = reference.visible(np, 9, 9, window=(2, 3))
    assert expected.sum() == 9 * 6 - (2 + 1) - (3 + 2 + 1)
    np.testing.assert_array_equal(reference.visible(np, 9, 9, window=(kind(2), kind(3))), expected)
    assert reference.visible(np, 9, 9, window=(kind(127), kind(127))).all()
    assert reference.visible(np, 9, 9, window=(10**5000, 10**5000)).all()


@pytest.mark.parametrize(
    "options, error",
    [
        ({"causal": "upper-left"}, ValueError),
        ({"causal": ""}, ValueError),
        ({"causal": 1}, TypeError),
        ({"window": (-1, 0)}, ValueError),
        ({"window": (1.0, 0)}, TypeError),
        ({"window": 3}, TypeError),
        ({"softcap": 0}, ValueError),
        ({"softcap": True}, TypeError),
    ],
)
def test_unknown_options(options, error):
    q, k, v, dout, _ = arrays(3, 4)
    out, lse = reference.attention(q, k, v, return_lse=True)
    for function, args in ((reference.attention, (q, k, v)), (reference.attention_backward, (dout, q, k, v, out, lse))):
        with pytest.raises(error, match="allowed"):
            function(*args, **options)


def test_query_heads_of_a_key_head():
    q, k, v, _, _ = arrays(3, 4, heads_q=6, heads_k=3)
    out = reference.attention(q, k, v)
    for head in range(6):
        one = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        alone = reference.attention(q[:, :, one[0]], k[:, :, one[1]], v[:, :, one[1]])
        np.testing.assert_allclose(out[:, :, one[0]], alone, rtol=1e-14)


def test_no_batch_axis():
    q, k, v, dout, dlse = arrays(3, 4)
    out, lse = reference.attention(q, k, v, return_lse=True)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
    for b in range(2):
        alone, alone_lse = reference.attention(q[b], k[b], v[b], return_lse=True)
        np.testing.assert_array_equal(alone, out[b])
        np.testing.assert_array_equal(alone_lse, lse[b])
        alone_gradients = reference.attention_backward(dout[b], q[b], k[b], v[b], out[b], lse[b], dlse=dlse[b])
        for one, all_ in zip(alone_gradients[:3], gradients[:3]):
            np.testing.assert_allclose(one, all_[b], rtol=1e-14)


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch, heads", [(4, 0, 2, 4), (0, 4, 2, 4), (3, 3, 0, 4), (3, 3, 2, 0)])
def test_empty(seqlen_q, seqlen_k, batch, heads):
    q, k, v, dout, dlse = arrays(seqlen_q, seqlen_k, heads, heads // 2, batch=(batch,))
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == dout.shape and not out.any()
    assert lse.shape == dlse.shape and np.isneginf(lse).all()
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
    for gradient, x in zip(gradients, (q, k, v)):
        assert gradient.shape == x.shape and not gradient.any()
    sink = np.arange(heads, dtype=float)
    out, lse = reference.attention(q, k, v, return_lse=True, sink=sink)
    assert not out.any() and (lse == sink[:, None]).all()
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, sink=sink)
    np.testing.assert_allclose(gradients.dsink, dlse.sum(axis=(0, 2)))


def test_huge_logits():
    q = np.full((1, 2, 1, 4), 1e150)
    q[0, 1] = -1e150
    out, lse = reference.attention(q, np.full((1, 3, 1, 4), 1e150), np.arange(3.0).reshape(1, 3, 1, 1), return_lse=True)
    np.testing.assert_allclose(out.ravel(), 1)
    np.testing.assert_allclose(lse.ravel(), [2e300, -2e300])


def test_cupy_equals_numpy(cuda):
    q, k, v, dout, dlse = arrays(17, 20, head_dim=16)
    on_gpu = [cuda.xp.asarray(x) for x in (q, k, v, dout, dlse)]
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    out_gpu, lse_gpu = reference.attention(*on_gpu[:3], causal=True, return_lse=True)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    gradients_gpu = reference.attention_backward(on_gpu[3], *on_gpu[:3], out_gpu, lse_gpu, dlse=on_gpu[4], causal=True)
    for name, a, b in zip(
        ("out", "lse", *gradients._fields), (out, lse, *gradients[:3]), (out_gpu, lse_gpu, *gradients_gpu[:3])
    ):
        tools.assert_close(name, b.get(), a, 1e-12)


def test_yardstick_is_the_reference():
    """The expectation of the other tests is the reference itself, and its tolerance is tight."""
    q, k, v, dout, dlse = arrays(65, 70, head_dim=16, head_dim_v=16)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    for dtype, most in (("float16", 0.02), ("bfloat16", 0.16), ("float32", 2e-5), ("float64", 1e-12)):
        right = tools.yardstick(tools.DTYPES[dtype], q, k, v, dout, dlse, causal=True)
        for name, result in zip(right, (out, lse, *gradients)):
            expected, allowed = right[name]
            np.testing.assert_array_equal(expected, result)
            assert allowed < most * max(1, abs(gradients.dv).max()), (dtype, name)


def test_assert_close_can_fail():
    right = np.array([1.0, np.nan, np.inf, -np.inf])
    tools.assert_close("x", right, right, 0)
    for at, wrong in ((0, 1.1), (0, np.nan), (1, 1.0), (2, -np.inf), (2, 3.0), (3, np.nan)):
        got = right.copy()
        got[at] = wrong
        with pytest.raises(AssertionError, match=rf"x: .*\({at},\)"):
            tools.assert_close("x", got, right, 0.05)


def test_guard_can_fail():
    for layout in tools.LAYOUTS.values():
        guarded = tools.Guarded(tools.Backend("numpy", "float16"), (2, 3, 2, 5), layout=layout)
        guarded.array[...] = 1
        guarded.check()
        outside = np.flatnonzero(guarded.flat == 65535)
        for at in (guarded.MARGIN - 1, outside[len(outside) // 2], guarded.flat.size - 1):
            guarded.flat[at], kept = 0, guarded.flat[at]
            with pytest.raises(AssertionError, match="outside"):
                guarded.check()
            guarded.flat[at] = kept
