// Instructions that every architecture has: conversions between float32 and the 16-bit types, reductions in memory.
// Section numbers are those of the PTX ISA 9.0 manual.
#pragma once

#include "core/types.cuh"

namespace cupyflash {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// 9.7.14.5.15 ldmatrix: four 8 x 8 matrices of 16 bits; lanes 8 i ... 8 i + 7 give the rows of matrix i.
__device__ __forceinline__ void load_matrix(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

struct float16 {
  unsigned short bits;

  // 9.7.9.21 cvt: round to nearest even; `low` goes to the lower half.
  __device__ __forceinline__ static uint32 pack(float low, float high) {
    uint32 packed;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(packed)
        : "f"(low), "f"(high));
#endif
    return packed;
  }
  __device__ __forceinline__ static float2 unpack(uint32 packed) {
    float2 r;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(r.x), "=f"(r.y)
        : "r"(packed));
    return r;
  }
};

struct bfloat16 {
  unsigned short bits;

  __device__ __forceinline__ static uint32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return rounded(low) | rounded(high) << 16;
#endif
  }
  __device__ __forceinline__ static float2 unpack(uint32 packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }

 private:
  __device__ __forceinline__ static uint32 rounded(float x) {
    const uint32 bits = __float_as_uint(x);
    return x == x ? bits + 0x7fffu + (bits >> 16 & 1) >> 16 : 0x7fffu;
  }
};

// 9.7.13.7 red: adds four neighbouring floats; one instruction from Hopper on.
__device__ __forceinline__ void reduce_add(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(address + i, x[i]);
#endif
}

// 9.7.13.4 ld, 9.7.13.7 red: a counter that one block raises and another waits for.
__device__ __forceinline__ uint32 load_acquire(const uint32* address) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(uint32* address, uint32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace cupyflash
