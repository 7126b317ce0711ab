// The instructions of the portable path, one function each; numbers are sections of the PTX ISA 9.0 manual.
// Turing (7.5) lacks cp.async and m16n8k16: the same functions fall back to a plain copy and to two m16n8k8.
#pragma once

#include "any/ptx.cuh"

namespace cupyflash {

// 9.7.9.25.3.1 cp.async: copies kBytes from `source`, or writes zeros and does not touch it.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32 target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile(
        "{ .reg .pred skip; setp.eq.u32 skip, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, skip; }" ::"r"(target),
        "l"(source), "r"(uint32(valid))
        : "memory");
    return;
  } else if constexpr (kBytes >= 4) {
    asm volatile(
        "{ .reg .pred skip; setp.eq.u32 skip, %2, 0; cp.async.ca.shared.global [%0], [%1], %3, skip; }" ::"r"(target),
        "l"(source), "r"(uint32(valid)), "n"(kBytes)
        : "memory");
    return;
  }
#endif
  const unsigned short* halves = static_cast<const unsigned short*>(source);
#pragma unroll
  for (int i = 0; i < kBytes / 2; ++i)
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + 2 * i), "h"(valid ? halves[i] : (unsigned short)0)
                 : "memory");
}

// 9.7.9.25.3.2 cp.async.commit_group, 9.7.9.25.3.3 cp.async.wait_group
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// 9.7.9.11 st
__device__ __forceinline__ void store_shared(uint32 address, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
// 9.7.9.8 ld
__device__ __forceinline__ uint4 load_shared_16(uint32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// 9.7.14.5.14 mma: d += a (16 x 16) b (16 x 8), float32 accumulation.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);

template <>
__device__ __forceinline__ void multiply<float16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
template <>
__device__ __forceinline__ void multiply<bfloat16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cupyflash
