"""Functions of the user: what changes the scores, and what says which keys are seen."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tools
from test_score import MASKS, changes
from test_sink import sinks
from tools import check, inputs

import cupyflash
from cupyflash import MaskMod, ModError, ScoreMod, checks, choose, compiler, dual, mods, reference, structs
from cupyflash.problem import Problem

option_backend, option_backend16 = tools.option_backend, tools.option_backend16

needs_nvrtc = pytest.mark.skipif(bool(tools.nvrtc_missing()), reason=str(tools.nvrtc_missing()))
BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 70, 130


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tree(n, seed=0):
    """Which tokens each token comes from, itself included."""
    ancestors, rng = np.eye(n, dtype=bool), np.random.default_rng(seed)
    for i in range(1, n):
        ancestors[i] |= ancestors[rng.integers(i)]
    return ancestors


def buckets(seqlen_q, seqlen_k):
    """Of T5 (arXiv 1910.10683): one for each near distance, then one for each factor."""
    distance = abs(np.arange(seqlen_q + seqlen_k - 1) - seqlen_q + 1)
    return np.minimum(np.where(distance < 8, distance, 6 + np.log2(np.maximum(distance, 1)) * 2), 23).astype(np.int32)


@dataclass(frozen=True)
class Example:
    """A function in both forms."""

    text: str
    function: object
    captures: dict = field(default_factory=dict)
    gradients: tuple = ()
    kind: type = ScoreMod

    def of(self, backend, gradients=None):
        """For arrays of the backend, and for the reference."""
        more = {} if self.kind is MaskMod else {"gradients": self.gradients if gradients is None else gradients}
        on_host = self.kind(self.function, **more, **self.captures)
        if backend.name == "numpy":
            return on_host, on_host
        arrays = {
            name: backend.array(x, x.dtype) if isinstance(x, np.ndarray) else x for name, x in self.captures.items()
        }
        return self.kind(self.text, **more, **arrays), on_host


def _branch(score, b, h, i, j, prefix):
    return np.where(j < prefix, score, np.where(i >= j - 60, score - 0.5 * abs(i - j), -math.inf))


SCORES = {
    "ALiBi": Example(
        "score - slope[h] * abs(i + shift - j)",
        lambda score, b, h, i, j, slope, shift: score - slope[h] * abs(i + shift - j),
        {"slope": abs(numbers(HEADS)), "shift": 60},
        ("slope",),
    ),
    "offset": Example("score - 0.1 * abs(float(i - j))", lambda score, b, h, i, j: score - 0.1 * abs(i - j)),
    "relative bias": Example(
        "score + table[bucket[j - i + seqlen_q - 1], h]",
        lambda score, b, h, i, j, table, bucket: score + table[bucket[j - i + SEQLEN_Q - 1], h],
        {"table": numbers(24, HEADS), "bucket": buckets(SEQLEN_Q, SEQLEN_K)},
        ("table",),
    ),
    "tanh": Example("cap * tanh(score / cap)", lambda score, b, h, i, j, cap: cap * np.tanh(score / cap), {"cap": 1.5}),
    "statements": Example(
        """
        if (j < prefix) return score;
        auto shifted = score - 0.5 * abs(i - j);
        return where(i >= j - 60, shifted, -inf);
        """,
        _branch,
        {"prefix": 3},
    ),
    "negative": Example("-score", lambda score, b, h, i, j: -score),
    "steep": Example(
        "a[h] * score * score + exp(min(score, 1.0)) / c[b, i, j % 5]",
        lambda score, b, h, i, j, a, c: a[h] * score * score + np.exp(np.minimum(score, 1.0)) / c[b, i, j % 5],
        {"a": 0.1 * numbers(HEADS), "c": 1.5 + abs(numbers(BATCH, SEQLEN_Q, 5))},
        ("c", "a"),
    ),
    "sometimes read": Example(
        "if (j % 3 == 0) return score * a[i]; return score + a[j % 7] - a[h];",
        lambda score, b, h, i, j, a: np.where(j % 3 == 0, score * a[i], score + a[j % 7] - a[h]),
        {"a": numbers(SEQLEN_Q)},
        ("a",),
    ),
    "16 bits": Example(
        "score + a[h, i] * half",
        lambda score, b, h, i, j, a, half: score + a[h, i] * half,
        {"a": numbers(HEADS, SEQLEN_Q, dtype=np.float16), "half": 0.5},
        ("a",),
    ),
}
VISIBLE = {
    "documents": Example(
        "doc[b, i] == doc[b, j]",
        lambda b, h, i, j, doc: doc[b, i] == doc[b, j],
        {"doc": np.sort(np.random.default_rng(1).integers(0, 9, (BATCH, SEQLEN_K)))},
        kind=MaskMod,
    ),
    "prefix": Example(
        "j < prefix || j <= i", lambda b, h, i, j, prefix: (j < prefix) | (j <= i), {"prefix": 20}, kind=MaskMod
    ),
    "dilated": Example(
        "j <= i + 60 && (i - j) % 3 == 0", lambda b, h, i, j: (j <= i + 60) & ((i - j) % 3 == 0), kind=MaskMod
    ),
    "tree": Example(
        "ancestor[i + 60, j]",
        lambda b, h, i, j, ancestor: ancestor[i + 60, j],
        {"ancestor": tree(SEQLEN_K)},
        kind=MaskMod,
    ),
    "some see nothing": Example(
        "on[i % 16] && i != j",
        lambda b, h, i, j, on: on[i % 16] & (i != j),
        {"on": np.arange(16) % 5 > 0},
        kind=MaskMod,
    ),
}


def case(backend, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, **how):
    return inputs(backend, seqlen_q, seqlen_k, **({"heads_q": HEADS, "heads_k": 2, "head_dim": 16} | how))


def run(backend, x, score=None, visible=None, gradients=None, dlse=True, **options):
    """A case with these examples."""
    given, expected = dict(options), {}
    for name, example in (("score_mod", score), ("mask_mod", visible)):
        if example is not None:
            more = {} if example.kind is MaskMod else {"gradients": gradients}
            given[name], expected[name] = example.of(backend, **more)
    return check(backend, *x.qkv, x.dout, x.dlse if dlse else None, expected=expected, **given)


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_scores(backend, score):
    results = run(backend, case(backend), score)
    assert ("dscore_mod" in results) == bool(score.gradients)
    if score.gradients:
        assert {*results["dscore_mod"]} == {*score.gradients}


@pytest.mark.parametrize("visible", VISIBLE.values(), ids=VISIBLE)
def test_visible(backend, visible):
    run(backend, case(backend), visible=visible)


@pytest.mark.parametrize("score", [SCORES["relative bias"], SCORES["statements"]], ids=["table", "statements"])
@pytest.mark.parametrize("visible", [VISIBLE["documents"], VISIBLE["some see nothing"]], ids=["documents", "some"])
def test_with_masks(backend1, score, visible):
    for options in MASKS.values():
        run(backend1, case(backend1, seed=3), score, visible, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("score, visible", [("ALiBi", None), ("negative", "some see nothing"), (None, "dilated")])
def test_with_bias_and_blocks(backend1, head_dim, score, visible):
    """A bias comes before the function, the masks behind it; of what they hide nothing has a gradient."""
    x = case(backend1, 200, 330, head_dim=head_dim)
    rng = np.random.default_rng(2)
    mask, shown = rng.random((HEADS, 1, 330)) < 0.7, rng.random((BATCH, 1, 2, 3)) < 0.6
    full = shown & (rng.random((2, 3)) < 0.5)
    mask, shown, full = map(backend1.xp.asarray, (mask, shown, full))
    bias = backend1.normal((HEADS, 200, 330), 4)
    dropped = {"dropout": 0.3, "seed": 7}
    for options in (
        {"bias": bias, "causal": True, **dropped},
        {"mask": mask, "block_mask": cupyflash.BlockMask(shown)},
        {"bias": bias[:, :1], "block_mask": cupyflash.BlockMask(shown, full=full, mask=mask)},
        {"bias": bias, "mask": mask, **changes(backend1, HEADS)["both"], **dropped},
    ):
        run(backend1, x, score and SCORES[score], visible and VISIBLE[visible], **options)


def full_blocks(backend, x, heads=1):
    """Of some blocks that are shown, at least one in each of three kinds: full, in part and hidden."""
    rng = np.random.default_rng(5)
    shape = (BATCH, heads, -(-x.q.shape[1] // 128), -(-x.k.shape[1] // 128))
    shown, full = rng.random(shape) < 0.8, rng.random(shape) < 0.5
    shown[..., 0, :3], full[..., 0, :3] = (False, True, True), (True, True, False)
    return tuple(backend.xp.asarray(a) for a in (shown, full))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("score", [None, "ALiBi", "negative"])
@pytest.mark.parametrize("visible", ["documents", "dilated", "some see nothing"])
def test_full_blocks(backend16, head_dim, score, visible):
    """In them a MaskMod is not asked, though it would hide some: both passes show them whole, up to every edge."""
    x = case(backend16, 300, 330, head_dim=head_dim)
    shown, full = full_blocks(backend16, x, heads=HEADS)
    given = cupyflash.BlockMask(shown, full=full)
    example = VISIBLE[visible]
    if visible == "documents":
        doc = np.sort(np.random.default_rng(1).integers(0, 9, (BATCH, 330)))
        example = replace(example, captures={"doc": doc})
    for options in ({}, {"causal": True}, {"window": (200, 60), **changes(backend16, HEADS)["both"]}):
        run(backend16, x, score and SCORES[score], example, block_mask=given, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("change", ["softcap", "alibi"])
def test_full_blocks_with_options(backend1, head_dim, change):
    x = case(backend1, 300, 330, head_dim=head_dim)
    shown, full = full_blocks(backend1, x)
    given = cupyflash.BlockMask(shown, full=full)
    more = {"bias": backend1.normal((HEADS, 300, 330), 4)}
    for options in (changes(backend1, HEADS)[change], {"dropout": 0.3, "seed": 7}, more, {"deterministic": True}):
        run(backend1, x, None, VISIBLE["dilated"], block_mask=given, **options)


def test_full_blocks_of_a_mask(backend1):
    """They are those of the mask: a MaskMod is asked in them. And a mask of the call is read in every block."""
    x = case(backend1, 300, 330)
    shown, full = full_blocks(backend1, x)
    mask = backend1.xp.asarray(np.random.default_rng(3).random((1, 1, 300, 330)) < 0.6)
    run(backend1, x, None, VISIBLE["dilated"], block_mask=cupyflash.BlockMask(shown, full=full, mask=mask))
    run(backend1, x, block_mask=cupyflash.BlockMask(shown, full=full), mask=mask)
    # Beside it a function may be asked everywhere, and shows what it promised.
    everywhere = Example("true", lambda b, h, i, j: True, kind=MaskMod)
    run(backend1, x, None, everywhere, block_mask=cupyflash.BlockMask(shown, full=full), mask=mask)


def test_full_blocks_alone(backend1):
    """Without a function or a mask nothing is hidden in a block that is shown."""
    x = case(backend1, 300, 330)
    shown, full = full_blocks(backend1, x)
    results = [
        cupyflash.attention(*x.qkv, block_mask=cupyflash.BlockMask(shown, **more)) for more in ({}, {"full": full})
    ]
    assert tools.same_bits(*results)


def test_the_reference_knows_full_blocks():
    x = case(tools.Backend("numpy", "float32"), 300, 330)
    shown, full = (np.random.default_rng(n).random((HEADS, 3, 3)) < 0.6 for n in (1, 2))
    mod = VISIBLE["dilated"].of(tools.Backend("numpy", "float32"))[0]
    got = reference.attention(*x.qkv, block_mask=cupyflash.BlockMask(shown, full=full), mask_mod=mod)
    wide, whole = (a.repeat(128, 1).repeat(128, 2)[:, :300, :330] for a in (shown, full))
    mask = wide & (whole | mod.function(0, 0, np.arange(300)[:, None], np.arange(330)))
    assert tools.same_bits(got, reference.attention(*x.qkv, mask=mask))


def test_blocks_of_the_same_function(backend1):
    """Block masks of a function without its elements: with it, results are those of the function alone."""
    x = case(backend1, 300, 330)
    wide = Example("j < 140 || j <= i - 20", lambda b, h, i, j: (j < 140) | (j <= i - 20), kind=MaskMod)
    given = cupyflash.BlockMask.from_function(wide.function, BATCH, HEADS, 300, 330, xp=backend1.xp, elements=False)
    assert given.mask is None and 0 < int(given.full.sum()) < int(given.blocks.sum()) < given.blocks.size
    run(backend1, x, None, wide, block_mask=given)
    mask = wide.function(0, 0, np.arange(300)[:, None], np.arange(330))
    run(backend1, x, mask=backend1.xp.asarray(mask))
    options = {"block_mask": given, "mask_mod": wide.of(backend1)[0]}
    together, alone = (cupyflash.attention(*x.qkv, **more) for more in (options, {"mask": backend1.xp.asarray(mask)}))
    tools.assert_close("out", backend1.host(together), backend1.host(alone), 0.01)


@pytest.mark.parametrize("change", ["softcap", "alibi", "both"])
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3, "seed": 7}])
@pytest.mark.parametrize("score", ["ALiBi", "negative", "steep"])
def test_with_options(backend1, change, dropout, score):
    """A derivative of any sign, and all that comes before and after the function."""
    options = changes(backend1, HEADS)[change] | dropout | {"sink": sinks(backend1, HEADS)}
    run(backend1, case(backend1), SCORES[score], VISIBLE["dilated"], causal=True, **options)


@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, -3e38])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_padding(backend1, value, head_dim):
    """As of a bias: a row that becomes one huge number, and whose result nobody uses, changes no other gradient."""
    x = case(backend1, 70, 130, head_dim=head_dim)
    x.dout[:, 5] = 0
    text = f"if (i == 5) return {value}; return score;"
    run(backend1, x, Example(text, lambda score, b, h, i, j: np.where(i == 5, value, score)), dlse=False)


@pytest.mark.parametrize("score", [None, "negative"])
def test_with_dropout(backend1, score):
    run(backend1, case(backend1), score and SCORES[score], VISIBLE["prefix"], dropout=0.4, seed=5)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("score, visible", [("ALiBi", None), ("relative bias", "documents"), (None, "tree")])
@pytest.mark.parametrize("heads_k", [4, 1])
def test_head_dims(backend16, head_dim, score, visible, heads_k):
    x = case(backend16, head_dim=head_dim, heads_k=heads_k)
    run(backend16, x, score and SCORES[score], visible and VISIBLE[visible])


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1, 1), (1, 300), (63, 65), (64, 128), (65, 127), (200, 17), (300, 600)]
)
@pytest.mark.parametrize("heads_q, heads_k, head_dim", [(4, 4, 64), (4, 1, 128)])
def test_lengths(backend1, seqlen_q, seqlen_k, heads_q, heads_k, head_dim):
    """Places around every edge of a tile, of heads that share a tile too: each is read from an array of them."""
    score = Example(
        "score + a[b, h, i, j]",
        lambda score, b, h, i, j, a: score + a[b, h, i, j],
        {"a": numbers(BATCH, heads_q, seqlen_q, seqlen_k)},
        ("a",),
    )
    x = case(backend1, seqlen_q, seqlen_k, heads_q=heads_q, heads_k=heads_k, head_dim=head_dim)
    for causal in (False, True):
        results = run(backend1, x, score, causal=causal)
        assert results["dscore_mod"]["a"].shape == (BATCH, heads_q, seqlen_q, seqlen_k)


@pytest.mark.parametrize("seqlen", [1, 70, 300, 513])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic(backend1, seqlen, head_dim):
    score = replace(SCORES["ALiBi"], gradients=())
    x = case(backend1, seqlen, seqlen, head_dim=head_dim)
    run(backend1, x, score, causal=True, deterministic=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale(backend1, scale):
    run(backend1, case(backend1), SCORES["steep"], scale=scale)


# ---------------------------------------------------------------------------------------------- what they say


def equal_bits(backend, got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(backend.host(a), backend.host(b), rtol=1e-2, atol=1e-2)


def test_the_order(backend1):
    """After softcap and ALiBi, before the masks: the score is the logit, and none that is hidden comes back."""
    x = case(backend1)
    one = Example("0 * score + 1", lambda score, b, h, i, j: 0 * score + 1)
    out, lse = cupyflash.attention(
        *x.qkv, score_mod=one.of(backend1)[0], causal=True, return_lse=True, **changes(backend1, HEADS)["both"]
    )
    seen = reference.visible(np, SEQLEN_Q, SEQLEN_K, True).sum(axis=1)
    np.testing.assert_allclose(backend1.host(lse), np.broadcast_to(1 + np.log(seen), lse.shape), rtol=1e-6)


def test_rows_that_see_nothing(backend):
    """By a mask or by -inf: out 0, lse -inf or the sink, gradients 0, also where the derivative is not finite."""
    x, rows = case(backend), [0, 5, 69]
    on = ~np.isin(np.arange(SEQLEN_Q), rows)
    masked = Example("on[i]", lambda b, h, i, j, on: on[i] & (j >= 0), {"on": on}, kind=MaskMod)
    logged = Example(
        "log(exp(score) * a[i])",
        lambda score, b, h, i, j, a: np.log(np.exp(score) * a[i]),
        {"a": on.astype(np.float32)},
        ("a",),
    )
    for how in ({"visible": masked}, {"score": logged}):
        for sink in (None, sinks(backend, HEADS)):
            results = run(backend, x, sink=sink, **how)
            lse = backend.host(results["lse"])[:, :, rows]
            assert (lse == (-math.inf if sink is None else backend.host(sink)[:, None])).all()
            assert not backend.host(results["out"])[:, rows].any() and not backend.host(results["dq"])[:, rows].any()
            if "dscore_mod" in results:
                assert not backend.host(results["dscore_mod"]["a"])[rows].any()


def test_other_values_in_the_same_call(backend1):
    """Numbers and arrays are arguments: what is remembered of a call holds none."""
    x = case(backend1)
    for seed in range(3):
        captures = {"slope": abs(numbers(HEADS, seed=seed)), "shift": seed}
        run(backend1, x, replace(SCORES["ALiBi"], captures=captures))


def test_strides(backend1):
    """Views of every kind, without a copy: transposed, backwards, every other, broadcast."""
    x, table = case(backend1), numbers(HEADS, 2 * 24)[:, ::-2].T
    for layout in (table, np.broadcast_to(table[:1], table.shape), np.ascontiguousarray(table)):
        score = replace(SCORES["relative bias"], captures=SCORES["relative bias"].captures | {"table": layout})
        given, expected = score.of(backend1)
        if backend1.name == "cuda":
            whole = backend1.xp.asarray(np.ascontiguousarray(layout.T[:, ::-1]))
            given = ScoreMod(
                score.text, gradients=score.gradients, table=whole[:, ::-1].T, bucket=given.captures["bucket"]
            )
        check(backend1, *x.qkv, x.dout, score_mod=given, expected={"score_mod": expected})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int64", "uint8", "bool"])
def test_dtypes_of_arrays(backend1, dtype):
    values = (abs(numbers(HEADS)) * 3).astype(tools.DTYPES.get(dtype, dtype))
    score = Example("score - a[h] * 0.25", lambda score, b, h, i, j, a: score - a[h] * 0.25, {"a": values})
    run(backend1, case(backend1), score)


def test_numbers(backend1):
    score = Example(
        "yes ? score * (n / 2) + x : 0 * score",
        lambda score, b, h, i, j, yes, n, x: score * (n // 2) + x if yes else 0 * score,
        {"yes": True, "n": np.int64(3), "x": np.float64(0.1)},
    )
    run(backend1, case(backend1), score)


def test_nan(backend1):
    """In one element: of the rows that see it, and of no other."""
    values = np.zeros((SEQLEN_Q, SEQLEN_K), np.float32)
    values[7, 3] = math.nan
    score = Example("score + a[i, j]", lambda score, b, h, i, j, a: score + a[i, j], {"a": values})
    out = backend1.host(cupyflash.attention(*case(backend1).qkv, score_mod=score.of(backend1)[0]))
    assert np.isnan(out[:, 7]).all() and np.isfinite(np.delete(out, 7, axis=1)).all()


@pytest.mark.parametrize("shape", [(4, 0, 2, 3), (0, 4, 2, 3), (3, 3, 0, 3), (3, 3, 2, 0)])
def test_empty(backend1, shape):
    seqlen_q, seqlen_k, batch, heads = shape
    q, k, v = (backend1.normal((batch, n, heads, 16)) for n in (seqlen_q, seqlen_k, seqlen_k))
    score = replace(SCORES["ALiBi"], captures={"slope": numbers(HEADS), "shift": 1}).of(backend1)[0]
    out, lse = cupyflash.attention(q, k, v, return_lse=True, score_mod=score)
    grads = cupyflash.attention_backward(out, q, k, v, out, lse, score_mod=score)
    assert not backend1.host(grads.dscore_mod["slope"]).any()


def test_without_batch(backend1):
    x = case(backend1, batch=1)
    score = SCORES["ALiBi"].of(backend1)[0]
    together = cupyflash.attention(*x.qkv, score_mod=score)
    assert tools.same_bits(cupyflash.attention(*(a[0] for a in x.qkv), score_mod=score), together[0])


def test_in_a_graph(cuda):
    """A captured call replays with the arrays' contents of then."""
    cupy, x = cuda.xp, case(cuda)
    score = SCORES["ALiBi"].of(cuda)[0]
    out = cupy.zeros_like(x.q)
    cupyflash.attention(*x.qkv, out=out, score_mod=score)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupyflash.attention(*x.qkv, out=out, score_mod=score)
        graph = stream.end_capture()
    score.captures["slope"][...] = 0
    cupy.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert tools.same_bits(out, cupyflash.attention(*x.qkv))


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if score.gradients and name != "16 bits"])
def test_gradients_along_a_direction(name):
    """The public functions and the reference against finite differences, by the captured arrays, q, k and v."""
    backend, score = tools.Backend("numpy", "float64"), SCORES[name]
    x = case(backend, head_dim=8)
    wide = {n: a.astype(float) if getattr(a, "dtype", None) == np.float32 else a for n, a in score.captures.items()}
    options = {"mask_mod": VISIBLE["dilated"].of(backend)[0], "sink": sinks(backend, HEADS), "softcap": 3.0}

    def call(module, arrays, captures):
        mod = ScoreMod(score.function, gradients=score.gradients, **captures)
        return mod, *module.attention(*arrays, return_lse=True, score_mod=mod, **options)

    def loss(arrays, captures):
        _, out, lse = call(cupyflash, arrays, captures)
        return (out * x.dout).sum() + (np.where(np.isneginf(lse), 0, lse) * x.dlse).sum()

    for module in (cupyflash, reference):
        mod, out, lse = call(module, x.qkv, wide)
        grads = module.attention_backward(x.dout, *x.qkv, out, lse, dlse=x.dlse, score_mod=mod, **options)
        for seed in range(2):
            rng = np.random.default_rng(seed)
            towards = {n: rng.standard_normal(wide[n].shape) for n in score.gradients}
            arrows = [rng.standard_normal(a.shape) for a in x.qkv]
            above, below = (
                loss(
                    [a + step * arrow for a, arrow in zip(x.qkv, arrows)],
                    wide | {n: wide[n] + step * towards[n] for n in towards},
                )
                for step in (1e-6, -1e-6)
            )
            slope = sum((g * arrow).sum() for g, arrow in zip(grads[:3], arrows))
            slope += sum((grads.dscore_mod[n] * towards[n]).sum() for n in towards)
            np.testing.assert_allclose((above - below) / 2e-6, slope, rtol=2e-6)


FUNCTIONS = {
    "sums": lambda x: (x + 2) - (3 - x) + (x - x * x) + -x + (+x),
    "quotients": lambda x: x / 3 + 2 / (x * x + 1) + x / (x + 5),
    "exp": lambda x: np.exp(x) + np.log(x + 4) + np.sqrt(x + 4) + np.square(x),
    "waves": lambda x: np.sin(x) * np.cos(2 * x) + np.tanh(x),
    "powers": lambda x: (x + 4) ** 3 + 2.0**x + (x + 4) ** x,
    "kinks": lambda x: abs(x) + np.minimum(x, 0.3) + np.maximum(0.3, x) + np.where(x > 0.2, x * x, -x),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_dual(function):
    x = np.random.default_rng(0).uniform(-2, 2, 50)
    value, tangent = dual.score_and_tangent(function, x, (), {})
    np.testing.assert_array_equal(value, function(x))
    np.testing.assert_allclose(tangent, (function(x + 1e-6) - function(x - 1e-6)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_dual_at_kinks():
    x = np.zeros(2)
    for function, right in ((abs, 0), (lambda x: np.minimum(x, 0), 1), (lambda x: np.maximum(0, x), 0)):
        np.testing.assert_array_equal(np.broadcast_to(dual.score_and_tangent(function, x, (), {})[1], 2), right)


@pytest.mark.parametrize("function", [np.arctan, np.cumsum, lambda x: np.add.reduce(x), np.asarray], ids=repr)
def test_a_derivative_that_is_not_known(function):
    with pytest.raises(TypeError, match="score_mod calls .*, whose derivative is not known; allowed: absolute, add"):
        dual.score_and_tangent(function, np.ones(3), (), {})


@pytest.mark.parametrize("read", [lambda a: a[69:], lambda a: a[None], lambda a: a[True], lambda a: a[0, 0]])
def test_reads_that_have_no_gradient(read):
    backend = tools.Backend("numpy", "float32")
    x = case(backend)
    a = numbers(SEQLEN_Q)
    mod = ScoreMod(lambda score, b, h, i, j, a: score + read(a), gradients=("a",), a=a)
    out, lse = cupyflash.attention(*x.qkv, return_lse=True)
    with pytest.raises((TypeError, IndexError)):
        cupyflash.attention_backward(x.dout, *x.qkv, out, lse, score_mod=mod)


# ---------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: ScoreMod(3), TypeError, r"ScoreMod got 3 \(int\); allowed: text of C\+\+"),
        (lambda: MaskMod(None), TypeError, "MaskMod got None"),
        (lambda: ScoreMod(" \n"), ValueError, "text without anything in it"),
        (lambda: ScoreMod("score", score=1), ValueError, "ScoreMod captures 'score'; allowed: names"),
        (lambda: ScoreMod("score", exp=1), ValueError, "captures 'exp'"),
        (lambda: MaskMod("true", template=1), ValueError, "MaskMod captures 'template'"),
        (lambda: ScoreMod("score", _x=1), ValueError, "captures '_x'"),
        (lambda: ScoreMod("score", ä=1), ValueError, "captures 'ä'"),
        (lambda: ScoreMod("score", n=2**31), ValueError, "captures n = 2147483648.*an int of 32 bits"),
        (lambda: ScoreMod("score", n=np.complex64(1)), TypeError, "captures n = .*an array, an int"),
        (
            lambda: ScoreMod("score", **{f"a{i}": i for i in range(9)}),
            ValueError,
            "captures 9 values; allowed: at most 8",
        ),
        (lambda: ScoreMod("score", a=1.0, gradients=("a",)), ValueError, "gradients has 'a'.*here none"),
        (lambda: ScoreMod("score", gradients="a"), TypeError, "gradients is 'a'.*allowed: a tuple"),
    ],
)
def test_wrong_functions(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"score_mod": abs}, TypeError, "score_mod is .*allowed: None or cupyflash.ScoreMod"),
        ({"mask_mod": ScoreMod("score")}, TypeError, "mask_mod is .*allowed: None or cupyflash.MaskMod"),
        ({"score_mod": ScoreMod("score")}, TypeError, r"score_mod has text of C\+\+; allowed on the host"),
        ({"mask_mod": MaskMod("true")}, TypeError, r"mask_mod has text of C\+\+; allowed on the host"),
        (
            {"score_mod": ScoreMod(max, a=np.zeros((), "f4"))},
            ValueError,
            r"score_mod.a has shape \(\); allowed: 1 to 4 axes",
        ),
        ({"score_mod": ScoreMod(max, a=np.zeros((1,) * 5, "f4"))}, ValueError, "1 to 4 axes"),
        ({"mask_mod": MaskMod(max, a=np.zeros(2))}, TypeError, "mask_mod.a has dtype float64; allowed: float16"),
        ({"mask_mod": MaskMod(max, a=np.zeros(2, "c8"))}, TypeError, "mask_mod.a has dtype complex64"),
        ({"mask_mod": MaskMod(max, a=[1, 2])}, TypeError, "mask_mod.a is a list; allowed: arrays"),
        (
            {
                "score_mod": ScoreMod(max, **dict.fromkeys("acdef", 1)),
                "mask_mod": MaskMod(max, **dict.fromkeys("acde", 1)),
            },
            ValueError,
            "score_mod and mask_mod capture 9 values; allowed: at most 8 together",
        ),
    ],
)
def test_wrong_options(options, kind, message):
    q = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(kind, match=message):
        cupyflash.attention(q, q, q, **options)


def test_a_gradient_of_integers():
    q = np.zeros((1, 2, 1, 4), np.float32)
    mod = ScoreMod(lambda score, b, h, i, j, a: score, a=np.zeros(2, np.int32), gradients=("a",))
    out, lse = cupyflash.attention(q, q, q, score_mod=mod, return_lse=True)
    with pytest.raises(TypeError, match="score_mod.a has dtype int32; allowed with a gradient: floating-point"):
        cupyflash.attention_backward(q, q, q, q, out, lse, score_mod=mod)


def typed(score=None, visible=None, backward=False, dtype="bfloat16"):
    """What a call of CuPy arrays makes of functions with NumPy arrays."""
    arrays = {name: x for mod in (score, visible) if mod is not None for name, x in mod.arrays.items()}
    return checks._typed(True, checks.mods(score, visible, backward), dtype, arrays)


@pytest.mark.parametrize(
    "text, offset",
    [
        ("score - float(i - j)", "(-_offset)"),
        ("i >= j && i != 3 ? float( j -i ) : score", "_offset "),
        ("score * afloat(i - j)", None),
        ("score * float(i - j * 2)", None),
        ("score + float(i - i)", None),
        ("(i += 3, score + float(i - j))", None),
        ("(--j, score + float(i - j))", None),
        ("int n = 4; { int i = n; return score + float(i - j); }", None),
    ],
)
def test_offset(text, offset):
    """The difference that a kernel has at hand stands for the same one only where i and j cannot have changed."""
    body = ScoreMod(text).mod.cpp().partition('"score_mod"\n')[2]
    assert (offset or text) in body and ("_offset" in body) == bool(offset)


def test_a_python_function_on_the_gpu():
    with pytest.raises(TypeError, match=r"score_mod has a Python function; allowed on the GPU: text of C\+\+"):
        typed(ScoreMod(max))


def test_on_another_device(cuda):
    x = case(cuda)
    with pytest.raises(TypeError, match="score_mod.slope is in NumPy on the host"):
        cupyflash.attention(*x.qkv, score_mod=ScoreMod("score - slope[h]", slope=np.ones(HEADS, np.float32)))


def test_deterministic_gradients_on_the_gpu(cuda):
    x, mod = case(cuda), SCORES["ALiBi"].of(cuda)[0]
    out, lse = cupyflash.attention(*x.qkv, score_mod=mod, return_lse=True)
    with pytest.raises(NotImplementedError, match="deterministic is True and score_mod has gradients"):
        cupyflash.attention_backward(x.dout, *x.qkv, out, lse, score_mod=mod, deterministic=True)


# ---------------------------------------------------------------------------------------------- what is compiled


def variant(given, head_dim=64, **options):
    problem = Problem("bfloat16", 1, 70, 70, 2, 2, head_dim, head_dim, 1.0, mods=given, **options)
    return choose.forward(problem, 16, False, choose.SHARED_LIMIT[80], 80)


def test_indices_become_calls():
    """Those of captured arrays, and no character moves."""
    text = "a[b, c[i]] + x[0] * d [ a[1, (2)] ] // a[i]"
    assert mods._called(text, {"a", "d"}) == "a(b, c[i]) + x[0] * d ( a(1, (2)) ) // a(i)"


@pytest.mark.parametrize(
    "text, got",
    [
        ("0.5 * a + 1. - .25", "0.5f * a + 1.f - .25f"),
        ("1e-3 + 2.5E+7", "1e-3f + 2.5E+7f"),
        ("0.5f + 3 + a1.x + 0x1e5 + 1", "0.5f + 3 + a1.x + 0x1e5 + 1"),
    ],
)
def test_numbers_are_float(text, got):
    assert got in typed(ScoreMod(text)).score.cpp()


def test_only_types_are_compiled():
    def source(**captures):
        return compiler.code(variant(typed(ScoreMod("score + a[h] * n", **captures))))

    one = source(a=numbers(4), n=1)
    assert one == source(a=numbers(9)[::2], n=-7)
    assert one != source(a=numbers(4), n=1.0) and one != source(a=numbers(4, dtype=np.float16), n=1)
    forward, backward = (
        typed(ScoreMod("score + a[h]", a=numbers(4), gradients=("a",)), backward=b) for b in (False, True)
    )
    assert forward == typed(ScoreMod("score + a[h]", a=numbers(4))) != backward


@pytest.mark.parametrize(
    "text, reads",
    [
        ("score - a[h]", False),
        ("score - a[b * n]", False),
        ("score - a[i]", True),
        ("a[h] + a[j + 1]", True),
        ("i", False),
    ],
)
def test_which_read_for_every_score(text, reads):
    assert typed(ScoreMod(text, a=numbers(4), n=2)).reads == reads


@needs_nvrtc
@pytest.mark.parametrize(
    "mod, line, message",
    [
        (ScoreMod("score +\n slop[h] +\n 1", slope=numbers(4)), 2, r'identifier "slop" is undefined'),
        (ScoreMod("score + slope[h, i]", slope=numbers(4)), 1, "an index for each axis"),
        (ScoreMod("if (j > 3)\n  return score;"), 2, "a path ends without return"),
        (ScoreMod("score +"), 1, "expected an expression"),
        (MaskMod("doc[i] == dock", doc=np.arange(3)), 1, r'identifier "dock" is undefined'),
    ],
)
def test_errors_show_the_line(mod, line, message):
    given = typed(**{"score" if isinstance(mod, ScoreMod) else "visible": mod})
    with pytest.raises(ModError) as error:
        compiler.compile_offline(variant(given), "sm_80")
    said = str(error.value)
    assert f"{mod.argument} does not compile for sm_80" in said and re.search(message, said)
    assert re.search(rf"^> +{line} \| {re.escape(mod.function.splitlines()[line - 1])}$", said, re.M)
    assert isinstance(error.value, ValueError)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_the_language(arch):
    """Everything that the docstring names compiles for both numbers."""
    text = """
        auto x = score;
        x += 1; x -= y; x *= 2; x /= 3.5;
        if (x > y || x <= 0 || x == 2 || x != 3 || 1 < x || 2 >= x) x = -x;
        auto z = sin(x) + cos(x) * tanh(x) + pow(2.0, x) + pow(x, x) + where(yes, x, 0) + where(yes, 1, a[h, 0]);
        z = z + min(x, y) + max(a[h, n], x) + min(i, j) + max(1, n) + abs(i - j) + abs(k[i]) + abs(a[b, 1] - 1.5);
        return seqlen_q > seqlen_k ? z : exp(z) + log(abs(x)) + sqrt(y) + (half[h] ? 1 : byte[h]) + on[i] - inf;
    """
    arrays = {"a": numbers(4, 4), "k": np.arange(4), "half": numbers(4, dtype=np.float16)}
    arrays |= {"byte": np.zeros(4, np.uint8), "on": np.zeros(4, bool)}
    given = typed(ScoreMod(text, y=2.5, n=3, yes=True, **arrays), dtype="float16")
    kernel = """
        using namespace cupyflash::mod;
        __global__ void both(UserMods mods, float* x) {
          const Element at = {1, 2, 3, 4, 5, 6};
          const Dual y = mods.score(Dual{x[0], 1.f}, at);
          x[0] = mods.score(x[0], at), x[1] = y.value, x[2] = y.tangent;
        }"""
    tools.nvrtc_compile(compiler.source("any/mods.cuh") + given.cpp() + kernel, (), arch)


def portable(given, head_dim, limit, **options):
    problem = Problem("bfloat16", 1, 2048, 2048, 4, 2, head_dim, head_dim, 1.0, mods=given, **options)
    yield choose.forward(problem, 16, False, limit, 80)
    yield (main := choose.backward(problem, 16, False, limit, 80))
    before = choose.before_backward(main, False, 16)
    if problem.bias:
        yield choose.bias_gradient(problem, before, (1, 4, 2048, 2048), 16, limit, 832)
    if given.tracked:
        yield choose.mod_gradient(problem, before, 16, 832, limit)


def hopper(given, head_dim, **options):
    for seqlen_k in (100, 2048):
        problem = Problem("bfloat16", 1, 2048, seqlen_k, 4, 2, head_dim, head_dim, 1.0, mods=given, **options)
        if not choose.forward_elsewhere(problem):
            yield (main := choose.hopper_forward(problem, 16, False))
            if choose.steady(replace(problem, batch=64)):
                yield choose.steadily(main)[0]
        if choose.backward_elsewhere(problem):
            continue
        if choose.split(problem):
            yield from choose.hopper_split_backward(problem, 16)
        else:
            yield from (choose.hopper_backward(problem, access, False) for access in (16, 2))


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("text, block_k", [("score", 128), ("score + a[i]", 64), (None, 128)])
def test_tiles_beside_a_block_mask(head_dim, text, block_k):
    """They divide those of the mask; a MaskMod alone keeps the wide ones."""
    score = text and ScoreMod(text, **({"a": numbers(4)} if "a[" in text else {}))
    given = typed(score, None if score else MaskMod("a[i] > 0", a=numbers(4)))
    problem = Problem("bfloat16", 1, 2048, 2048, 4, 2, head_dim, head_dim, 1.0, mods=given, blocks=True)
    if not choose.forward_elsewhere(problem):
        spec = choose.hopper_forward(problem, 16, False).spec
        assert choose.divides_mask_tile(spec.block_q, spec.block_k)
        assert spec.block_k == (block_k if head_dim <= 128 else 64)


@needs_nvrtc
@pytest.mark.parametrize(
    "head_dim, score, visible",
    [
        (64, "ALiBi", None),
        (128, "relative bias", "documents"),
        (256, "ALiBi", None),
        (128, None, "documents"),
        (128, None, "prefix"),
    ],
)
def test_no_spills(head_dim, score, visible):
    backend = tools.Backend("numpy", "float32")
    texts = [
        replace(e, function=e.text).of(backend)[0] if e else None for e in (SCORES.get(score), VISIBLE.get(visible))
    ]
    given = typed(*texts, backward=True)
    jobs = [(one, "sm_80") for one in portable(given, head_dim, choose.SHARED_LIMIT[80])]
    mixed = {"bias": "float32", "mask": True, "blocks": True}
    jobs += [(one, "sm_80") for one in portable(given, head_dim, choose.SHARED_LIMIT[80], **mixed)]
    for options in ({}, {"blocks": True}):
        jobs += [(one, "sm_90") for one in dict.fromkeys(hopper(given, head_dim, **options))]
    if score is None:  # beside a function that reads as much as a table, the forward spills
        jobs += [(one, "sm_80") for one in portable(given, head_dim, choose.SHARED_LIMIT[80], blocks=True)]
    with ThreadPoolExecutor(2) as pool:
        for report in pool.map(lambda job: compiler.compile_offline(*job), jobs):
            assert report.spill_bytes == 0 and not report.remarks, report.variant.expression


@needs_nvrtc
def test_struct_twin():
    """The functions stand where the words are written, and each captured value at its slot."""
    score = ScoreMod("score + a[b, h, i] + n * c[h]", a=numbers(2, 2, 2), n=2, c=numbers(2), gradients=("c", "a"))
    given = typed(score, MaskMod("yes && on[i, j]", yes=True, on=np.zeros((2, 2), bool)), backward=True)
    names = ["s0", "s1", "s2", "m0", "m1", "g0", "g1"]
    mod = "cupyflash::mod::UserMods"
    offset = "__INTADDR__(&(({})0)->{})".format
    lines = [f"static_assert(sizeof({mod}) == {8 * given.words});"]
    lines += [
        f"static_assert({offset(mod + '*', n)} == {8 * slot});" for n, slot in zip(names, given.slots, strict=True)
    ]
    for header, params, dtype in (
        ("sm80/forward.cuh", "ForwardParams", structs.FORWARD_PARAMS),
        ("sm80/backward.cuh", "BackwardParams", structs.BACKWARD_PARAMS),
        ("sm90/forward.cuh", "HopperForwardParams", structs.HOPPER_FORWARD_PARAMS),
        ("sm90/backward.cuh", "HopperBackwardParams", structs.HOPPER_BACKWARD_PARAMS),
    ):
        whole, name = structs.modified(dtype, given.words), f"Whole{params}"
        own = [f"using {name} = cupyflash::Modified<cupyflash::{params}, {mod}>;"]
        own += [f"static_assert(sizeof({name}) == {whole.itemsize});"]
        own += [f"static_assert({offset(name + '*', 'mods')} == {whole.fields['mods'][1]});"]
        arch = "sm_90a" if header.startswith("sm90") else "sm_80"
        tools.nvrtc_compile(compiler.source(header) + given.cpp() + "\n".join(lines + own), (), arch)
        with pytest.raises(RuntimeError, match="static assertion failed"):
            wrong = own[-1].replace(str(whole.fields["mods"][1]), str(whole.fields["mods"][1] + 64))
            tools.nvrtc_compile(compiler.source(header) + given.cpp() + own[0] + wrong, (), arch)


def test_words():
    """Of numbers, and strides in elements."""
    score = ScoreMod("score", a=numbers(3, 4)[::2, ::-1], n=-2, x=1.5, yes=True, one=numbers(1, 5))
    given = typed(score)
    params = structs.zeros(structs.FORWARD_PARAMS, given, mods.Given(score, None, score.arrays).captured())
    halves = params["mods"].view(np.int32)[0]
    a, n, x, yes, one = given.slots
    assert halves[2 * a + 2 : 2 * a + 4].tolist() == [8, -1] and halves[2 * one + 2 : 2 * one + 4].tolist() == [0, 1]
    captured = mods.Given(score, None, score.arrays).captured()
    assert captured[1:4] == [2**32 - 2, int(np.float32(1.5).view(np.uint32)), 1]
