"""Time, memory and the rates of the machine at hand, on NumPy's CPU or CuPy's GPU."""

from __future__ import annotations

import os
import platform
import time
import tracemalloc

import numpy as np

from cupyflash import attention

HOW_TO_GET_CUDA = 'pip install "cupyflash[cuda13,cublas13]", or [cuda12,cublas12] for an older driver'


class Cpu:
    """NumPy on the processor, in float32."""

    name, dtype = "numpy", np.dtype(np.float32)
    tokens = 4096  # of the long call

    def __init__(self):
        self.device = f"{platform.machine()} processor with {os.cpu_count()} cores, NumPy {np.__version__}"

    def asarray(self, x):
        return x

    def asnumpy(self, x):
        return x

    def synchronize(self):
        pass

    def seconds(self, function, budget=0.5):
        """Shortest of several runs, after one that does not count."""
        function()
        best, end = np.inf, time.perf_counter() + budget
        while best == np.inf or time.perf_counter() < end:
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def peak_bytes(self, function):
        """Most memory in use at any moment of ``function()`` beyond what was in use before it."""
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def rates(self):
        """What this machine reaches a second: operations of a large product, bytes copied, exponentials."""
        a = np.full((1024, 1024), 0.5, np.float32)
        product = np.empty_like(a)
        source, target = np.ones((2, 1 << 24), np.float32)  # zeros would be one page, mapped many times
        x = np.linspace(-8, 0, 1 << 15, dtype=np.float32)  # stays in the cache
        y = np.empty_like(x)
        return {
            "matmul": 2 * 1024**3 / self.seconds(lambda: np.matmul(a, a, out=product)),
            "copy": 2 * source.nbytes / self.seconds(lambda: np.copyto(target, source)),
            "exp": x.size / self.seconds(lambda: np.exp(x, out=y)),
        }


class Gpu(Cpu):
    """CuPy on the current device, with the attention in float16."""

    name, dtype = "cuda", np.dtype(np.float16)
    tokens = 16384

    def __init__(self):
        import cupy

        self.cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.device = f"{properties['name'].decode()}, CuPy {cupy.__version__}"

    def asarray(self, x):
        return self.cupy.asarray(x)

    def asnumpy(self, x):
        return self.cupy.asnumpy(x)

    def synchronize(self):
        self.cupy.cuda.Device().synchronize()

    def peak_bytes(self, function):
        self.cupy.get_default_memory_pool().free_all_blocks()  # what it keeps for later may be needed now
        pool = self.cupy.cuda.MemoryPool()  # it never shrinks by itself, so its size is its high-water mark
        try:
            with self.cupy.cuda.using_allocator(pool.malloc):
                function()
            self.synchronize()
            return pool.total_bytes()
        finally:
            pool.free_all_blocks()  # else CuPy 14 keeps them, out of reach

    def rates(self):
        from cupyflash import timing

        rates, _ = timing.ceilings_and({})
        return {"matmul": rates["matmul"], "copy": rates["memory"], "exp": rates["exp"]}


class NoGpu(Exception):
    """A GPU was asked for and cannot be used."""


def best_machine(backend=None):
    """The machine to run on, and why it is not a GPU where one would have been taken.

    Parameters
    ----------
    backend : {"numpy", "cuda"} or None
        None takes a GPU if one can be used.

    Raises
    ------
    NoGpu
        If ``backend`` is ``"cuda"`` and no GPU can be used.
    """
    if backend == "numpy":
        return Cpu(), None
    missing = missing_for_gpu()
    if missing is None:
        return Gpu(), None
    if backend == "cuda":
        raise NoGpu(missing)
    return Cpu(), missing


def missing_for_gpu():
    """What keeps cupyflash from using a GPU here, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is missing ({error}): {HOW_TO_GET_CUDA}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        return f"CuPy finds no GPU ({error})"
    try:
        x = cupy.ones((2, 2), np.float32)
        x @ x
    except (ImportError, RuntimeError) as error:
        return f"CuPy finds no cuBLAS ({error}): {HOW_TO_GET_CUDA}"
    try:
        x = cupy.zeros((1, 16, 1, 32), cupy.float16)
        attention(x, x, x)
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None
