// Which weights dropout keeps: what depends on seed, batch, head, query and key alone, whatever the tiles, as
// cupyflash/dropout.py says. A weight is kept if its random number is at least the threshold. Words of Philox 4x32
// (Salmon et al., SC 2011) with 7 rounds hold one bit each of the numbers of 32 weights, the highest one first, as what
// differs from the threshold's, so that all 32 are compared at once, and no more bits are made than the comparison
// needs. What comes out is a word with the bits of the kept weights. A block of 16 x 16 weights has 8 of them:
//   number of the word                 bits 2 and 1 of the query, bit 2 of the key
//   byte                               bit 3 of the query, bit 3 of the key
//   bit, from the highest one down     bit 1 of the key, bit 0 of the query, bit 0 of the key
// The 8 weights of a lane, in S and in S^T alike, are two bits of each byte of one word. Words of a tile are made where
// there is time, and wait in shared memory: an instruction spreads the sign of a byte.
#pragma once

#include "any/ptx.cuh"
#include "core/fragment.cuh"
#include "core/params.cuh"

namespace cupyflash {

// Philox with all but the second word of the counter in place, which enters where it is mixed the latest: what the
// others make of the first three rounds is made once.
class Philox {
 public:
  __device__ __forceinline__ constexpr Philox(uint32 a, uint32 c, uint32 d, const uint64* keys) : keys(keys) {
    const uint32 first = upper(c, kRight) ^ uint32(keys[0]), third = upper(a, kLeft) ^ d ^ uint32(keys[0] >> 32);
    const uint32 second = upper(third, kRight) ^ c * kRight ^ uint32(keys[1]);
    entry = first, others[0] = a * kLeft ^ uint32(keys[1] >> 32);
    others[1] = third * kRight ^ uint32(keys[2]), others[2] = upper(second, kLeft) ^ uint32(keys[2] >> 32);
    others[3] = second * kLeft;
  }
  // The second word is b ^ call: one instruction adds both, where a sum would be another one for each call.
  __device__ __forceinline__ constexpr void make(uint32 (&x)[4], uint32 b, uint32 call) const {
    const uint64 product = uint64(entry ^ b ^ call) * kLeft;  // whole: ptxas makes two of its halves here
    const uint32 third = uint32(product >> 32) ^ others[0];
    x[0] = upper(third, kRight) ^ others[1], x[1] = third * kRight, x[2] = uint32(product) ^ others[2],
    x[3] = others[3];
#pragma unroll
    for (int round = 3; round < Dropout::kRounds; ++round) {
      const uint32 left = x[0], right = x[2];
      x[0] = upper(right, kRight) ^ x[1] ^ uint32(keys[round]), x[1] = right * kRight;
      x[2] = upper(left, kLeft) ^ x[3] ^ uint32(keys[round] >> 32), x[3] = left * kLeft;
    }
  }

 private:
  static constexpr uint32 kLeft = 0xD2511F53u, kRight = 0xCD9E8D57u;
  const uint64* keys;
  uint32 entry, others[4];

  // Of the product. In 64 bits, as the compiler's own arithmetic needs it, ptxas adds a zero to each product.
  __device__ __forceinline__ static constexpr uint32 upper(uint32 a, uint32 b) {
    return __builtin_is_constant_evaluated() ? uint32(uint64(a) * b >> 32) : __umulhi(a, b);
  }
};

// The comparison of 32 numbers with a threshold, four bits at a time. The random words tell where bits differ: the
// highest one that does decides, an instruction for each.
struct Comparison {
  uint32 kept = ~0u, decided = 0;

  // `words` of four bits above those so far, and `bits` of the threshold, 32 times each.
  __device__ __forceinline__ constexpr void precede(const uint32 (&words)[4], const uint32* bits) {
    kept = chain(kept, words, bits), decide(words);
  }
  // Of four bits below them.
  __device__ __forceinline__ constexpr void follow(const uint32 (&words)[4], const uint32* bits) {
    kept &= decided | chain(~0u, words, bits), decide(words);
  }

 private:
  __device__ __forceinline__ static constexpr uint32 chain(uint32 kept, const uint32 (&words)[4], const uint32* bits) {
#pragma unroll
    for (int i = 3; i >= 0; --i) kept = (words[i] & ~bits[i]) | (~words[i] & kept);
    return kept;
  }
  __device__ __forceinline__ constexpr void decide(const uint32 (&words)[4]) {
    decided |= words[0] | words[1], decided |= words[2] | words[3];
  }
};

struct Dropping {  // from one head
  const Dropout& dropout;
  int batch, head;

  __device__ __forceinline__ static constexpr int words(int queries, int keys) { return queries * keys / 32; }

  // The words of a tile, block by block, by kThreads threads of neighbouring warps.
  template <int kQueries, int kKeys, int kThreads>
  __device__ __forceinline__ void decide(uint32* words, int first_query, int first_key) const {
    constexpr int kWords = Dropping::words(kQueries, kKeys);
    static_assert(kQueries % 16 == 0 && kKeys % 16 == 0 && kWords % 32 == 0, "whole blocks, whole warps");
#pragma unroll 1
    for (uint32 i = opaque(threadIdx.x) % kThreads; i < kWords; i += kThreads)
      words[i] = word_of_tile<kKeys>(i, first_query, first_key);
  }
  template <int kKeys>
  __device__ __forceinline__ uint32 word_of_tile(uint32 i, uint32 first_query, uint32 first_key) const {
    return word(row(first_query / 16 + i / (kKeys / 2)), first_key / 2 + i % (kKeys / 2));
  }

  // What the words of 16 queries have in common; `block`: their number.
  __device__ __forceinline__ Philox row(uint32 block) const {
    return {block, uint32(head), uint32(batch), dropout.keys};
  }
  // That of a stream.
  __device__ __forceinline__ uint32 word(const Philox& row, uint32 stream) const {
    return finished(begun(row, stream), row, stream);
  }
  // In two steps: what nearly all comparisons need, without a branch, and what is left.
  __device__ __forceinline__ Comparison begun(const Philox& row, uint32 stream) const {
    Comparison comparison;
#pragma unroll
    for (int n = kUsual - 1; n >= 0; --n) {
      uint32 words[4];
      row.make(words, kCalls * stream, n);
      comparison.precede(words, dropout.bits + 4 * n);
    }
    return comparison;
  }
  __device__ __forceinline__ uint32 finished(Comparison comparison, const Philox& row, uint32 stream) const {
#pragma unroll 1
    for (int n = kUsual; n < kCalls && __any_sync(kFullWarp, ~comparison.decided); ++n) {
      uint32 words[4];
      row.make(words, kCalls * stream, n);
      comparison.follow(words, dropout.bits + 4 * n);
    }
    return comparison.kept;
  }

 private:
  static constexpr int kCalls = 8, kUsual = 3;  // 12 bits decide 1024 comparisons, those of a warp, three times of four
};

enum class Rows { kQueries, kKeys };

// What is kept of a block of 16 x 16, of the weights that a lane holds of it.
template <Rows kRows>
struct Kept {
  static constexpr int kNext = kRows == Rows::kQueries ? 1 : 2;
  uint32 even;  // the sign of each byte tells of one column, the bit `kNext` further down of the next one

  // `words`: of a tile with kKeys keys; the block begins at (query, key) of it, multiples of 16.
  template <int kKeys>
  __device__ __forceinline__ static Kept of(const uint32* words, int query, int key) {
    const int lane = lane_index();
    return {words[query / 2 * (kKeys / 16) + key / 2 + stream(lane)] << shift(lane)};
  }
  // The word of a lane, of the block, and how far it is to be shifted.
  __device__ __forceinline__ static constexpr int stream(int lane) {
    return kRows == Rows::kQueries ? lane / 8 * 2 + lane / 2 % 2 : lane % 4 * 2 + lane / 16;
  }
  __device__ __forceinline__ static constexpr int shift(int lane) {
    return kRows == Rows::kQueries ? lane % 2 * 4 + lane / 4 % 2 * 2 : lane / 8 % 2 * 4 + lane / 4 % 2;
  }
  __device__ __forceinline__ static constexpr uint32 byte_of(int col_half, int row_half) {
    return kRows == Rows::kQueries ? 2 * row_half + col_half : 2 * col_half + row_half;
  }
  // Of an operand a[i] of these columns: ones where it is kept.
  __device__ __forceinline__ uint32 pair(int i) const {
    const uint32 byte = byte_of(i / 2, i % 2);
    return spread_signs(even, even << kNext, 0x1100 * (12 + byte) + 0x11 * (8 + byte));
  }
  // x, if it is a kept x[j][i], else 0.
  __device__ __forceinline__ float of(float x, int j, int i) const {
    const uint32 word = i % 2 ? even << kNext : even;
    return __uint_as_float(__float_as_uint(x) & spread_signs(word, word, 0x1111 * (8 + byte_of(j % 2, i / 2))));
  }
};

// What is kept of a fragment that begins at (row, col) of a tile.
template <Rows kRows, int kCols>
struct KeptFragment {
  static constexpr int kLaneWords = (kCols + 63) / 64;
  Kept<kRows> blocks[kCols / 16];
  Comparison begun[kLaneWords];

  template <int kKeys>
  __device__ __forceinline__ void read(const uint32* words, int row, int col) {
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
      const int query = kRows == Rows::kQueries ? row : col + 16 * step;
      const int key = kRows == Rows::kQueries ? col + 16 * step : row;
      blocks[step] = Kept<kRows>::template of<kKeys>(words, query, key);
    }
  }
  // By the warp itself: each lane makes a word of four blocks, also of those that are not there. In two steps, as
  // above.
  __device__ __forceinline__ void decide(const Dropping& dropping, int row, int col) {
    begin(dropping, row, col), finish(dropping, row, col);
  }
  __device__ __forceinline__ void begin(const Dropping& dropping, int row, int col) {
#pragma unroll
    for (int n = 0; n < kLaneWords; ++n) {
      const auto [block, stream] = counter_of(row, col + 64 * n);
      begun[n] = dropping.begun(dropping.row(block), stream);
    }
  }
  __device__ __forceinline__ void finish(const Dropping& dropping, int row, int col) {
    uint32 decided = ~0u;
#pragma unroll
    for (int n = 0; n < kLaneWords; ++n) decided &= begun[n].decided;
    if (__any_sync(kFullWarp, ~decided))
#pragma unroll
      for (int n = 0; n < kLaneWords; ++n) {
        const auto [block, stream] = counter_of(row, col + 64 * n);
        begun[n].kept = dropping.finished(begun[n], dropping.row(block), stream);
      }
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
      const uint32 word =
          __shfl_sync(kFullWarp, begun[step / 4].kept, 8 * (step % 4) + Kept<kRows>::stream(lane_index()));
      blocks[step].even = word << Kept<kRows>::shift(lane_index());
    }
  }
  // What is dropped becomes 0.
  __device__ __forceinline__ void drop(Accumulator<kCols>& x) const {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[j][i] = blocks[j / 2].of(x.x[j][i], j, i);
  }
  __device__ __forceinline__ void drop(uint32 (&operand)[kCols / 16][4]) const {
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) operand[step][i] &= blocks[step].pair(i);
  }
  // What is dropped gets the sign, of weights that go where the words do not. The bit itself, for NaN has it as well.
  __device__ __forceinline__ void mark(uint32 (&operand)[kCols / 16][4]) const {
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) operand[step][i] |= ~blocks[step].pair(i) & 0x80008000u;
  }

 private:
  struct Counter {
    uint32 block, stream;
  };
  __device__ __forceinline__ static Counter counter_of(int row, int col) {
    const uint32 lane = lane_index();
    return kRows == Rows::kQueries ? Counter{row / 16u, col / 2u + lane}
                                   : Counter{col / 16u + lane / 8, row / 2u + lane % 8};
  }
};

// dS of a marked P.
__device__ __forceinline__ float gradient_of_marked(float p, float dp, float delta, const Dropout& dropout) {
  return fabsf(p) * (__float_as_int(p) < 0 ? -delta : fmaf(dp, dropout.scale, -delta));
}

}  // namespace cupyflash
