"""Small calls of every kernel template, for compute-sanitizer; prints how many ran.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --paths sm80
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py --plant  # exits with 1

CuPy's memory pool is off: each array is an allocation of its own, so that memcheck sees an access beyond its end.
racecheck knows nothing of the copies that mbarriers announce (sm90). ``--plant`` runs three faulty kernels instead, one
for each tool: a tool that is silent about its own checks nothing.
"""

import argparse
import os
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cupy
import numpy as np

import cupyflash
from cupyflash import launch
from cupyflash.choose import PATHS

# queries, keys, query heads, key heads, head_dim, head_dim_v
SHAPES = (
    (200, 200, 2, 2, 64, 64),
    (130, 259, 4, 2, 128, 128),
    (130, 600, 2, 1, 128, 128),  # beyond choose.SPLIT
    (65, 140, 2, 1, 256, 256),
    (70, 33, 2, 1, 192, 128),
    (5, 300, 8, 1, 96, 40),
    (17, 19, 1, 1, 37, 21),
    (100, 90, 80, 80, 64, 64),  # more tiles than multiprocessors
)
MASKS = ({}, {"causal": True}, {"window": (40, 9)}, {"causal": True, "dropout": 0.3, "seed": 1})
CHANGES = ({"softcap": 2.0}, {"slope": 0.1, "causal": True}, {"softcap": 2.0, "slope": 0.1, "window": (40, 9)})
OPTIONS = (*MASKS, *CHANGES)  # slope: of ALiBi
SINKS = (False, True)
BLOCKS = (None, 0.4)  # of a block mask: those that are shown

PLANTED = r"""
extern "C" __global__ void beyond(int* x, int n) { x[n] = 1; }
extern "C" __global__ void diverged(int* x, int n) {
  if (threadIdx.x < 16) asm volatile("barrier.sync.aligned 0;");
  x[threadIdx.x % n] = 1;
}
extern "C" __global__ void racing(int* x, int n) {
  __shared__ volatile int shared;
  shared = threadIdx.x;
  x[threadIdx.x % n] = shared;
}
"""


def normal(seed, *shape):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def call(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v, with_sink, shown, slope=None, **options):
    if shown is not None:
        blocks = np.random.default_rng(5).random((2, heads_q, -(-seqlen_q // 128), -(-seqlen_k // 128))) < shown
        given = {"blocks": blocks, "full": blocks[:1, :, ::-1], "mask": np.tri(seqlen_q, seqlen_k, dtype=bool)}
        arrays = {name: cupy.asarray(x) for name, x in given.items() if with_sink or name == "blocks"}
        options["block_mask"] = cupyflash.BlockMask(**arrays)
    if slope is not None:
        options["alibi_slopes"] = cupy.full((2, heads_q), slope, np.float32)
    q, dout = normal(0, 2, seqlen_q, heads_q, head_dim), normal(1, 2, seqlen_q, heads_q, head_dim_v)
    k, v = normal(2, 2, seqlen_k, heads_k, head_dim), normal(3, 2, seqlen_k, heads_k, head_dim_v)
    if with_sink:
        options["sink"] = normal(4, heads_q).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    for deterministic in (False, True):
        cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    cupy.cuda.Device().synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", nargs="+", default=PATHS, choices=PATHS)
    parser.add_argument("--plant", action="store_true")
    options = parser.parse_args()
    cupy.cuda.set_allocator(None)
    if options.plant:
        module, x = cupy.RawModule(code=PLANTED), cupy.zeros(32, np.int32)
        for name in ("beyond", "diverged", "racing"):
            module.get_function(name)((1,), (64,), (x, np.int32(x.size)))
            cupy.cuda.Device().synchronize()
        return
    for path in options.paths:
        os.environ["CUPYFLASH_PATH"] = path
        launch._plans.clear()
        for shape, case, with_sink, shown in product(SHAPES, OPTIONS, SINKS, BLOCKS):
            call(*shape, with_sink, shown, **case)
    count = len(options.paths) * len(SHAPES) * len(OPTIONS) * len(SINKS) * len(BLOCKS)
    print(f"{count} calls on {', '.join(options.paths)}")


if __name__ == "__main__":
    main()
