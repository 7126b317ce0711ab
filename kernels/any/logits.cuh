// Arrays that hold something for each pair of a query and a key, a bias or a mask, as a lane's elements of a fragment
// of scores need it: read from global memory, element by element, where they are used.
#pragma once

#include "any/ptx.cuh"
#include "core/fragment.cuh"
#include "core/params.cuh"

namespace cupyflash {

enum BiasType { kNoBias, kFloat16Bias, kBfloat16Bias, kFloat32Bias };  // ForwardSpec.bias; spec.BIAS_TYPES

template <class Item>
struct LogitItems {
  const Item* row[2];  // of the two rows of a lane
  int64 step;          // from a column to the next
  int first, last;     // the lane's first column, and the last one that exists

  // Of the fragment that begins at (query, key), rows being queries. Beyond the lengths, where everything is hidden or
  // not stored, it repeats the last row and the last column: no element is read that is not there.
  __device__ __forceinline__ static LogitItems of(const LogitArray& array, int batch, int head, int query, int key,
                                                  const Sizes& s) {
    LogitItems items = {{}, array.col, key + Accumulator<8>::col(), s.seqlen_k - 1};
    const Item* of_head = static_cast<const Item*>(array.data) + batch * array.batch + head * array.head;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      items.row[half] = of_head + min(query + Accumulator<8>::row(half), s.seqlen_q - 1) * array.row;
    return items;
  }
  // The same of a transposed fragment, that begins at (key, query).
  __device__ __forceinline__ static LogitItems of_transposed(const LogitArray& array, int batch, int head, int key,
                                                             int query, const Sizes& s) {
    LogitItems items = {{}, array.row, query + Accumulator<8>::col(), s.seqlen_q - 1};
    const Item* of_head = static_cast<const Item*>(array.data) + batch * array.batch + head * array.head;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      items.row[half] = of_head + min(key + Accumulator<8>::row(half), s.seqlen_k - 1) * array.col;
    return items;
  }
  __device__ __forceinline__ Item operator()(int j, int i) const {
    return row[i / 2][min(first + 8 * j + i % 2, last) * step];
  }
};

template <int kBias>
struct BiasItem {
  using Type = unsigned short;
};
template <>
struct BiasItem<kFloat32Bias> {
  using Type = float;
};

// An element in base 2. What is finite stays so, or a row of the least float32 number would see no key.
template <int kBias>
__device__ __forceinline__ float bias_log2(typename BiasItem<kBias>::Type item) {
  float x;
  if constexpr (kBias == kFloat32Bias)
    x = item;
  else if constexpr (kBias == kFloat16Bias)
    return kLog2E * float16::unpack(item).x;
  else
    x = bfloat16::unpack(item).x;
  constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
  const float y = kLog2E * x;
  return fabsf(y) == kInfinity && fabsf(x) != kInfinity ? copysignf(kLargest, y) : y;
}

// Scores that a mask does not show -> -inf.
template <int kCols>
__device__ __forceinline__ void hide_masked(Accumulator<kCols>& x, const LogitItems<unsigned char>& shown) {
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    __syncwarp();  // or all loads go ahead, into registers that are not there
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[j][i] = shown(j, i) ? x.x[j][i] : -kInfinity;
  }
}

}  // namespace cupyflash
