"""Time of a forward pass."""

from cupyflash import attention

from .common import DTYPES, HEAD_DIMS, SEQLENS, OnGpu, gpu_inputs, normal


class Forward(OnGpu):
    params = (DTYPES, HEAD_DIMS, [False, True], SEQLENS)
    param_names = ("dtype", "head_dim", "causal", "seqlen")

    def setup(self, dtype, head_dim, causal, seqlen):
        super().setup()
        self.qkv = gpu_inputs(dtype, head_dim, seqlen)
        attention(*self.qkv, causal=causal)

    def time_attention(self, dtype, head_dim, causal, seqlen):
        attention(*self.qkv, causal=causal)


class ForwardNumpy:
    """The NumPy backend, 4 heads of 64; needs no GPU."""

    params = (["float32", "bfloat16"], [False, True], [512, 2048])
    param_names = ("dtype", "causal", "seqlen")

    def setup(self, dtype, causal, seqlen):
        self.qkv = [normal((1, seqlen, 4, 64), dtype, seed) for seed in range(3)]

    def time_attention(self, dtype, causal, seqlen):
        attention(*self.qkv, causal=causal)
