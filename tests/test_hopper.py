"""Hopper's own path: which calls take it, what tells its copy engine the layout, and that both paths agree."""

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import choose, compiler, structs, tensor_map

hopper = pytest.mark.skipif("sm90" not in tools.CUDA_PATHS, reason="needs a Hopper GPU")
ADDRESS_WORD = 0


def array(shape=(2, 5, 3, 64), steps=None, pointer=1 << 20, itemsize=2):
    """Something with the address and strides of a CuPy array."""
    steps = steps or (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    strides = tuple(itemsize * step for step in steps)
    return SimpleNamespace(data=SimpleNamespace(ptr=pointer), shape=shape, strides=strides, itemsize=itemsize)


# --- Maps, without a driver


@pytest.mark.parametrize(
    "expected, x",
    [
        (True, array()),
        (True, array((2, 5, 3, 40))),
        (True, array((2, 5, 3, 37), (3000, 120, 40, 1))),  # rows that start at multiples of 16 bytes
        (True, array(steps=(64, 128, 640, 1))),  # in any order
        (True, array(pointer=16)),
        (False, array(pointer=8)),
        (False, array(pointer=2)),
        (False, array((2, 5, 3, 36))),
        (False, array((2, 5, 3, 37))),
        (False, array(steps=(960, 192, 65, 1))),
        (False, array(steps=(960, 196, 64, 1))),
        (False, array(steps=(964, 192, 64, 1))),
        (False, array(steps=(0, 192, 64, 1))),
        (False, array(steps=(960, 0, 64, 1))),
        (False, array(steps=(960, 192, 0, 1))),
        (False, array(steps=(-960, 192, 64, 1))),
        (False, array(steps=(960, -192, 64, 1))),
        (False, array(steps=(960, 192, -64, 1))),
        (True, array(steps=((1 << 39) - 8, 192, 64, 1))),
        (False, array(steps=(1 << 39, 192, 64, 1))),  # 2^40 bytes
        (True, array((1, 5, 3, 64), (0, 192, 64, 1))),  # the stride of an axis with one entry means nothing
        (True, array((1, 5, 3, 64), (-3, 192, 64, 1))),
        (True, array((1, 5, 3, 64), (1 << 50, 192, 64, 1))),
        (True, array((2, 1, 3, 64), (192, 7, 64, 1))),
        (True, array((2, 5, 1, 64), (320, 64, 1, 1))),
        (True, array((1, 1, 1, 37), (37, 37, 37, 1))),
        (False, array((1, 2, 1, 37), (74, 37, 37, 1))),
    ],
)
def test_what_the_copy_engine_can_read(monkeypatch, expected, x):
    monkeypatch.setattr(tensor_map, "address_word", lambda: ADDRESS_WORD)
    assert tensor_map.possible(x) is expected


def test_a_driver_with_other_maps(monkeypatch):
    """Where the address has no word of its own, no map can be patched, and no call takes the path."""
    monkeypatch.setattr(tensor_map, "address_word", lambda: None)
    assert not tensor_map.possible(array())


@dataclass
class Driver:
    """Stands for libcuda: keeps the arguments, and writes the address where `place` says."""

    status: int = 0
    place: tuple = (ADDRESS_WORD,)
    shift: int = 0

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, sizes, strides, box, steps, *rest):  # noqa: N802
        self.arguments = kind, rank, address.value, list(sizes), list(strides), list(box), list(steps), rest
        self.target = target.value
        if not self.status:
            words = np.ctypeslib.as_array(ctypes.cast(target, ctypes.POINTER(ctypes.c_uint64)), (tensor_map.WORDS,))
            words[list(self.place)] = address.value << self.shift
        return self.status


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: fake)
    tensor_map.address_word.cache_clear()
    yield fake
    tensor_map.address_word.cache_clear()


@pytest.mark.parametrize("dtype, kind", [("float16", 6), ("bfloat16", 9)])
def test_arguments_of_the_driver(driver, dtype, kind):
    for _ in range(8):  # wherever NumPy puts its buffer
        words = tensor_map.encode(array((2, 5, 3, 40), (600, 128, 40, 1)), dtype, 128)
        assert words.shape == (tensor_map.WORDS,) and words.ctypes.data == driver.target and driver.target % 64 == 0
    sizes, strides = [40, 3, 5, 2], [80, 256, 1200]  # head_dim, heads, seqlen, batch; that of head_dim is understood
    assert driver.arguments == (kind, 4, 1 << 20, sizes, strides, [64, 1, 128, 1], [1, 1, 1, 1], (0, 3, 3, 0))
    tensor_map.encode(array(), dtype, 20, 3, pointer=1 << 30)
    assert driver.arguments[2] == 1 << 30 and driver.arguments[5] == [64, 3, 20, 1]


@pytest.mark.parametrize("dtype, kind, itemsize", [("float32", 7, 4), ("bool", 0, 1)])
def test_other_elements(driver, dtype, kind, itemsize):
    """A row of a box has 128 bytes, whatever they are."""
    tensor_map.encode(array(itemsize=itemsize), dtype, 20, 3)
    strides = [itemsize * n for n in (64, 192, 960)]
    assert driver.arguments[0] == kind and driver.arguments[4:6] == (strides, [128 // itemsize, 3, 20, 1])


@pytest.mark.parametrize(
    "shape, steps, strides",
    [
        ((1, 5, 3, 64), (-3, 192, 64, 1), [128, 384, 16]),
        ((2, 1, 3, 64), (192, 0, 64, 1), [128, 16, 384]),
        ((2, 5, 1, 64), (320, 64, 1, 1), [16, 128, 640]),
        ((1, 1, 1, 37), (37, 37, 37, 1), [16, 16, 16]),
    ],
)
def test_axes_with_one_entry(driver, shape, steps, strides):
    """Their strides are replaced by one that the driver takes."""
    tensor_map.encode(array(shape, steps), "float16", 64)
    assert driver.arguments[4] == strides


def test_a_refusal_of_the_driver(driver):
    driver.status = 1
    assert tensor_map.encode(array(), "float16", 64) is None


@pytest.mark.parametrize("place, shift, word", [((0,), 0, 0), ((5,), 0, 5), ((0, 1), 0, None), ((0,), 4, None)])
def test_address_word(driver, place, shift, word):
    driver.place, driver.shift = place, shift
    assert tensor_map.address_word() == word


# --- Maps of the driver


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_map_is_patched_by_its_address(dtype):
    word = tensor_map.address_word()
    assert word is not None
    shapes = array(), array((1, 1, 1, 37)), array((2, 300, 4, 256)), array((2, 5, 3, 40), (600, 128, 40, 1))
    for x in shapes:
        for rows in (64, 80, 112, 128, 192):
            first = tensor_map.encode(x, dtype, rows)
            for pointer in (16, 1 << 33, 0x7FFFFFFFFFF0):
                other = tensor_map.encode(x, dtype, rows, pointer=pointer)
                assert np.flatnonzero(first != other).tolist() == [word] and other[word] == pointer
                first[word] = pointer
                assert np.array_equal(first, other)
                first[word] = x.data.ptr


# --- Which path a call takes


@pytest.fixture
def paths_of_a_call(monkeypatch):
    """Makes a call on a path of choice; returns its results and the paths that its passes took."""
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    path_of = {struct.itemsize: "sm80" for struct in (structs.FORWARD_PARAMS, structs.BACKWARD_PARAMS)}
    path_of |= {struct.itemsize: "sm90" for struct in (structs.HOPPER_FORWARD_PARAMS, structs.HOPPER_BACKWARD_PARAMS)}
    assert len(path_of) == 4

    def run(path, q, k, v, dout=None, deterministic=False, **options):
        monkeypatch.setenv("CUPYFLASH_PATH", path)
        monkeypatch.setattr(launch, "_plans", {})
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        results = {"out": out, "lse": lse}
        if dout is not None:
            options["deterministic"] = deterministic
            results |= tools.named(cupyflash.attention_backward(dout, q, k, v, out, lse, **options))
        return results, [path_of[plan.words.nbytes] for plan in launch._plans.values()]

    return run


BFLOAT16 = tools.Backend("cuda", "bfloat16", "sm90")
ALIGNED = ("contiguous", "heads first", "sequence first", "padded")  # rows, and with them every stride


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", tools.LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_layouts_that_take_the_portable_path(paths_of_a_call, head_dim, layout):
    x = tools.inputs(BFLOAT16, 70, 65, heads_q=4, heads_k=2, head_dim=head_dim)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout)
    for which in range(4):
        arrays = [*x.qkv, x.dout]
        arrays[which] = tools.laid_out(BFLOAT16, arrays[which], tools.LAYOUTS[layout])
        results, paths = paths_of_a_call("sm90", *arrays)
        copied = not tools.rows_are_contiguous(arrays[which])
        path = "sm90" if layout in ALIGNED or copied else "sm80"
        assert paths == ["sm90" if which == 3 else path, path], ("q", "k", "v", "dout")[which]
        for name, result in results.items():
            tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", tools.LAYOUTS)
def test_layouts_of_out_take_the_path(paths_of_a_call, layout):
    """What the copy engine cannot write, the warps do."""
    x = tools.inputs(BFLOAT16, 70, 65, heads_q=4, heads_k=2)
    guarded = tools.Guarded(BFLOAT16, x.q.shape, x.q.dtype, tools.LAYOUTS[layout])
    results, taken = paths_of_a_call("sm90", *x.qkv, out=guarded.array)
    assert taken == ["sm90"]
    tools.assert_close("out", BFLOAT16.host(results["out"]), *tools.expectation(BFLOAT16, *x.qkv)["out"])
    guarded.check()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.0, -0.3])
def test_every_scale_takes_the_path(paths_of_a_call, scale, head_dim):
    x = tools.inputs(BFLOAT16, 70, 65, head_dim=head_dim)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout, scale=scale)
    results, paths = paths_of_a_call("sm90", *x.qkv, x.dout, scale=scale)
    assert paths == ["sm90", "sm90"]
    for name, result in results.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])


# --- Agreement

SHAPES = {  # queries, keys, query heads, key heads, head_dim, head_dim_v
    "64": (256, 256, 4, 4, 64, 64),
    "odd": (203, 391, 4, 2, 64, 64),
    "one query": (1, 1025, 8, 1, 128, 128),
    "one key": (129, 1, 2, 2, 128, 128),
    "40": (191, 193, 2, 1, 40, 40),
    "80": (193, 191, 6, 2, 80, 80),
    "96": (130, 257, 4, 2, 96, 96),
    "128": (513, 640, 4, 1, 128, 128),
    "192, 128": (255, 300, 4, 4, 192, 128),
    "40, 256": (66, 77, 2, 2, 40, 256),
    "256": (127, 161, 2, 1, 256, 256),
    "8": (65, 129, 2, 1, 8, 8),
    "many tiles": (400, 450, 120, 120, 64, 64),  # far more than multiprocessors: blocks go on to others
    "many tiles of 128": (500, 500, 60, 60, 128, 128),
    "many tiles of 128, beyond choose.SPLIT": (650, 700, 40, 20, 128, 128),
    "96, beyond choose.SPLIT": (203, 601, 4, 2, 96, 72),
    "many tiles of 256": (300, 333, 50, 50, 256, 256),
    "packed, 3 heads": (7, 300, 6, 2, 128, 128),
    "packed, 5 heads": (30, 65, 10, 2, 64, 64),
    "packed, 8 heads": (70, 260, 16, 2, 96, 64),
    "packed, 64 heads": (3, 2100, 64, 1, 128, 128),
    "packed, many tiles": (21, 150, 400, 200, 64, 64),
    "256, 64": (130, 200, 4, 1, 256, 64),
    "136": (65, 129, 2, 1, 136, 136),
    "many tiles of 192": (300, 333, 40, 20, 256, 192),  # in pairs of 6 and of 3, where banded
    "many keys": (600, 2100, 2, 1, 64, 64),  # beyond choose.SHORT
    "128 tiles of keys": (300, 16384, 6, 3, 64, 64),  # deterministic, full: blocks wait for all of their head
    "64 tiles of keys": (500, 8192, 8, 8, 64, 64),
    "22 tiles of 128 keys": (150, 2816, 20, 20, 128, 128),
    "3 tiles of keys": (300, 384, 90, 90, 64, 64),
    "100 tiles of keys": (500, 12800, 8, 8, 64, 64),  # too many places would be left
    "more tiles of keys than multiprocessors": (150, 17300, 1, 1, 64, 64),
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (100, 30)},
    "causal window": {"causal": True, "window": (17, None)},
    "rows without keys": {"causal": "upper_left", "window": (5, 0)},
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_paths_agree(paths_of_a_call, shape, mask, dtype):
    backend = tools.Backend("cuda", dtype, "sm90")
    seqlen_q, seqlen_k, heads_q, heads_k, *head_dims = SHAPES[shape]
    x = tools.inputs(backend, seqlen_q, seqlen_k, heads_q, heads_k, *head_dims)
    right = tools.expectation(backend, *x.qkv, x.dout, **MASKS[mask])
    results = {}
    for path in ("sm80", "sm90"):
        results[path], taken = paths_of_a_call(path, *x.qkv, x.dout, **MASKS[mask])
        assert set(taken) == {path}
    for name, one in results["sm80"].items():
        tools.assert_close(name, backend.host(results["sm90"][name]), backend.host(one), right[name][1])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_deterministic_on_hopper(paths_of_a_call, shape, mask):
    """Blocks wait for each other, also where the tiles of keys are more than the multiprocessors."""
    seqlen_q, seqlen_k, heads_q, heads_k, *head_dims = SHAPES[shape]
    x = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads_q, heads_k, *head_dims)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout, **MASKS[mask])
    (one, taken), (other, _) = (paths_of_a_call("sm90", *x.qkv, x.dout, True, **MASKS[mask]) for _ in range(2))
    assert set(taken) == {"sm90"} and all(tools.same_bits(one[name], other[name]) for name in one)
    for name, result in one.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.mark.gpu
@hopper
def test_the_split_backward_is_always_deterministic(paths_of_a_call):
    x = tools.inputs(BFLOAT16, 300, 333, heads_q=40, heads_k=20, head_dim=192)
    one, other = (paths_of_a_call("sm90", *x.qkv, x.dout, deterministic=d, causal=True)[0] for d in (False, True))
    assert all(tools.same_bits(one[name], other[name]) for name in one)


# --- Bias and mask

LOGIT_SHAPES = {  # batch, heads and queries are one or all; queries, keys, heads, head_dim
    "in full": (2, 4, True, True),
    "of a head": (1, 4, True, True),
    "for all heads": (2, 1, True, True),
    "for all queries": (2, 4, False, True),
    "of keys": (1, 1, False, True),
    "of queries": (1, 1, True, False),
}
LOGIT_CASES = {  # queries, keys, query heads, key heads, head_dim, head_dim_v
    "64": (203, 400, 4, 2, 64, 64),
    "96": (130, 256, 4, 4, 96, 72),
    "128, split": (300, 336, 4, 2, 128, 128),
    "128": (520, 1040, 4, 4, 128, 128),
    "192": (130, 272, 4, 2, 192, 160),
    "256": (127, 160, 4, 4, 256, 256),
    "packed": (7, 304, 4, 1, 128, 128),
    "packed, several tiles": (70, 272, 4, 2, 64, 64),
    "less than a tile": (5, 16, 4, 4, 64, 64),
}


def logits_of(shape, seqlen_q, seqlen_k):
    batch, heads, queries, keys = LOGIT_SHAPES[shape]
    return batch, heads, seqlen_q if queries else 1, seqlen_k if keys else 1


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("shape", LOGIT_SHAPES)
@pytest.mark.parametrize("which", LOGIT_CASES)
@pytest.mark.parametrize(
    "kind, mask",
    [
        ("float16", "full"),
        ("bfloat16", "causal"),
        ("float32", "rows without keys"),
        ("mask", "causal"),
        ("both", "full"),
    ],
)
def test_bias_and_mask_on_hopper(paths_of_a_call, kind, which, shape, mask):
    """Tiles that the copy engine brings: their elements, their edges, and what all heads or queries share."""
    seqlen_q, seqlen_k, heads_q, heads_k, *head_dims = LOGIT_CASES[which]
    x = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads_q, heads_k, *head_dims)
    rng, size = np.random.default_rng(1), logits_of(shape, seqlen_q, seqlen_k)
    options = dict(MASKS[mask])
    if kind != "mask":
        bias = np.where(rng.random(size) < 0.1, -np.inf, rng.normal(0, 1.5, size))
        options["bias"] = BFLOAT16.array(bias, tools.DTYPES["bfloat16" if kind == "both" else kind])
    if kind in ("mask", "both"):
        options["mask"] = BFLOAT16.xp.asarray(rng.random(size) < 0.7)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout, **options)
    results, paths = paths_of_a_call("sm90", *x.qkv, x.dout, **options)
    width, words = max(head_dims), kind == "mask"  # which the forward reads as words, and a backward that is not split
    read = shape != "of queries"  # no copy of less than 16 bytes
    whole = words and (width <= 64 or width <= 128 and seqlen_k > choose.SPLIT)
    back = "sm90" if width <= 192 and (read or whole) else "sm80"
    assert paths == ["sm90" if read or words else "sm80", back]
    for name, result in results.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"alibi_slopes": True}, {"sink": True}, {"deterministic": True}])
@pytest.mark.parametrize("which", ["64", "128", "192", "packed"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_bias_beside_other_options(paths_of_a_call, with_mask, which, options):
    seqlen_q, seqlen_k, heads_q, heads_k, *head_dims = LOGIT_CASES[which]
    x = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads_q, heads_k, *head_dims)
    rng, options = np.random.default_rng(2), dict(options)
    for name in ("alibi_slopes", "sink"):
        if name in options:
            options[name] = BFLOAT16.array(rng.random(heads_q), np.float32)
    options["bias"] = BFLOAT16.array(rng.normal(0, 1.5, (heads_q, seqlen_q, seqlen_k)))
    if with_mask:
        options["mask"] = BFLOAT16.xp.asarray(rng.random((2, 1, seqlen_q, seqlen_k)) < 0.7)
    deterministic = options.pop("deterministic", False)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout, **options)
    results, paths = paths_of_a_call("sm90", *x.qkv, x.dout, deterministic, **options)
    assert paths == ["sm90", "sm90"]
    for name, result in results.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.fixture
def built(monkeypatch):
    """The templates of the kernels that calls ask for."""
    built, kernel = set(), compiler.kernel

    def build(variant, device):
        built.add(variant.template)
        return kernel(variant, device)

    monkeypatch.setattr(compiler, "kernel", build)
    return built


WORD_CASES = {  # queries, keys, query heads, key heads, head_dim; no length is one of tiles, none can be copied
    "64": (203, 397, 4, 2, 64),
    "96": (331, 700, 4, 4, 96),  # tiles of 96 keys
    "128": (331, 1301, 4, 2, 128),
    "128, split": (130, 304, 4, 4, 128),  # in tiles that are copied
    "192": (331, 1301, 4, 2, 192),  # of 80
    "packed": (7, 1301, 6, 2, 128),
    "packed, several tiles": (70, 333, 4, 1, 64),
    "clusters": (600, 513, 2, 2, 128),
    "teams": (300, 200, 2, 2, 64),
}
WORD_LAYOUTS = {
    "whole": lambda xp, x: x,
    "of all heads": lambda xp, x: x[:1, :1],
    "of heads": lambda xp, x: x[:1],
    "of keys": lambda xp, x: x[:, :1, :1],
    "of queries": lambda xp, x: x[:, :, :, :1],
    "backwards": lambda xp, x: x[:, ::-1, ::-1, ::-1],
    "queries last": lambda xp, x: xp.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "every second": lambda xp, x: x.repeat(2, axis=3)[..., ::2],
    "broadcast before": lambda xp, x: xp.broadcast_to(x[:1, :1, :1], x.shape),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", WORD_LAYOUTS)
@pytest.mark.parametrize("which", WORD_CASES)
def test_words_of_a_mask_of_any_layout(paths_of_a_call, built, which, layout):
    """Below any band, with rows and keys that see nothing; one kernel for the backward up to 128."""
    seqlen_q, seqlen_k, heads_q, heads_k, head_dim = WORD_CASES[which]
    x = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads_q, heads_k, head_dim)
    shown = np.random.default_rng(4).random((x.q.shape[0], heads_q, seqlen_q, seqlen_k)) < 0.6
    shown[:, :, seqlen_q // 2] = shown[:, :, :, 5] = False
    mask = WORD_LAYOUTS[layout](BFLOAT16.xp, BFLOAT16.xp.asarray(shown))
    for options in ({}, {"causal": True}, {"window": (100, 30)}):
        right = tools.expectation(BFLOAT16, *x.qkv, x.dout, mask=mask, **options)
        built.clear()
        results, paths = paths_of_a_call("sm90", *x.qkv, x.dout, mask=mask, **options)
        assert paths[0] == "sm90" and "make_mask_words" in built
        whole = head_dim <= 64 or head_dim <= 128 and seqlen_k > choose.SPLIT
        assert ("hopper_backward" in built) == whole
        for name, result in results.items():
            tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"alibi_slopes": True}, {"softcap": 3.0, "alibi_slopes": True, "causal": True}, {"sink": True}]
    + [{"scale": -0.3}, {"dropout": 0.3, "seed": 5}, {"deterministic": True}, {"deterministic": True, "causal": True}],
)
@pytest.mark.parametrize("which", ["64", "96", "128", "packed"])
def test_words_of_a_mask_beside_other_options(paths_of_a_call, built, which, options):
    seqlen_q, seqlen_k, heads_q, heads_k, head_dim = WORD_CASES[which]
    x, options = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads_q, heads_k, head_dim), dict(options)
    rng, deterministic = np.random.default_rng(5), options.pop("deterministic", False)
    for name in ("alibi_slopes", "sink"):
        if name in options:
            options[name] = BFLOAT16.array(rng.random(heads_q), np.float32)
    options["mask"] = BFLOAT16.xp.asarray(rng.random((2, 1, seqlen_q, seqlen_k)) < 0.6)
    right = tools.expectation(BFLOAT16, *x.qkv, x.dout, **options)
    calls = [paths_of_a_call("sm90", *x.qkv, x.dout, deterministic, **options) for _ in range(1 + deterministic)]
    results, paths = calls[0]
    assert paths == ["sm90", "sm80" if "dropout" in options else "sm90"]
    assert ("hopper_backward" in built) == ("dropout" not in options)
    assert all(tools.same_bits(result, calls[-1][0][name]) for name, result in results.items())
    for name, result in results.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("outer", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_words_of_a_block_mask(paths_of_a_call, built, head_dim, outer):
    """Its blocks are whole, hidden and in part, of all heads or of each, and the mask is that of all or of each."""
    x = tools.inputs(BFLOAT16, 700, 1301, 4, 2, head_dim)
    xp, rng = BFLOAT16.xp, np.random.default_rng(6)
    blocks, full = (rng.random((*outer, 6, 11)) < seen for seen in (0.7, 0.5))
    for size in ((2, 4, 700, 1301), (1, 1, 700, 1301), (2, 1, 1, 1301)):
        mask = xp.asarray(rng.random(size) < 0.6)
        given = cupyflash.BlockMask(xp.asarray(blocks), full=xp.asarray(full), mask=mask)
        right = tools.expectation(BFLOAT16, *x.qkv, x.dout, block_mask=given)
        results, paths = paths_of_a_call("sm90", *x.qkv, x.dout, block_mask=given)
        assert paths == ["sm90", "sm90"] and {"make_mask_words", "hopper_backward"} <= built
        for name, result in results.items():
            tools.assert_close(name, BFLOAT16.host(result), *right[name])


def places_of_words():
    """Row and column in a part of 64 x 64 of each lane's bits: those of x[j][i] of kernels/core/fragment.cuh."""
    lane, bit = np.arange(128)[:, None], np.arange(32)
    j, i = bit // 4, bit % 4
    return lane // 32 * 16 + lane % 32 // 4 + 8 * (i // 2), 8 * j + 2 * (lane % 4) + i % 2


def words_of(shown, by_key=False, group=1):
    """(batch, heads, parts of rows, parts of columns, 128) of a mask of all logits; what does not exist is hidden."""
    batch, heads, seqlen_q, seqlen_k = shown.shape
    step = 64 // group
    rows, cols = -(-seqlen_q // step), -(-seqlen_k // 64)
    if by_key:
        return words_of(shown.swapaxes(2, 3))
    padded = np.zeros((batch, heads // group, group, (rows + 1) * step, cols * 64), bool)
    padded[..., :seqlen_q, :seqlen_k] = shown.reshape(batch, heads // group, group, seqlen_q, seqlen_k)
    padded = padded.swapaxes(2, 3).reshape(batch, heads // group, -1, cols, 64)  # query by query
    first = step * group * np.arange(rows)[:, None]
    row, col = places_of_words()
    bits = padded[:, :, first[..., None] + row, :, col]  # (128, 32) and parts of rows in front, then batch and heads
    return (np.moveaxis(bits, (3, 4, 5), (0, 1, 3)).astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(
        axis=-1, dtype=np.uint32
    )


def test_every_element_has_a_bit():
    """One, of the lane and the register that hold it; and four bytes become bits as the kernel does it."""
    row, col = places_of_words()
    assert sorted(zip(row.ravel().tolist(), col.ravel().tolist())) == [(r, c) for r in range(64) for c in range(64)]
    # As operands of the next product: bits 8 s ... 8 s + 7 are those of 16 columns, pair by pair.
    assert (col // 16 == np.arange(32) // 8).all() and (col[:, 1::2] == col[:, ::2] + 1).all()
    shown = np.zeros((1, 2, 70, 130), bool)
    shown[0, 1, 67, 129] = True
    (found,) = np.argwhere(words_of(shown))
    assert found.tolist() == [0, 1, 1, 2, 12] and words_of(shown)[tuple(found)] == 1 << 1
    (found,) = np.argwhere(words_of(shown, by_key=True))
    assert found.tolist() == [0, 1, 2, 1, 5] and words_of(shown, by_key=True)[tuple(found)] == 1 << 1
    (found,) = np.argwhere(words_of(shown, group=2))  # row 67 * 2 + 1 of all heads
    assert found.tolist() == [0, 0, 2, 2, 28]
    x = np.random.default_rng(0).choice(np.array([0, 1, 2, 128, 255], np.uint8), (1000, 4)).view("<u4")[:, 0]
    spread = x | x >> 4
    spread |= spread >> 2
    spread |= spread >> 1
    got = (spread & 0x01010101) * np.uint32(0x10204080) >> 28
    assert (got == ((x[:, None] >> 8 * np.arange(4, dtype=np.uint32) & 255 != 0) << np.arange(4)).sum(axis=1)).all()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", WORD_LAYOUTS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (64, 256), (200, 336), (331, 1301)])
@pytest.mark.parametrize("group, by_key", [(1, False), (1, True), (2, False), (6, False)])
def test_words(layout, seqlen_q, seqlen_k, group, by_key):
    """Bit by bit, of all that exists."""
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    xp, shape = BFLOAT16.xp, (2, 12, seqlen_q, seqlen_k)
    values = np.random.default_rng(7).choice(np.array([0, 1, 2, 255], np.uint8), shape).view(bool)
    mask = xp.broadcast_to(WORD_LAYOUTS[layout](xp, xp.asarray(values)), shape)
    params = np.zeros(1, structs.HOPPER_BACKWARD_PARAMS)
    rest = launch.Rest(None, None, None, None, mask, launch.NO_BLOCKS)
    main = SimpleNamespace(dtype="float16")
    (maker, count) = launch._plan_mask_words(params, "words", main, rest, group, by_key)
    words = xp.zeros(count, np.uint32)
    maker.run(mask.data.ptr, words.data.ptr)
    expected = words_of(mask.get().view(np.uint8) != 0, by_key, group)
    steps = [params["words"][0][name] for name in ("batch", "head", "rows", "cols")]
    batch, head, rows, cols = np.ogrid[tuple(map(slice, expected.shape[:4]))]
    at = batch * steps[0] + head * steps[1] + rows * steps[2] + cols * steps[3]
    got = words.get()[at[..., None] + np.arange(128)]
    exists = words_of(np.ones(shape, bool), by_key, group)
    if 64 % group:  # the rows behind the last query of a part are not used
        exists[..., places_of_words()[0][:, 0] >= 64 // group * group] = 0
        exists &= (
            np.where(places_of_words()[0] < 64 // group * group, 1 << np.arange(32), 0).sum(axis=1).astype(np.uint32)
        )
    assert (got & exists == expected & exists).all()


CAPPED = {"softcap": 3.0, "causal": True}
DBIAS_CASES = {  # queries, keys, heads, head_dim, head_dim_v; with 15 tiles of a head and more, a cluster takes several
    "64": (700, 1032, 36, 64, 64),
    "64 and 96": (300, 272, 4, 64, 96),
    "128": (700, 1032, 36, 128, 128),
    "one block": (128, 120, 6, 40, 48),
    "along the keys": (100, 600, 6, 128, 72),
    "along the queries": (600, 104, 6, 96, 128),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "shape, options",
    [("in full", options) for options in ({}, CAPPED, {"window": (100, 30)}, {"window": (0, 0)})]
    + [("of a head", {}), ("of a head", CAPPED), ("for all heads", CAPPED), ("for all heads", {"window": (100, 30)})]
    + [("for all queries", {}), ("for all queries", {"window": (0, 0)}), ("of keys", {}), ("of keys", CAPPED)],
)
@pytest.mark.parametrize("case", DBIAS_CASES)
def test_dbias_on_hopper(paths_of_a_call, built, case, shape, options):
    """Sums of several tiles, several sums of a cluster, tiles that nobody sees; twice the same bits."""
    seqlen_q, seqlen_k, heads, *head_dims = DBIAS_CASES[case]
    x = tools.inputs(BFLOAT16, seqlen_q, seqlen_k, heads, heads, *head_dims)
    size = [n if n < 4 else heads for n in logits_of(shape, 4, 4)][:2]
    size += [seqlen_q if LOGIT_SHAPES[shape][2] else 1, seqlen_k]
    rng = np.random.default_rng(3)
    for dtype in ("bfloat16", "float32"):
        bias = BFLOAT16.array(rng.normal(0, 1.5, size), tools.DTYPES[dtype])
        right = tools.expectation(BFLOAT16, *x.qkv, x.dout, bias=bias, **options)
        BFLOAT16.array(np.full(size, np.nan), bias.dtype)  # what its memory holds next
        (one, paths), (other, _) = (paths_of_a_call("sm90", *x.qkv, x.dout, True, bias=bias, **options) for _ in "ab")
        assert paths == ["sm90", "sm90"] and tools.same_bits(one["dbias"], other["dbias"])
        for name, result in one.items():
            tools.assert_close(name, BFLOAT16.host(result), *right[name])
    beside_dq = shape == "in full" and "hopper_queries" in built and "softcap" not in options
    assert ("hopper_bias_gradient" in built) != beside_dq and "bias_gradient" not in built


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("value", [float(np.finfo(np.float32).min), -1e30, 1e30])
def test_a_row_of_huge_bias_on_hopper(paths_of_a_call, value):
    """What is finite hides nothing: the row is the mean of the values."""
    x = tools.inputs(BFLOAT16, 70, 336, head_dim=128)
    bias = np.zeros((70, 336), np.float32)
    bias[5] = value
    results, paths = paths_of_a_call("sm90", *x.qkv, bias=BFLOAT16.array(bias, np.float32))
    assert paths == ["sm90"]
    mean = np.repeat(BFLOAT16.host(x.v).mean(axis=1), x.q.shape[2] // x.v.shape[2], axis=1)
    np.testing.assert_allclose(BFLOAT16.host(results["out"])[:, 5], mean, atol=8 * BFLOAT16.eps)


# --- Sums in place of maxima


@pytest.fixture
def by_sums(monkeypatch):
    """Makes a call that may follow sums, or not; returns its results and the flag, None where there is none."""
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    monkeypatch.setenv("CUPYFLASH_PATH", "sm90")
    monkeypatch.setattr(choose, "STEADY_KEYS", 1)
    monkeypatch.setattr(choose, "STEADY_SCORES", 1)
    words, keep_for_graph = [], launch.keep_for_graph

    def keep(*temporaries):
        words.extend(x for x in temporaries if x is not None and x.dtype == np.uint32 and x.size == launch.ZEROS)
        keep_for_graph(*temporaries)

    monkeypatch.setattr(launch, "keep_for_graph", keep)

    def run(head_dim, *qkv, **options):
        monkeypatch.setattr(choose, "STEADY", head_dim)
        monkeypatch.setattr(launch, "_plans", {})
        words.clear()
        results = cupyflash.attention(*qkv, return_lse=True, **options)
        assert all(plan.words.nbytes >= structs.HOPPER_FORWARD_PARAMS.itemsize for plan in launch._plans.values())
        return dict(zip(("out", "lse"), results)), words[0][-1].item() if words else None

    return run


def both(by_sums, *qkv, **options):
    """The results and the flag by sums, and the results by maxima."""
    results, flag = by_sums(256, *qkv, **options)
    others, none = by_sums(0, *qkv, **options)
    assert flag is not None and none is None
    return results, flag, others


def check_by_sums(by_sums, backend, *qkv, wild=False, like=None, **options):
    """Results by sums, or, of what is ``wild``, the bits of the other kernel; ``like``: options of the yardstick."""
    results, flag, others = both(by_sums, *qkv, **options)
    assert flag == wild
    right = tools.expectation(backend, *qkv, **(like or options))
    for name, result in results.items():
        assert not wild or tools.same_bits(result, others[name]), name
        tools.assert_close(name, backend.host(result), *right[name])
    return results


BY_SUMS = {  # queries, keys, query heads, key heads, head_dim, head_dim_v
    "64": (512, 1024, 4, 4, 64, 64),
    "odd": (403, 1391, 4, 2, 64, 64),
    "one tile": (70, 128, 2, 2, 64, 64),
    "less than a tile": (70, 100, 2, 2, 64, 64),
    "two tiles": (193, 256, 2, 2, 64, 64),
    "one query": (1, 2049, 8, 1, 64, 64),
    "packed, 3 heads": (7, 1300, 6, 2, 64, 64),
    "packed, many tiles": (21, 650, 400, 200, 64, 64),
    "40, 8": (300, 1300, 2, 1, 40, 8),
    "8": (300, 1300, 2, 1, 8, 64),
    "many tiles": (1400, 1450, 24, 24, 64, 64),
    "128": (500, 1500, 6, 2, 128, 128),
    "128, short": (500, 1000, 60, 60, 128, 128),  # in clusters
    "96": (300, 1200, 2, 2, 96, 72),
    "192": (300, 1200, 2, 2, 192, 128),
    "256": (300, 900, 4, 2, 256, 256),
}
SIXTEEN = {"bfloat16": BFLOAT16, "float16": tools.Backend("cuda", "float16", "sm90")}
BY_SUMS_IN = [("bfloat16", shape) for shape in BY_SUMS] + [("float16", shape) for shape in ("odd", "128", "256")]
MASKS_BY_SUMS = MASKS | {"wide window": {"window": (700, 300)}, "far window": {"window": (900, None)}}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("mask", MASKS_BY_SUMS)
@pytest.mark.parametrize("dtype, shape", BY_SUMS_IN)
def test_sums_in_place_of_maxima(by_sums, dtype, shape, mask):
    """Where no score exceeds the first maximum by 2^8 it would have stayed anyway: the same bits."""
    backend = SIXTEEN[dtype]
    seqlen_q, seqlen_k, *rest = BY_SUMS[shape]
    for factor in (0.5, 1.5):
        x = tools.inputs(backend, seqlen_q, seqlen_k, *rest, factor=factor)
        results, flag, others = both(by_sums, *x.qkv, **MASKS_BY_SUMS[mask])
        assert flag == 0
        right = tools.expectation(backend, *x.qkv, **MASKS_BY_SUMS[mask])
        for name, result in results.items():
            assert factor > 1 or tools.same_bits(result, others[name]), name
            tools.assert_close(name, backend.host(result), *right[name])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", tools.LAYOUTS)
def test_layouts_by_sums(by_sums, layout):
    x = tools.inputs(BFLOAT16, 300, 700, heads_q=4, heads_k=2)
    right = tools.expectation(BFLOAT16, *x.qkv, causal=True)
    guarded = tools.Guarded(BFLOAT16, x.q.shape, x.q.dtype, tools.LAYOUTS[layout])
    qkv = [tools.laid_out(BFLOAT16, y, tools.LAYOUTS[layout]) for y in x.qkv] if layout in ALIGNED else x.qkv
    results, flag = by_sums(256, *qkv, causal=True, out=guarded.array)
    assert flag == 0
    for name, result in results.items():
        tools.assert_close(name, BFLOAT16.host(result), *right[name])
    guarded.check()
    results, flag = by_sums(256, *qkv, causal=True, out=BFLOAT16.xp.empty(x.q.shape, np.float32))
    assert flag == 0 and results["out"].dtype == np.float32
    tools.assert_close("out", BFLOAT16.host(results["out"]), *right["out"])


def with_scores(backend, seqlen_q, scores, query=None, width=64):
    """q, k, v of one head; `scores`: of each key with `query`, or with all, in base 2 as the dtype rounds them."""
    q, k = np.zeros((1, seqlen_q, 1, width)), np.zeros((1, len(scores), 1, width))
    q[:, slice(None) if query is None else query, :, 0] = width**0.5
    k[0, :, 0, 0] = np.asarray(scores) * np.log(2)
    return backend.array(q), backend.array(k), backend.normal((1, len(scores), 1, width))


def scores(seqlen_k, **at):
    """Zeros, but for the keys k0, k100, ..."""
    x = np.zeros(seqlen_k)
    for name, value in at.items():
        x[int(name[1:])] = value
    return x


RISING = {  # queries, options, scores of the keys, the query that has them or all; whether they are too large
    "below": (300, {}, scores(700, k0=126), None, False),
    "above": (300, {}, scores(700, k0=130), None, True),
    "one row": (300, {}, scores(700, k0=130), 299, True),
    "one row below": (300, {}, scores(700, k0=126), 299, False),
    "many together": (70, {}, np.where(np.arange(700) < 500, 126.0, 0), None, True),  # 2^131 in a lane
    "fewer together": (70, {}, np.where(np.arange(700) < 200, 56.0, 0), None, False),
    "twice": (70, {}, scores(700, k300=30, k10=60), None, False),
    "second tile": (70, {}, scores(640, k500=140), None, True),
    "first full tile": (70, {}, scores(640, k600=100), None, False),
    "second tile, the first in part": (70, {}, scores(650, k520=140), None, False),
    "first tile in part": (70, {}, scores(650, k648=100), None, False),
    "third tile, the first in part": (70, {}, scores(650, k500=140), None, True),
    "descending": (70, {}, np.linspace(100, 0, 1000), None, False),
    "ascending": (70, {}, np.linspace(0, 100, 1000), None, False),
    "gently descending": (70, {}, np.linspace(40, 0, 1000), None, False),
    "large below 0": (300, {}, scores(700) - 16000, None, False),
    "falling below": (300, {}, np.where(np.arange(700) < 500, -300.0, 0), None, False),
    "causal, before the diagonal": (700, {"causal": True}, scores(700, k128=140), None, True),
    "causal, early rows": (700, {"causal": True}, scores(700, k0=100), 60, False),  # which see no tile in full
    "causal, late row": (700, {"causal": True}, scores(700, k0=140), 650, True),
    "window, left edge": (700, {"window": (400, 0)}, scores(700, k250=100), 640, False),  # of a tile seen in part
    "window, in between": (700, {"window": (400, 0)}, scores(700, k400=140), 640, True),
    "narrow window": (700, {"window": (100, 0)}, scores(700, k560=100), 640, False),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("case", RISING)
def test_scores_above_the_first_maximum(by_sums, case, dtype):
    """By up to 2^126 they are as exact as others; beyond, and then alone, the other kernel computes the call."""
    seqlen_q, options, of_keys, query, wild = RISING[case]
    backend = SIXTEEN[dtype]
    qkv = with_scores(backend, seqlen_q, of_keys, query)
    check_by_sums(by_sums, backend, *qkv, wild=wild, **options)


CHANGES = {  # head_dim, options
    "ALiBi": (64, {"slopes": (0.7, 0.02)}),  # whose first tile is far below the others
    "causal ALiBi": (128, {"slopes": (0.7, 0.02), "causal": True}),
    "ALiBi, window": (96, {"slopes": (0.3, 0.0), "window": (900, 200)}),
    "softcap": (128, {"softcap": 50.0}),
    "causal softcap and ALiBi": (128, {"softcap": 9.0, "slopes": (0.7, 0.02), "causal": True}),
    "dropout": (64, {"dropout": 0.3}),
    "causal dropout": (128, {"dropout": 0.3, "causal": True}),
    "dropout and ALiBi": (128, {"dropout": 0.3, "slopes": (0.7, 0.02)}),
    "all": (128, {"softcap": 9.0, "dropout": 0.3, "slopes": (0.7, 0.02), "causal": True}),
    "sink and ALiBi": (64, {"slopes": (0.7, 0.02), "sink": (-1.0, 3.0)}),
}


def changes(backend, slopes=None, sink=None, dropout=None, **options):
    options |= {} if slopes is None else {"alibi_slopes": backend.array(slopes, np.float32)}
    options |= {} if sink is None else {"sink": backend.array(sink, np.float32)}
    return options | ({} if dropout is None else {"dropout": dropout, "seed": 3})


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "dtype, change",
    [("bfloat16", change) for change in CHANGES] + [("float16", c) for c in ("dropout", "causal dropout")],
)
def test_changed_scores_by_sums(by_sums, dtype, change):
    backend, (head_dim, options) = SIXTEEN[dtype], CHANGES[change]
    for seqlen_q, seqlen_k in ((403, 1391), (900, 900)):
        x = tools.inputs(backend, seqlen_q, seqlen_k, head_dim=head_dim)
        check_by_sums(by_sums, backend, *x.qkv, **changes(backend, **options))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_function_by_sums(by_sums, head_dim, causal):
    """ALiBi, which is the yardstick."""
    x, slopes = tools.inputs(BFLOAT16, 500, 1391, head_dim=head_dim), BFLOAT16.array((0.7, 0.02), np.float32)
    mod = cupyflash.ScoreMod("score - slope[h] * abs(i + (seqlen_k - seqlen_q) - j)", slope=slopes)
    like = {"alibi_slopes": slopes, "causal": causal}
    check_by_sums(by_sums, BFLOAT16, *x.qkv, like=like, score_mod=mod, causal=causal)


FAR_DOWN = {  # scores in base 2, slopes; whether they are too small
    "a little": (-20.0, (0.0,), False),  # in units of 2^-16, 700 keys have a sum of 44
    "too far": (-30.0, (0.0,), True),  # of 0.04
    "rising": (np.where(np.arange(700) < 300, 60.0, -50.0), (0.0,), False),
    "rising too far": (np.where(np.arange(700) < 300, 120.0, -50.0), (0.0,), True),
    "steep": (0.0, (8.0,), False),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", FAR_DOWN)
def test_changed_scores_far_from_the_first(by_sums, case):
    """Rows whose sums are too small, or too large, are computed by the other kernel."""
    of_keys, slopes, wild = FAR_DOWN[case]
    qkv = with_scores(BFLOAT16, 700, scores(700) + of_keys)
    options = {"alibi_slopes": BFLOAT16.array(slopes, np.float32)}
    check_by_sums(by_sums, BFLOAT16, *qkv, wild=wild, **options)


@pytest.mark.gpu
@hopper
def test_changed_scores_of_rows_without_keys(by_sums):
    """They are no reason to compute a call again."""
    x = tools.inputs(BFLOAT16, 900, 600)
    options = {"alibi_slopes": BFLOAT16.array((0.7, 0.02), np.float32), "causal": True}
    results = check_by_sums(by_sums, BFLOAT16, *x.qkv, **options)
    assert bool((results["lse"][:, :, :300] == -np.inf).all())


def changed(which, index, value):
    def change(arrays):
        arrays[which] = arrays[which].copy()
        arrays[which][index] = value
        return arrays

    return change


def far_up(arrays):
    """Sums of values that overflow, relative to a maximum that 2^20 exceed."""
    q, k, v = with_scores(BFLOAT16, 300, scores(700, k0=20))
    v[:, 0] = 1e37
    return [q, k, v]


def times(factor):
    return lambda arrays: [BFLOAT16.array(BFLOAT16.host(arrays[0]) * factor), *arrays[1:]]


WILD = {
    "NaN in q": changed(0, (0, 250, 1, 3), np.nan),
    "inf in q": changed(0, (0, 250, 1, 3), np.inf),
    "-inf in q": changed(0, (1, 0, 0, 0), -np.inf),
    "NaN in k": changed(1, (0, 7, 0, 0), np.nan),
    "inf in k": changed(1, (0, 7, 0, 0), np.inf),
    "-inf in a late key": changed(1, (0, -50, 0, 0), -np.inf),
    "-inf in all keys": changed(1, (0, slice(None), 0, 0), -np.inf),
    "NaN in v": changed(2, (0, 7, 0, 0), np.nan),
    "inf in v": changed(2, (0, 7, 0, 0), np.inf),
    "-inf in the last value": changed(2, (1, -1, 0, 0), -np.inf),
    "large values": far_up,
    "huge scores": times(2.0**14),
    "huge scores below 0": lambda arrays: [*with_scores(BFLOAT16, 300, scores(700) - 20000)],
    "huge scores of one row": lambda arrays: [*with_scores(BFLOAT16, 300, scores(700) - 16500, 299)],
    "infinite scores": times(2.0**125),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", WILD)
def test_what_sums_do_not_tell(by_sums, case, causal):
    qkv = WILD[case]([*tools.inputs(BFLOAT16, 300, 700, heads_q=2).qkv])
    results, flag, others = both(by_sums, *qkv, causal=causal)
    assert flag == 1 and all(tools.same_bits(result, others[name]) for name, result in results.items())


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sink, far", [(-np.inf, False), (-50.0, False), (0.0, False), (44.0, False), (45.0, True)])
def test_a_sink_by_sums(by_sums, sink, far):
    """One so far above that what the keys have of the weight would be cut off."""
    q, k, v = with_scores(BFLOAT16, 300, scores(700, k0=40), 200)
    options = {"sink": BFLOAT16.array([sink], np.float32)}
    check_by_sums(by_sums, BFLOAT16, q, k, v, wild=far, **options)


@pytest.mark.gpu
@hopper
def test_a_row_is_wild_for_itself(by_sums):
    """What others hold changes whether the flag is set, and with it at most the rounding of those that are not."""
    x = tools.inputs(BFLOAT16, 300, 700, heads_q=2, factor=0.5)
    tame, flag = by_sums(256, *x.qkv)
    assert flag == 0
    q, k, v = changed(0, (0, 250, 1, 3), np.nan)([*x.qkv])
    wild, flag = by_sums(256, q, k, v)
    assert flag == 1 and bool(BFLOAT16.xp.isnan(wild["lse"][0, 1, 250]))
    for name, axes in (("out", (0, 250, 1)), ("lse", (0, 1, 250))):
        tame[name][axes] = wild[name][axes]
        assert tools.same_bits(tame[name], wild[name])


@pytest.mark.gpu
@hopper
def test_graph_by_sums(by_sums):
    """Each replay clears the flag."""
    cupy = BFLOAT16.xp
    q, k, v = tools.inputs(BFLOAT16, 300, 700, factor=0.5).qkv
    keys, expected = {"tame": k.copy()}, {}
    for name, value in (("far", 300), ("NaN", np.nan)):
        _, keys[name], _ = changed(1, (0, 7), value)([q, k, v])
    for name, given in keys.items():
        expected[name], _ = by_sums(0, q, given, v)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the arrays
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert by_sums(256, q, k, v)[1] == 0
        stream.begin_capture()
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        graph = stream.end_capture()
        for name in ("tame", "far", "tame", "NaN", "tame"):
            k[...] = keys[name]
            out[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            assert tools.same_bits(out, expected[name]["out"]) and tools.same_bits(lse, expected[name]["lse"]), name
