// out = softmax(scale q k^T) v and its log-sum-exp: FlashAttention-2's forward (arXiv 2307.08691, Algorithm 1) with
// mma.sync. A block owns block_q queries of one head and goes through the keys they see from the last tile to the
// first.
#pragma once

#include "any/dropout.cuh"
#include "any/logits.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/softmax.cuh"
#include "core/spec.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

template <int kRowTiles, int kSteps>
struct InRegisters {  // a left operand read once
  uint32 a[kSteps][kRowTiles][4];

  template <class Source>
  __device__ __forceinline__ void read(Source source) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) source(a[step][t], t, step);
  }
  __device__ __forceinline__ void operator()(uint32 (&r)[4], int row_tile, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = a[step][row_tile][i];
  }
};
template <int kRowTiles>
struct InRegisters<kRowTiles, 0> {};

template <class T, ForwardSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(32 * kSpec.warps, kSpec.blocks_per_sm)
    forward(const __grid_constant__ Modified<ForwardParams, Mods> p) {
  constexpr int kThreads = 32 * kSpec.warps, kRowTiles = kSpec.rows_per_warp() / 16;
  constexpr int kSteps = kSpec.head_dim / 16, kAccess = kSpec.access;
  // What a warp owns of out.
  constexpr int kOutRows = kSpec.block_q / kSpec.out_warps_q, kOutRowTiles = kOutRows / 16;
  constexpr int kOutCols = kSpec.head_dim_v * kSpec.out_warps_q / kSpec.warps;
  constexpr bool kPInRegisters = kSpec.p_in_registers();
  static_assert(kPInRegisters || kSpec.stages == 1, "the copies go on during the products");
  using QTile = Tile<kSpec.block_q, kSpec.head_dim>;
  using KTile = Tile<kSpec.block_k, kSpec.head_dim>;
  using VTile = Tile<kSpec.block_k, kSpec.head_dim_v>;
  using PTile = Tile<kSpec.block_q, kSpec.block_k>;
  using OutTile = Tile<kSpec.block_q, kSpec.head_dim_v>;  // takes the place of q
  constexpr int kQBytes = QTile::kBytes > OutTile::kBytes ? QTile::kBytes : OutTile::kBytes;

  extern __shared__ __align__(1024) char shared[];
  const QTile q_tile(shared_address(shared));
  const OutTile out_tile(q_tile.base);
  const auto k_tile = [&](int stage) { return KTile(q_tile.base + kQBytes + stage * KTile::kBytes); };
  const auto v_tile = [&](int stage) {
    return VTile(q_tile.base + kQBytes + kSpec.stages * KTile::kBytes + stage * VTile::kBytes);
  };
  const PTile p_tile(v_tile(kSpec.stages).base);
  // A number for each row, from the warp that owns its scores to those that own its out.
  float* const row_factors = reinterpret_cast<float*>(shared + (p_tile.base + PTile::kBytes - q_tile.base));
  // What dropout keeps of a tile: of two in turn, as slow warps read those of one while others make those of the next.
  char* const words_base =
      kPInRegisters ? shared + (p_tile.base - q_tile.base) : reinterpret_cast<char*>(row_factors + kSpec.block_q);
  int kept_at = 0;
  const auto kept_words = [&] { return reinterpret_cast<uint32*>(words_base) + kept_at; };

  const Work work = find_tile<kSpec.varlen, kQueryTiles>(p.sizes, p.segments, kSpec.block_q, blockIdx.x);
  if (kSpec.varlen && work.batch < 0) return;
  const auto place = place_of<kSpec.varlen>(p.sizes, p.segments, work.batch);
  const Sizes& s = sizes_in(p.sizes, place);
  const Matrix q = head_of(p.q, place.q(), work.head, s.seqlen_q, s.head_dim);
  const Matrix k = head_of(p.k, place.k(), work.head / s.group, s.seqlen_k, s.head_dim);
  const Matrix v = head_of(p.v, place.k(), work.head / s.group, s.seqlen_k, s.head_dim_v);

  const Band band(s);
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, kSpec.bias != kNoBias, Mods>;
  const Change change = {p.score, s};
  const float slope = change.slope(work.batch, work.head);
  const Dropping dropping = {p.dropout, work.batch, work.head};
  const int first_row = work.tile * kSpec.block_q, warp = warp_index(), warp_row = warp * kSpec.rows_per_warp();
  const int out_row = warp % kSpec.out_warps_q * kOutRows, out_col = warp / kSpec.out_warps_q * kOutCols;
  const Range rows = {first_row, min(first_row + kSpec.block_q, s.seqlen_q) - 1};
  const Range seen_by_all = keys_of_all(band, rows);
  const Range tiles = tiles_of(band, first_row, kSpec.block_q, kSpec.block_k);
  static_assert(!kSpec.blocks || kMaskTile % kSpec.block_q == 0, "the rows have the same blocks");
  const auto shown = ShownTiles<kSpec.blocks, kSpec.block_k>::of(p.blocks, work.batch, work.head, first_row);
  const int first_tile = shown.down(tiles.last, tiles.first);

  Accumulator<kOutCols> out[kOutRowTiles];
#pragma unroll
  for (int t = 0; t < kOutRowTiles; ++t) out[t].clear();
  OnlineSoftmax<kRowTiles> softmax;
  constexpr bool kRelative = Change::kAny && !Change::kModded && kSpec.bias == kNoBias;
  const auto scale_out = [&] {
#pragma unroll
    for (int t = 0; t < kOutRowTiles; ++t) {
      const float* factors = row_factors + out_row + 16 * t;
      out[t].scale_rows(factors[out[t].row(0)], factors[out[t].row(1)]);
    }
  };
  const auto drop = [&](Accumulator<kSpec.block_k>(&weights)[kRowTiles]) {
    if constexpr (kSpec.dropout) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        KeptFragment<Rows::kQueries, kSpec.block_k> kept;
        kept.template read<kSpec.block_k>(kept_words(), warp_row + 16 * t, 0);
        kept.drop(weights[t]);
      }
    }
  };
  const auto hand_over = [&](int t, int half, float factor) {
    if (lane_index() % 4 == 0) row_factors[warp_row + 16 * t + out[0].row(half)] = factor;
  };

  if (first_tile >= tiles.first) {
    load_tile<kThreads, kAccess>(q_tile, q, first_row);
    load_tile<kThreads, kAccess>(k_tile(0), k, first_tile * kSpec.block_k);
    if constexpr (kSpec.stages == 2) load_tile<kThreads, kAccess>(v_tile(0), v, first_tile * kSpec.block_k);
    commit_copies();
  }
  InRegisters<kRowTiles, kSpec.q_in_registers ? kSteps : 0> q_operand;
  if constexpr (kSpec.q_in_registers) {
    wait_copies<0>();
    __syncthreads();
    q_operand.read(Left(q_tile, warp_row));
  }

  int stage = 0;
#pragma unroll 1
  for (int tile = first_tile; tile >= tiles.first; tile = shown.down(tile - 1, tiles.first)) {
    const auto is_last = [&] { return shown.is_first(tile, tiles.first); };
    const auto next = [&] { return shown.down(tile - 1, tiles.first); };
    if constexpr (kSpec.dropout) {
      kept_at ^= Dropping::words(kSpec.block_q, kSpec.block_k);
      dropping.decide<kSpec.block_q, kSpec.block_k, kThreads>(kept_words(), first_row, tile * kSpec.block_k);
    }
    wait_copies<0>();
    __syncthreads();  // this tile has landed, and every warp is done with the previous one
    if constexpr (kSpec.stages == 2) {
      if (!is_last()) {
        load_tile<kThreads, kAccess>(k_tile(stage ^ 1), k, next() * kSpec.block_k);
        load_tile<kThreads, kAccess>(v_tile(stage ^ 1), v, next() * kSpec.block_k);
      }
      commit_copies();
    }
    const auto load_values = [&](int i, int n) {
      if constexpr (kSpec.stages == 1) load_part<kThreads, kAccess>(v_tile(0), v, tile * kSpec.block_k, i, n);
    };

    Accumulator<kSpec.block_k> scores[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) scores[t].clear();
    const RightTransposed k_operand(k_tile(stage));
    if constexpr (kSpec.q_in_registers)
      product<T, kSteps>(scores, q_operand, k_operand, load_values);
    else
      product<T, kSteps>(scores, Left(q_tile, warp_row), k_operand, load_values);

    const int first_key = tile * kSpec.block_k;
    if constexpr (Change::kAny)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const int tile_row = first_row + warp_row + 16 * t;
        const Slant slant = change.slant(
            first_key, [&](int half) { return tile_row + scores[t].row(half) + place.diagonal(p.score); },
            [&](int) { return slope; });
        if constexpr (Change::kModded) {
          auto places = mod::Places<Rows::kQueries, kSpec.block_k>::from(s, work.batch, work.head, tile_row, first_key);
          places.whole = kSpec.blocks && !kSpec.mask && !shown.in_part(tile);
          if constexpr (kSpec.bias != kNoBias) {
            using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
            const Items bias = Items::of(p.bias, work.batch, work.head, tile_row, first_key, s);
            change.template apply_mods<1>(scores[t], slant, p.mods, places,
                                          [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)); });
          } else {
            change.apply_mods(scores[t], slant, p.mods, places, [](int, int) { return 0.f; });
          }
        } else if constexpr (kSpec.bias != kNoBias) {
          using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
          const Items bias = Items::of(p.bias, work.batch, work.head, tile_row, first_key, s);
          change.template apply<1>(scores[t], slant, [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)); });
        } else {
          change.apply(scores[t], slant, [&](int, int i) { return -softmax.origin(t, i / 2); });
        }
      }
    if (first_key < seen_by_all.first || first_key + kSpec.block_k - 1 > seen_by_all.last) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        scores[t].hide(first_row + warp_row + 16 * t, first_key, -kInfinity, [&](int row) { return band.keys(row); });
    }
    if constexpr (kSpec.mask)
      if (shown.in_part(tile))
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          const int tile_row = first_row + warp_row + 16 * t;
          hide_masked(scores[t], LogitItems<unsigned char>::of(p.mask, work.batch, work.head, tile_row, first_key, s));
        }

    if constexpr (kPInRegisters) {
      if constexpr (kSpec.stages == 1) {
        wait_copies<0>();
        __syncthreads();  // v has landed, and every warp is done with k
        if (!is_last()) load_tile<kThreads, kAccess>(k_tile(0), k, next() * kSpec.block_k);
        commit_copies();
      }
      softmax.template weigh<kRelative>(scores, change.scale_log2(), [&](const float (&factor)[kRowTiles][2]) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) out[t].scale_rows(factor[t][0], factor[t][1]);
      });
      drop(scores);
      product<T, kSpec.block_k / 16>(out, rounded<T>(scores), Right(v_tile(stage)));
    } else {
      float factors[kRowTiles][2];
      bool grew = false;
      softmax.template weigh<kRelative>(scores, change.scale_log2(), [&](const float (&factor)[kRowTiles][2]) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) factors[t][0] = factor[t][0], factors[t][1] = factor[t][1];
        grew = true;
      });
      drop(scores);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        p_tile.template store<T>(scores[t], warp_row + 16 * t, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) hand_over(t, half, grew ? factors[t][half] : 1.f);
      }
      wait_copies<0>();
      if (__syncthreads_or(grew)) scale_out();  // P is complete, v has landed, and every warp is done with k
      Matrix next_k = k;
      // There is none: zeros come instead, so that no branch parts the copies from the products among which they go.
      if (is_last()) next_k.cols = 0;
      const auto load_keys = [&](int i, int n) {
        load_part<kThreads, kAccess>(k_tile(0), next_k, next() * kSpec.block_k, i, n);
      };
      product<T, kSpec.block_k / 16>(out, Left(p_tile, out_row), Right(v_tile(0), out_col), load_keys);
    }
    if constexpr (kSpec.stages == 2) stage ^= 1;
  }

  if constexpr (!kPInRegisters) __syncthreads();  // every warp has read the factors of its last tile
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float inverse[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.finish(t, half, change.scale(), p.sink.of(work.head), inverse[half], lse[half]);
      if constexpr (kSpec.dropout) inverse[half] *= p.dropout.scale;
      const int row = first_row + warp_row + 16 * t + out[0].row(half);
      if (p.lse.data != nullptr && lane_index() % 4 == 0 && row < s.seqlen_q)
        p.lse.at(place.q(), work.head)[row * p.lse.row] = lse[half];
      if constexpr (!kPInRegisters) hand_over(t, half, inverse[half]);
    }
    if constexpr (kPInRegisters) out[t].scale_rows(inverse[0], inverse[1]);
  }
  if constexpr (!kPInRegisters) {
    __syncthreads();
    scale_out();
  }
  const Matrix target = head_of(p.out, place.q(), work.head, s.seqlen_q, s.head_dim_v, kSpec.float32_out ? 4 : 2);
  if constexpr (kSpec.float32_out || kAccess < 16) {
#pragma unroll
    for (int t = 0; t < kOutRowTiles; ++t) {
      if constexpr (kSpec.float32_out)
        store_direct<float, 4>(out[t], target, first_row + out_row + 16 * t, out_col);
      else
        store_direct<T, kAccess>(out[t], target, first_row + out_row + 16 * t, out_col);
    }
  } else {
    __syncthreads();  // every warp is done with q, whose place the tile takes
#pragma unroll
    for (int t = 0; t < kOutRowTiles; ++t) out_tile.template store<T>(out[t], out_row + 16 * t, out_col);
    __syncthreads();
    store_tile<kThreads>(out_tile, target, first_row);
  }
}

}  // namespace cupyflash
