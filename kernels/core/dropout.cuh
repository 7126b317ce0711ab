// Which weights dropout keeps: what depends on seed, batch, head, query and key alone, whatever the tiles. The random
// numbers are those of Philox 4x32 (Salmon et al., SC 2011) with 7 rounds, as cupyflash/dropout.py says; its counter is
//   (query / 16 * 8 + query % 8, key / 16 * 8 + key % 8, head, batch),
// its key the seed. One call gives those of 2 x 2 weights, which one lane holds in S and in S^T alike:
//
//              key  key + 8
//   query        0        1      the words of the result (query % 16 and key % 16 are less than 8);
//   query + 8    2        3      a weight is kept if its word is at least the threshold
#pragma once

#include "core/fragment.cuh"
#include "core/params.cuh"

namespace cupyflash {

struct Philox {
  static constexpr int kRounds = 7;
  uint32 x[4];

  __device__ __forceinline__ constexpr Philox(uint32 query, uint32 key, uint32 head, uint32 batch, uint64 seed)
      : x{query, key, head, batch} {
    uint32 left = uint32(seed), right = uint32(seed >> 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round, left += 0x9E3779B9u, right += 0xBB67AE85u) {
      const uint32 first = x[0], third = x[2];
      x[0] = upper(third, 0xCD9E8D57u) ^ x[1] ^ left, x[1] = third * 0xCD9E8D57u;
      x[2] = upper(first, 0xD2511F53u) ^ x[3] ^ right, x[3] = first * 0xD2511F53u;
    }
  }

 private:
  // Of the product. In 64 bits, as the compiler's own arithmetic needs it, ptxas adds a zero to each product.
  __device__ __forceinline__ static constexpr uint32 upper(uint32 a, uint32 b) {
    return __builtin_is_constant_evaluated() ? uint32(uint64(a) * b >> 32) : __umulhi(a, b);
  }
};

enum class Rows { kQueries, kKeys };

struct Dropping {  // from one head
  const Dropout& dropout;
  int batch, head;

  // Calls tell(j, i, kept) for the elements x.x[j][i] of a fragment that begins at (row, col), multiples of 16.
  template <Rows kRows, int kCols, class Tell>
  __device__ __forceinline__ void tell(const Accumulator<kCols>& x, int row, int col, Tell tell) const {
    static_assert(kCols % 16 == 0, "each group of columns is complete");
    constexpr bool kQueries = kRows == Rows::kQueries;
    const uint32 row_group = row / 2 + x.row(0);
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32 col_group = col / 2 + x.col() + 4 * j + i;
        const Philox random(kQueries ? row_group : col_group, kQueries ? col_group : row_group, head, batch,
                            dropout.seed);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            const uint32 word = random.x[kQueries ? 2 * half + next : 2 * next + half];
            tell(j + next, 2 * half + i, word >= dropout.threshold);
          }
      }
  }

  // Of P, queries by keys: what is dropped becomes 0.
  template <int kCols>
  __device__ __forceinline__ void drop(Accumulator<kCols>& p, int query, int key) const {
    tell<Rows::kQueries>(p, query, key, [&](int j, int i, bool kept) { p.x[j][i] = kept ? p.x[j][i] : 0.f; });
  }
  // Of P or P^T: what is dropped gets the sign, as dS needs the value too. The bit itself, for NaN has it as well.
  template <Rows kRows, int kCols>
  __device__ __forceinline__ void mark(Accumulator<kCols>& p, int row, int col) const {
    tell<kRows>(p, opaque(row), col, [&](int j, int i, bool kept) {
      if (!kept) p.x[j][i] = __uint_as_float(__float_as_uint(p.x[j][i]) | 1u << 31);
    });
  }
  template <int kCols>
  __device__ __forceinline__ static void drop_marked(Accumulator<kCols>& p) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (marked(p.x[j][i])) p.x[j][i] = 0.f;
  }
  // From the operand of what is marked.
  template <int kCols>
  __device__ __forceinline__ static void drop_marked(const Accumulator<kCols>& p, uint32 (&operand)[kCols / 16][4]) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (marked(p.x[j][i])) cupyflash::clear(operand, j, i);
  }
  // dS of a marked P.
  __device__ __forceinline__ float gradient(float p, float dp, float delta) const {
    return fabsf(p) * (marked(p) ? -delta : fmaf(dp, dropout.scale, -delta));
  }

 private:
  __device__ __forceinline__ static bool marked(float p) { return __float_as_int(p) < 0; }
};

}  // namespace cupyflash
