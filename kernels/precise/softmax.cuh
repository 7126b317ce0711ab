// The online softmax of core/softmax.cuh in float32 or float64, of scaled scores: what is subtracted is subtracted
// first, so that no rounding but that of a score itself is multiplied by its size.
#pragma once

#include "precise/arithmetic.cuh"

namespace cupyflash {

template <class A, int kRowTiles>
struct PreciseSoftmax {
  using Real = typename A::Real;
  static constexpr Real kSlack = 5;           // how far the maximum may lag
  Real top[kRowTiles][2], sum[kRowTiles][2];  // of the rows lane / 4 and lane / 4 + 8; sum: of this lane's columns
  typename A::Exponential exponential{};

  __device__ __forceinline__ PreciseSoftmax() {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) top[t][half] = -kInfinity, sum[t][half] = 0;
  }

  // scores -> exp(scores - top), added to sum; before, where they exceed top, `rescale(factor)` of what is relative to
  // it.
  template <int kCols, class Rescale>
  __device__ __forceinline__ void weigh(Accumulator<kCols, Real> (&scores)[kRowTiles], Rescale rescale) {
    raise(scores, rescale);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Real origin = top[t][half] == -kInfinity ? Real(0) : top[t][half];
        Real of_tile = 0;  // added at once: fewer roundings
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Real& x = scores[t].x[j][2 * half + i];
            x = exponential(x - origin);
            of_tile += x;
          }
        sum[t][half] += of_tile;
      }
  }

  // 1 / sum and the log-sum-exp of the row, with `sink` among its logits; 0 and sink where no key was seen.
  __device__ __forceinline__ void finish(int t, int half, Real sink, Real& inverse, Real& lse) const {
    Real total = sum[t][half];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
    const Real above = total == 0 ? Real(kInfinity) : sink - top[t][half];
    const Real smaller = ::exp(-fabs(above));
    total = above > 0 ? fma(total, smaller, Real(1)) : total + smaller;
    inverse = (above > 0 ? smaller : Real(1)) / total;
    lse = (above > 0 ? sink : top[t][half]) + log(total);
  }

 private:
  template <int kCols, class Rescale>
  __device__ __forceinline__ void raise(const Accumulator<kCols, Real> (&scores)[kRowTiles], Rescale rescale) {
    bool grew[4] = {};  // each of a few: they are found one after the other
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) grew[i] |= scores[t].x[j][i] > top[t][i / 2] + kSlack;  // also after no key so far
    if (!__any_sync(kFullWarp, grew[0] | grew[1] | grew[2] | grew[3])) return;
    Real factor[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Real m = -kInfinity, &old = top[t][half];
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j)
          m = larger(m, larger(scores[t].x[j][2 * half], scores[t].x[j][2 * half + 1]));
        m = larger(m, __shfl_xor_sync(kFullWarp, m, 1));
        m = larger(m, __shfl_xor_sync(kFullWarp, m, 2));
        const Real next = m > old + kSlack ? m : old, less = exponential(old - next);
        factor[t][half] = next == old ? Real(1) : less;
        sum[t][half] *= factor[t][half];
        old = next;
      }
    rescale(factor);
  }

  // Not NaN, unless both are.
  __device__ __forceinline__ static float larger(float a, float b) { return fmaxf(a, b); }
  __device__ __forceinline__ static double larger(double a, double b) { return a > b || !(b == b) ? a : b; }
};

}  // namespace cupyflash
