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
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import checks, choose, compiler, interop, structs, tensor_map
from cupyflash.problem import Problem

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
    "sm80/forward.cuh": structs.FORWARD_PARAMS,
    "sm90/forward.cuh": structs.HOPPER_FORWARD_PARAMS,
    **dict.fromkeys(("sm80/backward.cuh", "any/around_backward.cuh", "any/sink.cuh"), structs.BACKWARD_PARAMS),
    **dict.fromkeys(
        ("sm90/backward.cuh", "sm90/backward_keys.cuh", "sm90/backward_queries.cuh"), structs.HOPPER_BACKWARD_PARAMS
    ),
}
MULTIPROCESSORS, STREAM = 132, 77
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
        dtype = STRUCTS[variant.header]
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
        """The temporary at `pointer`, None for a null pointer."""
        return next(x for x in self.temporaries if x.ctypes.data == pointer) if pointer else None


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


OPTIONS = {
    "none": {},
    "window": {"window": (20, 30), "scale": 0.3},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": True, "causal": True},
    "sink": {"sink": True},
    "dropout": {"dropout": 0.25},
    "all": {"causal": "upper_left", "softcap": 5.0, "alibi_slopes": True, "sink": True, "dropout": 0.5},
}
BY_HEAD = ("alibi_slopes", "sink")  # arrays among the options
SEEDS = itertools.count((1 << 63) + 1)


@dataclass
class Call:
    """What was passed and what came back, by the names of the arguments, and what was launched."""

    problem: Problem
    seed: int
    arrays: dict
    launched: list
    main: tuple[str, ...]  # kernels of the pass, without those around them
    deterministic: bool = False


def prepared(shape, options, names, float32_out, layouts):
    """Problem, arrays by name, and keywords; `layouts`: functions from a shape and a dtype to an array."""
    q = (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim)
    k = (shape.batch, shape.seqlen_k, shape.heads_k, shape.head_dim)
    out, rows = (*q[:-1], shape.head_dim_v), (shape.batch, shape.heads_q, shape.seqlen_q)
    shapes = {"q": q, "k": k, "v": (*k[:-1], shape.head_dim_v), "out": out, "dout": out, "lse": rows, "dlse": rows}
    shapes |= {"alibi_slopes": rows[:2], "sink": rows[1:2]}
    narrow = {"q", "k", "v", "dout"} | (set() if float32_out else {"out"})
    dtypes = {name: tools.DTYPES[shape.dtype if name in narrow else "float32"] for name in shapes}
    names += tuple(name for name in BY_HEAD if name in options)
    arrays = {name: layouts.get(name, array)(shapes[name], dtypes[name]) for name in names}
    keywords = options | {name: arrays[name] for name in BY_HEAD if name in options}
    if "dropout" in options:
        keywords["seed"] = next(SEEDS)
    words = {"causal": False, "window": None, "scale": None} | {n: x for n, x in options.items() if n not in BY_HEAD}
    problem = checks.forward(
        True, checks.options(**words), **{name: arrays[name] for name in ("q", "k", "v", *BY_HEAD) if name in arrays}
    )
    return problem, arrays, keywords


def forward(gpu, shape, options, float32_out=False, lse=True, **layouts):
    """Call; what was launched is as it must be."""
    problem, arrays, keywords = prepared(shape, options, ("q", "k", "v", "out"), float32_out, layouts)
    gpu.launched.clear()
    got = cupyflash.attention(*(arrays[name] for name in "qkv"), out=arrays["out"], return_lse=lse, **keywords)
    if lse:
        arrays["lse"] = got[1]
    on_hopper = gpu.path == "sm90" and not gpu.refuses and copyable(*(arrays[name] for name in "qkv"))
    main = ("hopper_forward" if on_hopper else "forward",)
    call = Call(problem, keywords.get("seed", 0), arrays, list(gpu.launched), main)
    check(gpu, call)
    return call


def backward(gpu, shape, options, dlse=True, deterministic=False, float32_out=False, **layouts):
    """Call; what was launched is as it must be."""
    names = ("dout", "q", "k", "v", "out", "lse", *(("dlse",) if dlse else ()))
    problem, arrays, keywords = prepared(shape, options, names, float32_out, layouts)
    gpu.launched.clear()
    got = cupyflash.attention_backward(
        *(arrays[name] for name in names[:6]), dlse=arrays.get("dlse"), deterministic=deterministic, **keywords
    )
    arrays |= tools.named(got)
    assert ("dsink" in arrays) == ("sink" in arrays)
    main = ("backward",)
    copied = copyable(*(arrays[name] for name in ("q", "k", "v", "dout")))
    if gpu.path == "sm90" and not gpu.refuses and copied and not choose.drops_elsewhere(problem):
        main = ("hopper_keys", "hopper_queries") if choose.split(problem) else ("hopper_backward",)
    call = Call(problem, keywords.get("seed", 0), arrays, list(gpu.launched), main, deterministic)
    check(gpu, call)
    return call


def copyable(*arrays):
    """Whether Hopper's copy engine reads these layouts."""
    steps = [s for x in arrays for s, n in zip(x.strides[:3], x.shape) if n > 1]
    return all(x.ctypes.data % 16 == 0 for x in arrays) and all(s > 0 and s % 16 == 0 for s in steps)


# --- What is true by definition


def check(gpu, call):
    """One struct for all launches of a call, the launches in their order, each as its kernel needs it."""
    packed = call.main == ("hopper_backward",)
    order = list(call.main)
    if "dq" in call.arrays:  # delta is there before anything uses it, and dq's sum before it becomes dq
        order = ["prepare_backward", *order]
        order += [] if "hopper_queries" in order else ["finish_backward"]
        order += ["sink_gradient"] if call.problem.sink else []
    assert [one.variant.template for one in call.launched] == order
    for one in call.launched:
        check_launch(gpu, call, one, packed)
    for one in call.launched:
        check_params(call, one.params)
        if one.variant.template.startswith("hopper"):
            check_maps(call, one)
    if "dq" in call.arrays:
        check_workspace(gpu, call, packed)


def check_launch(gpu, call, one, packed):
    problem, spec, template = call.problem, one.spec, one.variant.template
    assert exists(one.variant.header, template)
    assert one.variant.dtype == problem.dtype
    assert one.threads == spec.threads and one.shared_bytes == spec.shared_bytes
    assert one.shared_bytes * getattr(spec, "blocks_per_sm", 1) <= choose.SHARED_LIMIT[gpu.capability]
    assert 0 < one.blocks < 1 << 31
    if template in call.main:
        options = problem.softcap is not None, problem.alibi, problem.dropout > 0
        assert (spec.softcap, spec.alibi, getattr(spec, "dropout", False)) == options
        assert getattr(spec, "deterministic", call.deterministic) == call.deterministic
    if hasattr(spec, "head_dim"):
        assert spec.head_dim >= problem.head_dim and spec.head_dim_v >= problem.head_dim_v
    if template in ("forward", "hopper_forward", "prepare_backward"):
        assert spec.float32_out == (call.arrays["out"].dtype == np.float32)
    if template in ("prepare_backward", "sink_gradient"):
        assert spec.packed == packed
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
    "prepare_backward": ("dout", "out"),
    "finish_backward": ("dq",),
}


def check_access(call, one):
    """No access lies across the end of a row or off its alignment; float32 goes out element by element."""
    access = one.spec.access
    for name in ALIGNED[one.variant.template]:
        x = call.arrays[name]
        if x.dtype == np.float32 and one.variant.template in call.main:
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
    else:
        check_order(call, one)


def check_order(call, one):
    """Persistent blocks take all tiles of all heads, alone or in pairs."""
    problem, spec, params, template = call.problem, one.spec, one.params, one.variant.template
    if template == "hopper_forward":
        group = problem.group if spec.packed else 1
        assert params["queries"] == 64 // group
        order, heads, at_once = params["order"], problem.heads_q // group, spec.teams
        count = tiles(problem.seqlen_q, spec.block_q // 64 * (64 // group))
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
    wait = template == "hopper_backward" and call.deterministic and params["rotated"]
    assert one.cooperative == bool(wait), "only blocks that run at once may wait for each other"
    if wait:
        assert one.blocks % count == 0 and params["sizes"]["section"] == 1, "whole heads at a time"


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
    if "dsink" in names:
        assert params["dsink"] == (arrays["dsink"].ctypes.data if problem.sink else 0)
    softcap = problem.softcap
    capped = (0, 0) if softcap is None else (problem.scale / softcap, softcap / math.log(2))
    assert score.item()[3:] == (*map(np.float32, capped), problem.diagonal)
    kept = 1 - problem.dropout
    assert params["dropout"].item() == (call.seed, 2**32 * problem.dropout, np.float32(1 / kept))
    sizes = params["sizes"]
    for name in ("batch", "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        assert sizes[name] == getattr(problem, name), name
    for query in (0, problem.seqlen_q - 1):
        low, high = max(0, query + sizes["low"]), min(problem.seqlen_k, query + sizes["high"] + 1)
        assert (low, max(low, high)) == problem.key_range(query, query + 1)
    assert 1 <= sizes["section"] <= problem.batch * problem.heads_q
    assert (sizes["scale"], sizes["scale_log2"]) == (np.float32(problem.scale), np.float32(problem.scale / math.log(2)))


def check_array(record, x, name):
    """The pointer, and for each axis that has a next entry the elements until there."""
    pointer, *steps = record
    if x is None:
        assert (pointer, *steps) == (0,) * (1 + len(steps)), name
        return
    assert pointer == x.ctypes.data, name
    for step, stride, n in zip(steps, x.strides, x.shape):
        assert n == 1 or step * x.itemsize == stride, name


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
    for name in names:
        x, words = call.arrays[name], params[name if params.dtype[name] == structs.MAP else f"{name}_map"]
        kind, (box_rows, box_heads) = tensor_map.ELEMENT_TYPES[call.problem.dtype], rows[name]
        strides = [s if n > 1 else 16 for s, n in zip(x.strides[2::-1], x.shape[2::-1])]
        batch, seqlen, heads, head_dim = x.shape
        expected = [kind, head_dim, heads, seqlen, batch, *strides, 64, box_heads, box_rows, 1, x.ctypes.data]
        assert words[: ADDRESS_WORD + 1].tolist() == expected, name


def check_workspace(gpu, call, packed):
    """Large enough for what the kernels index, and counters of turns begin with 0."""
    problem, by_name = call.problem, {one.variant.template: one.spec for one in call.launched}
    params, main = call.launched[0].params, by_name[call.main[0]]
    heads, seqlen = problem.heads_q, problem.seqlen_q
    pairs = problem.batch * heads
    pointer, *steps = params["delta"].item()
    delta, dq_sum, turn = map(gpu.allocated, (pointer, params["dq_sum"], params["turn"]))
    if packed:
        assert delta.size == pairs * tiles(seqlen, 128) * 128 * 2
    else:
        assert delta.size == pairs * seqlen and steps == [heads * seqlen, seqlen, 1]
    assert delta.dtype == np.float32
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


def name_of(shape):
    return "-".join(map(str, vars(shape).values()))


every_call = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_call
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_forward(gpu, shape, options):
    for float32_out, lse in itertools.product((False, True), repeat=2):
        for _ in range(2):  # the second time with a plan, other pointers and another seed
            forward(gpu, shape, options, float32_out, lse)
    assert len(launch._plans) == len(gpu.built) == 4


@every_call
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_backward(gpu, shape, options):
    for dlse, deterministic in itertools.product((False, True), repeat=2):
        for _ in range(2):
            call = backward(gpu, shape, options, dlse, deterministic)
    assert len(launch._plans) == 4 and len(gpu.built) == 4 * len(call.launched)
    backward(gpu, shape, options, float32_out=True)


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


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", [Shape(), Shape(256, 256)], ids=name_of)
def test_a_driver_that_refuses(gpu, shape, late):
    """All maps or, late, those of these arrays: the portable kernels take the call."""
    if late:
        tensor_map.address_word()
    gpu.refuses = True
    forward(gpu, shape, OPTIONS["sink"])
    backward(gpu, shape, OPTIONS["sink"])


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
    backward(gpu, Shape(), {}, deterministic=True)
    assert len(gpu.temporaries) == 3
    scattered = array((2, 70, 64, 4), tools.DTYPES["bfloat16"]).swapaxes(2, 3)
    cupyflash.attention(scattered, *[array(scattered.shape, scattered.dtype) for _ in "kv"])
    assert len(gpu.temporaries) == 4 and gpu.launched[-1].params["sizes"]["head_dim"] == 64
    assert {x.ctypes.data for x in launch._kept_for_graphs} == (
        {x.ctypes.data for x in gpu.temporaries} if capturing else set()
    )


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
    with pytest.raises(ValueError, match="exceeds the 2147483647 blocks of a launch; split the batch"):
        launch._plan_forward(
            Problem("bfloat16", 1 << 16, 1, 1, 1 << 15, 1 << 15, 64, 64, 1.0), many, many, many, many, None, None, None
        )
