// The argument of each kernel for float32 and float64: that of the others, whose pointers to float may lead to double.
#pragma once

#include "core/params.cuh"

namespace cupyflash {

struct PreciseForwardParams : ForwardParams {
  double exact_scale;
};

struct PreciseBackwardParams : BackwardParams {
  double exact_scale;
};

// The rows of one head.
template <class Real>
__device__ __forceinline__ Real* rows_of(const RowArray& array, int batch, int head) {
  return reinterpret_cast<Real*>(array.data) + (batch * array.batch + head * array.head);
}

}  // namespace cupyflash
