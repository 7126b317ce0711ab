// The instructions of the kernels for float32 and float64, one function each; numbers are sections of the PTX ISA 9.0
// manual.
#pragma once

#include "sm80/ptx.cuh"

namespace cupyflash {

// 9.7.14.5.14 mma: d = a (16 x 8) b (8 x 8) + c. Of TF32 numbers, the upper 19 bits of each register.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                              const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
      "%12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The same of float64, d += a (16 x 8 kSteps) b (8 kSteps x 8): from Hopper on one instruction, at twice the rate of
// the smaller product that Ampere has.
template <int kSteps>
__device__ __forceinline__ void multiply_float64(double (&d)[4], const double (&a)[kSteps][4],
                                                 const double (&b)[kSteps][2]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kSteps == 2) {
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, "
        "%13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0][0]), "d"(a[0][1]), "d"(a[0][2]), "d"(a[0][3]), "d"(a[1][0]), "d"(a[1][1]), "d"(a[1][2]),
          "d"(a[1][3]), "d"(b[0][0]), "d"(b[0][1]), "d"(b[1][0]), "d"(b[1][1]));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0][0]), "d"(a[0][1]), "d"(a[0][2]), "d"(a[0][3]), "d"(b[0][0]), "d"(b[0][1]));
  }
#else
#pragma unroll
  for (int step = 0; step < 2 * kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
          : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
          : "d"(a[step / 2][step % 2 * 2 + half]), "d"(b[step / 2][step % 2]));
#endif
}

// 9.7.9.8 ld
__device__ __forceinline__ void load_unit(float (&x)[4], uint32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_unit(double (&x)[2], uint32 address) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x[0]), "=d"(x[1]) : "r"(address) : "memory");
}

}  // namespace cupyflash
