// The argument of each kernel for float32 and float64: that of the others, whose pointers to float may lead to double.
#pragma once

#include "core/params.cuh"

namespace cupyflash {

struct PreciseForwardParams : ForwardParams {
  double exact_scale;
  const uint32* only_if;  // where it is not null and leads to 0, another kernel computes everything
};

struct PreciseBackwardParams : BackwardParams {
  double exact_scale;
  const uint32* only_if;
};

// float32 arrays as two of float16, precise/halves.cuh.
enum Operand { kQ, kK, kV, kDout, kOperands };

constexpr int kMostCols = 128;

struct Scales {
  uint32 largest[kOperands];  // bits of the largest |x|, with which 2^e is chosen
  uint32 of_column[kOperands][kMostCols];
  uint32 wide;  // 1: some row or column needs more digits than two float16 have, or is not finite
};

struct Halves {
  void *q, *k, *v, *dout;  // float16 (batch, seqlen, heads, 2, padded head_dim): big, then small
  Scales* scales;

  __device__ __forceinline__ void* of(Operand operand) const {
    return operand == kQ ? q : operand == kK ? k : operand == kV ? v : dout;
  }
};

// What the kernels that split are given; those that multiply are given more.
template <bool kBackward>
struct HalvesParams : PreciseForwardParams {
  Halves halves;
};
template <>
struct HalvesParams<true> : PreciseBackwardParams {
  Halves halves;
};

// The rows of one head.
template <class Real>
__device__ __forceinline__ Real* rows_of(const RowArray& array, int batch, int head) {
  return reinterpret_cast<Real*>(array.data) + (batch * array.batch + head * array.head);
}

// What the backward needs of a query. The lse of one that does not exist, or that sees no key, is inf: its P is 0.
template <class Real>
struct Statistic {
  Real lse, delta;

  __device__ __forceinline__ static Statistic of(const BackwardParams& p, int batch, int head, int row) {
    if (row >= p.sizes.seqlen_q) return {kInfinity, 0};
    const Real lse = rows_of<Real>(p.lse, batch, head)[row * p.lse.row];
    return {lse == -kInfinity ? Real(kInfinity) : lse, rows_of<Real>(p.delta, batch, head)[row * p.delta.row]};
  }
};

}  // namespace cupyflash
