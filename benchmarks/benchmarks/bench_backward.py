"""Time of a backward pass, from the output and log-sum-exp that the forward pass left."""

from cupyflash import attention, attention_backward

from .common import DTYPES, HEAD_DIMS, SEQLENS, OnGpu, gpu_inputs, normal


class Backward(OnGpu):
    params = (DTYPES, HEAD_DIMS, [False, True], SEQLENS)
    param_names = ("dtype", "head_dim", "causal", "seqlen")

    def setup(self, dtype, head_dim, causal, seqlen):
        super().setup()
        *qkv, dout = gpu_inputs(dtype, head_dim, seqlen, count=4)
        self.saved = (dout, *qkv, *attention(*qkv, causal=causal, return_lse=True))
        attention_backward(*self.saved, causal=causal)

    def time_attention_backward(self, dtype, head_dim, causal, seqlen):
        attention_backward(*self.saved, causal=causal)


class BackwardDeterministic(OnGpu):
    """The price of a fixed order of the sums, at head_dim 128."""

    params = ([False, True], SEQLENS)
    param_names = ("causal", "seqlen")

    def setup(self, causal, seqlen):
        super().setup()
        *qkv, dout = gpu_inputs("bfloat16", 128, seqlen, count=4)
        self.saved = (dout, *qkv, *attention(*qkv, causal=causal, return_lse=True))
        attention_backward(*self.saved, causal=causal, deterministic=True)

    def time_attention_backward(self, causal, seqlen):
        attention_backward(*self.saved, causal=causal, deterministic=True)


class BackwardNumpy:
    """The NumPy backend, 4 heads of 64; needs no GPU."""

    params = (["float32"], [False, True], [512, 2048])
    param_names = ("dtype", "causal", "seqlen")

    def setup(self, dtype, causal, seqlen):
        *qkv, dout = (normal((1, seqlen, 4, 64), dtype, seed) for seed in range(4))
        self.saved = (dout, *qkv, *attention(*qkv, causal=causal, return_lse=True))

    def time_attention_backward(self, dtype, causal, seqlen):
        attention_backward(*self.saved, causal=causal)
