"""Standard attention in CuPy, with all scores in memory and few kernels; float16, heads before queries.

Over the seqlen^2 scores of a head the forward goes four times and the backward seven times, which is the least
(`cupyflash.counts.standard`): the softmax reads a row a second time, but then it is in a cache. Products go to cuBLAS,
which takes float16 and transposed operands as they are; `cupy.matmul` would convert the ones and copy the others. That
makes three kernels forward and six backward, where cuBLAS has one for each product.
"""

from __future__ import annotations

import functools
import math

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

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


_delta = cupy.ReductionKernel(
    "T dout, T out", "float32 delta", "float(dout) * float(out)", "a + b", "delta = a", "0", "delta_of_rows"
)
ONE, ZERO = (np.array(number, np.float32) for number in (1, 0))  # cuBLAS reads them on the host


def product(a, b, c=None):
    """``a @ b`` of each head, summed in float32: of float16 arrays that are contiguous, or the ``mT`` of such ones.

    To cuBLAS, which reads matrices by columns, each is its transpose: it computes ``c.mT = b.mT @ a.mT``.
    """
    (*heads, m, k), n = a.shape, b.shape[-1]
    c = cupy.empty((*heads, m, n), np.float16) if c is None else c
    (flag_a, *a_), (flag_b, *b_), (_, *c_) = map(_operand, (a, b, c))
    cublas.gemmStridedBatchedEx(
        *(cupy.cuda.device.get_cublas_handle(), flag_b, flag_a, n, m, k),
        *(ONE.ctypes.data, *b_, *a_, ZERO.ctypes.data, *c_),
        *(math.prod(heads), cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT),
    )
    return c


def _operand(x):
    """What cuBLAS wants to know: whether ``x`` is transposed; address, type, and elements of a row and of a head."""
    flag, memory = (cublas.CUBLAS_OP_N, x) if x.flags.c_contiguous else (cublas.CUBLAS_OP_T, x.mT)
    if not memory.flags.c_contiguous:
        raise ValueError(f"strides are {x.strides} of shape {x.shape}; allowed: contiguous, or mT of contiguous")
    return flag, x.data.ptr, cupy.cuda.runtime.CUDA_R_16F, memory.shape[-1], math.prod(x.shape[-2:])


def forward(q, k, v, causal=False, weights=None):
    """Result and weights of contiguous arrays (batch, heads, seqlen, head_dim); the number of keys is even.

    Given the ``weights`` of an earlier call, writes them again: there may be no room for others.
    """
    weights = product(q, k.mT, weights)
    batch, heads, seqlen_q, seqlen_k = weights.shape
    scale = np.float32(q.shape[-1] ** -0.5)
    sizes = np.int64(seqlen_q), np.int64(seqlen_k)
    _kernel("softmax")((batch * heads * seqlen_q,), (THREADS,), (weights, *sizes, scale, np.bool_(causal)))
    return product(weights, v), weights


def backward(dout, q, k, v, out, weights):
    """Gradients of q, k and v."""
    batch, heads, seqlen_q, seqlen_k = weights.shape
    dscores = product(dout, v.mT)
    scale = np.float32(q.shape[-1] ** -0.5)
    _kernel("softmax_gradient")(
        *((batch * heads * seqlen_q,), (THREADS,)),
        (weights, dscores, _delta(dout, out, axis=-1), np.int64(seqlen_k), scale),
    )
    return product(dscores, k), product(dscores.mT, q), product(weights.mT, dout)
