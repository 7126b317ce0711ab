"""Hopper's own path: which calls take it, what tells its copy engine the layout, and that both paths agree."""

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import tensor_map

hopper = pytest.mark.skipif("sm90" not in tools.CUDA_PATHS, reason="needs a Hopper GPU")
ADDRESS_WORD = 0


def array(shape=(2, 5, 3, 64), steps=None, pointer=1 << 20):
    """Something with the address and strides of a CuPy array of 16-bit elements."""
    steps = steps or (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return SimpleNamespace(data=SimpleNamespace(ptr=pointer), shape=shape, strides=tuple(2 * step for step in steps))


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
def path_of_a_call(monkeypatch):
    """Makes a call on a path of choice; returns its results on the host and the path that it took."""
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    structs = {launch.FORWARD_PARAMS.itemsize: "sm80", launch.HOPPER_FORWARD_PARAMS.itemsize: "sm90"}
    assert len(structs) == 2

    def run(path, q, k, v, **options):
        monkeypatch.setenv("CUPYFLASH_PATH", path)
        monkeypatch.setattr(launch, "_plans", {})
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        *_, plan = launch._plans.values()
        return out, lse, structs[plan.words.nbytes]

    return run


BFLOAT16 = tools.Backend("cuda", "bfloat16", "sm90")
ALIGNED = ("contiguous", "heads first", "sequence first", "padded")  # rows, and with them every stride


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("layout", tools.LAYOUTS)
def test_layouts_that_take_the_portable_path(path_of_a_call, layout):
    x = tools.inputs(BFLOAT16, 70, 65, heads_q=4, heads_k=2)
    right = tools.expectation(BFLOAT16, *x.qkv)
    for which in range(3):
        arrays = list(x.qkv)
        arrays[which] = tools.laid_out(BFLOAT16, arrays[which], tools.LAYOUTS[layout])
        out, lse, path = path_of_a_call("sm90", *arrays)
        copied = not tools.rows_are_contiguous(arrays[which])
        assert path == ("sm90" if layout in ALIGNED or copied else "sm80"), "qkv"[which]
        tools.assert_close("out", BFLOAT16.host(out), *right["out"])
        tools.assert_close("lse", BFLOAT16.host(lse), *right["lse"])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.3])
def test_every_scale_takes_the_path(path_of_a_call, scale):
    x = tools.inputs(BFLOAT16, 70, 65)
    right = tools.expectation(BFLOAT16, *x.qkv, scale=scale)
    out, lse, taken = path_of_a_call("sm90", *x.qkv, scale=scale)
    assert taken == "sm90"
    tools.assert_close("out", BFLOAT16.host(out), *right["out"])
    tools.assert_close("lse", BFLOAT16.host(lse), *right["lse"])


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
    "many tiles of 256": (300, 333, 50, 50, 256, 256),
    "packed, 3 heads": (7, 300, 6, 2, 128, 128),
    "packed, 5 heads": (30, 65, 10, 2, 64, 64),
    "packed, 8 heads": (70, 260, 16, 2, 96, 64),
    "packed, 64 heads": (3, 2100, 64, 1, 128, 128),
    "packed, many tiles": (21, 150, 400, 200, 64, 64),
    "many keys": (600, 2100, 2, 1, 64, 64),  # beyond choose.SHORT
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
def test_both_paths_agree(path_of_a_call, shape, mask, dtype):
    backend = tools.Backend("cuda", dtype, "sm90")
    seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v = SHAPES[shape]
    x = tools.inputs(backend, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v)
    right = tools.expectation(backend, *x.qkv, **MASKS[mask])
    results = {}
    for path in ("sm80", "sm90"):
        out, lse, taken = path_of_a_call(path, *x.qkv, **MASKS[mask])
        assert taken == path
        results[path] = {"out": backend.host(out), "lse": backend.host(lse)}
    for name in ("out", "lse"):
        one, other = results["sm80"][name], results["sm90"][name]
        tools.assert_close(name, other, one, right[name][1])
