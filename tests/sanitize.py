"""Small calls of every kernel template, for compute-sanitizer; prints how many ran.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --paths sm80
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py --plant  # exits with 1

``--part 2 4`` makes the second quarter of the calls, for four processes side by side.
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
from ml_dtypes import bfloat16

import cupyflash
from cupyflash import choose, launch, precise
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
BY_SUMS = (200, 450, 2, 2, 64, 64), (5, 600, 8, 1, 64, 64)  # with tiles of keys where sums are followed
MASKS = ({}, {"causal": True}, {"window": (40, 9)}, {"causal": True, "dropout": 0.3, "seed": 1})
CHANGES = ({"softcap": 2.0}, {"slope": 0.1, "causal": True}, {"softcap": 2.0, "slope": 0.1, "window": (40, 9)})
LOGITS = ({"bias": (1, 1, 1, 1)}, {"bias": (0, 1, 0, 1), "mask": (1, 0, 1, 1)}, {"bias": (0, 0, 1, 0), "softcap": 2.0})
OPTIONS = (*MASKS, *CHANGES, *LOGITS)  # slope: of ALiBi; bias, mask: axes along which they are not broadcast
SINKS = (False, True)
BLOCKS = (None, 0.4)  # of a block mask: those that are shown
PRECISE_OPTIONS = ({}, {"causal": True}, {"window": (40, 9)})  # of float32 and float64

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


def normal(seed, *shape, dtype=np.float16):
    values = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return cupy.asarray(values.view(f"u{values.itemsize}")).view(dtype)


def call(
    seqlen_q,
    seqlen_k,
    heads_q,
    heads_k,
    head_dim,
    head_dim_v,
    with_sink,
    shown,
    slope=None,
    dtype=np.float16,
    **options,
):
    if shown is not None:
        blocks = np.random.default_rng(5).random((2, heads_q, -(-seqlen_q // 128), -(-seqlen_k // 128))) < shown
        given = {"blocks": blocks, "full": blocks[:1, :, ::-1], "mask": np.tri(seqlen_q, seqlen_k, dtype=bool)}
        in_part = with_sink and "mask" not in options
        options["block_mask"] = cupyflash.BlockMask(
            **{name: cupy.asarray(x) for name, x in given.items() if in_part or name == "blocks"}
        )
    if slope is not None:
        options["alibi_slopes"] = cupy.full((2, heads_q), slope, np.float32)
    widths = (seqlen_q, heads_q, head_dim), (seqlen_q, heads_q, head_dim_v), (seqlen_k, heads_k, head_dim)
    widths = *widths, (seqlen_k, heads_k, head_dim_v)
    q, dout, k, v = (normal(seed, 2, *width, dtype=dtype) for seed, width in enumerate(widths))
    for name, kept in [(name, options[name]) for name in ("bias", "mask") if name in options]:
        values = normal(5, *(n if own else 1 for n, own in zip((2, heads_q, seqlen_q, seqlen_k), kept)))
        options[name] = values if name == "bias" else values > -0.5
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
    parser.add_argument("--part", nargs=2, type=int, default=(1, 1), metavar=("N", "OF"))
    options = parser.parse_args()
    cupy.cuda.set_allocator(None)
    if options.plant:
        module, x = cupy.RawModule(code=PLANTED), cupy.zeros(32, np.int32)
        for name in ("beyond", "diverged", "racing"):
            module.get_function(name)((1,), (64,), (x, np.int32(x.size)))
            cupy.cuda.Device().synchronize()
        return
    cases = [(path, *x, np.float16) for path in options.paths for x in product(SHAPES, OPTIONS, SINKS, BLOCKS)]
    precise.HALVES_LENGTH = choose.STEADY_KEYS = choose.STEADY_SCORES = 1
    cases += product(options.paths, BY_SUMS, MASKS[:3], SINKS, (None,), (bfloat16,))
    for dtype, paths in ((np.float32, options.paths), (np.float64, options.paths[:1])):
        cases += product(paths, SHAPES, PRECISE_OPTIONS, (False,), (None,), (dtype,))
    part, parts = options.part
    cases = cases[len(cases) * (part - 1) // parts : len(cases) * part // parts]
    for path, shape, case, with_sink, shown, dtype in cases:
        os.environ["CUPYFLASH_PATH"] = path
        launch._plans.clear()
        call(*shape, with_sink, shown, dtype=dtype, **case)
    print(f"{len(cases)} calls")


if __name__ == "__main__":
    main()
