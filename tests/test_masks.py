"""Causal masks in both alignments, windows, and rows that see no key."""

import itertools
import math

import numpy as np
import pytest
import tools
from tools import check, inputs

import cupyflash

every_backend = tools.every_backend

OPTIONS = {
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window 0": {"window": (0, 0)},
    "window 5 3": {"window": (5, 3)},
    "window left 70": {"window": (70, None)},
    "window right 40": {"window": (None, 40)},
    "window right 0": {"window": (None, 0)},
    "window left 0": {"window": (0, None)},
    "causal window 64": {"causal": True, "window": (64, None)},
    "upper_left window 33": {"causal": "upper_left", "window": (33, 7)},
    "window 128 128": {"window": (128, 128)},
    "causal window 0": {"causal": True, "window": (0, 5)},
}
PAIRS = [
    (1, 1),
    (5, 2),
    (2, 5),
    (64, 64),
    (65, 63),
    (63, 129),
    (128, 17),
    (129, 257),
    (203, 203),
    (257, 65),
    (256, 640),
]


@pytest.mark.parametrize("seqlen_q, seqlen_k", PAIRS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masks(backend1, options, seqlen_q, seqlen_k):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, seed=3)
    check(backend1, *x.qkv, x.dout, x.dlse, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masks_with_groups_of_heads(backend1, options):
    x = inputs(backend1, 150, 170, batch=1, heads_q=6, heads_k=2, seed=4)
    check(backend1, *x.qkv, x.dout, **options)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1023, 1025), (1025, 600), (600, 1025)])
@pytest.mark.parametrize("name", ["causal", "upper_left", "window 128 128", "causal window 64"])
def test_long_masks(backend1, name, seqlen_q, seqlen_k):
    """Tiles that no row sees, tiles that all rows see, and tiles in between."""
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, heads_q=3, heads_k=1, head_dim=128)
    check(backend1, *x.qkv, x.dout, **OPTIONS[name])


def counted(backend, seqlen_q, seqlen_k, head_dim=16, **options):
    """Out and lse where q = 0 and V[j] = j: the mean of the visible keys, and the logarithm of their number."""
    q, k = (backend.array(np.zeros((1, n, 1, head_dim))) for n in (seqlen_q, seqlen_k))
    v = np.zeros((1, seqlen_k, 1, head_dim))
    v[0, :, 0] = np.arange(seqlen_k)[:, None]
    out, lse = cupyflash.attention(q, k, backend.array(v), return_lse=True, **options)
    out = backend.host(out)
    assert (out == out[..., :1]).all()
    return out[0, :, 0, 0], backend.host(lse)[0, 0]


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options, means, counts",
    [
        pytest.param(5, 2, {"causal": True}, [0, 0, 0, 0, 0.5], [0, 0, 0, 1, 2], id="Dao-AILab/flash-attention#1778"),
        pytest.param(1, 8, {"causal": True}, [3.5], [8], id="pytorch/pytorch#144858-one"),
        pytest.param(2, 5, {"causal": True}, [1.5, 2], [4, 5], id="pytorch/pytorch#144858-two"),
        pytest.param(2, 5, {"causal": "upper_left"}, [0, 0.5], [1, 2], id="upper_left"),
        pytest.param(5, 5, {"window": (2, 0)}, [0, 0.5, 1, 2, 3], [1, 2, 3, 3, 3], id="huggingface/transformers#39408"),
        pytest.param(
            5, 5, {"window": (0, None)}, [2, 2.5, 3, 3.5, 4], [5, 4, 3, 2, 1], id="Dao-AILab/flash-attention#2624"
        ),
        pytest.param(1, 100, {"window": (3, 0)}, [97.5], [4], id="karpathy/nanochat#452"),
        pytest.param(3, 5, {"window": (1, 1)}, [2, 3, 3.5], [3, 3, 2], id="window-lower-right"),
        pytest.param(
            3, 5, {"window": (1, 1), "causal": "upper_left"}, [0, 0.5, 1.5], [1, 2, 2], id="window-upper-left"
        ),
        pytest.param(5, 3, {"window": (1, 0)}, [0, 0, 0, 0.5, 1.5], [0, 0, 1, 2, 2], id="window-before-keys"),
        pytest.param(
            5, 2, {"window": (1, None), "causal": "upper_left"}, [0, 0.5, 1, 0, 0], [1, 2, 1, 0, 0], id="after-keys"
        ),
    ],
)
def test_counted_by_hand(backend, seqlen_q, seqlen_k, options, means, counts):
    out, lse = counted(backend, seqlen_q, seqlen_k, **options)
    np.testing.assert_allclose(out, means, rtol=backend.eps)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(counts), atol=1e-6)


def test_causal_with_more_queries_than_keys(backend1):
    """Dao-AILab/flash-attention#1778: the first half of the rows sees nothing."""
    x = inputs(backend1, 2048, 1024, batch=1, heads_q=1)
    results = check(backend1, *x.qkv, x.dout, x.dlse, causal=True)
    results = {name: backend1.host(array) for name, array in results.items()}
    assert not results["out"][:, :1024].any() and not results["dq"][:, :1024].any()
    assert np.isneginf(results["lse"][..., :1024]).all() and np.isfinite(results["lse"][..., 1024:]).all()


def test_only_the_last_row_sees_a_key(backend):
    """Dao-AILab/flash-attention#978."""
    q, k = (backend.array(np.zeros((1, n, 2, 64))) for n in (33, 1))
    v = backend.array(np.ones((1, 1, 2, 64)))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    out, lse = backend.host(out), backend.host(lse)
    assert not out[:, :32].any() and (out[:, 32] == 1).all()
    assert np.isneginf(lse[..., :32]).all() and (lse[..., 32] == 0).all()


@pytest.mark.parametrize("options", [{"causal": "upper_left", "window": (3, None)}, {"window": (0, 2)}])
def test_no_row_sees_a_key(backend, options):
    """Each row is empty, yet there are keys."""
    if "causal" in options:  # rows 10 and later of a longer case, as its own case
        x = inputs(backend, 40, 4)
        rows = slice(10, None)
    else:
        x = inputs(backend, 90, 20)
        rows = slice(0, 60)
    x.dlse[..., rows] = np.nan  # of lse = -inf: what the derivative of any loss of it gives
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, **options)
    assert not backend.host(out)[:, rows].any() and np.isneginf(backend.host(lse)[..., rows]).all()
    assert not backend.host(gradients.dq)[:, rows].any()
    for gradient in gradients[:3]:
        assert np.isfinite(backend.host(gradient)).all()


@pytest.mark.parametrize("window", [(256, 0), (257, 0), (10**9, 0), (2**63, 0), (None, 0)])
def test_wide_window_is_causal(backend1, window):
    """Dao-AILab/flash-attention#1133."""
    x = inputs(backend1, 257, batch=1)
    options = {"window": window}
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    windowed, windowed_lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    assert tools.same_bits(out, windowed) and tools.same_bits(lse, windowed_lse)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True, deterministic=True)
    windowed = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)
    assert all(map(tools.same_bits, gradients[:3], windowed[:3]))


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (2**62, 2**70), (256, 256), (None, None)])
def test_widest_window_is_full(backend1, window):
    """Dao-AILab/flash-attention#1133."""
    x = inputs(backend1, 257, batch=1)
    assert tools.same_bits(cupyflash.attention(*x.qkv, window=window), cupyflash.attention(*x.qkv))


@pytest.mark.parametrize("window", [(2**31 - 1, 3), (3, 2**31 - 1), (10**9, 0), (0, 10**9)])
def test_one_wide_side(backend1, window):
    """Dao-AILab/flash-attention#1133: no overflow of position + window."""
    x = inputs(backend1, 200, 130, batch=1)
    check(backend1, *x.qkv, x.dout, window=window)


def test_window_of_the_diagonal(backend):
    """Dao-AILab/flash-attention#2624: (0, 0) is a bound: each row sees its own key only."""
    x = inputs(backend, 5)
    results = check(backend, *x.qkv, x.dout, window=(0, 0))
    tools.assert_copied(backend, results["out"].copy(), x.v)
    tools.assert_copied(backend, results["dv"], x.dout)
    logits = (backend.host(x.q) * backend.host(x.k)).sum(axis=-1) / 8
    np.testing.assert_allclose(backend.host(results["lse"]), logits.transpose(0, 2, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -3), (-5, 0), (-1, 0), (0, -1), (-1, None), (-1, -1)])
def test_negative_windows(backend1, window):
    """Dao-AILab/flash-attention#1116."""
    x = inputs(backend1, 5)
    with pytest.raises(ValueError, match="None"):
        cupyflash.attention(*x.qkv, window=window)
    with pytest.raises(ValueError, match="None"):
        cupyflash.attention_backward(x.dout, *x.qkv, x.dout, x.dlse, window=window)


def test_look_ahead_over_a_long_cache(backend):
    """MinghuasLab/flash-attention-npu#168: thousands of keys before the first that is seen, and an odd head_dim."""
    x = inputs(backend, 16, 20000, batch=1, heads_q=1, head_dim=59)
    results = check(backend, *x.qkv, x.dout, window=(0, 256))
    assert not backend.host(results["dk"])[:, : 20000 - 16].any()
    k = backend.array(np.zeros(x.k.shape))
    _, lse = cupyflash.attention(x.q, k, x.v, window=(0, 256), return_lse=True)
    np.testing.assert_allclose(backend.host(lse)[0, 0], np.log(np.arange(16, 0, -1)), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_tiles_that_no_row_sees(backend1, bad):
    """pytorch/pytorch#101967: what no row of a tile sees does not reach it, forward and backward."""
    x = inputs(backend1, 2048, batch=1, heads_q=1)
    clean, clean_lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    clean_dq = cupyflash.attention_backward(x.dout, *x.qkv, clean, clean_lse, causal=True, deterministic=True).dq
    k, v = x.k.copy(), x.v.copy()
    k[:, 1536:], v[:, 1536:] = bad, bad
    out, lse = cupyflash.attention(x.q, k, v, causal=True, return_lse=True)
    dq = cupyflash.attention_backward(x.dout, x.q, k, v, out, lse, causal=True, deterministic=True).dq
    assert tools.same_bits(out[:, :1024].copy(), clean[:, :1024].copy())
    assert tools.same_bits(lse[..., :1024].copy(), clean_lse[..., :1024].copy())
    assert tools.same_bits(dq[:, :1024].copy(), clean_dq[:, :1024].copy())
    assert np.isnan(backend1.host(out)[:, 1536:]).all()


def test_finite_rubbish_behind_the_mask(backend):
    """pytorch/pytorch#101967: a hidden key of any finite value changes nothing."""
    x = inputs(backend, 64, batch=1)
    clean, clean_lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    largest = 1e4 if backend.dtype_name == "float16" else 1e10
    x.k[:, 63], x.v[:, 63] = largest, -largest
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True)
    got, expected = (map(backend.host, (a[:, :63], b[..., :63])) for a, b in ((out, lse), (clean, clean_lse)))
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=backend.other_rounding, atol=backend.other_rounding)


def test_every_small_band(backend1):
    """All masks of all shapes up to 4 x 4, by counting."""
    sides = (None, 0, 1, 2)
    for seqlen_q, seqlen_k in itertools.product(range(1, 5), repeat=2):
        for left, right, causal in itertools.product(sides, sides, (False, True, "upper_left")):
            diagonal = 0 if causal == "upper_left" else seqlen_k - seqlen_q
            rows = []
            for i in range(seqlen_q):
                ahead = [j - i - diagonal for j in range(seqlen_k)]
                least, most = (-math.inf if left is None else -left), (math.inf if right is None else right)
                rows.append([j for j, a in enumerate(ahead) if least <= a <= (min(most, 0) if causal else most)])
            out, lse = counted(backend1, seqlen_q, seqlen_k, causal=causal, window=(left, right))
            np.testing.assert_allclose(out, [np.mean(row) if row else 0 for row in rows], rtol=backend1.eps)
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose(lse, np.log([len(row) for row in rows]), atol=1e-6)
