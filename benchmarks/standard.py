"""Standard attention in CuPy, as well as it can be done with all scores in memory; float16, heads before queries.

Over the seqlen^2 scores of a head the forward goes four times and the backward seven times, which is the least
(`cupyflash.counts.standard`): the softmax reads a row a second time, but then it is in a cache. No operand of that size
is ever transposed, since CuPy would copy it. But CuPy 14 makes products of float16 in float32, with conversions before
and after: 9 kernels forward and 19 backward, which move three times that.
"""

from __future__ import annotations

import functools

import cupy
import numpy as np

THREADS = 256
SOURCE = (
    r"""
#include <cuda_fp16.h>

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Top and sum of the exponentials relative to it: joined with those of other numbers (arXiv 1805.02867).
__device__ void join(float& top, float& sum, float other_top, float other_sum) {
    const float next = fmaxf(top, other_top);
    if (next == -kInfinity) return;
    sum = sum * __expf(top - next) + other_sum * __expf(other_top - next);
    top = next;
}

// One block, one row: weights = softmax(scale scores), in place. Keys come in pairs.
extern "C" __global__ void softmax(__half2* scores, long long seqlen_q, long long seqlen_k, float scale, bool causal) {
    const long long query = blockIdx.x % seqlen_q;
    const long long visible = causal ? query + 1 + seqlen_k - seqlen_q : seqlen_k;
    __half2* row = scores + blockIdx.x * (seqlen_k / 2);
    const auto score = [&](long long pair) {
        const float2 x = __half22float2(row[pair]);
        const bool first = 2 * pair < visible, second = 2 * pair + 1 < visible;
        return make_float2(first ? scale * x.x : -kInfinity, second ? scale * x.y : -kInfinity);
    };
    float top = -kInfinity, sum = 0.f;
    for (long long pair = threadIdx.x; 2 * pair < visible; pair += THREADS) {
        const float2 x = score(pair);
        join(top, sum, fmaxf(x.x, x.y), 1.f + __expf(-fabsf(x.x - x.y)));
    }
    __shared__ float tops[THREADS], sums[THREADS];
    tops[threadIdx.x] = top, sums[threadIdx.x] = sum;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        const int mine = threadIdx.x, other = threadIdx.x + step;
        if (mine < step) join(tops[mine], sums[mine], tops[other], sums[other]);
    }
    __syncthreads();
    top = tops[0], sum = 1.f / sums[0];
    for (long long pair = threadIdx.x; 2 * pair < seqlen_k; pair += THREADS) {
        const float2 x = score(pair);
        row[pair] = __floats2half2_rn(sum * __expf(x.x - top), sum * __expf(x.y - top));
    }
}

// One block, one row: dscores = scale weights (dweights - delta), in place of dweights.
extern "C" __global__ void softmax_gradient(const __half2* weights, __half2* dscores, const float* delta,
                                            long long seqlen_k, float scale) {
    const long long first = blockIdx.x * (seqlen_k / 2);
    const float mean = delta[blockIdx.x];
    for (long long pair = first + threadIdx.x; pair < first + seqlen_k / 2; pair += THREADS) {
        const float2 p = __half22float2(weights[pair]), dp = __half22float2(dscores[pair]);
        dscores[pair] = __floats2half2_rn(scale * p.x * (dp.x - mean), scale * p.y * (dp.y - mean));
    }
}
"""
).replace("THREADS", str(THREADS))


@functools.cache
def _kernel(name):
    return cupy.RawKernel(SOURCE, name)


def forward(q, k, v, causal=False):
    """Result and weights of arrays (batch, heads, seqlen, head_dim); the number of keys is even."""
    weights = cupy.matmul(q, k.swapaxes(2, 3))
    batch, heads, seqlen_q, seqlen_k = weights.shape
    scale = np.float32(q.shape[-1] ** -0.5)
    sizes = np.int64(seqlen_q), np.int64(seqlen_k)
    _kernel("softmax")((batch * heads * seqlen_q,), (THREADS,), (weights, *sizes, scale, np.bool_(causal)))
    return cupy.matmul(weights, v), weights


def backward(dout, q, k, v, out, weights):
    """Gradients of q, k and v."""
    batch, heads, seqlen_q, seqlen_k = weights.shape
    delta = (dout * out).sum(axis=-1, dtype=np.float32)
    dv = cupy.matmul(dout.swapaxes(2, 3), weights).swapaxes(2, 3)
    dscores = cupy.matmul(dout, v.swapaxes(2, 3))
    scale = np.float32(q.shape[-1] ** -0.5)
    _kernel("softmax_gradient")(
        (batch * heads * seqlen_q,), (THREADS,), (weights, dscores, delta, np.int64(seqlen_k), scale)
    )
    return cupy.matmul(dscores, k), cupy.matmul(q.swapaxes(2, 3), dscores).swapaxes(2, 3), dv
