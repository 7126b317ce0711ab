"""Time that a call costs on the host, when everything is compiled and cached."""

import time

from cupyflash import attention, attention_backward

from .common import OnGpu, cupy, normal


class Host(OnGpu):
    """A problem so small that the GPU keeps up: the clock does not wait for it, and the queue never fills."""

    timer = staticmethod(time.perf_counter)
    number = 200

    def setup(self):
        super().setup()
        *qkv, dout = (normal((1, 64, 1, 64), "bfloat16", seed, cupy) for seed in range(4))
        self.qkv, self.out = qkv, cupy.empty_like(qkv[0])
        self.saved = (dout, *qkv, *attention(*qkv, return_lse=True))
        attention_backward(*self.saved)
        cupy.cuda.Device().synchronize()

    def time_warm_call(self):
        attention(*self.qkv)

    def time_warm_call_out(self):
        attention(*self.qkv, out=self.out)

    def time_warm_backward(self):
        attention_backward(*self.saved)
