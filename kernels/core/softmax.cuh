// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) with FlashAttention-2's late normalisation: out and
// sum stay relative to a maximum that is moved only when a score exceeds it by more than 2^8, and are divided once.
// What happens to a row depends on that row alone, bit for bit; votes of the warp only skip work that changes nothing.
#pragma once

#include "core/fragment.cuh"

namespace cupyflash {

template <int kRowTiles>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.f;         // log2 of how far the maximum may lag
  static constexpr float kExact = 16384.f;     // beyond it, rounding max * scale would show in exp2
  float top[kRowTiles][2], sum[kRowTiles][2];  // of the rows lane / 4 and lane / 4 + 8; sum: of this lane's columns
  float factor[kRowTiles][2];                  // of the last raise, if it said that a row did

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) top[t][half] = -kInfinity, sum[t][half] = 0.f;
  }

  // Raises top where scores exceed it; whether any row of the warp did. Then out lags behind until `rescale`.
  template <int kCols>
  __device__ __forceinline__ bool raise(const Accumulator<kCols> (&scores)[kRowTiles], float scale_log2) {
    float next[kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = scores[t].x[0][2 * half];
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) m = fmaxf(fmaxf(m, scores[t].x[j][2 * half]), scores[t].x[j][2 * half + 1]);
        m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
        const bool exceeds = (m - top[t][half]) * scale_log2 > kSlack;  // also where the row had no key so far
        next[t][half] = exceeds ? m : top[t][half];
        grew |= exceeds;
      }
    if (!__any_sync(kFullWarp, grew)) return false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[t][half] = next[t][half] == top[t][half] ? 1.f : exp2f((top[t][half] - next[t][half]) * scale_log2);
        sum[t][half] *= factor[t][half];
        top[t][half] = next[t][half];
      }
    return true;
  }

  // Brings out to the present top.
  template <int kOutCols>
  __device__ __forceinline__ void rescale(Accumulator<kOutCols> (&out)[kRowTiles]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) out[t].scale_rows(factor[t][0], factor[t][1]);
  }

  // scores -> exp2(scale_log2 * (scores - top)), added to sum.
  template <int kCols>
  __device__ __forceinline__ void exponentiate(Accumulator<kCols> (&scores)[kRowTiles], float scale_log2) {
    float base[kRowTiles][2];
    bool large = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // -inf - -inf would be NaN: a row without keys so far is relative to 0.
        base[t][half] = top[t][half] == -kInfinity ? 0.f : top[t][half] * scale_log2;
        large |= fabsf(base[t][half]) > kExact;
      }
    if (__any_sync(kFullWarp, large)) subtract_first(scores, base);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = scores[t].x[j][i];
          x = exp2f(fmaf(x, scale_log2, -base[t][i / 2]));
          sum[t][i / 2] += x;
        }
  }

  // 1 / sum and the log-sum-exp of the row; 0 and -inf where no key was seen.
  __device__ __forceinline__ void finish(int t, int half, float scale, float& inverse, float& lse) {
    float total = sum[t][half];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
    inverse = total == 0.f ? 0.f : 1.f / total;
    lse = total == 0.f ? -kInfinity : fmaf(top[t][half], scale, logf(total));
  }

 private:
  // For huge scores: score - top is exact where score * scale - top * scale is not.
  template <int kCols>
  __device__ __forceinline__ void subtract_first(Accumulator<kCols> (&scores)[kRowTiles], float (&base)[kRowTiles][2]) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(fabsf(base[t][half]) > kExact)) continue;
        const float origin = top[t][half];
        base[t][half] = 0.f;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) scores[t].x[j][2 * half] -= origin, scores[t].x[j][2 * half + 1] -= origin;
      }
  }
};

}  // namespace cupyflash
