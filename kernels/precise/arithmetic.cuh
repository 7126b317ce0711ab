// Products of float32 and of float64 on tensor cores, of fragments as mma.m16n8k8 has them, and their exponentials.
//
// float32: a number x is big + small, big the nearest TF32 number, with 11 bits, small the rest, of which TF32 keeps
// 11 bits. Three products, big big + big small + small big, leave out 2^-22 of each term. Tensor cores cut off what
// does not fit into a sum: over many steps that drifts to zero, so that a sum begins anew every 16 columns and is added
// outside, rounded (Ootomo and Yokota, arXiv 2203.03341).
#pragma once

#include "core/fragment.cuh"
#include "precise/ptx.cuh"

namespace cupyflash {

struct float32;
struct float64;

// kSteps of 8 columns are multiplied together.
template <class T, int kProducts, int kSteps = 2>
struct Arithmetic;

template <int kProducts>
struct Arithmetic<float32, kProducts, 2> {
  static_assert(kProducts == 1 || kProducts == 3);
  using Real = float;
  static constexpr int kUnit = 4;  // elements of 16 bytes
  static constexpr int kSteps = 2;
  static constexpr bool kAhead = false;  // whether registers are left for the factors of the next product
  struct Factor {
    uint32 big, small;
  };

  __device__ __forceinline__ static Factor factor(float x) {
    const uint32 big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    return {big, __float_as_uint(x - __uint_as_float(big))};
  }

  // acc += a (16 x 16) b (16 x 8). kTransposed: with the same roundings as b^T a^T has without it.
  template <bool kTransposed = false>
  __device__ __forceinline__ static void multiply(float (&acc)[4], const Factor (&a)[kSteps][4],
                                                  const Factor (&b)[kSteps][2]) {
    float sum[4] = {};
    if constexpr (kProducts == 3) {  // without braces NVRTC 13.0 leaves out the next loop, too
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32 big[4] = {a[s][0].big, a[s][1].big, a[s][2].big, a[s][3].big};
        const uint32 small[4] = {a[s][0].small, a[s][1].small, a[s][2].small, a[s][3].small};
        if constexpr (!kTransposed) multiply_tf32(sum, small, b[s][0].big, b[s][1].big, sum);
        multiply_tf32(sum, big, b[s][0].small, b[s][1].small, sum);
        if constexpr (kTransposed) multiply_tf32(sum, small, b[s][0].big, b[s][1].big, sum);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32 big[4] = {a[s][0].big, a[s][1].big, a[s][2].big, a[s][3].big};
      multiply_tf32(sum, big, b[s][0].big, b[s][1].big, sum);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += sum[i];
  }

  // Rounded, and not with what is added next: the same in both passes.
  __device__ __forceinline__ static float scaled(float x, float scale) { return __fmul_rn(x, scale); }
  struct Exponential {
    __device__ __forceinline__ float operator()(float x) const { return exp2f(kLog2E * x); }
  };
};

template <int kSteps_>
struct Arithmetic<float64, 1, kSteps_> {
  using Real = double;
  static constexpr int kUnit = 2, kSteps = kSteps_;
  static constexpr bool kAhead = true;
  using Factor = double;

  __device__ __forceinline__ static double factor(double x) { return x; }

  // acc += a (16 x 8 kSteps) b (8 kSteps x 8)
  template <bool kTransposed = false>
  __device__ __forceinline__ static void multiply(double (&acc)[4], const double (&a)[kSteps][4],
                                                  const double (&b)[kSteps][2]) {
    multiply_float64(acc, a, b);
  }

  __device__ __forceinline__ static double scaled(double x, double scale) { return __dmul_rn(x, scale); }

  // e^x = 2^(n / 32) 2^f, n the integer nearest to 32 x / ln 2; 2^(l / 32) is kept by lane l, so that all lanes of a
  // warp call together: 9 instructions of float64, for which products wait, and no branch. Relative error: 4e-16, and
  // 1.5e-17 |x|, less than the rounding of a logit x. 0 from -708 on, next to the least normal number; not for x over
  // 709.
  class Exponential {
   public:
    __device__ __forceinline__ double operator()(double x) const {
      constexpr double kLog2E = 1.4426950408889634, kShift = 211106232532992.0;  // 1.5 * 2^47: ends with n
      // 2^f = 1 + f (...), of degree 5: the least relative error, 9e-17, for |f| <= 1/64.
      constexpr double kPower[] = {0.0013333490250903985, 0.00961818146680304, 0.055504108667926766, 0.2402265069551457,
                                   0.6931471805599451};
      const double shifted = fma(x, kLog2E, kShift), f = fma(x, kLog2E, kShift - shifted);
      double rest = kPower[0];
#pragma unroll
      for (int i = 1; i < 5; ++i) rest = fma(rest, f, kPower[i]);
      const int n = __double2loint(shifted);
      const double root = __shfl_sync(kFullWarp, root_, n);
      const double power = __hiloint2double(__double2hiint(root) + (n >> 5 << 20), __double2loint(root));
      // From the upper halves of -708 to that of -inf: integers, which float64 need not wait for; NaN is none of them.
      const bool vanishes = uint32(__double2hiint(x)) - 0xc0862000u <= 0xfff00000u - 0xc0862000u;
      const double result = fma(power, rest * f, power);
      return vanishes ? 0. : result;
    }

   private:
    double root_ = exp2(lane_index() / 32.);
  };
};

}  // namespace cupyflash
