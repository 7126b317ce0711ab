"""The kernels of float32 and float64, chosen from literal tables as in ``choose.py``.

Floors on an H200, in TFLOP/s, for one head of ``N`` queries and keys of width ``d``, from its data sheet, what was
expected, and what came at 4096 keys, d = 64 and 128. By ``mma`` its tensor cores reach about 62 % of what they do by
``wgmma``, so 310 of TF32, and 100 of float32 by three products. Six products of bfloat16 at twice the rate would cost
as much, be exact to the last bit and take twice the instructions to split. Of float64 ``mma`` has all 67: the compiler
gives 16 x 8 x 8 of them 32 cycles, in a pipe that takes other instructions of float64 every second cycle. The backward
makes seven products where five count.

=================  =================================================================================================
float32, forward   at most 100; expected: 55 to 70; came: 57, 51. For 16 x 8 x 16 a warp issues 6 products, 39 cycles,
                   beside 12 instructions to split the right factor, as many for the left one at 16 keys, 4
                   additions, 2 loads
float32, backward  at most 71; expected: 35 to 45; came: 40, 29
float64, forward   at most 55, 60: 32 scores of a warp take 128 or 256 cycles of products and 13 instructions of 2,
                   9 of which are the exponential's; expected: 35, 40; came: 38, 45. With 19, a branch for each
                   exponential, none of which ran beside another, and factors read when needed: 26, 29
float64, backward  at most 43; at d = 128, where two warps compute the same scores of their keys, 35; expected: 28 to
                   31, 21 to 23; came: 30, 22. In that way, with copies that all waited for: 23, 17
=================  =================================================================================================

On Hopper float32 up to head_dim 128 is not multiplied as TF32 but, by ``wgmma``, as two float16 of each number,
``2^e x = big + small``: three products as well, of 650 TFLOP/s as float16 makes in practice, where TF32 would have
half as many. What splits reads q, k and v twice and writes as much: 0.3 ms for 16384 rows of 2048 columns, a tenth of
4096 keys.

=================  =================================================================================================
forward            at most 215; expected: 120 to 170 and 150 to 190; came: 181, 204. A warpgroup has 1536 cycles for
                   the softmax of 128 keys, at d = 64 because three take turns; its instructions are 800
backward           about 155 at that rate; expected: 95 to 115 and 100 to 125; came: 139, 158. A tile of 64 x 64
                   scores takes 96 products of 32 cycles for dk and dv at d = 128, 72 for dq, beside 700 and 450
                   instructions of a warp; at d = 64 half as many products, and 650 and 400 instructions, but three
                   that take turns
=================  =================================================================================================

Where a row or a column is so small beside the largest number of its array that small has no digits left for it, or a
number is not finite, the kernels of halves return at once, and those of TF32, launched behind them, compute everything;
otherwise these return.

Standard attention in float64 makes 15 TFLOP/s forward at d = 64 and 27 at d = 128, 35 and 45 backward: to be twice as
fast takes 30 and 54 forward, which the floors allow, and more than the tensor cores have backward.

Tried for float64, full masks, 4096, in one run: forward at 64 of 64 x 32, 32 and 36 (products 16 and 8 deep), of 64 x
64, 38 and 38, of 128 x 16 with 32 rows a warp 38; causal 38, 37, 39, 37, 35. At 128 of 64 x 16, 34 and 38, of 64 x 24,
42, of 128 x 32 by 8 warps, 45; causal 41, 38, 39, 41. Backward at 64 without the second stage 28 to 29, at 128 21.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from .choose import SHARED_LIMIT, fitting, round_up
from .problem import Problem
from .spec import (
    HopperPreciseKeysSpec,
    HopperPreciseQueriesSpec,
    HopperPreciseSpec,
    PreciseDeltaSpec,
    PreciseForwardSpec,
    PreciseKeysSpec,
    PreciseQueriesSpec,
    SplitSpec,
    Variant,
)

ITEM = {"float32": 4, "float64": 8}  # bytes of an element
STEPS = {"float32": 2, "float64": 2}  # of 8 columns, multiplied together where a tile has as many rows

# head_dim up to: (block_q, block_k, row_tiles, parts, blocks_per_sm), ... The first that fits is taken. Of float32
# none was timed: the largest without spills. Warps of 32 rows read K and V half as often from shared memory, which
# d = 64 allows.
FORWARD = {
    "float32": {
        64: ((128, 16, 2, 1, 2),),
        128: ((64, 16, 1, 1, 2),),
        192: ((64, 32, 1, 2, 1),),
        256: ((64, 16, 1, 2, 1),),
    },
    "float64": {
        64: ((64, 64, 1, 1, 2), (64, 32, 1, 1, 2), (64, 32, 1, 1, 1)),
        128: ((128, 32, 1, 1, 1), (64, 16, 1, 1, 1)),
        192: ((32, 16, 1, 2, 1),),
        256: ((32, 16, 1, 2, 1), (16, 16, 1, 2, 1)),
    },
}
# head_dim up to: (block_q, block_k, parts, stages, blocks_per_sm), ... of the kernel of dk and dv, and of that of dq.
KEYS = {
    "float32": {
        64: ((32, 64, 1, 1, 2),),
        128: ((32, 64, 2, 1, 1),),
        192: ((16, 32, 2, 1, 1),),
        256: ((16, 32, 4, 1, 1),),
    },
    "float64": {
        64: ((16, 64, 1, 2, 2), (16, 64, 1, 1, 1)),
        128: ((16, 64, 2, 2, 1), (16, 32, 2, 1, 1)),
        192: ((8, 32, 3, 1, 1), (16, 16, 3, 1, 1)),
        256: ((8, 32, 4, 1, 1), (8, 16, 4, 1, 1)),
    },
}
QUERIES = {
    "float32": {
        64: ((64, 32, 1, 1, 2),),
        128: ((64, 16, 1, 1, 2), (64, 16, 1, 1, 1)),
        192: ((64, 16, 2, 1, 1), (32, 16, 2, 1, 1)),
        256: ((64, 16, 2, 1, 1), (32, 16, 2, 1, 1)),
    },
    "float64": {
        64: ((64, 32, 1, 1, 2), (64, 16, 1, 1, 2), (64, 16, 1, 1, 1)),
        128: ((64, 16, 1, 2, 1), (32, 16, 1, 1, 1)),
        192: ((32, 16, 2, 1, 1), (16, 16, 2, 1, 1)),
        256: ((16, 16, 2, 1, 1), (16, 8, 2, 1, 1)),
    },
}

# head_dim up to: (block_k, groups, slots) of Hopper's forward of halves.
HOPPER_FORWARD = {64: (128, 3, 2), 128: (128, 2, 1)}
# The same: (groups, slots of q or k, slots of dout or v) of both kernels of its backward. At 128, 224 KiB.
HOPPER_BACKWARD = {64: (3, 3, 3), 128: (2, 2, 1)}
HOPPER_DIMS_V = (64, 96, 128)  # widths of a product
HALVES_LENGTH = 256  # queries and keys from which on splitting is worth its time; twice that beside one product of TF32


def _widths(problem: Problem, parts: int) -> tuple[int, int]:
    """Both widths padded: whole rounds through the banks, whole units for each part."""
    return tuple(
        round_up(n, max(32, 128 // ITEM[problem.dtype] * parts)) for n in (problem.head_dim, problem.head_dim_v)
    )


def _variant(problem: Problem, table: dict, kernel: tuple, access: int, shared_limit: int) -> Variant:
    header, template, spec, parts_at = kernel
    products = 3 if problem.dtype == "float32" and problem.precision is None else 1

    def make(tiling):
        widths = _widths(problem, tiling[parts_at])
        steps = STEPS[problem.dtype] if all(n % 16 == 0 for n in tiling[:2]) else 1
        return spec(*widths, ITEM[problem.dtype], *tiling, steps, products, access)

    width = max(problem.head_dim, problem.head_dim_v)
    return Variant(header, template, problem.dtype, fitting(table[problem.dtype], {}, make, width, shared_limit))


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem, access: int, shared_limit: int) -> Variant:
    """Return the forward kernel for `problem` on a device with `shared_limit` bytes of shared memory in a block."""
    kernel = "precise/forward.cuh", "precise_forward", PreciseForwardSpec, 3
    return _variant(problem, FORWARD, kernel, access, shared_limit)


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, access: int, shared_limit: int) -> tuple[Variant, Variant, Variant]:
    """Return the kernels of delta, of dk and dv, and of dq."""
    keys = "precise/backward.cuh", "precise_keys", PreciseKeysSpec, 2
    queries = "precise/backward.cuh", "precise_queries", PreciseQueriesSpec, 2
    return (
        Variant("precise/backward.cuh", "precise_delta", problem.dtype, PreciseDeltaSpec(8, ITEM[problem.dtype])),
        _variant(problem, KEYS, keys, access, shared_limit),
        _variant(problem, QUERIES, queries, access, shared_limit),
    )


def by_halves(problem: Problem) -> bool:
    """Whether Hopper multiplies float32 as two float16, which one more pass over the inputs makes of each number.

    Their three products are faster than even one of TF32, by ``mma``.
    """
    return (
        problem.dtype == "float32"
        and max(problem.head_dim, problem.head_dim_v) <= max(HOPPER_FORWARD)
        and min(problem.seqlen_q, problem.seqlen_k) >= (1 if problem.precision is None else 2) * HALVES_LENGTH
    )


def padded(head_dim: int) -> int:
    """Columns of each of the halves."""
    return 64 if head_dim <= 64 else 128


def split(access: int, backward: bool) -> tuple[Variant, Variant]:
    """Return the kernels that look for the largest numbers of the inputs and that split them."""
    spec = SplitSpec(8, 4, access, backward)
    return tuple(Variant("precise/split.cuh", name, "float32", spec) for name in ("find_largest", "split_rows"))


@functools.lru_cache(maxsize=1024)
def hopper_forward(problem: Problem, access: int) -> Variant:
    """Return Hopper's forward kernel of halves; `access` is that of out."""
    width = max(problem.head_dim, problem.head_dim_v)
    d = round_up(problem.head_dim, 32)
    dv = min(n for n in HOPPER_DIMS_V if n >= problem.head_dim_v)
    spec = HopperPreciseSpec(d, dv, *HOPPER_FORWARD[min(n for n in HOPPER_FORWARD if n >= width)], min(access, 8))
    return Variant("sm90/precise_forward.cuh", "hopper_precise_forward", problem.dtype, spec)


@functools.lru_cache(maxsize=1024)
def hopper_backward(problem: Problem, access: int) -> tuple[Variant, Variant]:
    """Return Hopper's kernels of halves for dk and dv, and for dq; `access` is that of the gradients."""
    dims = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    tiling = HOPPER_BACKWARD[min(n for n in HOPPER_BACKWARD if n >= max(dims))]
    return tuple(
        Variant("sm90/precise_backward.cuh", template, problem.dtype, spec(*dims, *tiling, min(access, 8)))
        for template, spec in (
            ("hopper_precise_keys", HopperPreciseKeysSpec),
            ("hopper_precise_queries", HopperPreciseQueriesSpec),
        )
    )


def variants(capability: int) -> Iterator[Variant]:
    """Yield the kernels that devices of `capability` (80, 90, ...) choose for aligned arrays."""
    if capability < 80:
        return
    limit = SHARED_LIMIT.get(capability, SHARED_LIMIT[86])
    for dtype in FORWARD:
        for head_dim in (64, 96, 128, 192, 256):
            problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim, 1.0)
            yield from (forward(problem, 16, limit), *backward(problem, 16, limit))
            long = replace(problem, seqlen_q=HALVES_LENGTH, seqlen_k=HALVES_LENGTH)
            if capability == 90 and by_halves(long):
                yield from (*split(16, False), *split(16, True), hopper_forward(long, 16), *hopper_backward(long, 16))
