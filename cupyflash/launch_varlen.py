"""The CUDA backend for packed sequences: ``launch.py``, with a kernel before all others that finds their tiles.

The lengths stay on the GPU. What a launch needs of them beforehand is a bound: so many rows, cut into so many
sequences, have no more than so many tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cupy
import numpy as np

from . import choose, launch, tensor_map
from .launch import NO_BLOCKS, Launch, Plan, Rest
from .problem import Problem
from .spec import Variant
from .structs import (
    BACKWARD_PARAMS,
    BACKWARD_POINTERS,
    FORWARD_PARAMS,
    HOPPER_BACKWARD_PARAMS,
    HOPPER_FORWARD_PARAMS,
    MAPS,
    MOST,
    SEGMENT_WORDS,
    SEGMENTS_PARAMS,
    SEGMENTS_POINTERS,
    STATISTIC_TILE,
    TABLE_HEAD,
    TILE_KINDS,
    dropout_words,
    fill,
    sizes,
)

SEARCHED = 1024  # rows of a block that looks for those of no sequence
OTHER_POINTERS = ("lse", "score", "sink", "dropout", "segments")  # behind those of the arrays
# Those up to dropout, whose place has its keys; what is behind them is for options that packed sequences do not have.
POINTERS = (*BACKWARD_POINTERS[: BACKWARD_POINTERS.index("dropout") + 1], "segments")
_plans: dict = {}


@dataclass(frozen=True)
class Tiles:
    """The lists of tiles that a pass needs, and the table that holds them."""

    struct: tuple  # the values of SEGMENTS
    bounds: dict  # name of a list -> the most runs that it can have
    words: int  # of the table

    @classmethod
    def of(cls, problem: Problem, **kinds: tuple[int, bool]) -> Tiles:
        """`kinds`: rows of a tile, and whether a run is two of them, by the name of the list."""
        at, lists, bounds = TABLE_HEAD + (SEGMENT_WORDS + 1) * problem.batch, [], {}
        for kind in TILE_KINDS:
            rows, paired = kinds.get(kind, (0, False))
            total = problem.seqlen_k if kind == "keys" else problem.seqlen_q
            bounds[kind] = min(total, (total + problem.batch * (rows - 1)) // rows) if rows else 0
            lists.append((at, rows, paired, bounds[kind]))
            at += bounds[kind]
        return cls((0, problem.varlen == "lower_right", lists), bounds, at)

    @classmethod
    def in_runs(cls, problem: Problem, kind: str, rows: int, heads: int, places: int, **more) -> Tiles:
        """With a list for persistent blocks, in pairs as `launch._order` has them; `places` run at once."""
        alone = cls.of(problem, **{kind: (rows, False)})
        paired = problem.banded and heads * alone.bounds[kind] > places
        return cls.of(problem, **{kind: (rows, paired)}, **more)


@dataclass(frozen=True)
class _Pass:
    """Both plans of a pass, which have structs of their own."""

    before: Plan
    main: Plan
    words: int  # of the table


def forward(problem: Problem, indices: dict, q, k, v, out, lse, slopes, sink, seed: int) -> None:
    """Write ``out`` and, unless it is None, ``lse``. The arrays have three axes; ``indices`` are contiguous."""
    if problem.scale < 0:  # the kernels take the maximum before they scale
        negated = (q.view(np.uint16) ^ np.uint16(0x8000)).view(q.dtype)
        launch.keep_for_graph(negated)
        return forward(replace(problem, scale=-problem.scale), indices, negated, k, v, out, lse, slopes, sink, seed)
    if _nothing(problem):
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return
    arrays = (q, k, v, out)
    plan = _plan(_plan_forward, problem, indices, arrays, Rest(lse, slopes, sink, None, None, NO_BLOCKS))
    pointers = [launch._pointer(x) for x in (*arrays, lse, slopes, sink)]
    table = _prepare(plan, indices, pointers[3], 0, 0, pointers[4])
    zero = cupy.zeros(plan.main.workspace, np.uint32) if plan.main.workspace else None
    launch.keep_for_graph(zero)
    plan.main.run(*pointers, *dropout_words(problem, seed), table.data.ptr, *launch._of_zeros(zero))


def backward(
    problem: Problem,
    indices: dict,
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
    seed: int,
) -> None:
    """Write ``dq``, ``dk``, ``dv`` and, unless it is None, ``dsink``, which is contiguous."""
    if _nothing(problem):
        for gradient in (dq, dk, dv, dsink):
            if gradient is not None:
                gradient[...] = 0
        return
    arrays = (q, k, v, dout, out, dq, dk, dv)
    rest = Rest(lse, slopes, sink, None, None, NO_BLOCKS, dlse=dlse)
    plan = _plan(_plan_backward, problem, indices, arrays, rest, deterministic)
    statistics, sum_size, turns = plan.main.workspace
    delta = cupy.empty(statistics, np.float32)
    dq_sum = cupy.empty(sum_size, np.float32) if sum_size else None
    turn = cupy.zeros(turns, np.uint32) if turns else None
    launch.keep_for_graph(delta, dq_sum, turn)
    pointers = [launch._pointer(x) for x in (*arrays, lse, dlse, delta, dq_sum, turn, slopes, sink, dsink)]
    table = _prepare(plan, indices, *pointers[5:8], 0)
    plan.main.run(
        *pointers, *dropout_words(problem, seed), table.data.ptr, *pointers[:4]
    )  # the first four again: into maps, if there are any


def keep_for_graph(*temporaries) -> None:
    """As ``launch.keep_for_graph``."""
    launch.keep_for_graph(*temporaries)


def _nothing(problem: Problem) -> bool:
    """Whether no row is of any sequence."""
    return 0 in (problem.batch, problem.seqlen_q, problem.heads_q)


def _prepare(plan: _Pass, indices: dict, *cleared: int):
    """Launch what comes first; return the table, to be held: what is allocated later must not lie in its place."""
    table = cupy.empty(plan.words, np.int32)
    launch.keep_for_graph(table)
    pointers = [launch._pointer(indices.get(f"{name}_{side}")) for side in "qk" for name in ("cu_seqlens", "seqused")]
    plan.before.run(*pointers, table.data.ptr, *cleared)
    return table


def _plan(make, problem: Problem, indices: dict, arrays: tuple, rest: Rest, *more) -> _Pass:
    device = cupy.cuda.runtime.getDevice()
    given = (*arrays, rest.lse, rest.dlse, rest.slopes, rest.sink)
    layouts = tuple([None if x is None else (x.data.ptr & 15, x.strides, x.itemsize) for x in given])
    wide = tuple([(name, x.itemsize) for name, x in indices.items()])
    key = (make, problem, device, layouts, wide, more)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= launch.MAX_PLANS:
            _plans.clear()
        batched = rest._replace(lse=_batched(rest.lse), dlse=_batched(rest.dlse))
        plan = _plans[key] = make(device, problem, indices, [*map(_batched, arrays)], batched, *more)
    return plan


def _batched(x):
    """With an axis of one batch in front."""
    return None if x is None else x[None]


def _plan_before(
    problem: Problem, main: Variant, tiles: Tiles, indices: dict, cleared: dict, lse, longest_keys: bool
) -> Plan:
    """The kernel before all others; `cleared`: the results, by the fields that they are cleared by."""
    params = np.zeros(1, SEGMENTS_PARAMS)
    for side, total in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        wide = [name in indices and indices[name].itemsize == 8 for name in (f"cu_seqlens_{side}", f"seqused_{side}")]
        params[f"lengths_{side}"] = (0, 0, *wide, total)
    params["batch"], params["longest_keys"], params["segments"] = problem.batch, longest_keys, tiles.struct
    for name, x in cleared.items():
        record = params[0][name]
        _fill(record, "array", x)
        record["heads"], record["item"], record["units"] = x.shape[2], x.itemsize, x.shape[3] * x.itemsize // 2
    if lse is not None:
        _fill(params[0], "lse", lse)
        params["heads"] = problem.heads_q
    searched = -(-problem.seqlen_q // SEARCHED) + ("of_k" in cleared) * -(-problem.seqlen_k // SEARCHED)
    return Plan.of((Launch.of(choose.segments(main), 1 + searched),), params, SEGMENTS_POINTERS, None)


def _fill(record, name: str, x) -> None:
    """Strides of an array with an axis of one batch in front; every row is the first of a batch."""
    if x is not None:
        fill([record], name, x)
        record[name]["batch"] = record[name]["row"]


def _rows_in_l2(row_bytes: int, share: int = launch.L2_SHARE) -> int:
    """Rows of so many bytes that heads which run side by side may share."""
    return min(MOST, max(1, share // row_bytes))


def _order(heads: int) -> tuple:
    """The struct `Order`, of which kernels of packed sequences read the heads; the rest is in the table."""
    return heads, 0, 0, 0, False


def _fill_options(params: np.ndarray, problem: Problem, tiles: Tiles, rest: Rest) -> None:
    launch._fill_options(params, problem, rest)
    params["segments"] = tiles.struct


def _fill_maps(params: np.ndarray, problem: Problem, boxes: dict) -> bool:
    """Whether the driver makes the maps; `boxes`: the array and the rows of a box, by the name of a map."""
    for name, (x, rows) in boxes.items():
        words = tensor_map.encode(x, problem.dtype, rows, packed=True)
        if words is None:
            return False
        params[name] = words
    return True


# ---------------------------------------------------------------------------------------------- forward


def _plan_forward(device: int, problem: Problem, indices: dict, arrays: list, rest: Rest) -> _Pass:
    made = None
    if launch._path() == "sm90" and not choose.forward_elsewhere(problem):
        made = _hopper_forward(device, problem, arrays, rest)
    variant, tiles, main = made or _portable_forward(device, problem, arrays, rest)
    before = _plan_before(problem, variant, tiles, indices, {"of_q": arrays[3]}, rest.lse, longest_keys=True)
    return _Pass(before, main, tiles.words)


def _portable_forward(device: int, problem: Problem, arrays: list, rest: Rest) -> tuple:
    float32_out = arrays[3].dtype == np.float32
    access = launch._access(problem, arrays[:3] if float32_out else arrays)
    variant = choose.forward(problem, access, float32_out, launch._shared_limit(device), launch._capability(device))
    tiles = Tiles.of(problem, queries=(variant.spec.block_q, False))
    params = np.zeros(1, FORWARD_PARAMS)
    for name, x in zip(("q", "k", "v", "out"), arrays):
        _fill(params[0], name, x)
    _fill_forward(params, problem, tiles, rest)
    one = Launch.of(variant, launch._blocks(problem.heads_q, tiles.bounds["queries"]))
    return variant, tiles, Plan.of((one,), params, ("q", "k", "v", "out", *OTHER_POINTERS), None)


def _hopper_forward(device: int, problem: Problem, arrays: list, rest: Rest) -> tuple | None:
    """None where the copy engine does not read the layout of q, k or v."""
    q, k, v, out = arrays
    if not all(map(tensor_map.possible, (q, k, v))):
        return None
    access = launch._access(problem, (out,)) if tensor_map.possible(out) else min(4, launch._access(problem, (out,)))
    variant = choose.hopper_forward(problem, access, out.dtype == np.float32)
    spec = variant.spec
    target = "out_map" if spec.staged else "out"
    boxes = {"q": (q, 64), "k": (k, spec.block_k), "v": (v, spec.block_k)}
    if spec.staged:
        boxes[target] = (out, 64)
    params = np.zeros(1, HOPPER_FORWARD_PARAMS)
    if not _fill_maps(params, problem, boxes):
        return None
    most = launch._attribute(device, "MultiProcessorCount")
    tiles = Tiles.in_runs(problem, "queries", spec.block_q, problem.heads_q, most * spec.teams)
    params["order"], params["queries"] = _order(problem.heads_q), 64
    _fill(params[0], "out", out)
    _fill_forward(params, problem, tiles, rest)
    runs = launch._blocks(problem.heads_q, tiles.bounds["queries"])
    variants = choose.steadily(variant) if choose.steady(problem) else (variant,)
    launches = tuple(Launch.of(one, min(-(-runs // spec.teams), most)) for one in variants)
    more, workspace = (("taken", "only_if"), (launch.ZEROS,)) if len(launches) > 1 else ((), ())
    names = ("q", "k", "v", target, *OTHER_POINTERS, *more)
    return variant, tiles, Plan.of(launches, params, names, None, workspace)


def _fill_forward(params: np.ndarray, problem: Problem, tiles: Tiles, rest: Rest) -> None:
    params["sizes"] = sizes(problem, _rows_in_l2(2 * (problem.head_dim + problem.head_dim_v)))
    _fill(params[0], "lse", rest.lse)
    _fill_options(params, problem, tiles, rest)


# ---------------------------------------------------------------------------------------------- backward


def _plan_backward(
    device: int, problem: Problem, indices: dict, arrays: list, rest: Rest, deterministic: bool
) -> _Pass:
    made = None
    if launch._path() == "sm90" and not choose.backward_elsewhere(problem):
        if choose.split_packed(problem, launch._access(problem, arrays[5:]), deterministic):
            made = _split_backward(device, problem, arrays, rest)
        else:
            made = _hopper_backward(device, problem, arrays, rest, deterministic)
    variant, tiles, main = made or _portable_backward(device, problem, arrays, rest, deterministic)
    cleared = dict(zip(("of_q", "of_k", "of_v"), arrays[5:]))
    before = _plan_before(problem, variant, tiles, indices, cleared, None, longest_keys=False)
    return _Pass(before, main, tiles.words)


def _portable_backward(device: int, problem: Problem, arrays: list, rest: Rest, deterministic: bool) -> tuple:
    access = launch._access(problem, arrays)
    main = choose.backward(problem, access, deterministic, launch._shared_limit(device), launch._capability(device))
    tiles = Tiles.of(problem, keys=(main.spec.block_k, False), blocks=(16, False))
    params = np.zeros(1, BACKWARD_PARAMS)
    row_bytes = problem.group * (6 * problem.head_dim + 2 * problem.head_dim_v)
    _fill_backward(params, problem, tiles, arrays, rest, _rows_in_l2(row_bytes))
    before = choose.before_backward(main, arrays[4].dtype == np.float32, access)
    launches = (
        _launch_before(problem, before, tiles),
        *_launch_main(main, launch._blocks(problem.heads_k, tiles.bounds["keys"])),
        _launch_after(problem, choose.after_backward(main), tiles),
        *launch._launch_sink(problem, before),
    )
    workspace = (problem.heads_q * problem.seqlen_q, *_sum_and_turns(problem, main, tiles, deterministic))
    return main, tiles, Plan.of(launches, params, POINTERS, None, workspace)


def _hopper_backward(device: int, problem: Problem, arrays: list, rest: Rest, deterministic: bool) -> tuple | None:
    """None where the copy engine does not read the layout of q, k, v or dout."""
    q, k, v, dout, out, dq, dk, dv = arrays
    if not all(map(tensor_map.possible, (q, k, v, dout))):
        return None
    main = choose.hopper_backward(problem, launch._access(problem, (dq, dk, dv)), deterministic)
    spec, params = main.spec, np.zeros(1, HOPPER_BACKWARD_PARAMS)
    boxes = {"q_map": (q, spec.block_q), "k_map": (k, spec.block_k), "v_map": (v, spec.block_k)}
    if not _fill_maps(params, problem, boxes | {"dout_map": (dout, spec.block_q)}):
        return None
    most = launch._attribute(device, "MultiProcessorCount")
    # Deterministic blocks take one tile after the other; they must not pair those that others wait for.
    places = launch.MAX_BLOCKS if deterministic else most
    more = {"blocks": (16, False), "statistics": (STATISTIC_TILE, False)}
    tiles = Tiles.in_runs(problem, "keys", spec.block_k, problem.heads_k, places, **more)
    params["keys"], params["rotated"] = _order(problem.heads_k), not problem.banded and not deterministic
    row_bytes = problem.group * (6 * problem.head_dim + 2 * problem.head_dim_v)
    rows_in_l2 = _rows_in_l2(row_bytes, launch.L2_SHARE_SUMMED)
    _fill_backward(params, problem, tiles, arrays, rest, rows_in_l2)
    before = choose.before_backward(main, out.dtype == np.float32, launch._access(problem, (dout, out)))
    launches = (
        _launch_before(problem, before, tiles),
        *_launch_main(main, min(most, launch._blocks(problem.heads_k, tiles.bounds["keys"]))),
        _launch_after(problem, choose.after_backward(main), tiles),
        *launch._launch_sink(problem, before),
    )
    statistics = problem.heads_q * tiles.bounds["statistics"] * STATISTIC_TILE * 2
    workspace = (statistics, *_sum_and_turns(problem, main, tiles, deterministic))
    return main, tiles, Plan.of(launches, params, (*POINTERS, *MAPS), None, workspace)


def _split_backward(device: int, problem: Problem, arrays: list, rest: Rest) -> tuple | None:
    """None where the copy engine does not read the layout of q, k, v or dout. Every call is deterministic."""
    q, k, v, dout, out, dq, dk, dv = arrays
    copied = {"q_map": (q, 64), "k_map": (k, 64), "v_map": (v, 64), "dout_map": (dout, 64)}
    params = np.zeros(1, HOPPER_BACKWARD_PARAMS)
    if not all(map(tensor_map.possible, (q, k, v, dout))) or not _fill_maps(params, problem, copied):
        return None
    keys, queries = choose.hopper_split_backward(problem, launch._access(problem, (dq, dk, dv)))
    most = launch._attribute(device, "MultiProcessorCount")
    more = {"blocks": (16, False), "queries": (queries.spec.block_q, problem.banded)}
    tiles = Tiles.in_runs(problem, "keys", keys.spec.block_k, problem.heads_k, most, **more)
    params["keys"], params["queries"] = _order(problem.heads_k), _order(problem.heads_q)
    row_bytes = 2 * problem.group * (problem.head_dim + problem.head_dim_v)
    _fill_backward(params, problem, tiles, arrays, rest, _rows_in_l2(row_bytes))
    before = choose.before_backward(keys, out.dtype == np.float32, launch._access(problem, (dout, out)))
    launches = (
        _launch_before(problem, before, tiles),
        *_launch_main(keys, min(most, launch._blocks(problem.heads_k, tiles.bounds["keys"]))),
        *_launch_main(queries, min(most, launch._blocks(problem.heads_q, tiles.bounds["queries"]))),
        *launch._launch_sink(problem, before),
    )
    workspace = (problem.heads_q * problem.seqlen_q, 0, 0)
    return keys, tiles, Plan.of(launches, params, (*POINTERS, *MAPS), None, workspace)


def _fill_backward(
    params: np.ndarray, problem: Problem, tiles: Tiles, arrays: list, rest: Rest, rows_in_l2: int
) -> None:
    params["sizes"] = sizes(problem, rows_in_l2)
    for name, x in zip(BACKWARD_PARAMS.names, (*arrays, rest.lse, rest.dlse)):
        _fill(params[0], name, x)
    params["delta"] = (0, 1, problem.seqlen_q, 1)
    _fill_options(params, problem, tiles, rest)


def _launch_before(problem: Problem, before: Variant, tiles: Tiles) -> Launch:
    rows = tiles.bounds["statistics"] * (STATISTIC_TILE // 16) if before.spec.packed else tiles.bounds["blocks"]
    return Launch.of(before, launch._blocks(-(-problem.heads_q // before.spec.heads), rows))


def _launch_main(variant: Variant, blocks: int) -> tuple[Launch, ...]:
    """None of a kernel that has no tile: where there is no key."""
    return (Launch.of(variant, blocks),) if blocks else ()


def _launch_after(problem: Problem, after: Variant, tiles: Tiles) -> Launch:
    parts = after.spec.head_dim // after.spec.finished_cols
    return Launch.of(after, launch._blocks(-(-problem.heads_q * tiles.bounds["blocks"] * parts // after.spec.warps), 1))


def _sum_and_turns(problem: Problem, main: Variant, tiles: Tiles, deterministic: bool) -> tuple[int, int]:
    """Elements of dq_sum, and counters, one for each of its blocks of 16 rows and one more."""
    blocks = problem.heads_q * tiles.bounds["blocks"]
    return blocks * 16 * main.spec.head_dim, 1 + blocks if deterministic else 0
