// An element mask in the order of the accumulators of Hopper's scores: of each part of 64 rows and 64 columns a word
// for each of the 128 lanes that hold it, whose bit 4 j + i says whether x[j][i] is shown. Rows are queries, or keys.
// The mask is read once, along the axis on which its elements are neighbours; an axis along which it was broadcast has
// one entry, or one part.
#pragma once

#include "any/ptx.cuh"
#include "core/blocks.cuh"
#include "core/fragment.cuh"
#include "core/params.cuh"
#include "core/spec.cuh"

namespace cupyflash {

constexpr int kPartLanes = 128;  // of a part of 64 x 64

struct MaskWords {  // (batch, heads, parts of rows, parts of columns, kPartLanes); parts that do not exist end each
                    // axis
  uint32* data;
  int64 batch, head, rows, cols;  // strides, 0 along an axis with one entry for all
};

struct MaskWordsParams {
  LogitArray mask;
  MaskWords words;
  BlockMask blocks;          // of rows by columns: parts of tiles that are whole, or hidden, have no words; or no data
  int heads, group;          // heads of the words; heads whose rows follow each other, query by query
  int rows, row_step, cols;  // rows and columns of a head, and rows of a part: 64 / group
  int row_parts, col_parts;  // that exist
  int wide;                  // 16 neighbours can be read at once
};

// What a lane holds of scores from the tile `tile` of kCols columns on.
template <int kCols>
struct ShownBits {
  static constexpr int kWords = (kCols + 63) / 64;
  uint32 words[kWords];

  // `of_row`: this lane's word in the first part of a row of them, `step` the way to the next. Not by __ldg, which the
  // compiler would move past the waits to where the words are used.
  __device__ __forceinline__ void load(const uint32* of_row, int64 step, int tile) {
    const int first = tile * kCols / 64;
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = of_row[(first + k) * step];
    static_assert(kCols % 64 == 0 || kCols == 80 || kCols == 96, "a tile ends within two parts");
    if constexpr (kCols % 64 != 0) {             // it may begin within one
      const int before = tile * kCols % 64 / 2;  // bits of 16 columns: 8
      words[0] = __funnelshift_r(words[0], words[1], before), words[1] >>= before;
    }
  }
  __device__ __forceinline__ bool operator()(int j, int i) const { return words[j / 8] >> (j % 8 * 4 + i) & 1; }
};

// Four bytes -> a bit for each that is not 0.
__device__ __forceinline__ uint32 bits_of_bytes(uint32 x) {
  x |= x >> 4, x |= x >> 2, x |= x >> 1;
  return (x & 0x01010101) * 0x10204080 >> 28;
}

// One block: four parts side by side along the axis that is read. `bits[slow][fast / 32]`: bit fast % 32 of it.
template <class T, MaskWordsSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps) make_mask_words(const __grid_constant__ MaskWordsParams p) {
  constexpr int kParts = 4, kFast = 64 * kParts, kPieces = kFast / 16, kThreads = 32 * kSpec.warps;
  static_assert(kThreads % kPartLanes == 0 && kParts % (kThreads / kPartLanes) == 0 && 64 * kPieces % kThreads == 0);
  __shared__ uint32 bits[64][kFast / 32 + 1];
  const int lane = lane_index(), warp = warp_index();
  const int fast_parts = kSpec.along_rows ? p.row_parts : p.col_parts;
  const int slow_parts = kSpec.along_rows ? p.col_parts : p.row_parts;
  const int chunks = (fast_parts + kParts - 1) / kParts, first_part = blockIdx.x % chunks * kParts;
  const int slow_part = blockIdx.x / chunks % slow_parts, pair = blockIdx.x / chunks / slow_parts;
  const int batch = pair / p.heads, head = pair % p.heads;
  const auto row_part = [&](int part) { return kSpec.along_rows ? first_part + part : slow_part; };
  const auto col_part = [&](int part) { return kSpec.along_rows ? slow_part : first_part + part; };
  const auto wanted = [&](int part) {
    if (first_part + part >= fast_parts) return false;
    if (p.blocks.data == nullptr) return true;
    return ShownTiles<true, 64>::of(p.blocks, batch, head, 64 * row_part(part)).in_part(col_part(part));
  };
  const unsigned char* const data =
      static_cast<const unsigned char*>(p.mask.data) + batch * p.mask.batch + head * p.group * p.mask.head;
  const auto shown = [&](int slow, int fast) {  // address, or none
    const int row = kSpec.along_rows ? fast % 64 : slow;
    const int col = 64 * col_part(fast / 64) + (kSpec.along_rows ? slow : fast % 64);
    const int of_part = p.group == 1 ? row : row / p.group, entry = p.row_step * row_part(fast / 64) + of_part;
    const bool exists = entry < p.rows && col < p.cols;
    return exists ? data + entry * p.mask.row + (row - of_part * p.group) * p.mask.head + col * p.mask.col : nullptr;
  };

  if (p.wide) {
    const int piece = threadIdx.x % kPieces;
    const bool reads = wanted(piece / (kPieces / kParts));
    constexpr int kSteps = 64 * kPieces / kThreads;
    uint4 found[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const unsigned char* const source = shown(threadIdx.x / kPieces + kThreads / kPieces * step, 16 * piece);
      found[step] = {};
      if (reads && source != nullptr) found[step] = __ldg(reinterpret_cast<const uint4*>(source));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 x = found[step];
      auto* const line = reinterpret_cast<unsigned short*>(bits[threadIdx.x / kPieces + kThreads / kPieces * step]);
      line[piece] = bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
    }
  } else {
    bool reads[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) reads[part] = wanted(part);
#pragma unroll 2
    for (int slow = warp; slow < 64; slow += kSpec.warps) {
      unsigned char found[kFast / 32];
#pragma unroll
      for (int k = 0; k < kFast / 32; ++k) {
        const unsigned char* const source = shown(slow, 32 * k + lane);
        found[k] = reads[k / 2] && source != nullptr ? __ldg(source) : 0;
      }
#pragma unroll
      for (int k = 0; k < kFast / 32; ++k) {
        const uint32 word = __ballot_sync(kFullWarp, found[k] != 0);
        if (lane == 0) bits[slow][k] = word;
      }
    }
  }
  __syncthreads();  // all bits are there

  const int place = threadIdx.x % kPartLanes, row = place / 32 * 16 + Accumulator<8>::row(0);
#pragma unroll
  for (int part = threadIdx.x / kPartLanes; part < kParts; part += kThreads / kPartLanes) {
    if (!wanted(part)) continue;
    uint32 word = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (kSpec.along_rows) {  // two rows of a column
          const uint32 line = bits[8 * j + Accumulator<8>::col() + k][2 * part + row / 32] >> row % 32;
          word |= (line & 1 | line >> 6 & 4) << (4 * j + k);
        } else {  // two columns of a row
          const uint32 line = bits[row + 8 * k][2 * part + j / 4] >> Accumulator<8>::col();
          word |= (line >> 8 * (j % 4) & 3) << (4 * j + 2 * k);
        }
      }
    p.words.data[batch * p.words.batch + head * p.words.head + row_part(part) * p.words.rows +
                 col_part(part) * p.words.cols + place] = word;
  }
}

}  // namespace cupyflash
