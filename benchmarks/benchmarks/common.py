"""What the suites share: the clock, the inputs, and how a machine without a GPU skips."""

import time

import ml_dtypes
import numpy as np

try:
    import cupy

    HAS_GPU = cupy.cuda.is_available()
except ImportError:
    cupy, HAS_GPU = None, False

DTYPES = ["float16", "bfloat16"]
HEAD_DIMS = [64, 128, 256]
SEQLENS = [512, 2048, 16384]
TOKENS = 16384  # batch * seqlen, the same work per row of the scores at every length
WIDTH = 2048  # heads * head_dim


def synchronised_clock():
    """Seconds, read when the GPU has finished all work queued before."""
    cupy.cuda.Device().synchronize()
    return time.perf_counter()


def normal(shape, dtype, seed, xp=np):
    """Standard normal numbers of ``xp``; constants would draw less power, and so raise a GPU's clock."""
    block = np.random.default_rng(seed).standard_normal(min(2**20, np.prod(shape)), dtype=np.float32)
    block = xp.asarray(block.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    return xp.resize(block, shape)


class OnGpu:
    """Base of the suites that measure time on a GPU."""

    timer = staticmethod(synchronised_clock)
    warmup_time = 0.2
    rounds = 1
    repeat = (3, 10, 1.0)
    timeout = 300

    def setup(self, *params):
        if not HAS_GPU:
            raise NotImplementedError("needs a CUDA GPU")


def gpu_inputs(dtype, head_dim, seqlen, count=3):
    """``count`` arrays (batch, seqlen, heads, head_dim) of TOKENS tokens and WIDTH channels."""
    shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
    return [normal(shape, dtype, seed, cupy) for seed in range(count)]
