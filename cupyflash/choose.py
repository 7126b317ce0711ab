"""From a problem to the kernels that compute it: one literal table for each pass and path.

A row lists tilings in the order of their speed on an H200; the first one whose shared memory the device has is taken.
"""

from __future__ import annotations

import functools
import os

from .problem import Problem
from .spec import BackwardSpec, ForwardSpec, PrepareSpec, Variant

PATHS = ("sm80",)

# head_dim up to: (block_q, block_k, warps, stages, blocks_per_sm, q_in_registers), ...
FORWARD = {
    64: ((128, 64, 4, 2, 2, True),),
    128: ((128, 64, 8, 2, 1, True), (128, 32, 8, 1, 1, True)),
    256: ((64, 64, 4, 1, 2, False), (64, 32, 4, 1, 2, False)),
}

# head_dim up to: (block_q, block_k, warps, score_warps_k, grad_warps_k, dq_warps_q, stages, blocks_per_sm), ...
BACKWARD = {
    64: ((64, 128, 8, 8, 8, 4, 2, 1),),
    128: ((64, 128, 8, 4, 4, 2, 2, 1), (32, 64, 8, 4, 2, 2, 1, 1)),
    256: ((64, 64, 8, 4, 2, 2, 2, 1), (32, 32, 8, 2, 1, 2, 1, 1)),
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def path() -> str:
    """Return the kernel path: the only one there is, or what the environment variable CUPYFLASH_PATH names."""
    name = os.environ.get("CUPYFLASH_PATH", PATHS[-1])
    if name not in PATHS:
        raise ValueError(f"CUPYFLASH_PATH={name!r} names no kernel path; there are {', '.join(PATHS)}")
    return name


def _fitting(table: dict, make, head_dim: int, shared_limit: int):
    row = table[min(limit for limit in table if limit >= head_dim)]
    for tiling in row:
        spec = make(*tiling)
        if spec.shared_bytes <= shared_limit:
            return spec
    raise NotImplementedError(
        f"head_dim {head_dim} needs {spec.shared_bytes} bytes of shared memory in a block; this GPU has {shared_limit}"
    )


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem, access: int, float32_out: bool, shared_limit: int) -> Variant:
    """Return the forward kernel for `problem` on a device with `shared_limit` bytes of shared memory in a block."""
    d, dv = round_up(problem.head_dim, 16), round_up(problem.head_dim_v, 16)
    make = functools.partial(_forward_spec, d, dv, float32_out, access)
    return Variant(f"{path()}/forward.cuh", "forward", problem.dtype, _fitting(FORWARD, make, max(d, dv), shared_limit))


def _forward_spec(d, dv, float32_out, access, block_q, block_k, warps, stages, blocks_per_sm, q_in_registers):
    return ForwardSpec(d, dv, block_q, block_k, warps, stages, blocks_per_sm, q_in_registers, float32_out, access)


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, access: int, deterministic: bool, shared_limit: int) -> Variant:
    """Return the main backward kernel for `problem`."""
    d, dv = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    make = functools.partial(_backward_spec, d, dv, deterministic, access)
    return Variant(f"{path()}/backward.cuh", "backward", problem.dtype, _fitting(BACKWARD, make, max(d, dv), shared_limit))


def _backward_spec(d, dv, deterministic, access, *tiling):
    block_q, block_k, warps, score_warps_k, grad_warps_k, dq_warps_q, stages, blocks_per_sm = tiling
    columns = 16 * max(warps // grad_warps_k, warps // dq_warps_q)
    d, dv = round_up(d, columns), round_up(dv, columns)
    return BackwardSpec(
        d, dv, block_q, block_k, warps, score_warps_k, grad_warps_k, dq_warps_q, stages, blocks_per_sm, deterministic, access
    )


def around_backward(main: Variant, float32_out: bool) -> tuple[Variant, Variant]:
    """Return the kernels before and after `main`."""
    spec = PrepareSpec(main.spec.head_dim, main.spec.head_dim_v, float32_out, main.spec.access)
    return tuple(Variant("any/around_backward.cuh", name, main.dtype, spec) for name in ("prepare_backward", "finish_backward"))
