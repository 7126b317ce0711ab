"""Block masks: what they hide costs nothing and does not matter; what they show is as with the dense mask."""

import math

import numpy as np
import pytest
import tools
from test_score import changes
from test_sink import sinks
from tools import check, inputs

import cupyflash
from cupyflash import cpu, reference
from cupyflash.block_mask import TILE, bitmaps_of

option_backend, option_backend16 = tools.option_backend, tools.option_backend16

# Of 5 x 6 blocks, unless it says otherwise.
PATTERNS = {
    "none": np.zeros((5, 6), bool),
    "all": np.ones((5, 6), bool),
    "single block": np.pad([[True]], ((2, 2), (4, 1))),
    "rows without keys": np.arange(5)[:, None] % 2 == np.zeros((1, 6)),
    "keys that nobody sees": np.zeros((5, 1)) == np.arange(6) % 2,
    "diagonal": np.eye(5, 6, dtype=bool),
    "last column": np.arange(6) == np.full((5, 1), 5),
    "sliding window": abs(np.arange(5)[:, None] - np.arange(6)) <= 1,
    "documents": np.array([0, 0, 1, 1, 2])[:, None] == np.array([0, 0, 1, 1, 2, 2]),
    "BigBird": np.array([list(x) for x in ("111111", "111001", "101110", "110111", "100111")]) == "1",
    **{f"{seen:.0%}": np.random.default_rng(9).random((5, 6)) < seen for seen in (0.1, 0.3, 0.6, 0.9)},
}
every_pattern = pytest.mark.parametrize("blocks", PATTERNS.values(), ids=PATTERNS)


def blocks(backend, shape, seed=0, seen=0.5):
    return backend.xp.asarray(np.random.default_rng(seed).random(shape) < seen)


def mask_of(backend, shape, seed=1, seen=0.5):
    return blocks(backend, shape, seed, seen)


def case(backend, seqlen_q=600, seqlen_k=700, **how):
    return inputs(backend, seqlen_q, seqlen_k, **({"heads_q": 2, "batch": 1} | how))


def block_mask(backend, x, heads=(1, 1), size=(TILE, TILE), seed=0, seen=0.5):
    count = (-(-x.q.shape[1] // size[0]), -(-x.k.shape[1] // size[1]))
    return cupyflash.BlockMask(blocks(backend, (*heads, *count), seed, seen), size)


def check_all(backend, x, **options):
    for deterministic in (False, True):
        results = check(backend, *x.qkv, x.dout, x.dlse, deterministic=deterministic, **options)
    return results


# ---------------------------------------------------------------------------------------------- against the reference


@every_pattern
def test_patterns(backend, blocks):
    x = case(backend)
    given = cupyflash.BlockMask(backend.xp.asarray(blocks))
    for causal in (False, True, "upper_left"):
        results = check_all(backend, x, block_mask=given, causal=causal)
        empty = ~(given.dense(600, 700)[0, 0] & reference.visible(backend.xp, 600, 700, causal)).any(axis=1)
        rows = backend.host(empty).astype(bool)
        assert np.isneginf(backend.host(results["lse"])[:, :, rows]).all()
        for name in ("out", "dq"):
            assert not backend.host(results[name])[:, rows].any()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, (192, 128), (40, 72)])
@pytest.mark.parametrize("heads_q, heads_k", [(2, 2), (6, 2)])
def test_head_dims(backend16, head_dim, heads_q, heads_k):
    width, width_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    how = {"heads_q": heads_q, "heads_k": heads_k, "head_dim": width, "head_dim_v": width_v, "batch": 2}
    x = case(backend16, 400, 520, **how)
    check_all(backend16, x, block_mask=block_mask(backend16, x, (2, heads_q)), causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (1, 4), (3, 4)], ids=str)
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_broadcast(backend1, heads, heads_k):
    """Over batches and query heads, those that share a key head among them."""
    x = case(backend1, 300, 400, heads_q=4, heads_k=heads_k, batch=3)
    check_all(backend1, x, block_mask=block_mask(backend1, x, heads))


@pytest.mark.parametrize("seqlen_q", (1, 127, 128, 129, 257))
def test_lengths(backend1, seqlen_q):
    """Ragged ends."""
    for seqlen_k in (1, 63, 128, 130, 385):
        x = case(backend1, seqlen_q, seqlen_k)
        for seed, options in enumerate(({}, {"causal": True}, {"window": (100, 300)})):
            check_all(backend1, x, block_mask=block_mask(backend1, x, (1, 2), seed=seed), **options)


@pytest.mark.parametrize("length", [5000, 8200])
def test_far_words(backend1, length):
    """Few blocks, far from each other, with many words between."""
    x = case(backend1, 130, length, heads_q=1)
    for one in (x, tools.Inputs(x.k, x.q, backend1.normal(x.q.shape, 7), x.v, backend1.normal((1, 1, length), 8))):
        one = tools.Inputs(one.q, one.k, one.v, one.dout, one.dlse.astype(backend1.lse_dtype))
        check_all(backend1, one, block_mask=block_mask(backend1, one, seen=0.03, seed=2))


@pytest.mark.parametrize("size", [(256, 128), (128, 384), (512, 256), 1024], ids=str)
def test_block_sizes(backend1, size):
    x = case(backend1, 900, 1100)
    pair = size if isinstance(size, tuple) else (size, size)
    count = [-(-n // block) for n, block in zip((900, 1100), pair)]
    given = cupyflash.BlockMask(blocks(backend1, (2, *count), 4, 0.6), size)
    check_all(backend1, x, block_mask=given)


@pytest.mark.parametrize("change", ["softcap", "alibi", "both"])
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3, "seed": 7}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_options(backend16, change, dropout, head_dim):
    x = case(backend16, 300, 400, heads_q=4, heads_k=2, head_dim=head_dim, batch=2)
    options = changes(backend16, 4)[change] | dropout | {"window": (250, 100), "sink": sinks(backend16, 4)}
    check_all(backend16, x, block_mask=block_mask(backend16, x, (1, 4)), **options)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scale(backend1, scale):
    x = case(backend1)
    check_all(backend1, x, block_mask=block_mask(backend1, x), scale=scale)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 2, 300, 400), (2, 300, 400), (2, 2, 1, 400), (1, 300, 1)], ids=str)
def test_bias(backend16, head_dim, shape):
    """Its gradient is 0 where the block mask hides the logit, or all that it belongs to."""
    x = case(backend16, 300, 400, head_dim=head_dim, batch=2)
    shown = blocks(backend16, (2, 2, 3, 4))
    shown[:, :, :, 1] = shown[:, :, 2] = False
    in_part = cupyflash.BlockMask(
        shown, full=shown & blocks(backend16, shown.shape, 3), mask=mask_of(backend16, (300, 400))
    )
    for given, options in ((cupyflash.BlockMask(shown), {"causal": True}), (in_part, {"dropout": 0.3, "seed": 7})):
        results = check(backend16, *x.qkv, x.dout, x.dlse, block_mask=given, bias=backend16.normal(shape, 9), **options)
        dense = np.broadcast_to(backend16.host(given.dense(300, 400)).astype(bool), (2, 2, 300, 400))
        axes = (0,) * (len(shape) == 3) + tuple(axis for axis, n in enumerate(shape, 4 - len(shape)) if n == 1)
        seen = dense.any(axis=axes, keepdims=True).reshape(shape)
        assert not seen.all() and not backend16.host(results["dbias"])[~seen].any()


# ---------------------------------------------------------------------------------------------- blocks shown in part


@pytest.mark.parametrize("shape", [(1, 1, 600, 700), (2, 4, 600, 700), (2, 1, 1, 700), (4, 600, 1)], ids=str)
@pytest.mark.parametrize("size", [(128, 128), (256, 384)], ids=str)
def test_from_mask(backend1, shape, size):
    """Blocks of all three kinds: all, some and nothing shown."""
    x = case(backend1, heads_q=4, heads_k=2, batch=2, head_dim=32)
    wide = np.broadcast_to(np.asarray(np.random.default_rng(0).random(shape) < 0.5), (*shape[:-2], 600, 700)).copy()
    wide[..., 128:260, :] = True
    wide[..., 256:, 300:] = False
    wide = backend1.xp.asarray(wide)
    given = cupyflash.BlockMask.from_mask(wide, size)
    assert bool((given.dense(600, 700) == wide).all())
    check_all(backend1, x, block_mask=given, causal=True)


@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3, "seed": 7}])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_in_part(backend16, head_dim, dropout):
    """What the mask hides in blocks that are full, or hidden, is not read."""
    x = case(backend16, 300, 400, head_dim=head_dim, batch=2)
    shown, full = blocks(backend16, (2, 3, 4), 1, 0.7), blocks(backend16, (2, 3, 4), 2)
    given = cupyflash.BlockMask(shown, full=full, mask=mask_of(backend16, (1, 1, 300, 400)))
    for options in ({}, changes(backend16, 2)["both"] | {"window": (200, 60)}):
        check_all(backend16, x, block_mask=given, **options, **dropout)


@pytest.mark.parametrize("element_mask", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_in_place_of_maxima(hopper16, steady, head_dim, element_mask):
    """In blocks that are seen in full; and where that fails all is computed again, with runs dealt anew."""
    x = case(hopper16, 900, 1000, head_dim=head_dim, heads_q=4, heads_k=2, batch=2)
    shown, full = blocks(hopper16, (2, 4, 8, 8), 1, 0.7), blocks(hopper16, (2, 4, 8, 8), 2, 0.6)
    more = {"full": full, "mask": mask_of(hopper16, (1, 1, 900, 1000))} if element_mask else {}
    given = cupyflash.BlockMask(shown, **more)
    for options in ({}, {"causal": True}, {"window": (500, 200)}):
        check_all(hopper16, x, block_mask=given, **options)
    x.q[1, 700, 2, 5] = np.inf
    results = []
    for wanted in (True, False):
        steady(wanted)
        results.append(cupyflash.attention(*x.qkv, block_mask=given, return_lse=True))
    for one, other in zip(*results):
        assert tools.same_bits(one, other)


def test_with_a_mask(backend1):
    """It hides some of every block that is shown."""
    x = case(backend1)
    check_all(backend1, x, block_mask=block_mask(backend1, x), mask=mask_of(backend1, (2, 600, 700)))


@pytest.mark.parametrize("size", [128, (256, 128)], ids=str)
def test_from_function(backend1, size):
    xp = backend1.xp
    document = xp.asarray(np.repeat(np.arange(4), (150, 200, 50, 112)))
    functions = [
        lambda b, h, i, j: document[i] == document[j],
        lambda b, h, i, j: abs(i - j) <= 100 * (h + 1),
        lambda b, h, i, j: (i + b) % 3 != 0,
        lambda b, h, i, j: j < 128,
        lambda b, h, i, j: i >= 512,
    ]
    grids = [
        xp.arange(n).reshape([-1 if axis == k else 1 for k in range(4)]) for axis, n in enumerate((2, 2, 512, 512))
    ]
    x = case(backend1, 512, 512, batch=2, head_dim=32)
    for function in functions:
        given = cupyflash.BlockMask.from_function(function, 2, 2, 512, 512, size, xp=xp)
        assert bool((given.dense(512, 512) == function(*grids)).all())
        check(backend1, *x.qkv, x.dout, block_mask=given)


def test_a_function_is_given_one_row_of_blocks_at_a_time():
    seen = []

    def function(b, h, i, j):
        seen.append((b.shape, h.shape, i.ravel()[[0, -1]].tolist(), j.shape))
        return i >= j

    given = cupyflash.BlockMask.from_function(function, 3, 5, 300, 400)
    rows = [[0, 127], [128, 255], [256, 299]]
    assert seen == [((3, 1, 1, 1), (5, 1, 1), row, (400,)) for row in rows * 2]
    assert given.blocks.shape == (1, 1, 3, 4) and given.mask.shape == (1, 1, 300, 400)
    seen.clear()
    whole = cupyflash.BlockMask.from_function(lambda b, h, i, j: i // 128 >= j // 128, 3, 5, 300, 400)
    assert whole.mask is None


# ---------------------------------------------------------------------------------------------- what is hidden


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nan_in_what_is_hidden(backend16, head_dim):
    """Keys and values of blocks that nobody in a head sees are not read."""
    x = case(backend16, 300, 700, head_dim=head_dim, batch=2)
    shown = np.random.default_rng(0).random((2, 2, 3, 6)) < 0.5
    shown[0, 0, :, 1] = shown[1, 1, :, 4] = False
    given = cupyflash.BlockMask(backend16.xp.asarray(shown))
    q, k, v = x.qkv
    out, lse = cupyflash.attention(q, k, v, block_mask=given, return_lse=True)
    for array in (k, v):
        array[0, 128:256, 0] = math.nan
        array[1, 512:640, 1] = math.inf
    again, lse_again = cupyflash.attention(q, k, v, block_mask=given, return_lse=True)
    assert tools.same_bits(out, again) and tools.same_bits(lse, lse_again)
    gradients = cupyflash.attention_backward(x.dout, q, k, v, out, lse, block_mask=given, deterministic=True)
    for gradient in gradients[:3]:
        assert np.isfinite(backend16.host(gradient)).all()


def test_hidden_blocks_are_not_computed(monkeypatch):
    backend = tools.Backend("numpy", "float32")
    products, before = [], cpu._Stack.products

    def counted(stack, queries, keys, tile):
        result = before(stack, queries, keys, tile)
        products.append(result.size)
        return result

    monkeypatch.setattr(cpu._Stack, "products", counted)
    x = case(backend, 1024, 1024, head_dim=8)
    for seen in (0.0, 0.25, 1.0):
        shown = blocks(backend, (1, 2, 8, 8), 3, seen)
        mask = shown.repeat(128, axis=2).repeat(128, axis=3)
        for options, most in (({"block_mask": cupyflash.BlockMask(shown)}, 0), ({"mask": mask}, 4)):
            products.clear()
            cupyflash.attention(*x.qkv, **options)
            exact = int(shown.sum()) * 128 * 128
            assert exact <= sum(products) <= max(most, 1) * exact


def test_equal_bits(cuda):
    """The size of the blocks changes no bit, where they show the same."""
    x = case(cuda, 500, 500, head_dim=128, heads_q=4, heads_k=2)
    results = []
    for size in (128, 128, 256, 512):
        count = -(-500 // size)
        given = cupyflash.BlockMask(cuda.xp.ones((count, count), bool), size)
        options = {"block_mask": given, "causal": True}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)
        results.append((out, lse, *gradients[:3]))
    for other in results[1:]:
        assert all(map(tools.same_bits, results[0], other))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic(cuda, head_dim):
    """Sparse masks of which many heads add to one sum."""
    x = case(cuda, 2048, 2048, heads_q=8, heads_k=2, head_dim=head_dim, batch=2)
    for seen in (0.1, 0.5):
        given = block_mask(cuda, x, (2, 8), seen=seen)
        options = {"block_mask": given, "causal": True}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        first = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)
        for _ in range(20):
            again = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)
            assert all(map(tools.same_bits, first[:3], again[:3]))


# ---------------------------------------------------------------------------------------------- the object


def test_repr():
    given = cupyflash.BlockMask(np.eye(4, dtype=bool), (256, 128))
    assert repr(given) == "BlockMask(shape=(1, 1, 4, 4), block_size=(256, 128), density=0.250, in_part=0.000)"
    assert "density=0.000" in repr(cupyflash.BlockMask(np.zeros((0, 4), bool)))
    assert "in_part=1.000" in repr(cupyflash.BlockMask.from_mask(np.tri(100, 100, dtype=bool)))


def test_what_is_given_later_changes_nothing():
    shown = np.eye(2, dtype=bool)
    given = cupyflash.BlockMask(shown)
    shown[...] = True
    assert given.blocks.sum() == 2


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 70])
def test_bitmaps(backend1, columns):
    """Bit i of word w is tile 32 * w + i of the row; nothing is set beyond the end."""
    shown, full = (blocks(backend1, (2, 3, 5, columns), seed) for seed in (0, 1))
    mask = backend1.xp.ones((1, 1, 1, 1), bool)
    given = cupyflash.BlockMask(shown, (128, 256), full, mask)
    host, in_part = (backend1.host(x).astype(bool).repeat(2, axis=3) for x in (shown, shown & ~full))
    for transposed, words in enumerate(given.bitmaps):
        words = words if backend1.name == "numpy" else words.get()
        assert words.dtype == np.uint32 and words.flags.c_contiguous
        bits = (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(*words.shape[:4], -1)
        for plane, expected in enumerate((host, in_part)):
            expected = expected.swapaxes(2, 3) if transposed else expected
            got = bits[:, :, :, plane]
            assert (got[..., : expected.shape[3]] == expected).all() and not got[..., expected.shape[3] :].any()


@pytest.mark.parametrize("shape", [(2, 3, 256, 384), (1, 1, 300, 257), (1, 2, 1, 4200), (2, 1, 128, 100)], ids=str)
def test_bitmaps_of_a_mask(backend1, shape):
    """Those that a call makes are those of the object."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., :130, :200] = True
    mask[..., 100:, 120:260] = False
    mask = backend1.xp.asarray(mask)
    for given in (mask, ~mask, mask & False, mask | True, mask[:, :, ::-1]):
        made = cupyflash.BlockMask.from_mask(given)
        whole = cupyflash.BlockMask(made.blocks, full=made.blocks if made.full is None else made.full)
        for got, expected in zip(bitmaps_of(backend1.xp, given), whole.bitmaps):
            assert tools.same_bits(got, expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_large_masks(backend1, shape):
    """The portable kernels skip the tiles in which a large mask shows nothing."""
    x = case(backend1, 1100, 1000, batch=2)
    mask = mask_of(backend1, (*shape, 1100, 1000))
    mask[:, :, 130:600, 100:800] = False
    mask[:, :, 700:, 128:256] = True
    mask[:, :, 900:1060] = False
    check_all(backend1, x, mask=mask)
    if backend1.path != "sm80":
        return
    x.k[:, 256:640], x.v[:, 256:640] = math.nan, math.nan
    mask[:, :, :, 256:640] = False
    assert np.isfinite(backend1.host(cupyflash.attention(*x.qkv, mask=mask))).all()


def test_without_batch(backend1):
    x = case(backend1, 300, 400)
    given = block_mask(backend1, x, (1, 2))
    together = cupyflash.attention(*x.qkv, block_mask=given)
    alone = cupyflash.attention(*(array[0] for array in x.qkv), block_mask=given)
    assert tools.same_bits(together[0], alone)
    expected = reference.attention(*(array[0] for array in x.qkv), block_mask=given)
    tools.assert_close("out", backend1.host(alone), backend1.host(expected), 0.1)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 300), (300, 0)])
def test_empty(backend1, seqlen_q, seqlen_k):
    x = case(backend1, seqlen_q, seqlen_k)
    given = block_mask(backend1, x)
    out, lse = cupyflash.attention(*x.qkv, block_mask=given, return_lse=True)
    assert not out.any() and bool((lse == -math.inf).all())
    assert not cupyflash.attention_backward(x.dout, *x.qkv, out, lse, block_mask=given).dk.any()


def test_graph(cuda):
    """A warm call asks the GPU nothing: it can be captured."""
    cupy = cuda.xp
    x = case(cuda, 512, 512)
    given = block_mask(cuda, x)
    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.empty_like(x.q)
    cupy.cuda.Device().synchronize()  # this stream does not wait for the one that made the arrays
    with stream:
        cupyflash.attention(*x.qkv, block_mask=given, out=out)
        stream.synchronize()
        expected = out.copy()
        stream.begin_capture()
        cupyflash.attention(*x.qkv, block_mask=given, out=out)
        graph = stream.end_capture()
        out[...] = 0
        graph.launch(stream)
        stream.synchronize()
    assert tools.same_bits(out, expected)


# ---------------------------------------------------------------------------------------------- wrong arguments

ONE = np.ones((1, 1), bool)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((np.ones((2, 2)),), TypeError, "blocks has dtype float64; allowed: bool"),
        ((np.ones(3, bool),), ValueError, r"blocks has shape \(3,\); allowed: \(\[\[batch,\] heads_q,\] blocks_q"),
        ((np.ones((1,) * 5, bool),), ValueError, "blocks has shape"),
        (([[True]],), TypeError, "blocks is a list"),
        ((ONE, 64), ValueError, "block_size is 64; allowed: positive multiples of 128"),
        ((ONE, (128, 0)), ValueError, "block_size is"),
        ((ONE, (128,)), TypeError, "block_size is"),
        ((ONE, 128.0), TypeError, "block_size is 128.0"),
        ((ONE, True), TypeError, "block_size is True"),
        *(
            (
                (ONE, 128, np.ones((2, 2), bool), *mask),
                ValueError,
                r"full has shape \(2, 2\); allowed: what broadcasts to \(1, 1\)",
            )
            for mask in ((), (ONE,))
        ),
        ((ONE, 128, np.ones((1, 1))), TypeError, "full has dtype float64; allowed: bool"),
        ((ONE, 128, None, np.ones(3)), TypeError, "mask has dtype float64"),
        ((ONE, 128, None, np.ones((1,) * 5, bool)), ValueError, "mask has shape"),
    ],
)
def test_wrong_masks(arguments, error, words):
    with pytest.raises(error, match=words):
        cupyflash.BlockMask(*arguments)


def test_wrong_sources():
    with pytest.raises(
        ValueError, match=r"mask has shape \(3,\); allowed: \(\[\[batch,\] heads_q,\] seqlen_q, seqlen_k\)"
    ):
        cupyflash.BlockMask.from_mask(np.ones(3, bool))
    with pytest.raises(TypeError, match="mask has dtype int64; allowed: bool"):
        cupyflash.BlockMask.from_mask(np.ones((3, 3), np.int64))
    for function, error, words in (
        (lambda b, h, i, j: i + j, TypeError, "function returned dtype int64; allowed: bool"),
        (lambda b, h, i, j: np.ones((3, 3), bool), ValueError, r"what function returned has shape \(3, 3\)"),
    ):
        with pytest.raises(error, match=words):
            cupyflash.BlockMask.from_function(function, 1, 1, 200, 200)
    with pytest.raises(TypeError, match="xp is"):
        cupyflash.BlockMask.from_function(lambda b, h, i, j: i >= j, 1, 1, 2, 2, xp=math)
    with pytest.raises(TypeError, match="elements is 1"):
        cupyflash.BlockMask.from_function(lambda b, h, i, j: i >= j, 1, 1, 2, 2, elements=1)
    with pytest.raises(ValueError, match="seqlen_q is -1"):
        cupyflash.BlockMask.from_function(lambda b, h, i, j: i >= j, 1, 1, -1, 2)


@pytest.mark.parametrize(
    "given, error, words",
    [
        (np.ones((2, 3), bool), TypeError, "(?s)block_mask is array.*; allowed: None or a cupyflash.BlockMask"),
        (cupyflash.BlockMask(np.ones((3, 3), bool)), ValueError, r"block_mask has shape \(1, 1, 3, 3\) of blocks of"),
        (
            cupyflash.BlockMask(np.ones((3, 1, 2, 3), bool)),
            ValueError,
            r"allowed: \(2, 4, 2, 3\), where batch and heads",
        ),
        (cupyflash.BlockMask(np.ones((2, 2, 3), bool)), ValueError, "block_mask has shape"),
        (
            cupyflash.BlockMask(np.ones((2, 3), bool), mask=np.ones((200, 299), bool)),
            ValueError,
            "the mask of block_mask",
        ),
    ],
)
def test_wrong_in_a_call(given, error, words):
    x = case(tools.Backend("numpy", "float32"), 200, 300, heads_q=4, heads_k=2, batch=2, head_dim=8)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    with pytest.raises(error, match=words):
        cupyflash.attention(*x.qkv, block_mask=given)
    with pytest.raises(error, match=words):
        cupyflash.attention_backward(x.dout, *x.qkv, out, lse, block_mask=given)


def test_two_masks_of_elements():
    x = case(tools.Backend("numpy", "float32"), 100, 100, head_dim=8)
    given = cupyflash.BlockMask.from_mask(np.tri(100, 100, dtype=bool))
    with pytest.raises(ValueError, match="mask is given, and block_mask has blocks that are shown in part"):
        cupyflash.attention(*x.qkv, block_mask=given, mask=np.ones((100, 100), bool))


@pytest.mark.gpu
def test_other_places(cuda):
    x = case(cuda, 100, 100)
    with pytest.raises(ValueError, match="block_mask is on the host, the arrays are on GPU"):
        cupyflash.attention(*x.qkv, block_mask=cupyflash.BlockMask(ONE))
