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

template <class T, int kProducts>
struct Arithmetic;

template <int kProducts>
struct Arithmetic<float32, kProducts> {
  static_assert(kProducts == 1 || kProducts == 3);
  using Real = float;
  static constexpr int kUnit = 4;   // elements of 16 bytes
  static constexpr int kSteps = 2;  // of 8 columns, that are multiplied together
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
  __device__ __forceinline__ static float exp(float x) { return exp2f(kLog2E * x); }
};

template <>
struct Arithmetic<float64, 1> {
  using Real = double;
  static constexpr int kUnit = 2, kSteps = 1;
  using Factor = double;

  __device__ __forceinline__ static double factor(double x) { return x; }

  // acc += a (16 x 8) b (8 x 8)
  template <bool kTransposed = false>
  __device__ __forceinline__ static void multiply(double (&acc)[4], const double (&a)[kSteps][4],
                                                  const double (&b)[kSteps][2]) {
    multiply_float64(acc, a[0], b[0][0], b[0][1]);
  }

  __device__ __forceinline__ static double scaled(double x, double scale) { return __dmul_rn(x, scale); }
  // e^x = 2^n 2^f, n the integer nearest to x / ln 2: 16 instructions of float64 and no branch. Relative error: 4e-16,
  // and 1.5e-17 |x|, less than the rounding of a logit x. 0 below the least normal number; not for x over 709.
  __device__ __forceinline__ static double exp(double x) {
    constexpr double kLog2E = 1.4426950408889634, kShift = 6755399441055744.0;  // 1.5 * 2^52: ends with the integer
    // The polynomial of degree 11 with the least relative error, 3e-18, for |f| <= 1/2.
    constexpr double kPower[] = {4.4352809446103363e-10, 7.074105626245659e-9,  1.0178198033328528e-7,
                                 1.321543308959463e-6,   1.5252733489960805e-5, 1.5403530462514614e-4,
                                 1.333355814678995e-3,   9.618129107588335e-3,  5.5504108664819925e-2,
                                 0.24022650695910155,    0.6931471805599453,    1.};
    const double shifted = fma(x, kLog2E, kShift), f = fma(x, kLog2E, kShift - shifted);
    double power = kPower[0];
#pragma unroll
    for (int i = 1; i < 12; ++i) power = fma(power, f, kPower[i]);
    return x < -708. ? 0. : power * __hiloint2double((__double2loint(shifted) + 1023) << 20, 0);
  }
};

}  // namespace cupyflash
