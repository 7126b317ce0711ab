"""float32 and float64 on the GPU: how exact they are, shapes and layouts, and what is chosen and refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tools
from tools import LAYOUTS, check, inputs, laid_out, same_bits

import cupyflash
from cupyflash import checks, choose, precise, reference
from cupyflash.problem import Problem

LIMITS = sorted({limit for capability, limit in choose.SHARED_LIMIT.items() if capability >= 80})
BY_TABLE = {"forward": precise.FORWARD, "keys": precise.KEYS, "queries": precise.QUERIES}


def problem(dtype, head_dim, head_dim_v=None, **more):
    return Problem(dtype, 1, 128, 128, 1, 1, head_dim, head_dim_v or head_dim, 1.0, **more)


# --- What is chosen


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", precise.ITEM)
def test_every_head_dim_fits(dtype, limit):
    """Every GPU takes every size, and tiles are cut as the kernels cut them."""
    unit = 16 // precise.ITEM[dtype]
    multiples = range(16, 257, 16)
    for d, dv in {*((d, d) for d in range(1, 257)), *itertools.product(multiples, multiples)}:
        for variant in (
            precise.forward(problem(dtype, d, dv), 16, limit),
            *precise.backward(problem(dtype, d, dv), 16, limit)[1:],
        ):
            spec, row_tiles = variant.spec, getattr(variant.spec, "row_tiles", 1)
            assert spec.head_dim >= d and spec.head_dim_v >= dv and spec.item == precise.ITEM[dtype]
            assert spec.shared_bytes * spec.blocks_per_sm <= limit
            assert 64 <= spec.threads <= 1024, "a copy by words gives each thread of a row of 256 bytes its own column"
            rows = spec.block_k if variant.template == "precise_keys" else spec.block_q
            assert rows * spec.parts == 16 * row_tiles * spec.warps
            assert spec.block_q <= spec.threads, "each thread fetches the statistics of one row at most"
            for width in (spec.head_dim, spec.head_dim_v):
                assert width * spec.item % 128 == 0 and width % (8 * unit * spec.parts) == 0
            for depth in (spec.block_q, spec.block_k):
                assert depth % (4 * unit) == 0


@pytest.mark.parametrize("name", BY_TABLE)
@pytest.mark.parametrize("dtype", precise.ITEM)
def test_every_row_is_chosen(dtype, name):
    """By some GPU."""
    found = set()
    for limit, head_dim in itertools.product(LIMITS, range(32, 257, 32)):
        one = problem(dtype, head_dim)
        forward, (_, keys, queries) = precise.forward(one, 16, limit), precise.backward(one, 16, limit)
        spec = {"forward": forward, "keys": keys, "queries": queries}[name].spec
        width = min(n for n in BY_TABLE[name][dtype] if n >= head_dim)
        rest = (spec.row_tiles, spec.parts) if name == "forward" else (spec.parts, spec.stages)
        found.add((width, (spec.block_q, spec.block_k, *rest, spec.blocks_per_sm)))
    assert found == {(width, row) for width, rows in BY_TABLE[name][dtype].items() for row in rows}


def test_products():
    for precision, products in ((None, 3), ("tf32", 1)):
        one = problem("float32", 64, precision=precision)
        variants = precise.forward(one, 16, LIMITS[-1]), *precise.backward(one, 16, LIMITS[-1])[1:]
        assert {variant.spec.products for variant in variants} == {products}
    assert precise.forward(problem("float64", 64), 16, LIMITS[-1]).spec.products == 1


@pytest.mark.parametrize(
    "expected, change",
    [
        (True, {}),
        (True, {"head_dim": 128, "head_dim_v": 1, "right": 0}),
        (False, {"dtype": "float64"}),
        (False, {"dtype": "bfloat16"}),
        (False, {"precision": "tf32"}),
        (False, {"precision": "tf32", "seqlen_q": 2 * precise.HALVES_LENGTH}),
        (True, {"precision": "tf32"} | dict.fromkeys(("seqlen_q", "seqlen_k"), 2 * precise.HALVES_LENGTH)),
        (False, {"head_dim": 129}),
        (False, {"head_dim_v": 129}),
        (False, {"seqlen_q": precise.HALVES_LENGTH - 1}),
        (False, {"seqlen_k": precise.HALVES_LENGTH - 1}),
    ],
    ids=str,
)
def test_what_is_split(expected, change):
    n = precise.HALVES_LENGTH
    assert precise.by_halves(replace(Problem("float32", 1, n, n, 2, 1, 64, 64, 1.0), **change)) == expected


def test_every_head_dim_fits_as_halves():
    for d, dv in itertools.product(range(1, 129), repeat=2):
        spec = precise.hopper_forward(problem("float32", d, dv), 16).spec
        assert d <= spec.head_dim <= precise.padded(d) and spec.head_dim % 16 == 0
        assert dv <= spec.head_dim_v <= precise.padded(dv) and spec.head_dim_v in precise.HOPPER_DIMS_V
        assert spec.shared_bytes + 1024 <= choose.SHARED_LIMIT[90], "barriers and what the system takes"
        assert spec.access == 8
        for spec in (variant.spec for variant in precise.hopper_backward(problem("float32", d, dv), 16)):
            for used, width in ((spec.head_dim, d), (spec.head_dim_v, dv)):
                assert width <= used <= precise.padded(width) and used % 16 == 0
            assert spec.shared_bytes + 2048 <= choose.SHARED_LIMIT[90], "barriers, lse and delta too"
            assert spec.access == 8


# --- What is refused


BLOCKS = cupyflash.BlockMask(np.ones((1, 1), bool))


def wide(dtype):
    return [np.ones((2, 5, 4, 8), dtype) for _ in range(3)]


@pytest.mark.parametrize(
    "precision, error", [("high", ValueError), ("TF32", ValueError), (1, TypeError), (True, TypeError)]
)
def test_precisions_that_are_none(precision, error):
    q, k, v = wide("float32")
    for call in (cupyflash.attention, lambda *x, **o: cupyflash.attention_backward(x[0], *x, x[0], x[0], **o)):
        with pytest.raises(error, match=f"precision is {precision!r}.*; allowed: None, 'highest', .*'tf32'"):
            call(q, k, v, precision=precision)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_tf32_of_other_dtypes(dtype):
    q, k, v = wide(dtype)
    with pytest.raises(ValueError, match=f"precision is 'tf32' and q has dtype {dtype}; allowed: None, 'highest'"):
        cupyflash.attention(q, k, v, precision="tf32")
    assert tools.same_bits(cupyflash.attention(q, k, v, precision="highest"), cupyflash.attention(q, k, v))


def test_the_host_always_computes_in_float32():
    x = inputs(tools.Backend("numpy", "float32"), 30)
    expected, lse = cupyflash.attention(*x.qkv, return_lse=True)
    assert tools.same_bits(cupyflash.attention(*x.qkv, precision="tf32"), expected)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, expected, lse)
    again = cupyflash.attention_backward(x.dout, *x.qkv, expected, lse, precision="tf32")
    assert all(map(tools.same_bits, gradients[:3], again[:3]))


@pytest.mark.parametrize("dtype", precise.ITEM)
@pytest.mark.parametrize("name", ["softcap", "alibi_slopes", "sink", "dropout", "block_mask", "score_mod", "mask_mod"])
def test_options_of_narrow_dtypes(name, dtype):
    """As if the arrays were CuPy's."""
    q, k, v = wide(dtype)
    kind = {"score_mod": cupyflash.ScoreMod, "mask_mod": cupyflash.MaskMod}.get(name)
    functions = {"score_mod": None, "mask_mod": None} | ({name: kind(lambda *places: places[-1])} if kind else {})
    given = {"softcap": {"softcap": 2.0}, "dropout": {"dropout": 0.5}, "block_mask": {"block_mask": BLOCKS.layout}}
    options = checks.options(False, None, None, mods=checks.mods(**functions), **given.get(name, {}))
    arrays = {name: np.ones(4, dtype)} if name in ("alibi_slopes", "sink") else {}
    with pytest.raises(
        NotImplementedError, match=f"{name} is given and q has dtype {dtype}; .* GPU: float16, bfloat16"
    ):
        checks.forward(True, options, q=q, k=k, v=v, **arrays)
    assert checks.forward(False, options, q=q, k=k, v=v, **arrays).dtype == dtype


# --- How exact they are


def test_float32_is_not_rounded(precise):
    """triton-lang/triton#1671: the size of error that the reporter asked for; 8e-15 of it in float64."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (precise.array(rng.standard_normal((1, 128, 1, 32))) for _ in range(4))
    results = check(precise, q, k, v, dout, causal=True)
    right = tools.expectation(precise, q, k, v, dout, causal=True)
    for name, most in (("out", 2e-6), ("dq", 1e-5), ("dk", 1e-5), ("dv", 1e-5)):
        tools.assert_close(name, precise.host(results[name]), right[name][0], most * precise.eps / 1.2e-7)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [1, 3])
def test_long(precise, head_dim, factor):
    """Sums of 4096 terms: tensor cores that cut them off would drift to zero.

    Halves are summed in them over one tile: 8 products, each of which cuts off less than a unit.
    """
    x = inputs(precise, 4096, batch=1, heads_q=1, head_dim=head_dim, factor=factor)
    results = check(precise, *x.qkv, x.dout, x.dlse)
    right = tools.expectation(precise, *x.qkv, x.dout, x.dlse)
    cut_off = 8 * precise.eps if precise.splits and precise.path == "sm90" else 0
    for name in ("out", "dv"):
        error = precise.host(results[name]) - right[name][0]
        # 11 times, or 256 products, where sums go on in tensor cores
        assert abs(error.mean()) < 2 * error.std() + cut_off * abs(right[name][0]).mean(), f"{name} drifts"


def test_weights_down_to_none(precise):
    """From 1 to those that no number is small enough for: e^-760."""
    x = inputs(precise, 96, heads_q=1, batch=1)
    q, k = 0 * x.q, 0 * x.k
    q[..., 0], k[0, :, 0, 0] = 1, precise.array(-np.linspace(0, 760, 96))
    check(precise, q, k, x.v, x.dout, causal=True, scale=1.0)


def test_tf32(precise):
    """One product: the error is that of factors with 11 bits, as float16 has, and no longer that of float32.

    On Hopper three products of halves are faster.
    """
    if precise.dtype_name != "float32":
        pytest.skip("of float32 alone")
    x = inputs(precise, 300, 400, heads_q=4, heads_k=2, head_dim=128)
    exact = tools.expectation(precise, *x.qkv, x.dout, causal=True)
    with np.errstate(all="ignore"):
        arrays = [precise.host(array) for array in (*x.qkv, x.dout)]
    rough = tools.yardstick(tools.DTYPES["float16"], *arrays, causal=True)
    out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True, precision="tf32")
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True, precision="tf32")
    results = {"out": out} | tools.named(gradients)
    for name, result in results.items():
        error = np.abs(precise.host(result) - exact[name][0]).max()
        of_factors = np.abs(exact[name][0]).max() * 2.0**-11  # those of the scores, which no float16 rounds
        assert (error <= exact[name][1]) == (precise.path == "sm90"), name
        assert error <= rough[name][1] + 16 * of_factors, name


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 2), "scale": -0.7}], ids=str)
def test_finite_differences(precise, options):
    """Of a loss of out and lse, in float64: the gradients are those of the very forward that runs."""
    if precise.dtype_name != "float64":
        pytest.skip("differences of float32 are too coarse")
    x = inputs(precise, 9, 11, heads_q=4, heads_k=2, head_dim=8, head_dim_v=5, batch=1)
    arrays = dict(zip("qkv", x.qkv))

    def loss():
        out, lse = cupyflash.attention(*arrays.values(), return_lse=True, **options)
        return float((out * x.dout).sum() + (lse * x.dlse).sum())

    out, lse = cupyflash.attention(*arrays.values(), return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *arrays.values(), out, lse, dlse=x.dlse, **options)
    step, rng = 2.0**-17, np.random.default_rng(0)
    for name, gradient in zip("qkv", gradients):
        original = arrays[name]
        for seed in range(3):
            way = precise.array(rng.standard_normal(original.shape))
            losses = []
            for sign in (-1, 1):
                arrays[name] = original + sign * step * way
                losses.append(loss())
            arrays[name] = original
            slope, expected = (losses[1] - losses[0]) / (2 * step), float((gradient * way).sum())
            assert abs(slope - expected) <= 1e-7 * max(1, abs(expected)), (name, seed)


# --- Numbers as two float16


def by_both(halves, monkeypatch, call):
    """What `call` gives by Hopper's kernels of halves, and by the portable ones."""
    results = []
    for length in (1, 1 << 30):
        monkeypatch.setattr(precise, "HALVES_LENGTH", length)
        halves.module._plans.clear()
        results.append(call())
    return results


def scaled_rows(which, factor):
    """Of q, k, v or dout: some rows times `factor`, which may be another number."""

    def change(arrays):
        arrays[which] = arrays[which].copy()
        arrays[which][0, 3:200:7] *= np.float32(factor)
        return arrays

    return change


def scaled_column(which, factor):
    """One of q, k, v or dout, of all heads."""

    def change(arrays):
        arrays[which] = arrays[which].copy()
        arrays[which][..., 5] *= np.float32(factor)
        return arrays

    return change


def times(*factors):
    return lambda arrays: [x * np.float32(factor) for x, factor in zip(arrays, factors)]


def sink(arrays):
    """The first key has nearly all of the weight, and a value as small as what the others make together."""
    q, k, v, dout = (x.copy() for x in arrays)
    q[..., 0], k[..., 0] = 8, 0
    k[:, 0] = 0
    k[:, 0, :, 0], v[:, 0] = 17, v[:, 0] * np.float32(2.0**-14)
    return q, k, v, dout


NAMES = ("q", "k", "v", "dout")
SPLIT = {
    "normal": times(1, 1, 1, 1),
    "small": times(1e-25, 1e-25, 1e-12, 1e-12),
    "large": times(1e15, 1e-15, 1e20, 1),
    "zeros": times(1, 0, 1, 1),
    "sink": sink,
    **{f"{name} times {n}": scaled_rows(i, n) for i, name in enumerate(NAMES) for n in (0, 2.0**-12)},
    # Of q and k less: an lse of 30000 has 9 bits behind the point, and so has each weight of a backward that reads it.
    **{f"{name} times {n}": scaled_rows(i, n) for i, (name, n) in enumerate(zip(NAMES, (16, 16, 4096, 4096)))},
    **{f"a column of {name} times {n}": scaled_column(i, n) for i, name in enumerate(NAMES) for n in (0, 2.0**-12)},
}
TOO_WIDE = {
    f"{name} times {n}": scaled_rows(i, n)
    for i, name in enumerate(NAMES)
    for n in (2.0**-24, 2.0**24, 1e-36, np.nan, np.inf, -np.inf)
}
TOO_WIDE |= {f"a column of {name}": scaled_column(i, 2.0**-24) for i, name in enumerate(NAMES)}
OF_FORWARD = [name for name in TOO_WIDE if "dout" not in name]
TOO_WIDE |= {"v and dout small": times(1, 1, 1e-20, 1e-20), "v and dout large": times(1, 1, 1e15, 1e15)}


@pytest.mark.parametrize("change", SPLIT.values(), ids=SPLIT)
def test_numbers_that_split(halves, monkeypatch, change):
    x = inputs(halves, 300, 400, heads_q=4, heads_k=2)
    q, k, v, dout = change([*x.qkv, x.dout])
    (out, lse), (portable, _) = by_both(
        halves, monkeypatch, lambda: cupyflash.attention(q, k, v, causal=True, return_lse=True)
    )
    assert not same_bits(out, portable), "not computed as halves"
    gradients, portable = by_both(
        halves, monkeypatch, lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    )
    assert not same_bits(gradients.dv, portable.dv), "not computed as halves"
    halves.activate(monkeypatch)
    check(halves, q, k, v, dout, causal=True)


@pytest.mark.parametrize("name", TOO_WIDE)
def test_numbers_that_do_not_split(halves, monkeypatch, name):
    """The portable kernels run instead: nothing that two float16 lack is lost, NaN and inf stay where they belong."""
    x = inputs(halves, 300, 400, heads_q=4, heads_k=2)
    q, k, v, dout = TOO_WIDE[name]([*x.qkv, x.dout])
    by_halves, portable = by_both(halves, monkeypatch, lambda: cupyflash.attention(q, k, v, return_lse=True))
    assert name not in OF_FORWARD or all(map(same_bits, by_halves, portable))
    by_halves, portable = by_both(
        halves, monkeypatch, lambda: cupyflash.attention_backward(dout, q, k, v, *portable, dlse=x.dlse)
    )
    assert all(map(same_bits, by_halves[:3], portable[:3]))


def test_keys_of_small_weights(halves, monkeypatch):
    """Their gradients have as many digits as those of others."""
    x = inputs(halves, 300, 400)
    q, k, v, dout = sink([*x.qkv, x.dout])
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    results = by_both(halves, monkeypatch, lambda: cupyflash.attention_backward(dout, q, k, v, out, lse))
    wide = [*map(halves.host, (q, k, v))]
    right = reference.attention_backward(halves.host(dout), *wide, *reference.attention(*wide, return_lse=True))
    for name in ("dk", "dv"):
        exact = getattr(right, name)
        of_halves, portable = (
            np.median(abs(halves.host(getattr(result, name)) - exact).max(axis=-1) / abs(exact).max(axis=-1))
            for result in results
        )
        assert of_halves <= 4 * portable, name


def test_graph_of_halves(halves):
    """Each replay looks anew at how large the numbers are."""
    cupy, x = halves.xp, inputs(halves, 300, 400)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        original = x.k.copy()
        cupyflash.attention(*x.qkv)
        stream.begin_capture()
        out = cupyflash.attention(*x.qkv)
        graph = stream.end_capture()
        for factor in (1, 2.0**12, np.nan, 1):
            x.k[...] = original
            x.k[0, 7] *= np.float32(factor)
            graph.launch(stream)
            stream.synchronize()
            assert same_bits(out.copy(), cupyflash.attention(*x.qkv))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_more_tiles_than_multiprocessors(halves, options, head_dim):
    """Blocks that go from tile to tile."""
    x = inputs(halves, 600, 700, heads_q=32, heads_k=8, head_dim=head_dim)
    check(halves, *x.qkv, x.dout, **options)


# --- Shapes and layouts


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 128), (192, 128), (128, 64), (40, 72), (1, 256), (256, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_value_head_dim(precise, head_dim, head_dim_v, causal):
    x = inputs(precise, 150, 165, heads_q=4, heads_k=2, batch=1, head_dim=head_dim, head_dim_v=head_dim_v)
    check(precise, *x.qkv, x.dout, x.dlse, causal=causal)


@pytest.mark.parametrize("first", range(1, 257, 32))
def test_head_dims(precise, first):
    """NaN stands in memory next to the rows."""
    for head_dim in range(first, first + 32, 5):
        seqlen_q, seqlen_k = (min(n, 203) for n in tools.LENGTH_PAIRS[head_dim % len(tools.LENGTH_PAIRS)])
        x = inputs(precise, seqlen_q, seqlen_k, batch=1, head_dim=head_dim, seed=head_dim)
        arrays = [laid_out(precise, array, tools.Layout(padding=head_dim % 3)) for array in (*x.qkv, x.dout)]
        check(precise, *arrays, causal=head_dim % 2 == 0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(precise, layout):
    x = inputs(precise, 70, 65, heads_q=4, heads_k=2)
    q, k, v, dout = (laid_out(precise, array, layout) for array in (*x.qkv, x.dout))
    check(precise, q, k, v, dout, x.dlse, causal=True)


@pytest.mark.parametrize("heads_q, heads_k", [(5, 1), (6, 3), (28, 4)])
def test_groups_of_heads(precise, heads_q, heads_k):
    x = inputs(precise, 33, 40, heads_q=heads_q, heads_k=heads_k)
    check(precise, *x.qkv, x.dout, x.dlse, window=(7, 2))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_repeated(precise, options, head_dim):
    """Whether it is asked for or not, the same call gives the same bits."""
    x = inputs(precise, 600, heads_q=4, heads_k=2, head_dim=head_dim)
    first = None
    for deterministic in (False, True) * 5:
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        gradients = cupyflash.attention_backward(
            x.dout, *x.qkv, out, lse, dlse=x.dlse, deterministic=deterministic, **options
        )
        results = (out, lse, *gradients[:3])
        first = first or results
        assert all(map(tools.same_bits, results, first))
        precise.poison()
