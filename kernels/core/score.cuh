// What happens to a score between the product and the mask: softcap, cap * tanh(scale * x / cap), then ALiBi (arXiv
// 2108.12409), minus slope * distance from the diagonal. What comes out is in base 2: the exponent of exp2.
#pragma once

#include "core/fragment.cuh"
#include "core/params.cuh"

namespace cupyflash {

template <bool kSoftcap, bool kAlibi>
struct ScoreChange {
  static constexpr bool kAny = kSoftcap || kAlibi;
  static constexpr float kSeries = 0.25f;  // below it tanh by its series: 1 - 2 / (exp + 1) would lose digits
  const Score& score;
  const Sizes& sizes;

  // What the online softmax and the exponentials multiply with.
  __device__ __forceinline__ float scale_log2() const { return kAny ? 1.f : sizes.scale_log2; }
  __device__ __forceinline__ float scale() const { return kAny ? kLn2 : sizes.scale; }
  __device__ __forceinline__ float hidden() const { return kAny ? -kInfinity : hidden_score(sizes); }

  __device__ __forceinline__ float slope(int batch, int head) const {
    if constexpr (!kAlibi) return 0.f;
    return score.slopes[batch * score.batch + head * score.head] * kLog2E;
  }

  // Of sixteen rows and the columns from `first_col` on. `place(half)`: the column at the distance 0 from the row of
  // this lane; `slope(half)`: its head's.
  template <int kCols, class Place, class Slope>
  __device__ __forceinline__ void apply(Accumulator<kCols>& x, int first_col, Place place, Slope slope) const {
    if constexpr (kSoftcap)
      cap(x);
    else if constexpr (kAlibi)
      x.scale_rows(sizes.scale_log2, sizes.scale_log2);
    if constexpr (kAlibi)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float steep = -slope(half), origin = float(place(half) - first_col - x.col());
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            x.x[j][2 * half + i] = fmaf(steep, fabsf(origin - float(8 * j + i)), x.x[j][2 * half + i]);
      }
  }

  // The derivative of softcap, from the exponent that a score became and its distance. 0 where P is 0: there the
  // exponent is no number.
  __device__ __forceinline__ float derivative(float exponent, float slope, float distance) const {
    const float t = fmaf(slope, fabsf(distance), exponent) * score.per_cap;
    return fmaxf(0.f, fmaf(-t, t, 1.f));
  }

 private:
  template <int kCols>
  __device__ __forceinline__ void cap(Accumulator<kCols>& x) const {
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.x[j][i] *= score.inside;
        largest = fmaxf(largest, fabsf(x.x[j][i]));
      }
    // How a score is capped depends on it alone: the vote only leaves out what none needs.
    const bool some_far = __any_sync(kFullWarp, largest >= kSeries);
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float u = x.x[j][i];
        x.x[j][i] = series(u);
        if (some_far) {
          const float far = fmaf(-2.f, __fdividef(1.f, exp2f(2 * kLog2E * u) + 1.f), 1.f);
          if (!(fabsf(u) < kSeries)) x.x[j][i] = far;
        }
        x.x[j][i] *= score.cap;
      }
  }
  __device__ __forceinline__ static float series(float u) {
    const float square = u * u;
    float t = fmaf(square, 62.f / 2835, -17.f / 315);
    t = fmaf(square, t, 2.f / 15), t = fmaf(square, t, -1.f / 3);
    return fmaf(u * square, t, u);
  }
};

}  // namespace cupyflash
