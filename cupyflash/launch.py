"""The CUDA backend: fills one parameter struct for each kernel and launches it on the current device and stream.

Every array but the lse-shaped ones has a contiguous last axis: what has not was copied before (``attention.py``).
What depends on shapes, strides and alignment is worked out once and kept as a plan; a warm call copies the plan's
struct, writes the pointers and launches.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field, replace

import cupy
import numpy as np

from . import choose, compiler, tensor_map
from .problem import Problem
from .spec import Variant
from .structs import (
    BACKWARD_PARAMS,
    BACKWARD_POINTERS,
    FORWARD_PARAMS,
    FORWARD_POINTERS,
    HOPPER_BACKWARD_PARAMS,
    HOPPER_FORWARD_PARAMS,
    HOPPER_POINTERS,
    MAP,
    STATISTIC_TILE,
    fill,
    fill_dropout,
    fill_logits,
    fill_score,
    sizes,
    steps,
)

L2_SHARE = 24 << 20  # bytes that the heads which run side by side read again and again
L2_SHARE_SUMMED = 4 << 20  # the same for Hopper's main backward: 1 % faster than 24
MAX_BLOCKS = (1 << 31) - 1
MAX_PLANS = 4096
_plans: dict = {}
_kept_for_graphs: list = []
_thread = threading.local()


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid."""

    kernel: cupy.RawKernel
    blocks: int
    threads: int
    shared_bytes: int
    cooperative: bool  # its blocks wait for each other: the driver starts it when all can run at once

    @classmethod
    def of(cls, variant: Variant, blocks: int, cooperative: bool = False) -> Launch:
        kernel = compiler.kernel(variant, cupy.cuda.runtime.getDevice())
        return cls(kernel, blocks, variant.spec.threads, variant.spec.shared_bytes, cooperative)

    @property
    def call(self) -> tuple:
        """The driver's function, and its arguments before and after the stream and the struct."""
        driver = cupy.cuda.driver
        before = (self.kernel.kernel.ptr, self.blocks, 1, 1, self.threads, 1, 1, self.shared_bytes)
        return (driver.launchCooperativeKernel, before, ()) if self.cooperative else (driver.launchKernel, before, (0,))


@dataclass(frozen=True)
class Plan:
    """The launches of one pass and their struct, which lacks nothing but the pointers."""

    calls: tuple[tuple, ...]  # `Launch.call` of each
    kernels: tuple  # that they belong to
    words: np.ndarray  # the struct as 64-bit words
    slots: tuple[int, ...]  # the words that hold the pointers and the seed
    workspace: tuple[int, ...] = ()
    idle: list = field(default_factory=list)  # copies of the struct that no call uses, each with its argument list

    @classmethod
    def of(cls, launches: tuple[Launch, ...], params: np.ndarray, names: tuple[str, ...], workspace=()) -> Plan:
        slots = tuple([_word(params.dtype, name) for name in names])
        kernels = tuple(launch.kernel for launch in launches)
        calls = tuple(launch.call for launch in launches)
        return cls(calls, kernels, params.view(np.uint64), slots, workspace)

    def run(self, *pointers: int) -> None:
        # What CuPy does for any kernel and any arguments, in a fraction of the time.
        if not hasattr(_thread, "has_context"):
            cupy.cuda.runtime.memGetInfo()  # the runtime gives a thread its context, which the driver asks for
            _thread.has_context = True
        try:
            words, arguments, address = self.idle.pop()
        except IndexError:
            words = self.words.copy()
            arguments = np.array([words.ctypes.data])
            address = arguments.ctypes.data
        for slot, pointer in zip(self.slots, pointers):
            words[slot] = pointer
        stream = cupy.cuda.get_current_stream().ptr
        for function, before, after in self.calls:
            function(*before, stream, address, *after)
        self.idle.append((words, arguments, address))


def _word(dtype: np.dtype, name: str) -> int:
    """The word of a struct that holds the pointer `name`: the first one of that field, "field" or "field.field"."""
    outer, _, inner = name.partition(".")
    kind, offset, *_ = dtype.fields[outer]
    more = tensor_map.address_word() if kind == MAP else kind.fields[inner][1] // 8 if inner else 0
    return offset // 8 + more


def forward(problem: Problem, q, k, v, out, lse, slopes, sink, seed: int = 0, bias=None, mask=None) -> None:
    """Write ``out`` and, unless it is None, ``lse``. ``bias`` and ``mask`` have the shape of the logits."""
    if problem.scale < 0:  # the kernels take the maximum before they scale
        negated = (q.view(np.uint16) ^ np.uint16(0x8000)).view(q.dtype)
        keep_for_graph(negated)
        return forward(replace(problem, scale=-problem.scale), negated, k, v, out, lse, slopes, sink, seed, bias, mask)
    pointers = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, _pointer(lse), _pointer(slopes), _pointer(sink))
    offsets = ((pointers[0] | pointers[1] | pointers[2]) & 15, pointers[3] & 15)
    rows = tuple([None if x is None else x.strides for x in (lse, slopes, sink, bias, mask)])
    device = cupy.cuda.runtime.getDevice()
    key = (problem, device, offsets, q.strides, k.strides, v.strides, out.strides, rows, out.itemsize)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _plan_forward(problem, q, k, v, out, lse, slopes, sink, bias, mask))
    plan.run(*pointers, seed, _pointer(bias), _pointer(mask))


def backward(
    problem: Problem,
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse,
    dq,
    dk,
    dv,
    slopes,
    sink,
    dsink,
    deterministic: bool,
    seed: int = 0,
    bias=None,
    mask=None,
    dbias=None,
) -> None:
    """Write ``dq``, ``dk``, ``dv`` and, unless it is None, ``dsink``, which is contiguous.

    No kernel computes ``dbias`` yet: ``checks`` lets no bias pass.
    """
    arrays = (q, k, v, dout, out, dq, dk, dv)
    rows = (lse,) if dlse is None else (lse, dlse)
    device = cupy.cuda.runtime.getDevice()
    layouts = tuple([(x.data.ptr & 15, x.strides) for x in arrays + rows])
    more = tuple([None if x is None else x.strides for x in (slopes, sink, bias, mask)])
    key = (problem, device, layouts, more, out.itemsize, deterministic)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _plan_backward(problem, arrays, lse, dlse, slopes, sink, bias, mask, deterministic))
    statistics, sum_size, turns = plan.workspace
    delta = cupy.empty(statistics, np.float32)
    dq_sum = cupy.empty(sum_size, np.float32) if sum_size else None
    turn = cupy.zeros(turns, np.uint32) if turns else None
    keep_for_graph(delta, dq_sum, turn)
    plan.run(
        *(x.data.ptr for x in arrays),
        lse.data.ptr,
        _pointer(dlse),
        _pointer(delta),
        _pointer(dq_sum),
        _pointer(turn),
        _pointer(slopes),
        _pointer(sink),
        _pointer(dsink),
        seed,
        _pointer(bias),
        _pointer(mask),
        *(x.data.ptr for x in arrays[:4]),  # a second time: into maps, if the plan has any
    )


def _pointer(x) -> int:
    return 0 if x is None else x.data.ptr


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


def _access(problem: Problem, arrays: tuple) -> int:
    """Return the widest load, in bytes, that every row of every array is aligned to and a multiple of."""
    bits = 16 | 2 * problem.head_dim | 2 * problem.head_dim_v
    for x in arrays:
        bits |= x.data.ptr
        for step in steps(x):
            bits |= step * x.itemsize
    return bits & -bits


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
    return sizes(problem, section)


def _plan_forward(problem: Problem, q, k, v, out, lse, slopes, sink, bias, mask) -> Plan:
    device = cupy.cuda.runtime.getDevice()
    path = choose.path(_capability(device), cupy.cuda.nvrtc.getVersion())
    plan = None
    if path == "sm90" and bias is mask is None:
        plan = _plan_hopper_forward(device, problem, q, k, v, out, lse, slopes, sink)
    return plan or _plan_portable_forward(device, problem, q, k, v, out, lse, slopes, sink, bias, mask)


def _plan_portable_forward(device: int, problem: Problem, q, k, v, out, lse, slopes, sink, bias, mask) -> Plan:
    float32_out = out.dtype == np.float32
    access = _access(problem, (q, k, v) if float32_out else (q, k, v, out))
    variant = choose.forward(problem, access, float32_out, _shared_limit(device), _capability(device))
    blocks = _blocks(problem.batch * problem.heads_q, -(-problem.seqlen_q // variant.spec.block_q))
    params = np.zeros(1, FORWARD_PARAMS)
    params["sizes"] = _forward_sizes(problem)
    for name, x in zip(FORWARD_POINTERS, (q, k, v, out, lse)):
        fill(params, name, x)
    fill_score(params, problem, slopes)
    fill(params, "sink", sink)
    fill_dropout(params, problem)
    fill_logits(params, "bias", bias)
    fill_logits(params, "mask", mask)
    return Plan.of((Launch.of(variant, blocks),), params, FORWARD_POINTERS)


def _plan_hopper_forward(device: int, problem: Problem, q, k, v, out, lse, slopes, sink) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k or v."""
    if not all(map(tensor_map.possible, (q, k, v))):
        return None
    float32_out = out.dtype == np.float32
    access = _access(problem, (out,)) if tensor_map.possible(out) else min(4, _access(problem, (out,)))
    variant = choose.hopper_forward(problem, access, float32_out)
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
    clusters = _attribute(device, "MultiProcessorCount") // spec.cluster
    params["order"], runs = _order(problem, heads, tiles, clusters * spec.teams)
    params["queries"] = queries
    params["sizes"] = _forward_sizes(problem, group)
    fill(params, "out", out)
    fill(params, "lse", lse)
    fill_score(params, problem, slopes)
    fill(params, "sink", sink)
    fill_dropout(params, problem)
    launch = Launch.of(variant, min(-(-runs // spec.teams), clusters) * spec.cluster)
    return Plan.of((launch,), params, ("q", "k", "v", target, "lse", "score", "sink", "dropout"))


def _order(problem: Problem, heads: int, tiles: int, places: int) -> tuple[tuple, int]:
    """Return the struct `Order` and its number of runs; `heads` of a batch have `tiles` each, `places` run at once."""
    paired = problem.banded and problem.batch * heads * tiles > places  # fewer start together, the longest ends last
    runs = -(-tiles // 2) if paired else tiles
    all_runs = _blocks(problem.batch * heads, runs)
    return (heads, tiles, runs, all_runs, paired), all_runs


def _plan_backward(problem: Problem, arrays: tuple, lse, dlse, slopes, sink, bias, mask, deterministic: bool) -> Plan:
    device = cupy.cuda.runtime.getDevice()
    path = choose.path(_capability(device), cupy.cuda.nvrtc.getVersion())
    plan = None
    if path == "sm90" and bias is mask is None and not choose.drops_elsewhere(problem):
        if choose.split(problem):
            plan = _plan_split_backward(device, problem, arrays, lse, dlse, slopes, sink)
        else:
            plan = _plan_hopper_backward(device, problem, arrays, lse, dlse, slopes, sink, deterministic)
    return plan or _plan_portable_backward(device, problem, arrays, lse, dlse, slopes, sink, bias, mask, deterministic)


def _plan_portable_backward(
    device: int, problem: Problem, arrays: tuple, lse, dlse, slopes, sink, bias, mask, deterministic: bool
) -> Plan:
    access, out = _access(problem, arrays), arrays[4]
    main = choose.backward(problem, access, deterministic, _shared_limit(device), _capability(device))
    spec = main.spec
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    blocks = _blocks(pairs_k, -(-problem.seqlen_k // spec.block_k))
    params = np.zeros(1, BACKWARD_PARAMS)
    _fill_backward(params, problem, arrays, lse, dlse, slopes, sink)
    fill_logits(params, "bias", bias)
    fill_logits(params, "mask", mask)
    params["sizes"] = sizes(problem, _backward_section(problem))
    before = choose.before_backward(main, out.dtype == np.float32, access)
    launches = (
        _launch_before(problem, before),
        Launch.of(main, blocks),
        _launch_after(problem, choose.after_backward(main)),
        *_launch_sink(problem, before),
    )
    turns = 1 + pairs_q * -(-problem.seqlen_q // spec.block_q) if deterministic else 0
    workspace = (pairs_q * problem.seqlen_q, _dq_sum_size(problem, spec), turns)
    return Plan.of(launches, params, BACKWARD_POINTERS, workspace)


def _backward_section(problem: Problem, share: int = L2_SHARE) -> int:
    query_bytes = problem.group * problem.seqlen_q * (6 * problem.head_dim + 2 * problem.head_dim_v)
    return min(problem.batch * problem.heads_k, max(1, share // query_bytes))


def _dq_sum_size(problem: Problem, spec) -> int:
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // 16) * 16 * spec.head_dim


def _launch_before(problem: Problem, before: Variant) -> Launch:
    """A block computes 16 rows of some neighbouring heads."""
    rows = _statistic_rows(problem) if before.spec.packed else problem.seqlen_q
    blocks = _blocks(problem.batch * -(-problem.heads_q // before.spec.heads), -(-rows // 16))
    return Launch.of(before, blocks)


def _launch_after(problem: Problem, after: Variant) -> Launch:
    """A warp converts 16 rows of some columns of one head."""
    parts = after.spec.head_dim // after.spec.finished_cols
    warps = problem.batch * problem.heads_q * -(-problem.seqlen_q // 16) * parts
    return Launch.of(after, _blocks(-(-warps // after.spec.warps), 1))


def _launch_sink(problem: Problem, before: Variant) -> tuple[Launch, ...]:
    """A block sums one head, of what `before` left."""
    return (Launch.of(choose.sink_gradient(before), problem.heads_q),) if problem.sink else ()


def _statistic_rows(problem: Problem) -> int:
    """Rows of a head whose lse and delta are packed."""
    return -(-problem.seqlen_q // STATISTIC_TILE) * STATISTIC_TILE


def _plan_hopper_backward(
    device: int, problem: Problem, arrays: tuple, lse, dlse, slopes, sink, deterministic: bool
) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k, v or dout."""
    *copied, out, dq, dk, dv = arrays
    if not all(map(tensor_map.possible, copied)):
        return None
    main = choose.hopper_backward(problem, _access(problem, (dq, dk, dv)), deterministic)
    before = choose.before_backward(main, out.dtype == np.float32, _access(problem, (copied[-1], out)))
    spec = main.spec
    params = np.zeros(1, HOPPER_BACKWARD_PARAMS)
    rows = (spec.block_q, spec.block_k, spec.block_k, spec.block_q)
    if not _fill_maps(params, problem, copied, rows):
        return None
    pairs_q, tiles = problem.batch * problem.heads_q, -(-problem.seqlen_k // spec.block_k)
    most = _attribute(device, "MultiProcessorCount")
    # Deterministic blocks take one tile after the other; they must not pair those that others wait for.
    params["keys"], runs = _order(problem, problem.heads_k, tiles, MAX_BLOCKS if deterministic else most)
    rotated = params["rotated"] = choose.rotated(problem, deterministic, tiles, most)
    cooperative = deterministic and rotated  # the blocks of a head wait for each other: whole heads at a time
    if cooperative:
        most = most // tiles * tiles
    params["sizes"] = sizes(problem, 1 if cooperative else _backward_section(problem, L2_SHARE_SUMMED))
    _fill_backward(params, problem, arrays, lse, dlse, slopes, sink)
    launches = (
        _launch_before(problem, before),
        Launch.of(main, min(most, runs), cooperative),
        _launch_after(problem, choose.after_backward(main)),
        *_launch_sink(problem, before),
    )
    sum_size = _dq_sum_size(problem, spec)
    turns = 1 + pairs_q * -(-problem.seqlen_q // 16) if deterministic else 0
    return Plan.of(launches, params, HOPPER_POINTERS, (pairs_q * 2 * _statistic_rows(problem), sum_size, turns))


def _fill_maps(params: np.ndarray, problem: Problem, copied: list, rows: tuple[int, ...]) -> bool:
    """Whether the driver makes maps of q, k, v and dout, with boxes of so many rows."""
    for name, x, count in zip(("q_map", "k_map", "v_map", "dout_map"), copied, rows):
        words = tensor_map.encode(x, problem.dtype, count)
        if words is None:
            return False
        params[name] = words
    return True


def _plan_split_backward(device: int, problem: Problem, arrays: tuple, lse, dlse, slopes, sink) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k, v or dout.

    No sum depends on the order in which blocks run, so that every call is deterministic.
    """
    *copied, out, dq, dk, dv = arrays
    if not all(map(tensor_map.possible, copied)):
        return None
    params = np.zeros(1, HOPPER_BACKWARD_PARAMS)
    if not _fill_maps(params, problem, copied, (64, 64, 64, 64)):
        return None
    keys, queries = choose.hopper_split_backward(problem, _access(problem, (dq, dk, dv)))
    before = choose.before_backward(keys, out.dtype == np.float32, _access(problem, (copied[-1], out)))
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    head_bytes = 2 * (problem.head_dim + problem.head_dim_v) * max(problem.group * problem.seqlen_q, problem.seqlen_k)
    section = min(pairs_k, max(1, L2_SHARE // head_bytes))
    tiles_k, tiles_q = -(-problem.seqlen_k // keys.spec.block_k), -(-problem.seqlen_q // queries.spec.block_q)
    most = _attribute(device, "MultiProcessorCount")
    params["keys"], runs_k = _order(problem, problem.heads_k, tiles_k, most)
    params["queries"], runs_q = _order(problem, problem.heads_q, tiles_q, most)
    params["sizes"] = sizes(problem, section)
    _fill_backward(params, problem, arrays, lse, dlse, slopes, sink)
    launches = (
        _launch_before(problem, before),
        Launch.of(keys, min(most, runs_k)),
        Launch.of(queries, min(most, runs_q)),
        *_launch_sink(problem, before),
    )
    return Plan.of(launches, params, HOPPER_POINTERS, (pairs_q * problem.seqlen_q, 0, 0))


def _fill_backward(params: np.ndarray, problem: Problem, arrays: tuple, lse, dlse, slopes, sink) -> None:
    for name, x in zip(BACKWARD_PARAMS.names, (*arrays, lse, dlse)):
        fill(params, name, x)
    fill_score(params, problem, slopes)
    fill(params, "sink", sink)
    fill_dropout(params, problem)
    params["delta"] = (0, problem.heads_q * problem.seqlen_q, problem.seqlen_q, 1)
