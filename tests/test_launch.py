"""Every kind of call is planned and 'launched' without a GPU: each kernel gets the struct that it should get.

CuPy and the driver are replaced by what ``launch.py`` asks of them; arrays lie in host memory. A call comes in through
the public functions, and what is compared are the bytes that the driver was given, with what they mean by definition.
"""

import ctypes
import functools
import itertools
import math
import re
import sys
import threading
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import checks, choose, compiler, interop, precise, structs, tensor_map
from cupyflash.dropout import ROUNDS, round_keys
from cupyflash.problem import Problem
from cupyflash.spec import BIAS_TYPES

launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
launch_varlen = pytest.importorskip("cupyflash.launch_varlen", reason="needs CuPy")

# --- The GPU that is not there


class Array(np.ndarray):
    """Host memory that looks like an array of CuPy."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def array(shape, dtype, pad=0, offset=0):
    """Zeros, aligned as CuPy's are but for `offset` elements, with `pad` elements after each row of the last axis."""
    *outer, width = np.atleast_1d(shape).tolist()
    dtype = np.dtype(dtype)
    memory = np.zeros((math.prod(outer) * (width + pad) + offset) * dtype.itemsize + 256, np.uint8)
    start = -memory.ctypes.data % 256 + offset * dtype.itemsize
    end = start + math.prod(outer) * (width + pad) * dtype.itemsize
    return memory[start:end].view(dtype).reshape(*outer, width + pad)[..., :width].view(Array)


def of_logits(problem, arrays):
    """Those of bias and mask that are given, in the shape of the logits."""
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    return {n: np.broadcast_to(arrays[n], shape, subok=True) for n in OF_LOGITS if n in arrays}


@dataclass
class Launched:
    """What the driver was given."""

    variant: object
    blocks: int
    threads: int
    shared_bytes: int
    cooperative: bool
    params: np.void  # the struct

    @property
    def spec(self):
        return self.variant.spec


STRUCTS = {
    "any/segments.cuh": structs.SEGMENTS_PARAMS,
    "any/mask_words.cuh": structs.MASK_WORDS_PARAMS,
    "sm80/forward.cuh": structs.FORWARD_PARAMS,
    "sm90/forward.cuh": structs.HOPPER_FORWARD_PARAMS,
    **dict.fromkeys(("sm80/backward.cuh", "sm80/bias_gradient.cuh"), structs.BACKWARD_PARAMS),
    **dict.fromkeys(("any/around_backward.cuh", "any/sink.cuh"), structs.BACKWARD_PARAMS),
    **dict.fromkeys(
        [f"sm90/{name}.cuh" for name in ("backward", "backward_keys", "backward_queries", "bias_gradient")],
        structs.HOPPER_BACKWARD_PARAMS,
    ),
    "precise/forward.cuh": structs.PRECISE_FORWARD_PARAMS,
    "precise/backward.cuh": structs.PRECISE_BACKWARD_PARAMS,
    "sm90/precise_forward.cuh": structs.HOPPER_PRECISE_FORWARD_PARAMS,
    "sm90/precise_backward.cuh": structs.HOPPER_PRECISE_BACKWARD_PARAMS,
    "sm80/mod_gradient.cuh": structs.BACKWARD_PARAMS,
}
MULTIPROCESSORS, STREAM = 132, 77


def struct_of(variant):
    """What the kernel reads, its functions of the user included, where it looks for them."""
    if variant.header == "precise/split.cuh":
        return structs.HALVES_BACKWARD_PARAMS if variant.spec.backward else structs.HALVES_FORWARD_PARAMS
    dtype = STRUCTS[variant.header]
    if variant.mods is None:
        return dtype
    whole = structs.modified(dtype, variant.mods.words)
    if variant.template not in ("bias_gradient", "mod_gradient"):
        return whole
    offsets = [whole.fields[name][1] for name in dtype.names] + [variant.spec.mods_at]
    formats = [whole[name] for name in whole.names]
    return np.dtype({"names": whole.names, "formats": formats, "offsets": offsets})


ADDRESS_WORD = 12  # of a map, behind its other arguments


@dataclass
class Gpu:
    """Stands for CuPy, the driver and the compiler; its index is its capability, which keeps caches apart."""

    capability: int
    path: str
    launched: list = field(default_factory=list)
    temporaries: list = field(default_factory=list)  # that calls allocated for themselves
    built: list = field(default_factory=list)  # variants that plans asked for
    capturing: bool = False
    refuses: bool = False  # to make maps
    interrupt: object = None  # what happens after the next launch

    def cupy(self):
        """The names of the module `cupy` that a call uses."""
        attributes = {
            "MaxSharedMemoryPerBlockOptin": choose.SHARED_LIMIT[self.capability],
            "MultiProcessorCount": MULTIPROCESSORS,
        }
        device = SimpleNamespace(compute_capability=str(self.capability), attributes=attributes)
        stream = SimpleNamespace(ptr=STREAM, is_capturing=lambda: self.capturing)
        return SimpleNamespace(
            empty=self.empty,
            zeros=self.zeros,
            ndarray=array,
            broadcast_to=partial(np.broadcast_to, subok=True),
            ascontiguousarray=lambda x: x if x.flags.c_contiguous else self.copy(x),
            asarray=lambda x: x,
            **{name: getattr(np, name) for name in ("arange", "moveaxis", "stack")},
            cuda=SimpleNamespace(
                Device={self.capability: device}.__getitem__,
                get_current_stream=lambda: stream,
                nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
                runtime=SimpleNamespace(getDevice=lambda: self.capability, memGetInfo=lambda: (0, 0)),
                driver=SimpleNamespace(
                    launchKernel=self.launch_kernel, launchCooperativeKernel=partial(self.launch, True)
                ),
            ),
        )

    def zeros(self, shape, dtype):
        self.temporaries.append(array(shape, dtype))
        return self.temporaries[-1]

    def empty(self, shape, dtype):
        x = self.zeros(shape, dtype)
        x.flat[0] = 1
        return x

    def copy(self, x):
        y = self.empty(x.shape, x.dtype)
        y[...] = x
        return y

    def kernel(self, variant, device):
        assert device == self.capability
        self.built.append(variant)
        return SimpleNamespace(kernel=SimpleNamespace(ptr=variant))

    def launch_kernel(self, *arguments):
        *arguments, extra = arguments
        assert extra == 0
        self.launch(False, *arguments)

    def launch(self, cooperative, variant, blocks, y, z, threads, thread_y, thread_z, shared_bytes, stream, arguments):
        assert y == z == thread_y == thread_z == 1 and stream == STREAM
        dtype = struct_of(variant)
        address = ctypes.c_uint64.from_address(arguments).value
        params = np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]
        self.launched.append(Launched(variant, blocks, threads, shared_bytes, cooperative, params))
        if self.interrupt:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, sizes, strides, box, steps, *rest):  # noqa: N802
        if self.refuses or address.value % 16 or any(s % 16 or not 0 < s < 1 << 40 for s in strides):
            return 1
        assert rank in (4, 5) and all(0 < n <= 256 for n in box) and list(steps) == [1] * rank
        assert len(sizes) == len(box) == rank == len(strides) + 1 and all(0 < n <= 1 << 32 for n in sizes)
        words = np.ctypeslib.as_array(ctypes.cast(target, ctypes.POINTER(ctypes.c_uint64)), (tensor_map.WORDS,))
        arguments = [kind, *sizes, *strides, *box]
        words[:ADDRESS_WORD], words[ADDRESS_WORD] = arguments[:ADDRESS_WORD], address.value
        words[ADDRESS_WORD + 1 :][: len(arguments) - ADDRESS_WORD] = arguments[ADDRESS_WORD:]
        return 0

    def allocated(self, pointer):
        """What there is of a temporary from `pointer` on, None for a null pointer."""
        if not pointer:
            return None
        places = ((int(pointer) - x.ctypes.data, x) for x in self.temporaries)
        offset, found = next((offset, x) for offset, x in places if offset == 0 or 0 < offset < x.nbytes)
        return found[offset // found.itemsize :]


DEVICES = {
    "8.0": (80, "sm80"),
    "8.6": (86, "sm80"),
    "9.0 portable": (90, "sm80"),
    "9.0": (90, "sm90"),
    "12.0": (120, "sm80"),
}


@pytest.fixture(params=DEVICES)
def gpu(request, monkeypatch):
    gpu = Gpu(*DEVICES[request.param])
    cupy, home = gpu.cupy(), interop.CuPy(gpu.capability)
    home.xp = cupy
    monkeypatch.setenv("CUPYFLASH_PATH", gpu.path)
    monkeypatch.setattr(sys.modules["cupyflash.attention"].interop, "home", lambda arrays: home)
    monkeypatch.setattr(compiler, "kernel", gpu.kernel)
    monkeypatch.setattr(launch, "cupy", cupy)
    monkeypatch.setattr(launch_varlen, "cupy", cupy)
    monkeypatch.setattr(launch_varlen, "_plans", {})
    for name, empty in (("_plans", {}), ("_kept_for_graphs", []), ("_thread", threading.local())):
        monkeypatch.setattr(launch, name, empty)
    monkeypatch.setattr(tensor_map, "_driver", lambda: gpu)
    tensor_map.address_word.cache_clear()
    yield gpu
    tensor_map.address_word.cache_clear()


both_paths = pytest.mark.parametrize("gpu", ["9.0 portable", "9.0"], indirect=True)


# --- Calls


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    head_dim_v: int = 64
    batch: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 100
    heads_q: int = 4
    heads_k: int = 2
    dtype: str = "bfloat16"
    bias_dtype: str = "float32"


OPTIONS = {
    "none": {},
    "window": {"window": (20, 30), "scale": 0.3},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": True, "causal": True},
    "sink": {"sink": True},
    "dropout": {"dropout": 0.25},
    "all": {"causal": "upper_left", "softcap": 5.0, "alibi_slopes": True, "sink": True, "dropout": 0.5},
    "mask": {"mask": (1, 0, 1, 1)},
    "bias": {"bias": (1, 1, 1, 1), "sink": True},
    "bias of heads": {"bias": (0, 1, 0, 0), "softcap": 5.0, "dropout": 0.5},
    "bias of keys": {"bias": (1, 0, 0, 1), "mask": (0, 0, 1, 0), "causal": True},
    "bias of queries": {"bias": (0, 0, 1, 0), "alibi_slopes": True},
    "bias of pairs": {"bias": (0, 1, 1, 1)},
    "blocks": {"blocks": "whole"},
    "blocks and mask": {"blocks": "whole", "mask": (1, 0, 1, 1), "causal": True},
    "blocks in part": {"blocks": "in part"},
    "blocks and all": {"blocks": "whole", "causal": True, "softcap": 5.0, "alibi_slopes": True, "dropout": 0.5},
    "blocks and softcap": {"blocks": "whole", "softcap": 5.0},
    "blocks and bias": {"blocks": "whole", "bias": (1, 0, 1, 1)},
    "blocks in part and bias": {"blocks": "in part", "bias": (0, 1, 1, 0), "causal": True},
}
BY_HEAD = ("alibi_slopes", "sink")
OF_LOGITS = ("bias", "mask")  # axes along which they are not broadcast
ARRAYS = (*BY_HEAD, *OF_LOGITS)  # among the options
SEEDS = itertools.count((1 << 63) + 1)


@dataclass
class Call:
    """What was passed and what came back, by the names of the arguments, and what was launched."""

    problem: Problem
    seed: int
    arrays: dict
    launched: list
    main: tuple[str, ...]  # kernels of the pass, without those around them
    block_mask: object = None
    deterministic: bool = False


def prepared(shape, options, names, float32_out, layouts):
    """Problem, arrays by name, and keywords; `layouts`: functions from a shape and a dtype to an array."""
    q = (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim)
    k = (shape.batch, shape.seqlen_k, shape.heads_k, shape.head_dim)
    out, rows = (*q[:-1], shape.head_dim_v), (shape.batch, shape.heads_q, shape.seqlen_q)
    shapes = {"q": q, "k": k, "v": (*k[:-1], shape.head_dim_v), "out": out, "dout": out, "lse": rows, "dlse": rows}
    shapes |= {"alibi_slopes": rows[:2], "sink": rows[1:2]}
    logits = (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)
    shapes |= {
        name: tuple(n if kept else 1 for n, kept in zip(logits, options.get(name, logits))) for name in OF_LOGITS
    }
    narrow = {"q", "k", "v", "dout"} | (set() if float32_out else {"out"})
    wide = "float64" if shape.dtype == "float64" else "float32"
    dtypes = {name: tools.DTYPES[shape.dtype if name in narrow else wide] for name in shapes}
    dtypes |= {"bias": tools.DTYPES[shape.bias_dtype], "mask": np.dtype(bool)}
    names += tuple(name for name in ARRAYS if name in options)
    arrays = {name: layouts.get(name, array)(shapes[name], dtypes[name]) for name in names}
    keywords = options | {name: arrays[name] for name in ARRAYS if name in options}
    given = {name: options.get(name) for name in ("score_mod", "mask_mod")}
    captured = {name: x for mod in given.values() if mod is not None for name, x in mod.arrays.items()}
    if "blocks" in options:
        keywords["block_mask"] = block_mask(shape, keywords.pop("blocks"))
    if "dropout" in options:
        keywords["seed"] = next(SEEDS)
    words = {"causal": False, "window": None, "scale": None, "mods": checks.mods(**given, backward="lse" in names)}
    words |= {name: x for name, x in options.items() if name not in (*ARRAYS, "blocks", *given)}
    words["block_mask"] = keywords["block_mask"].layout if "blocks" in options else None
    passed = {name: arrays[name] for name in ("q", "k", "v", *ARRAYS) if name in arrays} | captured
    problem = checks.forward(True, checks.options(**words), **passed)
    if problem.mask and "mask" not in arrays:
        arrays["mask"] = keywords["block_mask"].mask
    return problem, arrays, keywords


def block_mask(shape, kind):
    """One that differs by head or, in part, by batch."""
    size = (128, 256) if kind == "whole" else (256, 128)
    heads = (1, shape.heads_q) if kind == "whole" else (shape.batch, 1)
    blocks = array((*heads, tiles(shape.seqlen_q, size[0]), tiles(shape.seqlen_k, size[1])), bool)
    rng = np.random.default_rng(0)
    blocks[...] = rng.random(blocks.shape) < 0.6
    if kind == "whole":
        return cupyflash.BlockMask(blocks, size)
    full = array(blocks.shape, bool)
    full[...] = rng.random(blocks.shape) < 0.5
    return cupyflash.BlockMask(blocks, size, full, array((shape.heads_q, shape.seqlen_q, shape.seqlen_k), bool))


def forward(gpu, shape, options, float32_out=False, lse=True, **layouts):
    """Call; what was launched is as it must be."""
    problem, arrays, keywords = prepared(shape, options, ("q", "k", "v", "out"), float32_out, layouts)
    gpu.launched.clear()
    got = cupyflash.attention(*(arrays[name] for name in "qkv"), out=arrays["out"], return_lse=lse, **keywords)
    if lse:
        arrays["lse"] = got[1]
    on_hopper = gpu.path == "sm90" and not gpu.refuses and not choose.forward_elsewhere(problem)
    on_hopper = on_hopper and copyable(*(arrays[name] for name in "qkv"))
    on_hopper = on_hopper and all(readable(x) for name, x in of_logits(problem, arrays).items() if name == "bias")
    main = ("precise_forward" if shape.dtype in precise.ITEM else "hopper_forward" if on_hopper else "forward",)
    if by_halves(gpu, problem):
        main = ("hopper_precise_forward", *main)
    if on_hopper and choose.steady(problem):
        main *= 2
    call = Call(problem, keywords.get("seed", 0), arrays, list(gpu.launched), main, keywords.get("block_mask"))
    check(gpu, call)
    return call


def backward(gpu, shape, options, dlse=True, deterministic=False, float32_out=False, bias_gradient=True, **layouts):
    """Call; what was launched is as it must be."""
    names = ("dout", "q", "k", "v", "out", "lse", *(("dlse",) if dlse else ()))
    problem, arrays, keywords = prepared(shape, options, names, float32_out, layouts)
    gpu.launched.clear()
    keywords |= {"bias_gradient": bias_gradient, "deterministic": deterministic}
    got = cupyflash.attention_backward(*(arrays[name] for name in names[:6]), dlse=arrays.get("dlse"), **keywords)
    arrays |= tools.named(got)
    assert ("dsink" in arrays) == ("sink" in arrays)
    main = ("backward",)
    assert ("dbias" in arrays) == ("bias" in arrays and bias_gradient)
    copied = copyable(*(arrays[name] for name in ("q", "k", "v", "dout")))
    tiled = ("bias", "mask") if choose.split(problem, deterministic) else ("bias",)
    copied = copied and all(readable(x) for name, x in of_logits(problem, arrays).items() if name in tiled)
    if gpu.path == "sm90" and not gpu.refuses and copied and not choose.backward_elsewhere(problem):
        main = ("hopper_keys", "hopper_queries") if choose.split(problem, deterministic) else ("hopper_backward",)
    if shape.dtype in precise.ITEM:
        main = ("precise_keys", "precise_queries")
        if by_halves(gpu, problem):
            main = ("hopper_precise_keys", "hopper_precise_queries", *main)
    blocks = keywords.get("block_mask")
    call = Call(problem, keywords.get("seed", 0), arrays, list(gpu.launched), main, blocks, deterministic)
    check(gpu, call)
    return call


def by_halves(gpu, problem):
    """Whether float32 is split, whatever its layout."""
    return gpu.path == "sm90" and not gpu.refuses and precise.by_halves(problem)


def copyable(*arrays):
    """Whether Hopper's copy engine reads these layouts."""
    steps = [s for x in arrays for s, n in zip(x.strides[:3], x.shape) if n > 1]
    return all(x.ctypes.data % 16 == 0 for x in arrays) and all(s > 0 and s % 16 == 0 for s in steps)


# --- What is true by definition


def readable(x):
    """Whether the copy engine reads this bias or mask, of the shape of the logits."""
    steps = [step for step, n in zip(x.strides[:3], x.shape) if n > 1 and step != 0]
    contiguous = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return contiguous and x.ctypes.data % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def check(gpu, call):
    """One struct for all launches of a call, the launches in their order, each as its kernel needs it."""
    packed = call.main == ("hopper_backward",)
    order, launched = list(call.main), call.launched
    if call.problem.mask and {*call.main} in ({"hopper_forward"}, {"hopper_backward"}):
        maker, *launched = launched
        check_mask_words(gpu, call, maker)
    if "dq" in call.arrays:  # delta is there before anything uses it, and dq's sum before it becomes dq
        order = ["precise_delta" if "precise_keys" in order else "prepare_backward", *order]
        order += [] if {"hopper_queries", "precise_queries"} & {*order} else ["finish_backward"]
        order += ["sink_gradient"] if call.problem.sink else []
        order += kernels_of_dbias(call)
        order += ["add_bias_gradients"] if call.launched[-1].params["dbias"]["parts"] > 1 else []
        order += ["mod_gradient"] if call.problem.mods and call.problem.mods.tracked else []
    halved = call.main[0].startswith("hopper_precise")
    if halved:
        order = ["find_largest", "split_rows", *order]
    assert [one.variant.template for one in launched] == order
    for one in launched:
        check_launch(gpu, call, one, packed)
    for one in launched:
        check_params(call, one.params)
        check_logits(call, one)
        if one.variant.template.startswith("hopper_precise"):
            check_halves(gpu, call, one)
        elif one.variant.template.startswith("hopper"):
            check_maps(call, one)
    if not halved and "only_if" in call.launched[-1].params.dtype.names:
        check_flag(gpu, call)
    if "dq" in call.arrays:
        check_workspace(gpu, call, packed)
    elif "hopper_forward" in call.main:
        check_taken(gpu, call)


def kernels_of_dbias(call):
    """None where it is not wanted, or that of dq writes it: no sums, nor the derivative of softcap."""
    problem, on_hopper = call.problem, call.main[0].startswith("hopper")
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if "dbias" not in call.arrays or stores_dbias(call):
        return []
    return ["hopper_bias_gradient" if on_hopper and not wide else "bias_gradient"]


def stores_dbias(call):
    problem = call.problem
    if "hopper_queries" not in call.main or "dbias" not in call.arrays or problem.softcap is not None:
        return False
    logits = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    return call.arrays["dbias"].size == math.prod(logits) and not (wide and problem.mask)


def check_launch(gpu, call, one, packed):
    problem, spec, template = call.problem, one.spec, one.variant.template
    assert exists(one.variant.header, template)
    assert one.variant.dtype == problem.dtype
    assert one.threads == spec.threads and one.shared_bytes == spec.shared_bytes
    assert one.shared_bytes * getattr(spec, "blocks_per_sm", 1) <= choose.SHARED_LIMIT[gpu.capability]
    assert 0 < one.blocks < 1 << 31
    if template == "hopper_queries":
        assert spec.dbias == stores_dbias(call)
        if spec.dbias:
            of_logits = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
            assert one.params["dbias"].item() == (call.arrays["dbias"].ctypes.data, *of_logits, 1, 1, 1)
    if template in (*call.main, "bias_gradient", "hopper_bias_gradient", "mod_gradient"):
        options = problem.softcap is not None, problem.alibi, problem.dropout > 0
        assert tuple(getattr(spec, name, False) for name in ("softcap", "alibi", "dropout")) == options
        assert getattr(spec, "bias", 0) == BIAS_TYPES.index(problem.bias)
        assert getattr(spec, "mask", False) == problem.mask
        if hasattr(spec, "products"):
            assert spec.item == call.arrays["q"].itemsize
            assert spec.products == (3 if problem.dtype == "float32" and problem.precision != "tf32" else 1)
        assert getattr(spec, "deterministic", call.deterministic) == call.deterministic
        assert getattr(spec, "blocks", False) == (call.block_mask is not None)
        if call.block_mask is not None:  # a tile lies within one of those that have bits
            assert all(128 % getattr(spec, name, 64) == 0 for name in ("block_q", "block_k"))
            assert not getattr(spec, "packed", False)
    if hasattr(spec, "head_dim"):
        assert spec.head_dim >= problem.head_dim and spec.head_dim_v >= problem.head_dim_v
    if template in ("forward", "hopper_forward", "prepare_backward"):
        assert spec.float32_out == (call.arrays["out"].dtype == np.float32)
    if template in ("prepare_backward", "sink_gradient", "bias_gradient", "hopper_bias_gradient", "mod_gradient"):
        assert spec.packed == packed
    with_mods = (*call.main, "bias_gradient", "mod_gradient")
    assert one.variant.mods == (problem.mods if template in with_mods else None)
    if hasattr(spec, "access"):
        check_access(call, one)
    check_blocks(call, one)


@functools.cache
def exists(header, template):
    """Whether the source has this kernel."""
    return bool(re.search(rf"__global__ [^;{{}}]*\b{template}\(", compiler.source(header)))


ALIGNED = {  # arrays that a kernel reads or writes `access` bytes at once
    "forward": ("q", "k", "v", "out"),
    "hopper_forward": ("out",),
    "backward": ("q", "k", "v", "dout", "dk", "dv"),
    "hopper_backward": ("dk", "dv"),
    "hopper_keys": ("dk", "dv"),
    "hopper_queries": ("dq",),
    "bias_gradient": ("q", "k", "v", "dout"),
    "precise_forward": ("q", "k", "v", "out"),
    "hopper_precise_forward": ("out",),
    "hopper_precise_keys": ("dk", "dv"),
    "hopper_precise_queries": ("dq",),
    "find_largest": ("q", "k", "v"),
    "split_rows": ("q", "k", "v"),
    "precise_keys": ("q", "k", "v", "dout", "dk", "dv"),
    "precise_queries": ("q", "k", "v", "dout", "dq"),
    "prepare_backward": ("dout", "out"),
    "finish_backward": ("dq",),
    "mod_gradient": ("q", "k", "v", "dout"),
}


def check_access(call, one):
    """No access lies across the end of a row or off its alignment; float32 goes out element by element."""
    access = one.spec.access
    for name in ALIGNED[one.variant.template] + (("dout",) if getattr(one.spec, "backward", False) else ()):
        x = call.arrays[name]
        if x.dtype == np.float32 != call.arrays["q"].dtype and one.variant.template in call.main:
            continue
        assert (x.ctypes.data | x.shape[3] * x.itemsize) % access == 0, name
        assert all(s % access == 0 for s, n in zip(x.strides[:3], x.shape) if n > 1), name


def check_blocks(call, one):
    """They are as many as the tiles, or share an order of them."""
    problem, spec, template = call.problem, one.spec, one.variant.template
    pairs_q, pairs_k = (problem.batch * heads for heads in (problem.heads_q, problem.heads_k))
    exact = {
        "forward": lambda: pairs_q * tiles(problem.seqlen_q, spec.block_q),
        "backward": lambda: pairs_k * tiles(problem.seqlen_k, spec.block_k),
        "sink_gradient": lambda: problem.heads_q,
        "precise_forward": lambda: pairs_q * tiles(problem.seqlen_q, spec.block_q),
        "precise_delta": lambda: tiles(pairs_q * problem.seqlen_q, spec.warps),
        **dict.fromkeys(
            ("precise_keys", "hopper_precise_keys"), lambda: pairs_k * tiles(problem.seqlen_k, spec.block_k)
        ),
        **dict.fromkeys(
            ("precise_queries", "hopper_precise_queries"), lambda: pairs_q * tiles(problem.seqlen_q, spec.block_q)
        ),
        "mod_gradient": lambda: pairs_q * tiles(problem.seqlen_q, spec.block_q),
    }
    if template in exact:
        assert one.blocks == exact[template]()
    elif template == "prepare_backward":  # the packed statistics have rows to spare
        rows = tiles(problem.seqlen_q, 128) * 128 if spec.packed else problem.seqlen_q
        assert one.blocks == problem.batch * tiles(problem.heads_q, spec.heads) * tiles(rows, 16)
    elif template == "finish_backward":
        assert spec.head_dim % spec.finished_cols == 0
        warps = pairs_q * tiles(problem.seqlen_q, 16) * spec.head_dim // spec.finished_cols
        assert one.blocks == tiles(warps, spec.warps)
    elif template in ("find_largest", "split_rows"):  # they share all vectors
        vectors = max(problem.batch * seqlen * heads for seqlen, heads in rows_and_heads(problem))
        assert one.blocks == min(MULTIPROCESSORS * spec.blocks_per_sm, tiles(vectors, spec.warps))
    elif template in ("bias_gradient", "hopper_bias_gradient"):
        check_sums(call, one)
    elif template == "add_bias_gradients":
        assert spec.bias == BIAS_TYPES.index(problem.bias)
        assert one.blocks == tiles(call.arrays["dbias"].size, 32)
    else:
        check_order(call, one)


def rows_and_heads(problem):
    return (problem.seqlen_q, problem.heads_q), (problem.seqlen_k, problem.heads_k)


def check_order(call, one):
    """Persistent blocks take all tiles of all heads, alone or in pairs."""
    problem, spec, params, template = call.problem, one.spec, one.params, one.variant.template
    if template == "hopper_forward":
        group = problem.group if spec.packed else 1
        assert params["queries"] == 64 // group
        order, heads, at_once = params["order"], problem.heads_q // group, spec.teams
        count = tiles(problem.seqlen_q, spec.block_q // 64 * (64 // group))
    elif template == "hopper_precise_forward":
        order, heads, at_once = params["order"], problem.heads_q, 1
        count = tiles(problem.seqlen_q, spec.block_q)
    elif template == "hopper_queries":
        order, heads, at_once = params["queries"], problem.heads_q, 1
        count = tiles(problem.seqlen_q, spec.block_q)
    else:
        order, heads, at_once = params["keys"], problem.heads_k, 1
        count = tiles(problem.seqlen_k, spec.block_k)
    runs = tiles(count, 2) if order["paired"] else count
    assert order.item() == (heads, count, runs, problem.batch * heads * runs, order["paired"])
    cluster = getattr(spec, "cluster", 1)
    assert one.blocks % cluster == 0 and one.blocks <= MULTIPROCESSORS
    assert one.blocks // cluster <= tiles(order["all_runs"].item(), at_once), "a block without work"
    assert not (template == "hopper_backward" and spec.blocks and params["rotated"])
    wait = template == "hopper_backward" and call.deterministic and params["rotated"]
    assert one.cooperative == bool(wait), "only blocks that run at once may wait for each other"
    if wait:
        assert one.blocks % count == 0 and params["sizes"]["section"] == 1, "whole heads at a time"


def check_flag(gpu, call):
    """Where a maximum stays, that is told to the kernel behind by a word of both, which begins with 0."""
    flag = gpu.allocated(call.launched[-1].params["only_if"])
    launched = call.launched[-len(call.main) :]
    specs = [one.spec for one in launched]
    if call.main == ("hopper_forward",) * 2:
        assert [(spec.steady, spec.only_if) for spec in specs] == [(True, False), (False, True)]
        assert (flag.dtype, flag.tolist()) == (np.uint32, [0])
        first, behind = launched
        assert first.blocks == behind.blocks and first.params.tobytes() == behind.params.tobytes()
    else:
        assert (flag is None or call.problem.blocks) and not any(getattr(spec, "steady", False) for spec in specs)


def check_taken(gpu, call):
    """With a block mask blocks count the runs that they take, from 0, and a run is one tile."""
    params = call.launched[-1].params
    counter = gpu.allocated(params["taken"])
    if call.problem.blocks:  # of each launch, then the flag
        assert (counter.dtype, counter.tolist()) == (np.uint32, [0] * 3) and not params["order"]["paired"]
        assert params["only_if"] == params["taken"] + 8


def check_sums(call, one):
    """Every tile of scores is added once, where it belongs, and every part of a sum is written once.

    By blocks or, on Hopper, by clusters of them, whose warps share the tile of the cluster.
    """
    problem, spec, record = call.problem, one.spec, one.params["dbias"]
    counts = (
        problem.batch,
        problem.heads_q,
        tiles(problem.seqlen_q, spec.block_q),
        tiles(problem.seqlen_k, spec.block_k),
    )
    shape = call.arrays["bias"].shape
    assert record.item()[:5] == (call.arrays["dbias"].ctypes.data, *shape)
    chunks, run, parts = record.item()[5:]
    # As the kernel does: positions count along the axes that are summed first, from the last one on.
    order = [axis for axis in (3, 2, 1, 0) if shape[axis] == 1] + [axis for axis in (3, 2, 1, 0) if shape[axis] > 1]
    of_one = math.prod(n for n, size in zip(counts, shape) if size == 1)
    assert getattr(spec, "summed", of_one > 1) == (of_one > 1)
    cluster = getattr(spec, "cluster", 1)
    assert one.blocks % cluster == 0
    added = np.zeros(counts, int)
    written = np.zeros((parts, *shape), int)
    for block in range(one.blocks // cluster):
        if chunks > 1:
            share, start, chunk = tiles(of_one, chunks), block // chunks * of_one, block % chunks
            positions = range(start + chunk * share, start + min(of_one, (chunk + 1) * share))
        else:
            first, chunk = block * run * of_one, 0
            positions = range(first, min(first + run * of_one, math.prod(counts)))
        assert positions, "a block without work"
        for position in positions:
            at = dict(zip(order, np.unravel_index(position, [counts[axis] for axis in order[::-1]])[::-1]))
            at = [int(at[axis]) for axis in range(4)]
            added[tuple(at)] += 1
            if position + 1 < positions.stop and (position + 1) % of_one:
                continue
            for warp in range(spec.warps):
                warps = warp % spec.warps_q, warp // spec.warps_q
                where, part = [n if size > 1 else 0 for n, size in zip(at[:2], shape)], chunk
                for axis, block_size, split in (
                    (2, spec.block_q, spec.warps_q),
                    (3, spec.block_k, spec.warps // spec.warps_q),
                ):
                    if shape[axis] == 1:
                        part, where = part * split + warps[axis - 2], [*where, slice(0, 1)]
                    else:
                        first = at[axis] * block_size + warps[axis - 2] * (block_size // split)
                        where.append(slice(first, first + block_size // split))
                written[(part, *where)] += 1
    assert (added == 1).all() and (written == 1).all()


def check_params(call, params):
    """Pointers and strides, options and the seed, sizes. What the call lacks is 0, or changes nothing."""
    problem, arrays = call.problem, call.arrays
    names = params.dtype.names
    elsewhere = {"delta"} | ({"out"} if "out_map" in names and params["out_map"].any() else set())
    for name in names:
        if params.dtype[name] in (structs.ARRAY, structs.ROW_ARRAY) and name not in elsewhere:
            check_array(params[name].item(), arrays.get(name), name)
    check_array(params["sink"].item(), arrays.get("sink"), "sink")
    slopes, score = arrays.get("alibi_slopes"), params["score"]
    if slopes is not None:  # as many as rows of lse, so that one for all batches has the stride 0
        slopes = np.broadcast_to(slopes, (problem.batch, problem.heads_q))
    check_array(score.item()[:3], slopes, "slopes")
    given = of_logits(problem, arrays)
    for name in OF_LOGITS:
        if name in names and params.dtype[name] == structs.LOGIT_ARRAY:
            check_array(params[name].item(), given.get(name), name)
    if "dsink" in names:
        assert "dbias" in arrays or params["dbias"].item() == (0,) * 8
        assert params["dsink"] == (arrays["dsink"].ctypes.data if problem.sink else 0)
    softcap = problem.softcap
    capped = (0, 0) if softcap is None else (problem.scale / softcap, softcap / math.log(2))
    assert score.item()[3:5] == tuple(map(np.float32, capped))
    assert score.item()[-2:] == (np.float32(capped[1]) / 2, problem.diagonal)
    kept, threshold = 1 - problem.dropout, int(2**32 * problem.dropout)
    assert params["dropout"]["scale"] == np.float32(1 / kept)
    keys = params["dropout"]["keys"].ravel().view(np.uint32).reshape(-1, 2).tolist()
    assert keys == ([list(pair) for pair in round_keys(call.seed)] if problem.dropout else [[0, 0]] * ROUNDS)
    bits = params["dropout"]["bits"].ravel().tolist()
    assert bits == [2**32 - 1 if threshold & 1 << 31 - n else 0 for n in range(32)]
    check_bitmaps(call, params)
    sizes = params["sizes"]
    for name in ("batch", "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        assert sizes[name] == getattr(problem, name), name
    for query in (0, problem.seqlen_q - 1):
        low, high = max(0, query + sizes["low"]), min(problem.seqlen_k, query + sizes["high"] + 1)
        assert (low, max(low, high)) == problem.key_range(query, query + 1)
    assert 1 <= sizes["section"] <= problem.batch * problem.heads_q
    assert "exact_scale" not in names or params["exact_scale"] == problem.scale
    assert (sizes["scale"], sizes["scale_log2"]) == (np.float32(problem.scale), np.float32(problem.scale / math.log(2)))


def check_logits(call, one):
    """Maps where Hopper's copy engine reads bias and mask."""
    given = of_logits(call.problem, call.arrays)
    template = one.variant.template
    for name in OF_LOGITS:
        words = name == "mask" and template in ("hopper_forward", "hopper_backward")
        if template.startswith("hopper") and "precise" not in template and not words:
            record = one.params[f"{name}_map" if "dq" in call.arrays else name]
            check_logit_map(call, one.spec, record, given.get(name))


def check_mask_words(gpu, call, maker):
    """The mask as it lies, and words where the main kernel looks for them, those of tiles that end later included."""
    problem, p, by_key = call.problem, maker.params, "dq" in call.arrays
    main = next(one for one in call.launched if one.variant.template in call.main)
    assert maker.variant.template == "make_mask_words" and exists(maker.variant.header, "make_mask_words")
    assert maker.threads == 256 and maker.shared_bytes == 0 and not maker.cooperative
    words = main.params["words" if by_key else "mask"]
    assert p["words"].item() == words.item()
    room, group = gpu.allocated(words["data"]), problem.group if getattr(main.spec, "packed", False) else 1
    x = of_logits(problem, call.arrays)["mask"]
    x = x.swapaxes(2, 3) if by_key else x
    check_array(p["mask"].item(), x, "mask")
    own = [n > 1 and step != 0 for n, step in zip(x.shape, x.strides)]
    lengths = [n if has else None for n, has in zip(x.shape, own)]
    assert (p["group"], p["row_step"]) == (group, 64 // group)
    assert [p["rows"], p["cols"]] == [n or 64 for n in lengths[2:]]
    parts = [tiles(n, size) if n else 1 for n, size in zip(lengths[2:], (64 // group, 64))]
    assert [p["row_parts"], p["col_parts"]] == parts
    batches, heads = lengths[0] or 1, lengths[1] // group if own[1] else 1
    assert p["heads"] == heads
    steps = [words[name].item() for name in ("batch", "head", "rows", "cols")]
    assert [step > 0 for step in steps] == own
    assert all(step % 128 == 0 for step in steps)
    counts = [batches, heads, *(n + has for n, has in zip(parts, own[2:]))]
    places = sum(step * np.arange(n).reshape([-1 if k == axis else 1 for k in range(4)])
                 for axis, (step, n) in enumerate(zip(steps, counts)))  # fmt: skip
    assert len(np.unique(places)) == places.size, "every part has words of its own"
    assert places.max() + 128 == room.size and room.dtype == np.uint32
    along_rows = maker.spec.along_rows
    slow, fast = parts[::-1] if along_rows else parts
    assert maker.blocks == batches * heads * slow * tiles(fast, 4)
    neighbours, other = (2, 3) if along_rows else (3, 2)
    if own[other]:
        assert own[neighbours] and abs(x.strides[neighbours]) <= abs(x.strides[other])
    if p["wide"]:
        assert x.strides[neighbours] == 1 and not (along_rows and group > 1)
        assert not any(n % 16 for n in (x.ctypes.data, x.shape[neighbours], *x.strides[:2], x.strides[other]))
    bitmap = main.params["key_blocks" if by_key else "blocks"]
    one_for_many = call.block_mask is not None and not all(own[2:])
    for has, name in zip(own, ("batch", "head")):
        one_for_many |= not has and bitmap[name] != 0
    assert p["blocks"].item() == (bitmap.item() if call.block_mask is not None and not one_for_many else (0,) * 4)


def check_logit_map(call, spec, record, x):
    """A box is 128 bytes wide; along an axis with one entry for all it has that alone, and no coordinate counts."""
    if x is None:
        assert not record["map"].any()
        return
    rows, heads = spec.block_q if isinstance(spec, choose.HopperBackwardSpec) else 64, 1  # of a warpgroup
    if isinstance(spec, choose.HopperForwardSpec) and spec.packed:
        rows, heads = 64 // call.problem.group, call.problem.group
    own = [n > 1 and stride != 0 for n, stride in zip(x.shape[:3], x.strides)]
    assert [record[axis] for axis in ("batch", "head", "row")] == own
    batch, head, seqlen = (n if has else 1 for n, has in zip(x.shape, own))
    strides = [x.strides[axis] if own[axis] else 16 for axis in (1, 2, 0)]
    box = [128 // x.itemsize, heads if own[1] else 1, rows if own[2] else 1, 1]
    kind = 0 if x.dtype == bool else tensor_map.ELEMENT_TYPES[call.problem.bias]
    expected = [kind, x.shape[3], head, seqlen, batch, *strides, *box, x.ctypes.data]
    assert record["map"][: ADDRESS_WORD + 1].tolist() == expected


def check_array(record, x, name):
    """The pointer, and for each axis that has a next entry the elements until there."""
    pointer, *steps = record
    if x is None:
        assert (pointer, *steps) == (0,) * (1 + len(steps)), name
        return
    assert pointer == x.ctypes.data, name
    for step, stride, n in zip(steps, x.strides, x.shape):
        assert n == 1 or step * x.itemsize == stride, name


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1.0, 30.0, 1e4, 1e12, 1e30])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 2**-3, -1.0, 1e30])
def test_series_of_softcap(scale, softcap):
    """Where it is used, softcap to the last digits of float32; where float32 cannot hold it, it is not used."""
    near, series = structs._series(scale, softcap)
    if not near:
        assert not 1e-3 < abs(scale) / softcap < 1e3
        return
    x = (np.float32(near) * np.linspace(-1, 1, 1001)).astype(np.float32)
    square, (c0, c1, c2) = x * x, np.array(series, np.float32)
    got = x * (c0 + square * (c1 + square * c2))
    exact = softcap * np.tanh(scale / softcap * x.astype(np.float64)) / math.log(2)
    np.testing.assert_allclose(got, exact, rtol=4 * 2**-24)


def check_bitmaps(call, params):
    """Bits that say what the block mask shows."""
    problem, given = call.problem, call.block_mask
    for name in {"blocks", "key_blocks"} & set(params.dtype.names):
        pointer, batch_step, head_step, words = params[name].item()
        if given is None:
            assert (pointer, batch_step, head_step, words) == (0,) * 4
            continue
        planes = [given.blocks, given.blocks if given.full is None else given.blocks & ~given.full]
        if problem.mask and given.mask is None:
            planes[1] = planes[0]
        by_tile = np.stack([np.kron(plane, np.ones([n // 128 for n in given.block_size], bool)) for plane in planes])
        by_tile = np.broadcast_to(by_tile, (2, problem.batch, problem.heads_q, *by_tile.shape[3:]))
        if name == "key_blocks":
            by_tile = by_tile.swapaxes(3, 4)
        rows, columns = by_tile.shape[3:]
        for b, h, row in itertools.product(range(problem.batch), range(problem.heads_q), range(rows)):
            at = pointer + 4 * 2 * words * (b * batch_step + h * head_step + row)
            bits = np.frombuffer(ctypes.string_at(at, 8 * words), np.uint8)
            bits = np.unpackbits(bits, bitorder="little").reshape(2, 32 * words)
            assert (bits[:, :columns] == by_tile[:, b, h, row]).all() and not bits[:, columns:].any()


def check_maps(call, one):
    """Hopper's copy engine gets the layout of an array, in boxes as its kernel awaits them."""
    spec, params, names = one.spec, one.params, ("q", "k", "v", "dout")
    rows = dict.fromkeys(names, (64, 1))
    if one.variant.template == "hopper_forward":
        group = call.problem.group if spec.packed else 1
        rows |= dict.fromkeys(("q", "out"), (64 // group, group))
        rows |= dict.fromkeys(("k", "v"), (spec.block_k // spec.cluster, 1))
        names = ("q", "k", "v", "out") if spec.staged else ("q", "k", "v")
        assert spec.staged == params["out_map"].any()
    elif one.variant.template == "hopper_backward":
        rows |= dict.fromkeys(("q", "dout"), (spec.block_q, 1)) | dict.fromkeys(("k", "v"), (spec.block_k, 1))
    elif one.variant.template == "hopper_bias_gradient":  # made for others
        rows |= dict.fromkeys(("k", "v"), (spec.box_k, 1))
    for name in names:
        x, words = call.arrays[name], params[name if params.dtype[name] == structs.MAP else f"{name}_map"]
        kind, (box_rows, box_heads) = tensor_map.ELEMENT_TYPES[call.problem.dtype], rows[name]
        strides = [s if n > 1 else 16 for s, n in zip(x.strides[2::-1], x.shape[2::-1])]
        batch, seqlen, heads, head_dim = x.shape
        expected = [kind, head_dim, heads, seqlen, batch, *strides, 64, box_heads, box_rows, 1, x.ctypes.data]
        assert words[: ADDRESS_WORD + 1].tolist() == expected, name


def check_halves(gpu, call, one):
    """Room for two float16 of each padded number, maps of it, and a flag among scales that begin with 0."""
    spec, params, halves = one.spec, one.params, one.params["halves"]
    names = ("q", "k", "v", "dout") if "dq" in call.arrays else ("q", "k", "v")
    scales = gpu.allocated(halves["scales"])
    assert scales.dtype == np.uint32 and not scales.any() and scales.nbytes == structs.SCALES.itemsize
    assert params["only_if"] == halves["scales"] + structs.SCALES.fields["wide"][1]
    room, start = gpu.allocated(halves["q"]), halves["q"]
    rows = dict.fromkeys(names, 64)
    if one.variant.template == "hopper_precise_forward":
        rows |= dict.fromkeys(("k", "v"), spec.block_k)
    for name in names:
        batch, seqlen, heads, head_dim = call.arrays[name].shape
        width = 2 * (64 if head_dim <= 64 else 128)
        assert halves[name] == start and start % 16 == 0, name
        assert head_dim <= (spec.head_dim if name in "qk" else spec.head_dim_v) <= width // 2
        kind, strides = tensor_map.ELEMENT_TYPES["float16"], [2 * width * n for n in (1, heads, seqlen * heads)]
        expected = [kind, width, heads, seqlen, batch, *strides, 64, 1, rows[name], 1, start]
        words = params[f"{name}_map"]
        for axis, n in ((5, heads), (6, seqlen), (7, batch)):  # steps of axes with one entry mean nothing
            if n == 1:
                expected[axis] = words[axis]
        assert words[: ADDRESS_WORD + 1].tolist() == expected, name
        start += 2 * batch * seqlen * heads * width
    assert start == halves["q"] + room.nbytes and room.dtype == np.float16
    if "dq" not in call.arrays:
        assert halves["dout"] == 0


def check_workspace(gpu, call, packed):
    """Large enough for what the kernels index, and counters of turns begin with 0."""
    problem, by_name = call.problem, {one.variant.template: one.spec for one in call.launched}
    params, main = call.launched[-1].params, by_name[call.main[0]]
    heads, seqlen = problem.heads_q, problem.seqlen_q
    pairs = problem.batch * heads
    pointer, *steps = params["delta"].item()
    delta, dq_sum, turn, sums = map(gpu.allocated, (pointer, *(params[n] for n in ("dq_sum", "turn", "dbias_parts"))))
    parts = params["dbias"]["parts"].item()
    assert (sums is None) == (parts < 2)
    if sums is not None:
        assert sums.dtype == np.float32 and sums.size == parts * call.arrays["dbias"].size
    if packed:
        assert delta.size == pairs * tiles(seqlen, 128) * 128 * 2
    else:
        assert delta.size == pairs * seqlen and steps == [heads * seqlen, seqlen, 1]
    assert delta.dtype == checks.lse_dtype(problem.dtype)
    finish, deterministic = by_name.get("finish_backward"), getattr(main, "deterministic", False)
    assert (dq_sum is None, turn is None) == (finish is None, not deterministic)
    if finish:
        assert finish.head_dim == main.head_dim and dq_sum.dtype == np.float32
        assert dq_sum.size == pairs * tiles(seqlen, 16) * 16 * finish.head_dim
    if deterministic:
        rows = 16 if packed else main.block_q
        assert turn.size == 1 + pairs * tiles(seqlen, rows) and turn.dtype == np.uint32 and not turn.any()


def tiles(length, rows):
    return -(-length // rows)


# --- Tests

SHAPES = [
    Shape(d, dv) for d, dv in ((40, 40), (64, 64), (128, 128), (192, 192), (256, 256), (64, 128), (192, 128), (72, 37))
]
SHAPES += [
    Shape(64, 64, 3, 5, 1300, 8, 2),  # packed rows
    Shape(96, 96, 1, 5, 100, 3, 1, "float16"),
    Shape(128, 128, 1, 200, 600, 2, 2, "float16"),  # not split
    Shape(16, 16, 2, 500, 600, 28, 14),  # more tiles than multiprocessors, which are not whole heads
    Shape(64, 64, 1, 1, 1, 1, 1),
]


LONG_SHAPES = [  # that Hopper splits in float32, or just not
    Shape(d, dv, batch, seqlen_q, seqlen_k, 4, 2)
    for d, dv, batch, seqlen_q, seqlen_k in (
        *((64, 64, 2, 256, 300), (128, 128, 1, 300, 256), (96, 40, 2, 400, 300), (40, 71, 1, 1000, 2000)),
        *((64, 64, 2, 255, 300), (128, 128, 2, 300, 255), (129, 64, 1, 300, 300), (64, 129, 1, 300, 300)),
    )
]


def name_of(shape):
    return "-".join(map(str, vars(shape).values()))


every_call = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_call
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_forward(gpu, shape, options):
    for float32_out, lse in itertools.product((False, True), repeat=2):
        for _ in range(2):  # the second time with a plan, other pointers and another seed
            call = forward(gpu, shape, options, float32_out, lse)
    assert len(launch._plans) == 4 and len(gpu.built) == 4 * len(call.launched)


@every_call
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_backward(gpu, shape, options):
    count = 0
    for dlse, deterministic in itertools.product((False, True), repeat=2):
        for _ in range(2):
            call = backward(gpu, shape, options, dlse, deterministic)
        count += len(call.launched)
    assert len(launch._plans) == 4 and len(gpu.built) == count
    backward(gpu, shape, options, float32_out=True)


WITH_BIAS = {name: options for name, options in OPTIONS.items() if "bias" in options}
OF_DBIAS = ("bias_gradient", "hopper_bias_gradient", "add_bias_gradients")


@pytest.mark.parametrize("options", WITH_BIAS.values(), ids=WITH_BIAS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_backward_of_a_constant_bias(gpu, shape, options):
    """The same without what computes dbias: kernels of its own, and what that of dq does for it."""
    for deterministic in (False, True):
        both = [
            backward(gpu, shape, options, deterministic=deterministic, bias_gradient=given) for given in (True, False)
        ]
        variants = [[(one.variant, one.blocks) for one in call.launched] for call in both]
        kept = [
            (replace(one, spec=replace(one.spec, dbias=False)) if hasattr(one.spec, "dbias") else one, blocks)
            for one, blocks in variants[0]
            if one.template not in OF_DBIAS
        ]
        assert variants[1] == kept
    assert len(launch._plans) == 4


PRODUCTS = {"hopper_backward": 5, "hopper_keys": 4, "hopper_queries": 3, "hopper_bias_gradient": 2}


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("bias", [(1, 1, 1, 1), (0, 1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("head_dim, seqlen_k, fewest", [(64, 2048, 7), (128, 512, 7), (128, 2048, 5), (192, 2048, 7)])
def test_products_of_the_backward_with_a_bias(gpu, head_dim, seqlen_k, fewest, bias):
    """Those of the same kernels without any, but two for dbias, unless that of dq writes it."""
    shape, counts = Shape(head_dim, head_dim, 2, 300, seqlen_k, 4, 4), []
    for wanted in (False, True):
        backward(gpu, shape, {"bias": bias}, bias_gradient=wanted)
        counts.append(sum(PRODUCTS.get(one.variant.template, 0) for one in gpu.launched))
    stored = fewest == 7 and all(bias)
    of_wide_heads = head_dim > 128  # which take the portable kernel for it
    assert counts == [fewest, fewest + (0 if stored or of_wide_heads else 2)]


LOGITS = {  # makers of an array of the shape of the logits, and whether Hopper's copy engine reads tiles of them
    "whole": (True, array),
    "padded": (True, partial(array, pad=64)),
    "one head": (True, lambda shape, dtype: array((shape[0], 1, *shape[2:]), dtype)),
    "one batch": (True, lambda shape, dtype: array((1, *shape[1:]), dtype)),
    "one query": (True, lambda shape, dtype: array((*shape[:2], 1, shape[3]), dtype)),
    "keys alone": (True, lambda shape, dtype: array((1, 1, 1, shape[3]), dtype)),
    "queries first": (True, lambda shape, dtype: array((shape[2], *shape[:2], shape[3]), dtype).transpose(1, 2, 0, 3)),
    "one key": (False, lambda shape, dtype: array((*shape[:3], 1), dtype)),
    "odd rows": (False, partial(array, pad=1)),
    "odd address": (False, partial(array, offset=1)),
    "every second key": (False, lambda shape, dtype: array((*shape[:3], 2 * shape[3]), dtype)[..., ::2]),
    "backwards": (False, lambda shape, dtype: array(shape, dtype)[:, :, ::-1]),
    "keys backwards": (False, lambda shape, dtype: array(shape, dtype)[..., ::-1]),
    "queries last": (False, lambda shape, dtype: array((*shape[:2], *shape[:1:-1]), dtype).swapaxes(2, 3)),
    "one for all": (False, lambda shape, dtype: array((1, 1, 1, 1), dtype)),
}
LOGIT_SHAPES = [
    Shape(40, 40, 2, 70, 112, 4, 2),
    Shape(64, 64, 3, 5, 1296, 8, 2),  # packed rows
    Shape(128, 128, 2, 200, 640, 4, 2),  # not split, but for both
    Shape(192, 160, 2, 130, 144, 4, 2, "float16"),
    Shape(256, 256, 2, 70, 112, 4, 4),
    Shape(96, 96, 2, 3, 208, 6, 2),  # three heads in a row, of 64
    Shape(64, 64, 2, 96, 64, 4, 4),
]


@both_paths
@pytest.mark.parametrize("layout", LOGITS)
@pytest.mark.parametrize("shape", LOGIT_SHAPES, ids=name_of)
@pytest.mark.parametrize("bias, mask", [("bfloat16", False), ("float32", False), (None, True), ("float32", True)])
def test_bias_and_mask(gpu, shape, layout, bias, mask):
    """Below the public functions: they are given in the shape of the logits, as views."""
    readable, make = LOGITS[layout]
    logits = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    for made in (make, array, make):  # strides and alignment that differ need another plan
        given = {"bias": tools.DTYPES.get(bias), "mask": np.dtype(bool) if mask else None}
        given = {n: np.broadcast_to(made(logits, t), logits, subok=True) for n, t in given.items() if t is not None}
        problem, arrays, _ = prepared(shape, {}, ("dout", "q", "k", "v", "out", "lse"), False, {})
        problem, hopper = replace(problem, bias=bias, mask=mask), gpu.path == "sm90" and (readable or made is array)
        gpu.launched.clear()
        forwards = [arrays[name] for name in ("q", "k", "v", "out", "lse")]
        launch.forward(problem, *forwards, None, None, 0, given.get("bias"), given.get("mask"))
        del arrays["dout"]
        words = bias is None and gpu.path == "sm90"  # any layout of a mask alone
        main = ("hopper_forward" if hopper or words else "forward",)
        check(gpu, Call(problem, 0, arrays | given, list(gpu.launched), main))
        gpu.launched.clear()
        arrays["dout"] = array(arrays["out"].shape, arrays["q"].dtype)
        arrays |= {f"d{name}": array(arrays[name].shape, arrays[name].dtype) for name in "qkv"}
        backwards = [arrays.get(name) for name in ("dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv")]
        if bias is not None:
            arrays["dbias"] = array(logits, given["bias"].dtype)
        rest = given.get("bias"), given.get("mask"), arrays.get("dbias")
        launch.backward(problem, *backwards, None, None, None, True, 0, *rest)
        main = ("backward",)
        split = choose.split(problem)
        if (hopper or words and not split) and not choose.backward_elsewhere(problem):
            main = ("hopper_keys", "hopper_queries") if split else ("hopper_backward",)
        check(gpu, Call(problem, 0, arrays | given, list(gpu.launched), main, deterministic=True))
    assert len(launch._plans) == (2 if make is array else 4)


@pytest.mark.parametrize("gpu", ["8.6", "9.0"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"scale": -0.3, "window": (20, 30)}], ids=["none", "window"])
@pytest.mark.parametrize("dtype", precise.ITEM)
@pytest.mark.parametrize("shape", SHAPES + LONG_SHAPES, ids=name_of)
def test_wide_dtypes(gpu, shape, dtype, options):
    shape = replace(shape, dtype=dtype)
    precisions = [{}] if dtype == "float64" else [{}, {"precision": "tf32"}]
    for more, lse, _ in itertools.product(precisions, (False, True), range(2)):
        forward(gpu, shape, options | more, lse=lse)
    for more, dlse, _ in itertools.product(precisions, (False, True), range(2)):
        backward(gpu, shape, options | more, dlse, deterministic=dlse)
    assert len(launch._plans) == 4 * len(precisions) and not launch._kept_for_graphs


LAYOUTS = {
    "padded": partial(array, pad=8),
    "odd rows": partial(array, pad=1),
    "odd address": partial(array, offset=1),
    "even address": partial(array, offset=4),
    "axes swapped": lambda shape, dtype: array((shape[1], shape[0], *shape[2:]), dtype).swapaxes(0, 1),
    "heads first": lambda shape, dtype: array((shape[0], shape[2], shape[1], *shape[3:]), dtype).swapaxes(1, 2),
    "backwards": lambda shape, dtype: array(shape, dtype)[::-1],
    "one for all": lambda shape, dtype: np.broadcast_to(array(shape[1:], dtype), shape, subok=True),
}
BY_HEAD_LAYOUTS = {
    "every second": lambda shape, dtype: array((*shape, 2), dtype)[..., 0],
    "backwards": lambda shape, dtype: array(shape, dtype)[..., ::-1],
    "another address": partial(array, offset=1),
}


PLAIN = ("q", "k", "v", "out", "dout", "lse", "dlse")
ANY_LAYOUT = [(name, layout) for name in PLAIN for layout in LAYOUTS if (name, layout) != ("out", "one for all")]


@both_paths
@pytest.mark.parametrize("name, layout", ANY_LAYOUT)
def test_layouts(gpu, name, layout):
    """Of one array, between calls with the plain one: strides and alignment that differ need another plan."""
    shape, options = Shape(), OPTIONS["all"]
    strange = {name: LAYOUTS[layout]}
    for layouts in ({}, strange, {}, strange):
        if name in ("q", "k", "v", "out"):
            for float32_out in (False, True):
                forward(gpu, shape, {"causal": True}, float32_out, **layouts)
        for one in (options, {}):
            backward(gpu, shape, one, **layouts)


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("dtype", precise.ITEM)
def test_wide_dtypes_on_turing(gpu, dtype, monkeypatch):
    monkeypatch.setattr(launch, "_capability", lambda device: 75)
    monkeypatch.setenv("CUPYFLASH_PATH", "sm80")
    for call in (forward, backward):
        with pytest.raises(NotImplementedError, match=f"{dtype} needs a GPU of compute capability 8.0 .* has 7.5;"):
            call(gpu, Shape(dtype=dtype), {})
    assert not gpu.launched and not gpu.built


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("dtype", precise.ITEM)
@pytest.mark.parametrize("name, layout", ANY_LAYOUT)
def test_layouts_of_wide_dtypes(gpu, name, layout, dtype):
    shape, strange = Shape(dtype=dtype), {name: LAYOUTS[layout]}
    for layouts in ({}, strange, {}, strange):
        if name in ("q", "k", "v", "out"):
            forward(gpu, shape, {"causal": True}, **layouts)
        backward(gpu, shape, {}, **layouts)


@both_paths
@pytest.mark.parametrize("layout", BY_HEAD_LAYOUTS)
@pytest.mark.parametrize("name", BY_HEAD)
def test_layouts_of_what_a_head_has(gpu, name, layout):
    strange = {name: BY_HEAD_LAYOUTS[layout]}
    for layouts in ({}, strange, {}, strange):
        forward(gpu, Shape(), {name: True}, **layouts)
        backward(gpu, Shape(), {name: True}, **layouts)


@both_paths
@pytest.mark.parametrize("options", [{}, OPTIONS["dropout"]], ids=["none", "dropout"])
def test_narrow_results_of_padded_rows(gpu, options):
    """The copy engine reads them; what is written has rows of its own, which allow no wide stores."""
    rows = dict.fromkeys(("q", "k", "v", "dout"), partial(array, pad=3))
    forward(gpu, Shape(37, 37), options, **rows)
    backward(gpu, Shape(37, 37), options, **rows)


@both_paths
def test_slopes_without_a_batch(gpu):
    for make in (array, lambda shape, dtype: array(shape[1:], dtype)) * 2:
        forward(gpu, Shape(), OPTIONS["alibi"], alibi_slopes=make)
        backward(gpu, Shape(), OPTIONS["alibi"], alibi_slopes=make)
    assert len(launch._plans) == 4


def captured_words(gpu, call, params, values):
    """What functions of the user captured, then the sums of gradients: pointers with strides, or numbers."""
    mods, words = call.problem.mods, params["mods"]
    for capture, slot, value in zip(mods.captures, mods.slots, values, strict=False):
        if capture.axes:
            strides = words.view(np.int32)[2 * slot + 2 : 2 * slot + 2 + capture.axes].tolist()
            assert words[slot] == value.ctypes.data, capture
            assert [stride * value.itemsize for stride in strides] == list(value.strides), capture
        else:
            assert words[slot : slot + 1].view(np.dtype(type(value)).str.replace("8", "4"))[0] == value, capture
    for capture, slot in zip(mods.tracked, mods.slots[len(mods.captures) :], strict=True):
        total = gpu.allocated(words[slot])
        assert total.dtype == np.float32 and total.ndim == capture.axes, capture


@pytest.mark.parametrize("shape", [Shape(), Shape(128, 96, heads_k=1), Shape(256, 256)], ids=name_of)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("options", ["none", "all", "mask", "blocks", "bias of keys", "blocks in part and bias"])
def test_functions_of_the_user(gpu, shape, reads, options):
    """Two calls with the same types: the second one gets its own numbers and arrays, by the same plan."""
    for n in (3, -4):
        slope, on = array((2, 4), np.float32), array((30, 40), bool)[::2, ::-1]
        score = cupyflash.ScoreMod(
            "score * factor - slope[b, h] * abs(i - j + n)", n=n, slope=slope, factor=n / 2, gradients=("slope",)
        )
        mask = cupyflash.MaskMod("on[i % 15, j % 40]" if reads else "on[b, h]", on=on)
        given = OPTIONS[options] | {"score_mod": score, "mask_mod": mask}
        calls = forward(gpu, shape, given), backward(gpu, shape, given)
        assert len(launch._plans) == 2
        for call in calls:
            for one in call.launched:
                if one.variant.mods:
                    captured_words(gpu, call, one.params, (n, slope, n / 2, on))
        assert calls[1].arrays["dscore_mod"]["slope"].shape == (2, 4)


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "shape, options",
    [(Shape(), {"sink": True}), (Shape(256, 256), {"sink": True}), (replace(LONG_SHAPES[0], dtype="float32"), {})],
    ids=str,
)
def test_a_driver_that_refuses(gpu, shape, options, late):
    """All maps or, late, those of these arrays: the portable kernels take the call."""
    if late:
        tensor_map.address_word()
    gpu.refuses = True
    forward(gpu, shape, options)
    backward(gpu, shape, options)


@both_paths
@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_the_words_of_a_mask(gpu, capturing):
    gpu.capturing = capturing
    forward(gpu, Shape(), {"mask": (1, 0, 1, 1)}, lse=False)
    assert len(launch._kept_for_graphs) == capturing * (gpu.path == "sm90")
    backward(gpu, Shape(), {"mask": (1, 0, 1, 1)})
    assert len(launch._kept_for_graphs) == capturing * (2 + 2 * (gpu.path == "sm90"))


@both_paths
def test_negative_scale(gpu):
    """The forward negates q instead; what it made of it lives as long as a graph may replay the call."""
    gpu.capturing = True
    q = array((2, 70, 4, 64), tools.DTYPES["bfloat16"])
    q[...] = np.arange(64)
    out, sink = array(q.shape, q.dtype), array(4, np.float32)
    for options in ({}, {"softcap": 3.0, "dropout": 0.5, "seed": 9}):
        cupyflash.attention(q, q, q, out=out, scale=-0.5, sink=sink, **options)
        negated, params = launch._kept_for_graphs[-1], gpu.launched[-1].params
        assert (negated == -q).all()
        given = {"q": negated, "k": q, "v": q, "out": out, "sink": sink}
        problem = Problem("bfloat16", 2, 70, 70, 4, 4, 64, 64, 0.5, 0, None, None, options.get("softcap"), sink=True)
        problem = replace(problem, dropout=options.get("dropout", 0.0))
        check_params(Call(problem, options.get("seed", 0), given, [], ()), params)
    backward(gpu, Shape(), {"scale": -0.5, "softcap": 3.0})


@both_paths
@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_what_it_needs(gpu, capturing):
    """And no other call does: copies, and the memory between the kernels of a backward."""
    gpu.capturing = capturing
    backward(gpu, Shape(), {"bias": (0, 1, 0, 0)}, deterministic=True)
    assert len(gpu.temporaries) == 4
    scattered = array((2, 70, 64, 4), tools.DTYPES["bfloat16"]).swapaxes(2, 3)
    cupyflash.attention(scattered, *[array(scattered.shape, scattered.dtype) for _ in "kv"])
    assert len(gpu.temporaries) == 5 and gpu.launched[-1].params["sizes"]["head_dim"] == 64
    assert {x.ctypes.data for x in launch._kept_for_graphs} == (
        {x.ctypes.data for x in gpu.temporaries} if capturing else set()
    )


def watch_workspace(gpu, monkeypatch):
    """What a call allocates, weakly, and which of it somebody holds at each launch."""
    workspace, held, launch_kernel = [], [], gpu.launch_kernel

    def zeros(shape, dtype):
        x = array(shape, dtype)
        workspace.append(weakref.ref(x))
        return x

    def watched(*arguments):
        held.append([x() is not None for x in workspace])
        launch_kernel(*arguments)

    monkeypatch.setattr(launch.cupy, "zeros", zeros)
    monkeypatch.setattr(launch.cupy, "empty", zeros)
    monkeypatch.setattr(launch.cupy.cuda.driver, "launchKernel", watched)
    return workspace, held


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
def test_a_call_holds_its_workspace(gpu, monkeypatch):
    """Until the last launch: what nobody holds, an allocator may free or give to another thread."""
    workspace, held = watch_workspace(gpu, monkeypatch)
    _, x, _ = prepared(
        replace(LONG_SHAPES[0], dtype="float32"), {}, ("q", "k", "v", "out", "dout", "lse", "dlse"), False, {}
    )
    cupyflash.attention(x["q"], x["k"], x["v"], out=x["out"])
    assert held == [[True] * 2] * 4
    workspace.clear(), held.clear()
    cupyflash.attention_backward(*(x[name] for name in ("dout", "q", "k", "v", "out", "lse")))
    assert held == [[True] * 3] * 7


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_halves(gpu, capturing):
    gpu.capturing = capturing
    forward(gpu, replace(LONG_SHAPES[0], dtype="float32"), {}, lse=False)
    assert len(gpu.temporaries) == 2
    assert {x.ctypes.data for x in launch._kept_for_graphs} == (
        {x.ctypes.data for x in gpu.temporaries} if capturing else set()
    )


@pytest.fixture
def short_is_steady(monkeypatch):
    """Whatever its length, a call that may follows sums in place of maxima."""
    monkeypatch.setattr(choose, "STEADY_KEYS", 1)
    monkeypatch.setattr(choose, "STEADY_SCORES", 1)


STEADY = ("none", "window", "sink", "dropout", "blocks", "blocks and mask", "blocks in part")
CHANGED_STEADY = {("bfloat16", 128): ("alibi", "all")} | dict.fromkeys((("bfloat16", 64), ("bfloat16", 40)), ("alibi",))


@both_paths
@pytest.mark.parametrize("options", OPTIONS)
def test_sums_in_place_of_maxima(gpu, short_is_steady, options):
    """Two launches, of those options alone whose rows have known keys."""
    for shape in (
        Shape(),
        Shape(40, 8, 1, 300, 500, 6, 2),
        Shape(64, 64, 3, 5, 1300, 8, 2),
        Shape(128),
        Shape(128, dtype="float16"),
    ):
        steady = options in STEADY or options in CHANGED_STEADY.get((shape.dtype, shape.head_dim), ())
        steady &= gpu.path == "sm90"
        for float32_out in (False, True):
            call = forward(gpu, shape, OPTIONS[options], float32_out)
            assert call.main == ("hopper_forward",) * 2 if steady else len(call.main) == 1
    for layout in (partial(array, pad=8), partial(array, offset=1)):
        forward(gpu, Shape(), OPTIONS[options], q=layout)
        forward(gpu, Shape(), OPTIONS[options], out=layout)
    assert len(forward(gpu, Shape(192), OPTIONS[options]).main) == 1


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_keeps_the_flag(gpu, short_is_steady, capturing):
    """A word for each call, held until the last launch."""
    gpu.capturing = capturing
    first, second = (forward(gpu, Shape(), {}, lse=False).launched[0].params["only_if"] for _ in range(2))
    assert first != second and len(gpu.temporaries) == 2 and len(launch._plans) == 1
    assert [x.ctypes.data + 8 for x in launch._kept_for_graphs] == ([first, second] if capturing else [])


@both_paths
def test_equal_strides_of_unequal_elements(gpu):
    """Those of out in float32, and in 16 bits where a row is every second element of two."""
    for float32_out in (False, True) * 2:
        out = array if float32_out else lambda shape, dtype: array((*shape[:3], 2), dtype)[..., ::2]
        forward(gpu, Shape(64, 1), {}, float32_out, out=out)
        backward(gpu, Shape(64, 1), {}, float32_out=float32_out, out=out)
    assert len(launch._plans) == 4


@both_paths
def test_a_call_between_the_kernels_of_another(gpu):
    """Of another thread, with the same plan: each has a struct of its own."""

    def same_call():
        launched, gpu.launched = gpu.launched, []
        backward(gpu, Shape(), OPTIONS["sink"])
        gpu.launched = launched

    for _ in range(2):
        gpu.interrupt = same_call
        backward(gpu, Shape(), OPTIONS["sink"])
    assert len(launch._plans) == 1


@both_paths
def test_plans_are_limited(gpu, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 2)
    for head_dim in (64, 96, 128, 64):
        forward(gpu, Shape(head_dim), {})
        assert len(launch._plans) <= 2


@both_paths
def test_too_many_blocks(gpu):
    """Rows without memory of their own, as many as no launch has blocks for."""
    one = array((1, 1, 1, 64), tools.DTYPES["bfloat16"])
    many = np.broadcast_to(one, (1 << 16, 1, 1 << 15, 64), subok=True)
    problem = Problem("bfloat16", 1 << 16, 1, 1, 1 << 15, 1 << 15, 64, 64, 1.0)
    with pytest.raises(ValueError, match="exceeds the 2147483647 blocks of a launch; split the batch"):
        launch._plan_forward(problem, (many,) * 4, launch.Rest(*[None] * 5, launch.NO_BLOCKS))
