"""The CUDA backend for packed sequences: ``launch.py``, with a kernel before all others that finds their tiles.

The lengths stay on the GPU. What a launch needs of them beforehand is a bound: so many rows, cut into so many
sequences, have no more than so many tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cupy
import numpy as np

from . import choose, launch
from .launch import Launch, Plan
from .problem import Problem
from .structs import (
    BACKWARD_PARAMS,
    BACKWARD_POINTERS,
    FORWARD_PARAMS,
    FORWARD_POINTERS,
    MOST,
    SEGMENT_WORDS,
    SEGMENTS_PARAMS,
    SEGMENTS_POINTERS,
    STATISTIC_TILE,
    TABLE_HEAD,
    TILE_KINDS,
    fill,
    fill_dropout,
    fill_score,
    sizes,
)

SEARCHED = 1024  # rows of a block that looks for those of no sequence
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
    plan = _plan(_plan_forward, problem, indices, arrays, (lse, slopes, sink), ())
    pointers = [launch._pointer(x) for x in (*arrays, lse, slopes, sink)]
    table = _prepare(plan, indices, pointers[3], 0, 0, pointers[4])
    plan.main.run(*pointers, seed, 0, 0, table)


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
    plan = _plan(_plan_backward, problem, indices, arrays, (lse, dlse, slopes, sink), (deterministic,))
    statistics, sum_size, turns = plan.main.workspace
    delta = cupy.empty(statistics, np.float32)
    dq_sum = cupy.empty(sum_size, np.float32) if sum_size else None
    turn = cupy.zeros(turns, np.uint32) if turns else None
    launch.keep_for_graph(delta, dq_sum, turn)
    pointers = [launch._pointer(x) for x in (*arrays, lse, dlse, delta, dq_sum, turn, slopes, sink, dsink)]
    table = _prepare(plan, indices, *pointers[5:8], 0)
    plan.main.run(*pointers, seed, 0, 0, table)


def keep_for_graph(*temporaries) -> None:
    """As ``launch.keep_for_graph``."""
    launch.keep_for_graph(*temporaries)


def _nothing(problem: Problem) -> bool:
    """Whether no row is of any sequence."""
    return 0 in (problem.batch, problem.seqlen_q, problem.heads_q)


def _prepare(plan: _Pass, indices: dict, *cleared: int) -> int:
    """Launch what comes first; return the address of the table."""
    table = cupy.empty(plan.words, np.int32)
    launch.keep_for_graph(table)
    pointers = [launch._pointer(indices.get(f"{name}_{side}")) for side in "qk" for name in ("cu_seqlens", "seqused")]
    plan.before.run(*pointers, table.data.ptr, *cleared)
    return table.data.ptr


def _plan(make, problem: Problem, indices: dict, arrays: tuple, rows: tuple, more: tuple) -> _Pass:
    device = cupy.cuda.runtime.getDevice()
    layouts = tuple([None if x is None else (x.data.ptr & 15, x.strides, x.itemsize) for x in (*arrays, *rows)])
    wide = tuple([(name, x.itemsize) for name, x in indices.items()])
    key = (make, problem, device, layouts, wide, more)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= launch.MAX_PLANS:
            _plans.clear()
        batched = [x[None] for x in arrays]
        plan = _plans[key] = make(device, problem, indices, batched, *rows, *more)
    return plan


def _plan_before(problem: Problem, main, tiles: Tiles, indices: dict, cleared: dict, lse, longest_keys: bool) -> Plan:
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
        _fill(params[0], "lse", lse[None])
        params["heads"] = problem.heads_q
    searched = -(-problem.seqlen_q // SEARCHED) + ("of_k" in cleared) * -(-problem.seqlen_k // SEARCHED)
    return Plan.of((Launch.of(choose.segments(main), 1 + searched),), params, SEGMENTS_POINTERS)


def _fill(record, name: str, x) -> None:
    """Strides of an array with an axis of one batch in front; every row is the first of a batch."""
    if x is not None:
        fill([record], name, x)
        record[name]["batch"] = record[name]["row"]


def _rows_in_l2(bytes_of_a_row: int) -> int:
    return min(MOST, max(1, launch.L2_SHARE // bytes_of_a_row))


def _plan_forward(device: int, problem: Problem, indices: dict, arrays: list, lse, slopes, sink) -> _Pass:
    float32_out = arrays[3].dtype == np.float32
    access = launch._access(problem, arrays[:3] if float32_out else arrays)
    variant = choose.forward(problem, access, float32_out, launch._shared_limit(device), launch._capability(device))
    tiles = Tiles.of(problem, queries=(variant.spec.block_q, False))
    params = np.zeros(1, FORWARD_PARAMS)
    params["sizes"] = sizes(problem, _rows_in_l2(2 * (problem.head_dim + problem.head_dim_v)))
    for name, x in zip(("q", "k", "v", "out"), arrays):
        _fill(params[0], name, x)
    _fill(params[0], "lse", None if lse is None else lse[None])
    _fill_options(params, problem, tiles, slopes, sink)
    blocks = launch._blocks(problem.heads_q, tiles.bounds["queries"])
    main = Plan.of((Launch.of(variant, blocks),), params, FORWARD_POINTERS)
    return _Pass(_plan_before(problem, variant, tiles, indices, {"of_q": arrays[3]}, lse, True), main, tiles.words)


def _fill_options(params: np.ndarray, problem: Problem, tiles: Tiles, slopes, sink) -> None:
    fill_score(params, problem, slopes)
    fill(params, "sink", sink)
    fill_dropout(params, problem)
    params["segments"] = tiles.struct


def _plan_backward(
    device: int, problem: Problem, indices: dict, arrays: list, lse, dlse, slopes, sink, deterministic: bool
) -> _Pass:
    access, out = launch._access(problem, arrays), arrays[4]
    main = choose.backward(problem, access, deterministic, launch._shared_limit(device), launch._capability(device))
    spec = main.spec
    before = choose.before_backward(main, out.dtype == np.float32, access)
    tiles = Tiles.of(problem, keys=(spec.block_k, False), blocks=(16, False))
    params = np.zeros(1, BACKWARD_PARAMS)
    params["sizes"] = sizes(problem, _rows_in_l2(problem.group * (6 * problem.head_dim + 2 * problem.head_dim_v)))
    _fill_backward(params, problem, arrays, lse, dlse)
    _fill_options(params, problem, tiles, slopes, sink)
    launches = (
        _launch_before(problem, before, tiles),
        *_launch_if_any(main, launch._blocks(problem.heads_k, tiles.bounds["keys"])),
        _launch_after(problem, choose.after_backward(main), tiles),
        *launch._launch_sink(problem, before),
    )
    turns = 1 + problem.heads_q * tiles.bounds["blocks"] if deterministic else 0
    workspace = (problem.heads_q * problem.seqlen_q, _dq_sum_size(problem, spec, tiles), turns)
    plan = Plan.of(launches, params, BACKWARD_POINTERS, workspace)
    return _Pass(_plan_before_backward(problem, main, tiles, indices, arrays), plan, tiles.words)


def _plan_before_backward(problem: Problem, main, tiles: Tiles, indices: dict, arrays: list) -> Plan:
    return _plan_before(
        problem, main, tiles, indices, dict(zip(("of_q", "of_k", "of_v"), arrays[5:])), None, longest_keys=False
    )


def _fill_backward(params: np.ndarray, problem: Problem, arrays: list, lse, dlse) -> None:
    for name, x in zip(BACKWARD_PARAMS.names, (*arrays, lse[None], None if dlse is None else dlse[None])):
        _fill(params[0], name, x)
    params["delta"] = (0, 1, problem.seqlen_q, 1)


def _launch_if_any(variant, blocks: int, cooperative: bool = False) -> tuple[Launch, ...]:
    return (Launch.of(variant, blocks, cooperative),) if blocks else ()


def _launch_before(problem: Problem, before, tiles: Tiles) -> Launch:
    rows = tiles.bounds["statistics"] * (STATISTIC_TILE // 16) if before.spec.packed else tiles.bounds["blocks"]
    return Launch.of(before, launch._blocks(-(-problem.heads_q // before.spec.heads), rows))


def _launch_after(problem: Problem, after, tiles: Tiles) -> Launch:
    parts = after.spec.head_dim // after.spec.finished_cols
    return Launch.of(after, launch._blocks(-(-problem.heads_q * tiles.bounds["blocks"] * parts // after.spec.warps), 1))


def _dq_sum_size(problem: Problem, spec, tiles: Tiles) -> int:
    return problem.heads_q * tiles.bounds["blocks"] * 16 * spec.head_dim
