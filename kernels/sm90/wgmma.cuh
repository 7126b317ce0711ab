// 9.7.15.5.2 wgmma.mma_async: d (64 x kN, float32) += a b for one warpgroup and 16 columns of a.
// a from registers (16 bits, as mma.m16n8k16 takes it) or from shared memory with the columns contiguous;
// b from shared memory: `dot_rows` takes its rows as columns (q k^T), `times` takes it as it is (P v).
#pragma once

#include "core/fragment.cuh"
#include "sm90/ptx.cuh"

namespace cupyflash {

// The operands of the accumulator: every width is a prefix of one list.
// clang-format off
#define REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_80 REGISTERS_64 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_96 REGISTERS_80 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_128 REGISTERS_96 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_192 REGISTERS_128 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_256 REGISTERS_192 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OPERANDS_64 \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
  "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), \
  "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
  "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define OPERANDS_80 OPERANDS_64, \
  "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3])
#define OPERANDS_96 OPERANDS_80, \
  "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
#define OPERANDS_128 OPERANDS_96, \
  "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), \
  "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
#define OPERANDS_192 OPERANDS_128, \
  "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), \
  "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]), \
  "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), \
  "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
#define OPERANDS_256 OPERANDS_192, \
  "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), \
  "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]), \
  "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), \
  "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
// clang-format on

template <class T, int kN>
struct Wgmma;

#define WGMMA(TYPE, NAME, N, A, B, C, D, E, F)                                                                     \
  template <>                                                                                                      \
  struct Wgmma<TYPE, N> {                                                                                          \
    __device__ __forceinline__ static void dot_rows(float (&d)[N / 8][4], uint64 a, uint64 b, int accumulate) {    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " C ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" REGISTERS_##N "}, " A ", " B ", p, 1, 1, 0, 0; }"                                 \
                   : OPERANDS_##N                                                                                  \
                   : "l"(a), "l"(b), "r"(accumulate));                                                             \
    }                                                                                                              \
    __device__ __forceinline__ static void dot_rows(float (&d)[N / 8][4], const uint32 (&a)[4], uint64 b,          \
                                                    int accumulate) {                                              \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " F ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" REGISTERS_##N "}, {" A ", " B ", " C ", " D "}, " E ", p, 1, 1, 0; }"             \
                   : OPERANDS_##N                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
    }                                                                                                              \
    /* a and b with contiguous columns, both taken by columns: a^T b */                                            \
    __device__ __forceinline__ static void transposed_times(float (&d)[N / 8][4], uint64 a, uint64 b,              \
                                                            int accumulate) {                                      \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " C ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" REGISTERS_##N "}, " A ", " B ", p, 1, 1, 1, 1; }"                                 \
                   : OPERANDS_##N                                                                                  \
                   : "l"(a), "l"(b), "r"(accumulate));                                                             \
    }                                                                                                              \
    __device__ __forceinline__ static void times(float (&d)[N / 8][4], const uint32 (&a)[4], uint64 b) {           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGISTERS_##N              \
                   "}, {" A ", " B ", " C ", " D "}, " E ", 1, 1, 1, 1;"                                           \
                   : OPERANDS_##N                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
    __device__ __forceinline__ static void times(float (&d)[N / 8][4], const uint32 (&a)[4], uint64 b,             \
                                                 int accumulate) {                                                 \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " F ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" REGISTERS_##N "}, {" A ", " B ", " C ", " D "}, " E ", p, 1, 1, 1; }"             \
                   : OPERANDS_##N                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
    }                                                                                                              \
  };
WGMMA(float16, "f16", 64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA(bfloat16, "bf16", 64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA(float16, "f16", 80, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA(bfloat16, "bf16", 80, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA(float16, "f16", 96, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA(bfloat16, "bf16", 96, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA(float16, "f16", 128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA(bfloat16, "bf16", 128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA(float16, "f16", 192, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA(bfloat16, "bf16", 192, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA(float16, "f16", 256, "%128", "%129", "%130", "%131", "%132", "%133")
WGMMA(bfloat16, "bf16", 256, "%128", "%129", "%130", "%131", "%132", "%133")

#undef WGMMA
#undef REGISTERS_64
#undef OPERANDS_64
#undef REGISTERS_80
#undef OPERANDS_80
#undef REGISTERS_96
#undef OPERANDS_96
#undef REGISTERS_128
#undef OPERANDS_128
#undef REGISTERS_192
#undef OPERANDS_192
#undef REGISTERS_256
#undef OPERANDS_256

}  // namespace cupyflash
