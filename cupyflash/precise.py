"""The kernels of float32 and float64, chosen from literal tables as in ``choose.py``.

Floors, for one head of ``N`` queries and keys on an H200, from its data sheet; nothing here was timed. ``mma`` reaches
about 62 % of the rate that Hopper's tensor cores have by ``wgmma``: 310 TFLOP/s of TF32, 100 of float32 by three
products, as many by six products of bfloat16, which would be more exact and take twice the splitting. Of float64 it has
all 67. The backward makes seven products where five count.

===================  ===========================================================================================
float32, d = 128     forward 4 d N^2 / 100e12: at most 100 TFLOP/s. Issue slots of a warp for 16 x 8 x 16: 6 products,
                     12 to split the right factor, 2 to 4 loads, 4 additions: 25 beside the 39 cycles of the products
float32, backward    at most 71
float64, d = 128     forward 64 TFLOP/s but for exponentials, 16 instructions at 34 TFLOP/s: 12 % beside the products
float64, backward    at most 48, and 38 at d = 128, where two warps compute the same scores
===================  ===========================================================================================

Standard attention moves 8 N^2 bytes of float64 four times forward and seven times backward, which takes 1.6 times as long
as its products at d = 64 and 0.8 times at 128: twice its speed is beyond the tensor cores' own rate in the backward.
"""

from __future__ import annotations

import functools

from .choose import fitting, round_up
from .problem import Problem
from .spec import PreciseDeltaSpec, PreciseForwardSpec, PreciseKeysSpec, PreciseQueriesSpec, Variant

ITEM = {"float32": 4, "float64": 8}  # bytes of an element

# head_dim up to: (block_q, block_k, row_tiles, parts, blocks_per_sm), ... The first that fits is taken.
FORWARD = {
    "float32": {
        64: ((64, 32, 1, 1, 3),),
        128: ((64, 16, 1, 1, 2),),
        192: ((64, 32, 1, 2, 1),),
        256: ((64, 16, 1, 2, 1),),
    },
    "float64": {
        64: ((64, 32, 1, 1, 2),),
        128: ((64, 16, 1, 1, 2),),
        192: ((32, 16, 1, 2, 1),),
        256: ((32, 16, 1, 2, 1),),
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
        64: ((16, 64, 1, 1, 1),),
        128: ((16, 32, 2, 1, 1),),
        192: ((8, 32, 3, 1, 1),),
        256: ((8, 32, 4, 1, 1),),
    },
}
QUERIES = {
    "float32": {
        64: ((64, 32, 1, 1, 2),),
        128: ((64, 32, 1, 1, 2),),
        192: ((64, 16, 1, 1, 1),),
        256: ((64, 16, 2, 1, 1),),
    },
    "float64": {
        64: ((64, 16, 1, 1, 2),),
        128: ((32, 16, 1, 1, 1),),
        192: ((32, 16, 2, 1, 1),),
        256: ((16, 16, 2, 1, 1),),
    },
}


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
        return spec(*widths, ITEM[problem.dtype], *tiling, products, access)

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
        Variant("precise/backward.cuh", "precise_delta", problem.dtype, PreciseDeltaSpec(8)),
        _variant(problem, KEYS, keys, access, shared_limit),
        _variant(problem, QUERIES, queries, access, shared_limit),
    )
