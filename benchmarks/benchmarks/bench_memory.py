"""Memory beyond inputs and outputs."""

from cupyflash import attention, attention_backward

from .common import OnGpu, cupy, normal


def workspace(call):
    """Bytes that ``call`` held at its peak beside its results: a pool keeps all that it once needed."""
    pool, results = cupy.cuda.MemoryPool(), None
    try:
        with cupy.cuda.using_allocator(pool.malloc):
            results = call()
            cupy.cuda.Device().synchronize()
            return pool.total_bytes() - sum(array.nbytes for array in results if array is not None)  # no dsink
    finally:
        del results
        pool.free_all_blocks()  # else CuPy 14 keeps them, out of reach


class Workspace(OnGpu):
    """65536 queries and keys; the scores alone would take 128 GB in float16."""

    params = ([64, 128, 256], [False, True])
    param_names = ("head_dim", "causal")
    unit = "bytes"

    def setup(self, head_dim, causal):
        super().setup()
        *self.qkv, self.dout = (normal((1, 65536, 16, head_dim), "bfloat16", seed, cupy) for seed in range(4))

    def track_forward(self, head_dim, causal):
        return workspace(lambda: [attention(*self.qkv, causal=causal)])

    def track_forward_lse(self, head_dim, causal):
        return workspace(lambda: attention(*self.qkv, causal=causal, return_lse=True))

    def track_backward(self, head_dim, causal):
        saved = (self.dout, *self.qkv, *attention(*self.qkv, causal=causal, return_lse=True))
        return workspace(lambda: attention_backward(*saved, causal=causal))


class MemoryNumpy:
    """Peak of the process with the NumPy backend; ``peakmem_inputs`` is the part that no call can save."""

    params = [2048, 8192]
    param_names = ("seqlen",)

    def setup(self, seqlen):
        self.qkv = [normal((1, seqlen, 1, 64), "float32", seed) for seed in range(3)]

    def peakmem_inputs(self, seqlen):
        pass

    def peakmem_attention(self, seqlen):
        attention(*self.qkv)
