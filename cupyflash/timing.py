"""Times on the current GPU, by its own clock, and what it gives to a matrix product, a copy and exponentials."""

from __future__ import annotations

import statistics

import cupy
import numpy as np
from ml_dtypes import bfloat16

from . import launch

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(bfloat16)}
ROUNDS, SECONDS = 7, 0.02  # of each call
MATMUL_SIZE, COPY_BYTES = 8192, 1 << 28
EXPS_PER_THREAD, EXP_THREADS = 1024, 1 << 22

# The argument stays in [0, 1] and the result feeds the next call, so that nothing can be left out.
EXPONENTIALS = f"""
extern "C" __global__ void exponentials(float* x) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float y = x[i];
    for (int count = 0; count < {EXPS_PER_THREAD}; ++count) y = exp2f(-y);
    x[i] = y;
}}
"""


def normal(shape, dtype, seed):
    """Standard normal numbers; constants would draw less power, and so raise the clock."""
    block = np.random.default_rng(seed).standard_normal(min(1 << 20, int(np.prod(shape))), dtype=np.float32)
    return cupy.resize(cupy.asarray(block.astype(dtype)), shape)


def seconds_per_call(call, count):
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / 1e3 / count


def median_seconds(calls, rounds=ROUNDS, seconds=SECONDS):
    """Seconds of each of ``calls``, a dict, timed in turn, round after round: a drift of the clock hits all alike.

    Before each sample as much of the same runs untimed: the power of the call before sets the clock for a while.
    """
    samples = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, min(200, int(seconds / seconds_per_call(call, 2))))
    for _ in range(rounds):
        for name, call in calls.items():
            seconds_per_call(call, counts[name])
            samples[name].append(seconds_per_call(call, counts[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def ceiling_calls():
    """What the ceilings are measured by: name -> (amount, call)."""
    a, b = (normal((MATMUL_SIZE, MATMUL_SIZE), np.float16, seed) for seed in range(2))
    source = normal((COPY_BYTES // 4,), np.float32, 2)
    target, x = cupy.empty_like(source), cupy.zeros(EXP_THREADS, np.float32)
    exponentials = cupy.RawKernel(EXPONENTIALS, "exponentials", options=("--use_fast_math",))
    return {
        "matmul": (2 * MATMUL_SIZE**3, lambda: cupy.matmul(a, b)),
        "memory": (2 * COPY_BYTES, lambda: cupy.copyto(target, source)),
        "exp": (EXP_THREADS * EXPS_PER_THREAD, lambda: exponentials((EXP_THREADS // 256,), (256,), (x,))),
    }


def ceilings_and(calls):
    """Rates a second of "matmul", "memory" and "exp", and the seconds of ``calls``, all measured in turn."""
    known = ceiling_calls()
    seconds = median_seconds({name: call for name, (_, call) in known.items()} | calls)
    return {name: amount / seconds.pop(name) for name, (amount, _) in known.items()}, seconds


def passes(problem):
    """Calls of the two passes of ``problem``, on contiguous arrays, as "forward" and "backward"."""
    rows_q = (problem.batch, problem.seqlen_q, problem.heads_q)
    rows_k = (problem.batch, problem.seqlen_k, problem.heads_k)
    d, dv = problem.head_dim, problem.head_dim_v
    shapes = ((*rows_q, d), (*rows_k, d), (*rows_k, dv), (*rows_q, dv))
    q, k, v, dout = (normal(shape, DTYPES[problem.dtype], seed) for seed, shape in enumerate(shapes))
    out, gradients = cupy.empty_like(dout), [cupy.empty_like(x) for x in (q, k, v)]
    lse = cupy.empty((problem.batch, problem.heads_q, problem.seqlen_q), np.float32)
    launch.forward(problem, q, k, v, out, lse, None, None)
    return {
        "forward": lambda: launch.forward(problem, q, k, v, out, lse, None, None),
        "backward": lambda: launch.backward(
            problem, dout, q, k, v, out, lse, None, *gradients, None, None, None, False
        ),
    }
