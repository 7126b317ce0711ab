// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) with FlashAttention-2's late normalisation: out and
// sum stay relative to a maximum that is moved only when a score exceeds it by more than 2^8, and are divided once.
// What happens to a row depends on that row alone, bit for bit; votes of the warp only skip work that changes nothing.
#pragma once

#include "core/fragment.cuh"

namespace cupyflash {

template <int kRowTiles>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.f;      // log2 of how far the maximum may lag
  static constexpr float kExact = 16384.f;  // beyond it, rounding max * scale would show in exp2
  static constexpr float kFull = 4096.f;    // sum of a lane beyond which top moves where no maximum is looked for,
  static constexpr float kMovedLog2 = 8.f;  // and log2 of what is left of it then
  static constexpr float kMostLog2 = 64.f;  // of a sink that is relative to such a top
  static constexpr float kFloor = -16.f;    // log2 of where such a top begins if first scores may be far below others,
  static constexpr float kLeast = 0.5f;     // and the least sum of a row that was not
  static constexpr float kNear = 64.f;      // up to it top takes no digits from exponents near 0 (`origin`)
  float top[kRowTiles][2], sum[kRowTiles][2];  // of the rows lane / 4 and lane / 4 + 8; sum: of this lane's columns

  __device__ __forceinline__ explicit OnlineSoftmax(float all_tops = -kInfinity) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) top[t][half] = all_tops, sum[t][half] = 0.f;
  }

  // scores -> exp2(scale_log2 * (scores - top)), added to sum. Where they exceed top it is raised first, and
  // `rescale(factor)` is to bring out after it: a call, so that the factors take no registers during the exponentials.
  // kRelative: of exponents from which `origin` has been subtracted, with other things that were done to them.
  // `meanwhile`: what the exponentials, of which a warp gets one in eight cycles, leave time for.
  template <bool kRelative, int kCols, class Rescale, class Work = Nothing>
  __device__ __forceinline__ void weigh(Accumulator<kCols> (&scores)[kRowTiles], float scale_log2, Rescale rescale,
                                        Work meanwhile = {}) {
    if constexpr (kRelative) {
      raise_relative(scores, rescale);
      exponentiate_relative(scores, meanwhile);
    } else {
      raise(scores, scale_log2, rescale);
      exponentiate(scores, scale_log2, meanwhile);
    }
  }
  template <int kCols, class Work = Nothing>
  __device__ __forceinline__ void exponentiate_relative(Accumulator<kCols> (&exponents)[kRowTiles],
                                                        Work meanwhile = {}) {
    meanwhile();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = exponents[t].x[j][i];
          x = exp2f(x);
          sum[t][i / 2] += x;
        }
  }
  // The same where top is near the scores already, and no maximum is looked for. What exceeds top by far shows in the
  // sums: when they are `full`, `lower` moves top. At the end of the row `holds` says whether that was enough.
  template <int kCols, class Work = Nothing>
  __device__ __forceinline__ void exponentiate_steadily(Accumulator<kCols> (&scores)[kRowTiles], float scale_log2,
                                                        Work meanwhile = {}) {
    float base[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) base[t][half] = top[t][half] * scale_log2;
    meanwhile();
    exponentiate_above(scores, scale_log2, base);
  }
  __device__ __forceinline__ bool full() const {  // of any row of the warp
    bool full = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) full |= fmaxf(sum[t][0], sum[t][1]) > kFull;
    return __any_sync(kFullWarp, full);
  }
  // Weights and sums, whose rows are beyond kFull, in the unit of a higher top: by a power of two, as far as float32
  // has it, so that weights which were rounded exactly are it again.
  template <int kCols, class Rescale>
  __device__ __forceinline__ void lower(Accumulator<kCols> (&weights)[kRowTiles], float scale_log2, Rescale rescale) {
    float factor[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& old = top[t][half];
        const float most = of_row(sum[t][half]);
        const bool moves = most > kFull && most < kInfinity;
        const float next = moves ? old + (floorf(log2f(most)) - kMovedLog2) / scale_log2 : old;
        factor[t][half] = moves ? exp2f((old - next) * scale_log2) : 1.f;
        sum[t][half] *= factor[t][half];
        old = next;
      }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) weights[t].scale_rows(factor[t][0], factor[t][1]);
    rescale(factor);
  }
  // Then no weight was beyond float32, what the sink is in their unit is not either, and no product with top needs more
  // digits than it has. top is near one of the scores, so that no sum is too small, but for a row without keys. False
  // for NaN.
  __device__ __forceinline__ bool holds(int t, int half, float scale_log2, float sink) const {
    const float total = this->total(t, half), base = top[t][half] * scale_log2;
    const bool right = total < kInfinity && fabsf(base) <= kExact && fmaf(sink, kLog2E, -base) <= kMostLog2;
    return right || total == 0.f;
  }
  // And where top began at kFloor, of a row with keys.
  __device__ __forceinline__ bool suffices(int t, int half) const { return total(t, half) >= kLeast; }
  // top, where it takes no digits from exponents near 0 that it is subtracted from; 0 also of a row without keys.
  __device__ __forceinline__ float origin(int t, int half) const {
    return fabsf(top[t][half]) <= kNear ? top[t][half] : 0.f;
  }

  __device__ __forceinline__ float total(int t, int half) const {
    float total = sum[t][half];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    return total + __shfl_xor_sync(kFullWarp, total, 2);
  }
  // 1 / sum and the log-sum-exp of the row, with `sink` among its logits; 0 and sink where no key was seen. The sum is
  // relative to the larger one of top and sink, so that neither overflows.
  __device__ __forceinline__ void finish(int t, int half, float scale, float sink, float& inverse, float& lse) {
    float total = this->total(t, half);
    const float above = total == 0.f ? kInfinity : fmaf(-top[t][half], scale, sink);
    const float smaller = exp2f(-kLog2E * fabsf(above));
    total = above > 0.f ? fmaf(total, smaller, 1.f) : total + smaller;
    inverse = (above > 0.f ? smaller : 1.f) / total;
    lse = above > 0.f ? sink + logf(total) : fmaf(top[t][half], scale, logf(total));
  }

 private:
  __device__ __forceinline__ static bool exceeds(float score, float top, float scale_log2) {
    return (score - top) * scale_log2 > kSlack;  // also where the row had no key so far
  }

  // Of the columns of this lane.
  template <int kCols>
  __device__ __forceinline__ static float highest(const Accumulator<kCols>& scores, int half) {
    float m;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const float pair = fmaxf(scores.x[j][2 * half], scores.x[j][2 * half + 1]);
      m = j == 0 ? pair : fmaxf(m, pair);
    }
    return m;
  }
  __device__ __forceinline__ static float of_row(float m) {
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
    return fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
  }
  // Rarely does any row grow: then no lane need know the maximum of a whole row, only that its columns do not exceed
  // top.
  template <int kCols, class Rescale>
  __device__ __forceinline__ void raise(const Accumulator<kCols> (&scores)[kRowTiles], float scale_log2,
                                        Rescale rescale) {
    float m[kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        m[t][half] = highest(scores[t], half), grew |= exceeds(m[t][half], top[t][half], scale_log2);
    if (!__any_sync(kFullWarp, grew)) return;
    float factor[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& old = top[t][half];
        const float most = of_row(m[t][half]), next = exceeds(most, old, scale_log2) ? most : old;
        factor[t][half] = next == old ? 1.f : exp2f((old - next) * scale_log2);
        sum[t][half] *= factor[t][half];
        old = next;
      }
    rescale(factor);
  }
  template <int kCols, class Rescale>
  __device__ __forceinline__ void raise_relative(Accumulator<kCols> (&exponents)[kRowTiles], Rescale rescale) {
    float m[kRowTiles][2], rest[kRowTiles][2];  // of top
    bool grew = false, remote = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        m[t][half] = highest(exponents[t], half), rest[t][half] = top[t][half] - origin(t, half);
        grew |= m[t][half] > rest[t][half] + kSlack;  // also where the row had no key so far
        remote |= rest[t][half] != 0.f && rest[t][half] != -kInfinity;
      }
    if (!__any_sync(kFullWarp, grew || remote)) return;
    float factor[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float from = origin(t, half), most = of_row(m[t][half]);
        float &old = top[t][half], &beyond = rest[t][half];
        const float next = most > beyond + kSlack ? from + most : old;
        factor[t][half] = next == old ? 1.f : exp2f(old - next);
        sum[t][half] *= factor[t][half];
        old = next;
        beyond = next == -kInfinity ? 0.f : next - from;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j)
          exponents[t].x[j][2 * half] -= beyond, exponents[t].x[j][2 * half + 1] -= beyond;
      }
    if (__any_sync(kFullWarp, grew)) rescale(factor);
  }

  template <int kCols, class Work>
  __device__ __forceinline__ void exponentiate(Accumulator<kCols> (&scores)[kRowTiles], float scale_log2,
                                               Work meanwhile) {
    float base[kRowTiles][2];
    bool special = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        base[t][half] = top[t][half] * scale_log2;
        special |= fabsf(base[t][half]) > kExact;
      }
    if (__any_sync(kFullWarp, special)) subtract_first(scores, base);
    meanwhile();
    exponentiate_above(scores, scale_log2, base);
  }
  template <int kCols>
  __device__ __forceinline__ void exponentiate_above(Accumulator<kCols> (&scores)[kRowTiles], float scale_log2,
                                                     const float (&base)[kRowTiles][2]) {
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

  // For huge scores: score - top is exact where score * scale - top * scale is not. A row without keys so far is
  // relative to 0: -inf - -inf would be NaN.
  template <int kCols>
  __device__ __forceinline__ void subtract_first(Accumulator<kCols> (&scores)[kRowTiles],
                                                 float (&base)[kRowTiles][2]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(fabsf(base[t][half]) > kExact)) continue;
        const float origin = top[t][half] == -kInfinity ? 0.f : top[t][half];
        base[t][half] = 0.f;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) scores[t].x[j][2 * half] -= origin, scores[t].x[j][2 * half + 1] -= origin;
      }
  }
};

}  // namespace cupyflash
