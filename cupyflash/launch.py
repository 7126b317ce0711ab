"""The CUDA backend: fills one parameter struct for each kernel and launches it on the current device and stream.

Every array but the lse-shaped ones has a contiguous last axis: what has not was copied before (``attention.py``).
What depends on shapes, strides and alignment is worked out once and kept as a plan; a warm call copies the plan's
struct, writes the pointers and launches.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import cupy
import numpy as np

from . import checks, choose, compiler, precise, tensor_map
from .block_mask import Bitmaps, bitmaps_of
from .dropout import ROUNDS
from .problem import Problem
from .spec import Variant
from .structs import (
    BACKWARD_PARAMS,
    BACKWARD_POINTERS,
    FORWARD_PARAMS,
    FORWARD_POINTERS,
    HALVES_BACKWARD_POINTERS,
    HALVES_FORWARD_POINTERS,
    HOPPER_BACKWARD_PARAMS,
    HOPPER_FORWARD_PARAMS,
    HOPPER_POINTERS,
    HOPPER_PRECISE_BACKWARD_PARAMS,
    HOPPER_PRECISE_FORWARD_PARAMS,
    LOGIT_MAP,
    MAP,
    MAPS,
    MASK_WORDS_PARAMS,
    MASK_WORDS_POINTERS,
    PRECISE_BACKWARD_PARAMS,
    PRECISE_FORWARD_PARAMS,
    SCALES,
    STATISTIC_TILE,
    dropout_words,
    fill,
    fill_blocks,
    fill_dropout,
    fill_logits,
    fill_score,
    sizes,
    steps,
    zeros,
)

L2_SHARE = 24 << 20  # bytes that the heads which run side by side read again and again
L2_SHARE_SUMMED = 4 << 20  # the same for Hopper's main backward: 1 % faster than 24
ZEROS = 3  # words: runs taken by each of two launches of Hopper's forward, and the flag between them
MASK_PART, PART_WORDS, PARTS_OF_BLOCK = 64, 128, 4  # in kernels/any/mask_words.cuh
BIAS_BLOCKS = 4  # of the kernel of dbias, for each place on the GPU: with fewer tiles, blocks share them,
BIAS_RUN = 16  # and with more, each computes up to so many, whose queries it reads once
LARGE_MASK = 1 << 20  # elements of a head from which a mask is read once more, to skip the tiles that it hides
NO_BLOCKS = Bitmaps(None, None)
MAX_BLOCKS = (1 << 31) - 1
MAX_PLANS = 4096
ANYWHERE = 1 << 20  # an address for a map until it gets its own
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


class Rest(NamedTuple):
    """What a pass reads and writes beside the arrays with a head_dim: arrays, or None."""

    lse: object
    slopes: object
    sink: object
    bias: object
    mask: object
    bitmaps: tuple  # of a block mask, queries by keys and keys by queries
    captured: list = ()  # by functions of the user, then the sums of their gradients
    dlse: object = None
    dbias: object = None


class Layout(NamedTuple):
    """Of a float16 array that is not there yet, for a map."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int = 2


@dataclass(frozen=True)
class Plan:
    """The launches of one pass and their struct, which lacks nothing but the pointers."""

    calls: tuple[tuple, ...]  # `Launch.call` of each
    kernels: tuple  # that they belong to
    words: np.ndarray  # the struct as 64-bit words
    slots: tuple[int, ...]  # the words that hold the pointers and the keys of dropout
    workspace: tuple[int, ...] = ()
    halves: tuple[int, ...] = ()  # elements of the float16 arrays that the plan splits its inputs into
    mask_words: tuple[Plan, int] | None = None  # what makes the words of a mask before, and how many there are
    idle: list = field(default_factory=list)  # copies of the struct that no call uses, each with its argument list

    @classmethod
    def of(
        cls,
        launches: tuple[Launch, ...],
        params: np.ndarray,
        names: tuple[str, ...],
        mods,
        workspace=(),
        halves=(),
        mask_words=None,
    ) -> Plan:
        slots = []
        for name in names:
            if name == "dropout":
                slots += range(first := _slot(params.dtype, name), first + ROUNDS * bool(params[name]["bits"].any()))
            elif name != "mods":
                slots.append(_slot(params.dtype, name))
            elif mods:
                slots += [params.dtype.fields[name][1] // 8 + slot for slot in mods.slots]
        kernels = tuple(launch.kernel for launch in launches)
        calls = tuple(launch.call for launch in launches)
        return cls(calls, kernels, params.view(np.uint64), tuple(slots), workspace, halves, mask_words)

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


def _slot(dtype: np.dtype, name: str) -> int:
    """The word of a struct that holds the pointer `name`: the first one of that field, "field" or "field.field"."""
    outer, _, inner = name.partition(".")
    kind, offset, *_ = dtype.fields[outer]
    more = tensor_map.address_word() if kind in (MAP, LOGIT_MAP) else kind.fields[inner][1] // 8 if inner else 0
    return offset // 8 + more


def forward(
    problem: Problem, q, k, v, out, lse, slopes, sink, seed: int = 0, bias=None, mask=None, block_mask=None, given=None
) -> None:
    """Write ``out`` and, unless it is None, ``lse``.

    ``bias`` and ``mask`` have the shape of the logits; `given` has the functions of the user.
    """
    if problem.scale < 0 and q.itemsize == 2:  # the kernels take the maximum before they scale
        negated = (q.view(np.uint16) ^ np.uint16(0x8000)).view(q.dtype)
        keep_for_graph(negated)
        problem = replace(problem, scale=-problem.scale)
        return forward(problem, negated, k, v, out, lse, slopes, sink, seed, bias, mask, block_mask, given)
    problem, bitmaps = _bitmaps(problem, mask, block_mask)
    pointers = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, _pointer(lse), _pointer(slopes), _pointer(sink))
    offsets = ((pointers[0] | pointers[1] | pointers[2]) & 15, pointers[3] & 15)
    rows = tuple([None if x is None else x.strides for x in (lse, slopes, sink)])
    logits = tuple([None if x is None else (x.data.ptr & 15, x.strides) for x in (bias, mask)])
    device = cupy.cuda.runtime.getDevice()
    captured = given.captured() if given else []
    more = *map(_layout, captured), None if bitmaps is NO_BLOCKS else bitmaps[0].shape, out.itemsize
    key = (problem, device, offsets, q.strides, k.strides, v.strides, out.strides, rows, logits, more)
    plan = _plans.get(key)
    if plan is None:
        rest = Rest(lse, slopes, sink, bias, mask, bitmaps, captured)
        plan = _remember(key, _plan_forward(problem, (q, k, v, out), rest))
    zero = cupy.zeros(plan.workspace, np.uint32) if plan.workspace else None
    keep_for_graph(zero)
    halves, _held = _room_for_halves(plan)
    words = _mask_words(plan, mask, bitmaps[0])
    more = halves or _of_zeros(zero)  # no plan has both
    plan.run(
        *pointers,
        *dropout_words(problem, seed),
        _pointer(bitmaps[0]),
        _pointer(bias),
        _pointer(mask if words is None else words),
        *map(_word, captured),
        *more,
    )


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
    block_mask=None,
    given=None,
    gradients=None,
) -> None:
    """Write ``dq``, ``dk``, ``dv`` and, unless they are None, ``dsink`` and ``dbias``, which are contiguous.

    ``dbias`` has four axes, of 1 where the bias was broadcast; and the ``gradients`` of what the functions `given`
    captured, in the order of ``Mods.tracked``.
    """
    arrays = (q, k, v, dout, out, dq, dk, dv)
    problem, bitmaps = _bitmaps(problem, mask, block_mask)
    rows = (lse,) if dlse is None else (lse, dlse)
    device = cupy.cuda.runtime.getDevice()
    layouts = tuple([(x.data.ptr & 15, x.strides) for x in arrays + rows])
    captured = given.captured() if given else []
    mod_sums = [cupy.zeros(x.shape, np.float32) for x in (gradients or {}).values()]
    captured += mod_sums
    more = tuple([None if x is None else x.strides for x in (slopes, sink)] + [*map(_layout, captured)])
    logits = tuple([None if x is None else (x.data.ptr & 15, x.strides) for x in (bias, mask)])
    shapes = tuple([None if x is None else x.shape for x in (dbias, *bitmaps)])
    key = (problem, device, layouts, more, logits, shapes, out.itemsize, deterministic)
    plan = _plans.get(key)
    if plan is None:
        rest = Rest(lse, slopes, sink, bias, mask, bitmaps, captured, dlse, dbias)
        plan = _remember(key, _plan_backward(problem, arrays, rest, deterministic))
    statistics, sum_size, turns, parts_size = plan.workspace
    delta = cupy.empty(statistics, checks.lse_dtype(problem.dtype))
    dq_sum = cupy.empty(sum_size, np.float32) if sum_size else None
    turn = cupy.zeros(turns, np.uint32) if turns else None
    parts = cupy.empty(parts_size, np.float32) if parts_size else None
    keep_for_graph(delta, dq_sum, turn, parts, *mod_sums)
    halves, _held = _room_for_halves(plan)
    words = _mask_words(plan, mask, bitmaps[1])
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
        *dropout_words(problem, seed),
        _pointer(bias),
        _pointer(mask),
        _pointer(dbias),
        _pointer(parts),
        *map(_pointer, bitmaps),
        *map(_word, captured),
        # Into maps, if the plan has any.
        *(halves or (*(x.data.ptr for x in arrays[:4]), _pointer(bias), _pointer(mask), _pointer(words))),
    )
    for gradient, total in zip((gradients or {}).values(), mod_sums):
        gradient[...] = total


def _bitmaps(problem: Problem, mask, block_mask) -> tuple[Problem, tuple]:
    """The tiles of queries by keys, and of keys by queries, that a block mask or a large mask shows.

    Hopper's kernels skip nothing where they read a mask, and are faster than the portable ones that do, unless it hides
    most: there only a block mask skips tiles.
    """
    if block_mask is not None:
        return problem, block_mask.bitmaps_under_mask if problem.mask else block_mask.bitmaps
    if mask is None or 0 in mask.strides[2:] or problem.seqlen_q * problem.seqlen_k < LARGE_MASK or _path() == "sm90":
        return problem, NO_BLOCKS
    own = mask[tuple([slice(None) if step else slice(1) for step in mask.strides])]
    bitmaps = bitmaps_of(cupy, own)
    keep_for_graph(*bitmaps)
    return replace(problem, blocks=True), bitmaps


def _pointer(x) -> int:
    return 0 if x is None else x.data.ptr


def _word(x) -> int:
    """Of a captured value."""
    return x if isinstance(x, int) else x.data.ptr


def _layout(x):
    return None if isinstance(x, int) else (x.shape, x.strides)


def keep_for_graph(*temporaries) -> None:
    """Keep what a captured graph will use at every replay; the pool would give it to others after this call.

    Nobody tells when the graph is gone, so the memory stays reserved until the process ends.
    """
    if cupy.cuda.get_current_stream().is_capturing():
        _kept_for_graphs.extend(x for x in temporaries if x is not None)


def _room_for_halves(plan: Plan) -> tuple[tuple[int, ...], tuple]:
    """Pointers for HALVES_FORWARD_POINTERS or HALVES_BACKWARD_POINTERS, if the plan needs any, and what they lead to.

    Hold it until all kernels are launched: before, an allocator could give it to another thread, or to the driver.
    """
    if not plan.halves:
        return (), ()
    room, scales = cupy.empty(sum(plan.halves), np.float16), cupy.zeros(SCALES.itemsize // 4, np.uint32)
    keep_for_graph(room, scales)
    halves = [room.data.ptr + 2 * sum(plan.halves[:i]) for i in range(len(plan.halves))]
    return (scales.data.ptr + SCALES.fields["wide"][1], *halves, scales.data.ptr, *halves), (room, scales)


def _of_zeros(zero) -> tuple[int, ...]:
    """Pointers to the runs that each launch has taken, and to the flag."""
    return () if zero is None else (zero.data.ptr, zero.data.ptr + 4 * (ZEROS - 1))


def _mask_words(plan: Plan, mask, bitmaps):
    """The mask in the order of accumulators, None where the plan needs none."""
    if plan.mask_words is None:
        return None
    maker, count = plan.mask_words
    words = cupy.empty(count, np.uint32)
    keep_for_graph(words)
    maker.run(mask.data.ptr, words.data.ptr, _pointer(bitmaps))
    return words


def _remember(key: tuple, plan: Plan) -> Plan:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _access(problem: Problem, arrays: tuple) -> int:
    """Return the widest load, in bytes, that every row of every array is aligned to and a multiple of."""
    item = arrays[0].itemsize
    bits = 16 | item * problem.head_dim | item * problem.head_dim_v
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
    key_bytes = precise.ITEM.get(problem.dtype, 2) * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    section = min(problem.batch * problem.heads_q, max(1, L2_SHARE // key_bytes) * problem.group) // packed
    return sizes(problem, section)


def _path() -> str:
    return choose.path(_capability(cupy.cuda.runtime.getDevice()), cupy.cuda.nvrtc.getVersion())


def _plan_forward(problem: Problem, arrays: tuple, rest: Rest) -> Plan:
    device, path = cupy.cuda.runtime.getDevice(), _path()
    if problem.dtype in precise.ITEM:
        by_halves = path == "sm90" and precise.by_halves(problem)
        plan = _plan_hopper_precise_forward(device, problem, arrays, rest) if by_halves else None
        return plan or _plan_precise_forward(device, problem, arrays, rest)
    plan = None
    if path == "sm90" and not choose.forward_elsewhere(problem):
        plan = _plan_hopper_forward(device, problem, arrays, rest)
    return plan or _plan_portable_forward(device, problem, arrays, rest)


def _plan_portable_forward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan:
    float32_out = arrays[3].dtype == np.float32
    access = _access(problem, arrays[:3] if float32_out else arrays)
    variant = choose.forward(problem, access, float32_out, _shared_limit(device), _capability(device))
    blocks = _blocks(problem.batch * problem.heads_q, -(-problem.seqlen_q // variant.spec.block_q))
    params = zeros(FORWARD_PARAMS, problem.mods, rest.captured)
    params["sizes"] = _forward_sizes(problem)
    for name, x in zip(FORWARD_POINTERS, (*arrays, rest.lse)):
        fill(params, name, x)
    _fill_options(params, problem, rest)
    fill_logits(params, "bias", rest.bias)
    fill_logits(params, "mask", rest.mask)
    return Plan.of((Launch.of(variant, blocks),), params, FORWARD_POINTERS, problem.mods)


def _plan_precise_forward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan:
    compiler.check_dtype(problem.dtype, _capability(device), "this GPU")
    params = np.zeros(1, PRECISE_FORWARD_PARAMS)
    launch = _launch_precise_forward(device, params, problem, arrays, rest)
    return Plan.of((launch,), params, FORWARD_POINTERS, None)


def _launch_precise_forward(device: int, params: np.ndarray, problem: Problem, arrays: tuple, rest: Rest) -> Launch:
    """Write all but pointers, what is of halves, and maps."""
    variant = precise.forward(problem, _access(problem, arrays), _shared_limit(device))
    blocks = _blocks(problem.batch * problem.heads_q, -(-problem.seqlen_q // variant.spec.block_q))
    params["sizes"] = _forward_sizes(problem)
    params["exact_scale"] = problem.scale
    for name, x in zip(FORWARD_POINTERS, (*arrays, rest.lse)):
        fill(params, name, x)
    _fill_options(params, problem, rest)
    return Launch.of(variant, blocks)


def _plan_hopper_precise_forward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan | None:
    """Split, multiply, and what runs instead where numbers do not split well. None without maps."""
    *inputs, out = arrays
    variant = precise.hopper_forward(problem, _access(problem, (out,)))
    spec = variant.spec
    params = np.zeros(1, HOPPER_PRECISE_FORWARD_PARAMS)
    split = _split(device, params, problem, inputs, (64, spec.block_k, spec.block_k))
    if split is None:
        return None
    launches, halves = split
    most, tiles = _attribute(device, "MultiProcessorCount"), -(-problem.seqlen_q // spec.block_q)
    params["order"], runs = _order(problem, problem.heads_q, tiles, most)
    other = _launch_precise_forward(device, params, problem, arrays, rest)
    launches = (*launches, Launch.of(variant, min(most, runs)), other)
    return Plan.of(launches, params, (*FORWARD_POINTERS, *HALVES_FORWARD_POINTERS), None, halves=halves)


def _split(device: int, params: np.ndarray, problem: Problem, inputs: list, rows: tuple[int, ...]) -> tuple | None:
    """Write maps of the halves of q, k, v and perhaps dout, with boxes of so many rows.

    Return the launches that make the halves, and how many elements each array of them has; None where the driver makes
    no maps.
    """
    if tensor_map.address_word() is None:
        return None
    halves = []
    for name, x, count in zip(MAPS, inputs, rows):
        shape = *x.shape[:3], 2 * precise.padded(x.shape[3])
        strides = tuple(2 * math.prod(shape[axis:]) for axis in range(1, 5))
        words = tensor_map.encode(Layout(shape, strides), "float16", count, pointer=ANYWHERE)
        if words is None:
            return None
        params[name] = words
        halves.append(math.prod(shape))
    variants = precise.split(_access(problem, tuple(inputs)), len(inputs) > 3)
    vectors, spec = max(math.prod(x.shape[:3]) for x in inputs), variants[0].spec
    blocks = min(spec.blocks_per_sm * _attribute(device, "MultiProcessorCount"), -(-vectors // spec.warps))
    return tuple(Launch.of(variant, blocks) for variant in variants), tuple(halves)


def _plan_hopper_forward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k, v or bias."""
    q, k, v, out = arrays
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
    params = zeros(HOPPER_FORWARD_PARAMS, problem.mods, rest.captured)
    for name, (x, rows, heads) in boxes.items():
        words = tensor_map.encode(x, problem.dtype, rows, heads)
        if words is None:
            return None
        params[name] = words
    if not _fill_logit_maps(params, problem, {"bias": rest.bias}, queries, group):
        return None
    words = _plan_mask_words(params, "mask", variant, rest, group)
    heads, tiles = problem.heads_q // group, -(-problem.seqlen_q // (spec.block_q // 64 * queries))
    clusters = _attribute(device, "MultiProcessorCount") // spec.cluster
    params["order"], runs = _order(problem, heads, tiles, clusters * spec.teams, pairs=not problem.blocks)
    params["queries"] = queries
    params["sizes"] = _forward_sizes(problem, group)
    fill(params, "out", out)
    fill(params, "lse", rest.lse)
    _fill_options(params, problem, rest)
    variants = choose.steadily(variant) if choose.steady(problem) else (variant,)
    launches = tuple(Launch.of(one, min(-(-runs // spec.teams), clusters) * spec.cluster) for one in variants)
    names = ("q", "k", "v", target, "lse", "score", "sink", "dropout", "blocks", "bias", "mask", "mods")
    more, workspace = (("taken", "only_if"), (ZEROS,)) if problem.blocks or len(launches) > 1 else ((), ())
    return Plan.of(launches, params, (*names, *more), problem.mods, workspace, mask_words=words)


def _plan_mask_words(params: np.ndarray, name: str, main: Variant, rest: Rest, group: int = 1, by_key: bool = False):
    """Write the field `name` of what `main` reads of a mask, unless that is None; return `Plan.mask_words`.

    Along an axis with one entry for all there is one head, or one part. Rows are the queries of `group` heads, or keys;
    so are those of the `bitmaps`. One more part than exists ends each axis: tiles may go beyond it.
    """
    mask, bitmaps = rest.mask, rest.bitmaps[by_key]
    if mask is None:
        return None
    shape, strides = list(mask.shape), [step if n > 1 else 0 for step, n in zip(mask.strides, mask.shape)]
    if by_key:
        shape[2:], strides[2:] = shape[:1:-1], strides[:1:-1]
    batches, heads, rows, cols = (
        n if step else one for n, step, one in zip(shape, strides, (1, group, *2 * (MASK_PART,)))
    )
    own_batch, own_head, own_row, own_col = map(bool, strides)
    heads, row_step = heads // group, MASK_PART // group
    row_parts, col_parts = (-(-rows // row_step) if own_row else 1), -(-cols // MASK_PART)
    row_size = PART_WORDS * (col_parts + own_col)
    head_size = row_size * (row_parts + own_row)
    made = own_batch * heads * head_size, own_head * head_size, own_row * row_size, own_col * PART_WORDS
    along_rows = own_row and not (own_col and abs(strides[3]) <= abs(strides[2]))
    neighbours, others = (2, 3) if along_rows else (3, 2)
    aligned = [mask.data.ptr, shape[neighbours], *strides[:2], strides[others]]
    wide = strides[neighbours] == 1 and not any(n % 16 for n in aligned) and not (along_rows and group > 1)
    maker = np.zeros(1, MASK_WORDS_PARAMS)
    maker["mask"], maker["words"] = (0, *strides), (0, *made)
    counts = heads, group, rows, row_step, cols, row_parts, col_parts, wide
    for field_name, count in zip(MASK_WORDS_PARAMS.names[3:], counts):
        maker[field_name] = count
    params[name] = (0, *made)
    pointers = MASK_WORDS_POINTERS
    outer = bitmaps is not None and own_row and own_col and zip((own_batch, own_head), bitmaps.shape)
    if outer and all(own or n == 1 for own, n in outer):
        fill_blocks(maker, "blocks", bitmaps)
    else:  # a part is that of several tiles, of which one may need it
        pointers = pointers[:-1]
    slow_parts, fast_parts = (col_parts, row_parts) if along_rows else (row_parts, col_parts)
    blocks = _blocks(batches * heads, slow_parts * -(-fast_parts // PARTS_OF_BLOCK))
    launch = Launch.of(choose.mask_words(main, along_rows), blocks)
    return Plan.of((launch,), maker, pointers, None), batches * heads * head_size


def _fill_logit_maps(params: np.ndarray, problem: Problem, arrays: dict, rows: int, heads: int = 1) -> bool:
    """Whether the copy engine reads these arrays of the shape of the logits, or None, in boxes of `heads` and `rows`.

    Along an axis with one entry for all, a box has that entry alone.
    """
    for name, x in arrays.items():
        if x is None:
            continue
        if x.shape[3] > 1 and x.strides[3] != x.itemsize:
            return False
        x = x.swapaxes(1, 2)
        own = [n > 1 and stride != 0 for n, stride in zip(x.shape[:3], x.strides)]
        x = x[tuple(slice(None if has else 1) for has in own)]
        batch, row, head = own
        if not tensor_map.possible(x):
            return False
        dtype = problem.bias if name.startswith("bias") else "bool"
        words = tensor_map.encode(x, dtype, rows if row else 1, heads if head else 1)
        if words is None:
            return False
        params[name] = (words, batch, head, row)
    return True


def _order(problem: Problem, heads: int, tiles: int, places: int, pairs: bool = True) -> tuple[tuple, int]:
    """Return the struct `Order` and its number of runs; `heads` of a batch have `tiles` each, `places` run at once.

    Without `pairs`, for blocks that take runs as they get through, every run is one tile.
    """
    # Fewer than there are places start together, and the longest ends last.
    paired = pairs and problem.banded and problem.batch * heads * tiles > places
    runs = -(-tiles // 2) if paired else tiles
    all_runs = _blocks(problem.batch * heads, runs)
    return (heads, tiles, runs, all_runs, paired), all_runs


def _plan_backward(problem: Problem, arrays: tuple, rest: Rest, deterministic: bool) -> Plan:
    device, path = cupy.cuda.runtime.getDevice(), _path()
    if problem.dtype in precise.ITEM:
        by_halves = path == "sm90" and precise.by_halves(problem)
        plan = _plan_hopper_precise_backward(device, problem, arrays, rest) if by_halves else None
        return plan or _plan_precise_backward(device, problem, arrays, rest)
    plan = None
    if path == "sm90" and not choose.backward_elsewhere(problem):
        if choose.split(problem, deterministic):
            plan = _plan_split_backward(device, problem, arrays, rest)
        else:
            plan = _plan_hopper_backward(device, problem, arrays, rest, deterministic)
    return plan or _plan_portable_backward(device, problem, arrays, rest, deterministic)


def _plan_portable_backward(device: int, problem: Problem, arrays: tuple, rest: Rest, deterministic: bool) -> Plan:
    access, out = _access(problem, arrays), arrays[4]
    main = choose.backward(problem, access, deterministic, _shared_limit(device), _capability(device))
    spec = main.spec
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    blocks = _blocks(pairs_k, -(-problem.seqlen_k // spec.block_k))
    params = zeros(BACKWARD_PARAMS, problem.mods, rest.captured)
    _fill_backward(params, problem, arrays, rest)
    params["sizes"] = sizes(problem, _backward_section(problem))
    before = choose.before_backward(main, out.dtype == np.float32, access)
    of_bias, parts_size = _launch_bias(device, params, problem, before, arrays, rest.dbias)
    launches = (
        _launch_before(problem, before),
        Launch.of(main, blocks),
        _launch_after(problem, choose.after_backward(main)),
        *_launch_sink(problem, before),
        *of_bias,
        *_launch_mod_gradient(device, params, problem, before, arrays),
    )
    turns = 1 + pairs_q * -(-problem.seqlen_q // spec.block_q) if deterministic else 0
    workspace = (pairs_q * problem.seqlen_q, _dq_sum_size(problem, spec), turns, parts_size)
    return Plan.of(launches, params, BACKWARD_POINTERS, problem.mods, workspace)


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


def _launch_bias(
    device: int, params: np.ndarray, problem: Problem, before: Variant, arrays: tuple, dbias, box_k: int | None = None
) -> tuple[tuple[Launch, ...], int]:
    """Write the field ``dbias``; return the launches, and how many floats their parts of sums take.

    ``box_k``: rows that the maps of k and v copy at once, where ``params`` has maps.

    Tiles of dbias are independent. Where they are few, `chunks` blocks share each, and write parts; so do the warps of
    one block along an axis of a tile that is summed.
    """
    if dbias is None:
        return (), 0
    main = choose.hopper_bias_gradient(problem, before, box_k) if box_k else None
    cluster = main.spec.cluster if main else 1
    if main is None:
        access, mods_at = _access(problem, arrays[:4]), _mods_at(params)
        main = choose.bias_gradient(problem, before, dbias.shape, access, _shared_limit(device), mods_at)
    spec = main.spec
    of_one, tiles = map(math.prod, choose.bias_tiles(problem, spec, dbias.shape))
    most = BIAS_BLOCKS * (_attribute(device, "MultiProcessorCount") // cluster) * spec.blocks_per_sm
    share = -(-of_one // min(of_one, -(-most // tiles)))
    chunks = -(-of_one // share)  # none of which is empty
    run = max(1, min(BIAS_RUN, tiles // most), -(-tiles * cluster // MAX_BLOCKS))
    _, _, rows, cols = dbias.shape
    parts = chunks * (spec.warps_q if rows == 1 else 1) * (spec.warps // spec.warps_q if cols == 1 else 1)
    params["dbias"] = (0, *dbias.shape, chunks, run, parts)
    launches = (Launch.of(main, _blocks(-(-tiles // run), chunks * cluster)),)
    if parts == 1:
        return launches, 0
    return (*launches, Launch.of(choose.bias_sum(main), _blocks(-(-dbias.size // 32), 1))), parts * dbias.size


def _launch_mod_gradient(
    device: int, params: np.ndarray, problem: Problem, before: Variant, arrays: tuple
) -> tuple[Launch, ...]:
    """A block takes some queries of one head."""
    if not (problem.mods and problem.mods.tracked):
        return ()
    access = _access(problem, arrays[:4])
    variant = choose.mod_gradient(problem, before, access, _mods_at(params), _shared_limit(device))
    tiles = -(-problem.seqlen_q // variant.spec.block_q)
    return (Launch.of(variant, _blocks(problem.batch * problem.heads_q, tiles)),)


def _mods_at(params: np.ndarray) -> int:
    return params.dtype.fields["mods"][1] if "mods" in params.dtype.names else 0


def _statistic_rows(problem: Problem) -> int:
    """Rows of a head whose lse and delta are packed."""
    return -(-problem.seqlen_q // STATISTIC_TILE) * STATISTIC_TILE


def _plan_hopper_backward(device: int, problem: Problem, arrays: tuple, rest: Rest, deterministic: bool) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k, v, dout or bias."""
    *copied, out, dq, dk, dv = arrays
    if not all(map(tensor_map.possible, copied)):
        return None
    main = choose.hopper_backward(problem, _access(problem, (dq, dk, dv)), deterministic)
    before = choose.before_backward(main, out.dtype == np.float32, _access(problem, (copied[-1], out)))
    spec = main.spec
    params = zeros(HOPPER_BACKWARD_PARAMS, problem.mods, rest.captured)
    rows = (spec.block_q, spec.block_k, spec.block_k, spec.block_q)
    logits = {"bias_map": rest.bias}
    if not _fill_maps(params, problem, copied, rows) or not _fill_logit_maps(params, problem, logits, spec.block_q):
        return None
    words = _plan_mask_words(params, "words", main, rest, by_key=True)
    pairs_q, tiles = problem.batch * problem.heads_q, -(-problem.seqlen_k // spec.block_k)
    most = _attribute(device, "MultiProcessorCount")
    # Deterministic blocks take one tile after the other; they must not pair those that others wait for.
    params["keys"], runs = _order(problem, problem.heads_k, tiles, MAX_BLOCKS if deterministic else most)
    rotated = params["rotated"] = choose.rotated(problem, deterministic, tiles, most)
    cooperative = deterministic and rotated  # the blocks of a head wait for each other: whole heads at a time
    if cooperative:
        most = most // tiles * tiles
    params["sizes"] = sizes(problem, 1 if cooperative else _backward_section(problem, L2_SHARE_SUMMED))
    _fill_backward(params, problem, arrays, rest)
    of_bias, parts_size = _launch_bias(device, params, problem, before, arrays, rest.dbias, spec.block_k)
    launches = (
        _launch_before(problem, before),
        Launch.of(main, min(most, runs), cooperative),
        _launch_after(problem, choose.after_backward(main)),
        *_launch_sink(problem, before),
        *of_bias,
        *_launch_mod_gradient(device, params, problem, before, arrays),
    )
    turns = 1 + pairs_q * -(-problem.seqlen_q // 16) if deterministic else 0
    workspace = (pairs_q * 2 * _statistic_rows(problem), _dq_sum_size(problem, spec), turns, parts_size)
    return Plan.of(launches, params, HOPPER_POINTERS, problem.mods, workspace, mask_words=words)


def _fill_maps(params: np.ndarray, problem: Problem, copied: list, rows: tuple[int, ...]) -> bool:
    """Whether the driver makes maps of q, k, v and dout, with boxes of so many rows."""
    for name, x, count in zip(("q_map", "k_map", "v_map", "dout_map"), copied, rows):
        words = tensor_map.encode(x, problem.dtype, count)
        if words is None:
            return False
        params[name] = words
    return True


def _plan_split_backward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan | None:
    """Return None where the copy engine does not read the layout of q, k, v, dout, bias or mask.

    No sum depends on the order in which blocks run, so that every call is deterministic.
    """
    *copied, out, dq, dk, dv = arrays
    if not all(map(tensor_map.possible, copied)):
        return None
    params = zeros(HOPPER_BACKWARD_PARAMS, problem.mods, rest.captured)
    logits = {"bias_map": rest.bias, "mask_map": rest.mask}
    if not _fill_maps(params, problem, copied, (64, 64, 64, 64)) or not _fill_logit_maps(params, problem, logits, 64):
        return None
    dbias, stores = rest.dbias, rest.dbias is not None and choose.stores_dbias(problem, rest.dbias.shape)
    keys, queries = choose.hopper_split_backward(problem, _access(problem, (dq, dk, dv)), stores)
    before = choose.before_backward(keys, out.dtype == np.float32, _access(problem, (copied[-1], out)))
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    head_bytes = 2 * (problem.head_dim + problem.head_dim_v) * max(problem.group * problem.seqlen_q, problem.seqlen_k)
    section = min(pairs_k, max(1, L2_SHARE // head_bytes))
    tiles_k, tiles_q = -(-problem.seqlen_k // keys.spec.block_k), -(-problem.seqlen_q // queries.spec.block_q)
    most = _attribute(device, "MultiProcessorCount")
    params["keys"], runs_k = _order(problem, problem.heads_k, tiles_k, most)
    params["queries"], runs_q = _order(problem, problem.heads_q, tiles_q, most)
    params["sizes"] = sizes(problem, section)
    _fill_backward(params, problem, arrays, rest)
    if stores:
        params["dbias"], dbias = (0, *dbias.shape, 1, 1, 1), None
    of_bias, parts_size = _launch_bias(device, params, problem, before, arrays, dbias, 64)
    launches = (
        _launch_before(problem, before),
        Launch.of(keys, min(most, runs_k)),
        Launch.of(queries, min(most, runs_q)),
        *_launch_sink(problem, before),
        *of_bias,
        *_launch_mod_gradient(device, params, problem, before, arrays),
    )
    return Plan.of(launches, params, HOPPER_POINTERS, problem.mods, (pairs_q * problem.seqlen_q, 0, 0, parts_size))


def _plan_precise_backward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan:
    """No sum depends on the order in which blocks run, so that every call is deterministic."""
    compiler.check_dtype(problem.dtype, _capability(device), "this GPU")
    params = np.zeros(1, PRECISE_BACKWARD_PARAMS)
    launches = _launch_precise_backward(device, params, problem, arrays, rest)
    return Plan.of(launches, params, BACKWARD_POINTERS, None, _precise_workspace(problem))


def _precise_workspace(problem: Problem) -> tuple[int, ...]:
    return (problem.batch * problem.heads_q * problem.seqlen_q, 0, 0, 0)


def _launch_precise_backward(
    device: int, params: np.ndarray, problem: Problem, arrays: tuple, rest: Rest
) -> tuple[Launch, ...]:
    """Write all but pointers, what is of halves, and maps."""
    delta, keys, queries = precise.backward(problem, _access(problem, arrays), _shared_limit(device))
    _fill_backward(params, problem, arrays, rest)
    params["sizes"] = sizes(problem, _backward_section(problem))
    params["exact_scale"] = problem.scale
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return Launch.of(delta, _blocks(-(-rows // delta.spec.warps), 1)), *_launch_gradients(problem, keys, queries)


def _launch_gradients(problem: Problem, keys: Variant, queries: Variant) -> tuple[Launch, Launch]:
    """A block takes a tile of one head."""
    pairs_q, pairs_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    return (
        Launch.of(keys, _blocks(pairs_k, -(-problem.seqlen_k // keys.spec.block_k))),
        Launch.of(queries, _blocks(pairs_q, -(-problem.seqlen_q // queries.spec.block_q))),
    )


def _plan_hopper_precise_backward(device: int, problem: Problem, arrays: tuple, rest: Rest) -> Plan | None:
    """As `_plan_hopper_precise_forward`; the halves are made anew."""
    q, k, v, dout, _, dq, dk, dv = arrays
    keys, queries = precise.hopper_backward(problem, _access(problem, (dq, dk, dv)))
    params = np.zeros(1, HOPPER_PRECISE_BACKWARD_PARAMS)
    split = _split(device, params, problem, [q, k, v, dout], (64, 64, 64, 64))
    if split is None:
        return None
    launches, halves = split
    delta, *others = _launch_precise_backward(device, params, problem, arrays, rest)
    launches = (*launches, delta, *_launch_gradients(problem, keys, queries), *others)
    names = (*BACKWARD_POINTERS, *HALVES_BACKWARD_POINTERS)
    return Plan.of(launches, params, names, None, _precise_workspace(problem), halves)


def _fill_backward(params: np.ndarray, problem: Problem, arrays: tuple, rest: Rest) -> None:
    for name, x in zip(BACKWARD_PARAMS.names, (*arrays, rest.lse, rest.dlse)):
        fill(params, name, x)
    _fill_options(params, problem, rest)
    fill_logits(params, "bias", rest.bias)
    fill_logits(params, "mask", rest.mask)
    fill_blocks(params, "key_blocks", rest.bitmaps[1])
    params["delta"] = (0, problem.heads_q * problem.seqlen_q, problem.seqlen_q, 1)


def _fill_options(params: np.ndarray, problem: Problem, rest: Rest) -> None:
    fill_score(params, problem, rest.slopes)
    fill(params, "sink", rest.sink)
    fill_dropout(params, problem)
    fill_blocks(params, "blocks", rest.bitmaps[0])
