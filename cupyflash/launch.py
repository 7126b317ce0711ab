"""The CUDA backend: fills one parameter struct for each kernel and launches it on the current device and stream.

Every array but the lse-shaped ones has a contiguous last axis: what has not was copied before (``attention.py``).
What depends on shapes, strides and alignment is worked out once and kept as a plan; a warm call copies the plan's
struct, writes the pointers and launches. The dtypes are the twins of the structs in ``kernels/core/params.cuh``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import cupy
import numpy as np

from . import choose, compiler, tensor_map
from .problem import Problem
from .spec import Variant

ARRAY = np.dtype([("data", "u8"), ("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)
ROW_ARRAY = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")], align=True)
_COUNTS = "batch heads_q group seqlen_q seqlen_k head_dim head_dim_v low high section"
SIZES = np.dtype([*((n, "i4") for n in _COUNTS.split()), ("scale", "f4"), ("scale_log2", "f4")], align=True)
FORWARD_PARAMS = np.dtype(
    [*((n, ARRAY) for n in ("q", "k", "v", "out")), ("lse", ROW_ARRAY), ("sizes", SIZES)], align=True
)
BACKWARD_PARAMS = np.dtype(
    [*((n, ARRAY) for n in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"))]
    + [*((n, ROW_ARRAY) for n in ("lse", "dlse", "delta"))]
    + [("dq_sum", "u8"), ("turn", "u8"), ("sizes", SIZES)],
    align=True,
)

ORDER = np.dtype([(n, "i4") for n in ("heads", "tiles", "runs", "all_runs", "paired")])
MAP = np.dtype(("u8", tensor_map.WORDS))
HOPPER_FORWARD_PARAMS = np.dtype(
    {
        "names": ["q", "k", "v", "out_map", "out", "lse", "sizes", "order", "queries"],
        "formats": [MAP, MAP, MAP, MAP, ARRAY, ROW_ARRAY, SIZES, ORDER, "i4"],
        "offsets": [0, 128, 256, 384, 512, 544, 576, 624, 644],
        "itemsize": 704,
    }
)

_ARRAYS, _ROWS = ("dout", "out", "dq", "dk", "dv"), ("lse", "dlse")
HOPPER_BACKWARD_PARAMS = np.dtype(
    {
        "names": ["q_map", "k_map", "v_map", "dout_map", *_ARRAYS, *_ROWS, "statistics", "dq_sum", "counters", "sizes"]
        + ["window", "row_blocks", "rotated"],
        "formats": [MAP] * 4 + [ARRAY] * 5 + [ROW_ARRAY] * 2 + ["u8"] * 3 + [SIZES] + ["i4"] * 3,
        "offsets": [0, 128, 256, 384, 512, 544, 576, 608, 640, 672, 704, 736, 744, 752, 760, 808, 812, 816],
        "itemsize": 832,
    }
)

UNBOUNDED = 1 << 30  # beyond every key: seqlen_q + seqlen_k < 2^30
TINY = 2.0**-126  # the least scale: one that float32 takes for 0 would make NaN of the -inf of a hidden score
L2_SHARE = 24 << 20  # bytes that the heads which run side by side read again and again
MAX_BLOCKS = (1 << 31) - 1
MAX_PLANS = 4096
_plans: dict = {}
_kept_for_graphs: list = []


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid."""

    kernel: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int

    @classmethod
    def of(cls, variant: Variant, blocks: int, threads: int) -> Launch:
        kernel = compiler.kernel(
            variant, cupy.cuda.runtime.getDevice()
        ).kernel  # a RawKernel finds it anew in each call
        return cls(kernel, (blocks, 1, 1), (threads, 1, 1), variant.spec.shared_bytes)

    def __call__(self, struct: np.ndarray) -> None:
        self.kernel(self.grid, self.block, (struct,), self.shared_bytes)


@dataclass(frozen=True)
class Plan:
    """The launches of one pass and their struct, which lacks nothing but the pointers."""

    launches: tuple[Launch, ...]
    words: np.ndarray  # the struct as 64-bit words: NumPy copies and CuPy passes structured arrays slowly
    struct: np.dtype
    slots: tuple[int, ...]  # the words that hold the pointers
    workspace: tuple[int, ...] = ()
    hopper: bool = False

    @classmethod
    def of(cls, launches: tuple[Launch, ...], params: np.ndarray, names: tuple[str, ...], workspace=(), hopper=False):
        slots = tuple(
            params.dtype.fields[name][1] // 8 + (tensor_map.address_word() if params.dtype[name] == MAP else 0)
            for name in names
        )
        return cls(launches, params.view(np.int64), np.dtype(("V", params.nbytes)), slots, workspace, hopper)

    def run(self, *pointers: int) -> None:
        words = self.words.copy()
        for slot, pointer in zip(self.slots, pointers):
            words[slot] = pointer
        struct = words.view(self.struct)
        for launch in self.launches:
            launch(struct)


def forward(problem: Problem, q, k, v, out, lse) -> None:
    """Write ``out`` and, unless it is None, ``lse``."""
    if problem.scale < 0:  # the kernels take the maximum before they scale
        negated = (q.view(np.uint16) ^ np.uint16(0x8000)).view(q.dtype)
        keep_for_graph(negated)
        return forward(replace(problem, scale=-problem.scale), negated, k, v, out, lse)
    offsets = (q.data.ptr & 15, k.data.ptr & 15, v.data.ptr & 15, out.data.ptr & 15)
    lse_strides = None if lse is None else lse.strides
    device = cupy.cuda.runtime.getDevice()
    key = (problem, device, offsets, q.strides, k.strides, v.strides, out.strides, lse_strides, out.itemsize)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _plan_forward(problem, q, k, v, out, lse))
    plan.run(q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0 if lse is None else lse.data.ptr)


def backward(problem: Problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic: bool) -> None:
    """Write ``dq``, ``dk`` and ``dv``."""
    arrays = (q, k, v, dout, out, dq, dk, dv)
    rows = (lse,) if dlse is None else (lse, dlse)
    device = cupy.cuda.runtime.getDevice()
    layouts = tuple([(x.data.ptr & 15, x.strides) for x in arrays + rows])
    key = (problem, device, layouts, out.itemsize, deterministic)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _plan_backward(problem, arrays, lse, dlse, deterministic))
    delta, dq_sum, turns = plan.workspace
    # Statistics of each row before its sums; the counters of the portable kernels begin with 0.
    workspace = (cupy.empty(delta, np.float32), cupy.empty(dq_sum, np.float32))
    workspace += ((cupy.empty if plan.hopper else cupy.zeros)(turns, np.uint32) if turns else None,)
    keep_for_graph(*workspace)
    plan.run(
        *(x.data.ptr for x in arrays),
        lse.data.ptr,
        0 if dlse is None else dlse.data.ptr,
        *(0 if x is None else x.data.ptr for x in workspace),
        *((dout.data.ptr,) if plan.hopper else ()),
    )


def keep_for_graph(*temporaries) -> None:
    """Keep what a captured graph will use at every replay; the pool would give it to others after this call.

    Nobody tells when the graph is gone, so the memory stays reserved until the process ends.
    """
    if cupy.cuda.get_current_stream().is_capturing():
        _kept_for_graphs.extend(temporaries)


def _remember(key: tuple, plan: Plan) -> Plan:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _steps(x) -> tuple[int, ...]:
    """Strides in elements of the first three axes; that of an axis with one entry means nothing and becomes 0."""
    return tuple(stride // x.itemsize if n > 1 else 0 for stride, n in zip(x.strides[:3], x.shape))


def _access(problem: Problem, arrays: tuple) -> int:
    """Return the widest load, in bytes, that every row of every array is aligned to and a multiple of."""
    bits = 16 | 2 * problem.head_dim | 2 * problem.head_dim_v
    for x in arrays:
        bits |= x.data.ptr
        for step in _steps(x):
            bits |= step * x.itemsize
    return bits & -bits


def _fill(params: np.ndarray, name: str, x) -> None:
    if x is not None:
        record = params[0][name]
        for field, step in zip(record.dtype.names[1:], _steps(x)):
            record[field] = step


def _sizes(problem: Problem, section: int):
    low = -UNBOUNDED if problem.left is None else problem.diagonal - problem.left
    high = UNBOUNDED if problem.right is None else problem.diagonal + problem.right
    used = math.copysign(max(abs(problem.scale), TINY), problem.scale)
    return (
        problem.batch, problem.heads_q, problem.group, problem.seqlen_q, problem.seqlen_k, problem.head_dim,
        problem.head_dim_v, low, high, section, problem.scale, used * math.log2(math.e),
    )  # fmt: skip


@functools.cache
def _attribute(device: int, name: str) -> int:
    return cupy.cuda.Device(device).attributes[name]


def _shared_limit(device: int) -> int:
    return _attribute(device, "MaxSharedMemoryPerBlockOptin")


@functools.cache
def _capability(device: int) -> int:
    return int(cupy.cuda.Device(device).compute_capability)


def _blocks(pairs: int, tiles: int) -> int:
    if pairs * tiles > MAX_BLOCKS:
        raise ValueError(
            f"batch * heads * tiles of a head = {pairs} * {tiles} exceeds the {MAX_BLOCKS} blocks of a launch; "
            "split the batch"
        )
    return pairs * tiles


def _forward_sizes(problem: Problem, packed: int = 1):
    """`packed`: heads of a tile."""
    key_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    section = min(problem.batch * problem.heads_q, max(1, L2_SHARE // key_bytes) * problem.group) // packed
    return _sizes(problem, section)


def _plan_forward(problem: Problem, q, k, v, out, lse) -> Plan:
    device = cupy.cuda.runtime.getDevice()
    path = choose.path(_capability(device), cupy.cuda.nvrtc.getVersion())
    plan = _plan_hopper_forward(device, problem, q, k, v, out, lse) if path == "sm90" else None
    return plan or _plan_portable_forward(device, problem, q, k, v, out, lse)


def _plan_portable_forward(device: int, problem: Problem, q, k, v, out, lse) -> Plan:
    float32_out = out.dtype == np.float32
    access = _access(problem, (q, k, v) if float32_out else (q, k, v, out))
    variant = choose.forward(problem, access, float32_out, _shared_limit(device), _capability(device))
    blocks = _blocks(problem.batch * problem.heads_q, -(-problem.seqlen_q // variant.spec.block_q))
    params = np.zeros(1, FORWARD_PARAMS)
    params["sizes"] = _forward_sizes(problem)
    for name, x in zip(FORWARD_PARAMS.names, (q, k, v, out, lse)):
        _fill(params, name, x)
    return Plan.of((Launch.of(variant, blocks, variant.spec.threads),), params, FORWARD_PARAMS.names[:-1])


def _plan_hopper_forward(device: int, problem: Problem, q, k, v, out, lse) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k or v."""
    if not all(map(tensor_map.possible, (q, k, v))):
        return None
    float32_out = out.dtype == np.float32
    variant = choose.hopper_forward(problem, _access(problem, (out,)), float32_out)
    spec = variant.spec
    group = problem.group if spec.packed else 1
    queries = 64 // group  # of a warpgroup
    part = spec.block_k // spec.cluster  # the keys that one block of a cluster copies
    boxes = {"q": (q, queries, group), "k": (k, part, 1), "v": (v, part, 1)}
    target = "out_map" if spec.staged else "out"
    if spec.staged:
        boxes["out_map"] = (out, queries, group)
    params = np.zeros(1, HOPPER_FORWARD_PARAMS)
    for name, (x, rows, heads) in boxes.items():
        words = tensor_map.encode(x, problem.dtype, rows, heads)
        if words is None:
            return None
        params[name] = words
    heads, tiles = problem.heads_q // group, -(-problem.seqlen_q // (spec.block_q // 64 * queries))
    params["order"], runs = _order(problem, heads, tiles)
    params["queries"] = queries
    params["sizes"] = _forward_sizes(problem, group)
    _fill(params, "out", out)
    _fill(params, "lse", lse)
    clusters = min(-(-runs // spec.teams), _attribute(device, "MultiProcessorCount") // spec.cluster)
    launch = Launch.of(variant, clusters * spec.cluster, spec.threads)
    return Plan.of((launch,), params, ("q", "k", "v", target, "lse"))


def _order(problem: Problem, heads: int, tiles: int) -> tuple[tuple, int]:
    """Return the struct `Order` of persistent blocks, and the number of runs; `heads` of a batch have `tiles` each."""
    paired = problem.banded and tiles > 1
    runs = -(-tiles // 2) if paired else tiles
    all_runs = _blocks(problem.batch * heads, runs)
    return (heads, tiles, runs, all_runs, paired), all_runs


def _plan_backward(problem: Problem, arrays: tuple, lse, dlse, deterministic: bool) -> Plan:
    device = cupy.cuda.runtime.getDevice()
    path = choose.path(_capability(device), cupy.cuda.nvrtc.getVersion())
    plan = _plan_hopper_backward(device, problem, arrays, lse, dlse, deterministic) if path == "sm90" else None
    return plan or _plan_portable_backward(device, problem, arrays, lse, dlse, deterministic)


def _plan_portable_backward(device: int, problem: Problem, arrays: tuple, lse, dlse, deterministic: bool) -> Plan:
    access, out = _access(problem, arrays), arrays[4]
    main = choose.backward(problem, access, deterministic, _shared_limit(device), _capability(device))
    before, after = choose.around_backward(main, out.dtype == np.float32)
    spec = main.spec
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    row_blocks = _blocks(pairs_q, -(-problem.seqlen_q // 16))
    blocks = _blocks(pairs_k, -(-problem.seqlen_k // spec.block_k))

    params = np.zeros(1, BACKWARD_PARAMS)
    for name, x in zip(("q", "k", "v", "dout", "out", "dq", "dk", "dv", "lse", "dlse"), (*arrays, lse, dlse)):
        _fill(params, name, x)
    params["delta"] = (0, problem.heads_q * problem.seqlen_q, problem.seqlen_q, 1)
    params["sizes"] = _sizes(problem, _backward_section(problem))
    launches = (
        Launch.of(before, row_blocks, before.spec.threads),
        Launch.of(main, blocks, spec.threads),
        Launch.of(after, row_blocks, after.spec.threads),
    )
    turns = 1 + pairs_q * -(-problem.seqlen_q // spec.block_q) if deterministic else 0
    names = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", "lse", "dlse", "delta", "dq_sum", "turn")
    return Plan.of(launches, params, names, (pairs_q * problem.seqlen_q, row_blocks * 16 * spec.head_dim, turns))


def _backward_section(problem: Problem) -> int:
    query_bytes = problem.group * problem.seqlen_q * (6 * problem.head_dim + 2 * problem.head_dim_v)
    return min(problem.batch * problem.heads_k, max(1, L2_SHARE // query_bytes))


def _plan_hopper_backward(device: int, problem: Problem, arrays: tuple, lse, dlse, deterministic: bool) -> Plan | None:
    """Return None where there is no such kernel or the copy engine does not read the layout of q, k, v or dout."""
    q, k, v, dout, out, dq, dk, dv = arrays
    access = _access(problem, (dq, dk, dv)), _access(problem, (dout, out))
    chosen = choose.hopper_backward(problem, access[0], deterministic, out.dtype == np.float32, access[1])
    if chosen is None or not all(map(tensor_map.possible, (q, k, v, dout))):
        return None
    before, main = chosen
    spec = main.spec
    params = np.zeros(1, HOPPER_BACKWARD_PARAMS)
    rows = spec.block_q, spec.block_k, spec.block_k, spec.block_q
    for name, x, n in zip(HOPPER_BACKWARD_PARAMS.names, arrays, rows):
        words = tensor_map.encode(x, problem.dtype, n)
        if words is None:
            return None
        params[name] = words
    for name, x in zip(("dout", "out", "dq", "dk", "dv", "lse", "dlse"), (dout, out, dq, dk, dv, lse, dlse)):
        _fill(params, name, x)
    pairs = problem.batch * problem.heads_k
    section = _backward_section(problem)
    window, row_blocks = min(pairs, 2 * section), -(-problem.seqlen_q // 128) * 8
    params["sizes"] = _sizes(problem, section)
    params["window"], params["row_blocks"], params["rotated"] = window, row_blocks, choose.rotated(problem)
    works = _blocks(pairs, -(-problem.seqlen_k // spec.block_k))
    heads = 8 if before.spec.head_dim_v <= 64 else 4  # of one block of the kernel before
    blocks = _blocks(problem.batch * -(-problem.heads_q // heads), row_blocks // 4)
    launches = (
        Launch.of(before, blocks, 256),
        Launch.of(main, min(works, _attribute(device, "MultiProcessorCount")), spec.threads),
    )
    names = ("q_map", "k_map", "v_map", "dout_map", "out", "dq", "dk", "dv", "lse", "dlse")
    names += ("statistics", "dq_sum", "counters", "dout")
    rows = problem.batch * problem.heads_q * row_blocks * 16
    workspace = (2 * rows, window * problem.group * row_blocks * 16 * spec.head_dim, 2 + 2 * window)
    return Plan.of(launches, params, names, workspace, True)
