// Names for what every kernel uses: fixed-width integers, constants, the warp.
#pragma once

namespace cupyflash {

using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.69314718055994531f;
constexpr uint32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
// Tells the compiler that a value is the same in the whole warp: it may keep it, and what follows from it, in uniform
// registers, where the descriptors of wgmma must be. All lanes must get here.
template <class T>
__device__ __forceinline__ T same_in_warp(T value) {
  return __shfl_sync(kFullWarp, value, 0);
}
__device__ __forceinline__ int warp_index() { return same_in_warp(threadIdx.x / 32); }

// In the place of a function that has something to do.
struct Nothing {
  template <class... Arguments>
  __device__ __forceinline__ void operator()(Arguments...) const {}
};

// The same value, of unknown origin: what depends on it is computed where it is used, not kept in registers for a loop.
template <class T>
__device__ __forceinline__ T opaque(T value) {
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(value));
  else if constexpr (T(0.5) != T(0))
    asm volatile("" : "+f"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

// The same, but what was computed once may be used again: only its formula is hidden, so that the compiler does not
// turn products of an index in a loop into many running sums, each in registers.
__device__ __forceinline__ int indivisible(int value) {
  asm("" : "+r"(value));
  return value;
}

}  // namespace cupyflash
