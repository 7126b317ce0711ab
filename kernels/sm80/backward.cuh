// Gradients of attention with P recomputed from the log-sum-exp (FlashAttention-2, arXiv 2307.08691, Algorithm 2).
// A block owns block_k keys of one key head and goes through the queries that see them, for every query head of the
// group, so that dk and dv are summed in registers. Scores are kept transposed (keys x queries):
//   S^T = k q^T    P^T = exp(scale S^T - lse)    dP^T = v dout^T    dS^T = P^T (dP^T - delta)
//   dv += P^T dout    dk += dS^T q    dq += dS k      (dq in float32, reduced in global memory)
// With dropout, P^T in dv and dP^T lack what is dropped and are scaled; P^T in dS^T is whole.
#pragma once

#include "any/dropout.cuh"
#include "any/logits.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/spec.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

// Base-2 lse and delta of the queries of one tile, in shared memory. A row that does not exist, or whose lse is
// -inf, gets lse = +inf, which makes its P exactly 0.
template <int kRows, bool kHuge>
struct Statistics {
  float* lse;  // kRows, then kRows of delta

  struct Row {
    float lse, delta;
  };
  __device__ __forceinline__ static Row fetch(const BackwardParams& p, const Sizes& s, int batch, int head, int first) {
    const int row = first + threadIdx.x;
    if (threadIdx.x >= kRows || row >= s.seqlen_q) return {kInfinity, 0.f};
    const float lse = p.lse.at(batch, head)[row * p.lse.row];
    return {lse_in_base_2<kHuge>(lse), p.delta.at(batch, head)[row * p.delta.row]};
  }
  __device__ __forceinline__ void put(Row row) const {
    if (threadIdx.x < kRows) lse[threadIdx.x] = row.lse, lse[kRows + threadIdx.x] = row.delta;
  }
  __device__ __forceinline__ float2 lse_of(int col) const { return *reinterpret_cast<const float2*>(lse + col); }
  __device__ __forceinline__ float2 delta_of(int col) const {
    return *reinterpret_cast<const float2*>(lse + kRows + col);
  }
};

// Deterministic: the blocks of one head add to a query tile in the order of their keys.
__device__ __forceinline__ void wait_for_turn(const uint32* counter, uint32 mine) {
  if (threadIdx.x == 0)
    while (load_acquire(counter) != mine) __nanosleep(64);
  __syncthreads();
}
__device__ __forceinline__ void pass_turn_on(uint32* counter) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) add_release(counter, 1);
}

template <class T, BackwardSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(32 * kSpec.warps, kSpec.blocks_per_sm)
    backward(const __grid_constant__ Modified<BackwardParams, Mods> p) {
  constexpr int kThreads = 32 * kSpec.warps, kAccess = kSpec.access, kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k;
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  using KTile = Tile<kBlockK, kDim>;
  using VTile = Tile<kBlockK, kDimV>;
  using QTile = Tile<kBlockQ, kDim>;
  using DoutTile = Tile<kBlockQ, kDimV>;
  using ScoreTile = Tile<kBlockK, kBlockQ>;  // P^T and dS^T

  // What a warp owns of S^T and dP^T, of dk and dv, and of dq.
  constexpr int kScoreRows = kBlockK / kSpec.score_warps_k, kScoreCols = kBlockQ * kSpec.score_warps_k / kSpec.warps;
  constexpr int kGradRows = kBlockK / kSpec.grad_warps_k, kGradCols = kDim * kSpec.grad_warps_k / kSpec.warps;
  constexpr int kGradColsV = kDimV * kSpec.grad_warps_k / kSpec.warps;
  constexpr int kDqRows = kBlockQ / kSpec.dq_warps_q, kDqCols = kDim * kSpec.dq_warps_q / kSpec.warps;
  const int warp = warp_index();
  const int score_row = warp % kSpec.score_warps_k * kScoreRows, score_col = warp / kSpec.score_warps_k * kScoreCols;
  const int grad_row = warp % kSpec.grad_warps_k * kGradRows;
  const int grad_col = warp / kSpec.grad_warps_k * kGradCols, grad_col_v = warp / kSpec.grad_warps_k * kGradColsV;
  const int dq_row = warp % kSpec.dq_warps_q * kDqRows, dq_col = warp / kSpec.dq_warps_q * kDqCols;

  extern __shared__ __align__(1024) char shared[];
  const KTile k_tile(shared_address(shared));
  const VTile v_tile(k_tile.base + KTile::kBytes);
  const uint32 q_base = v_tile.base + VTile::kBytes, dout_base = q_base + kSpec.stages * QTile::kBytes;
  const ScoreTile ds_tile(dout_base + kSpec.stages * DoutTile::kBytes);
  const ScoreTile p_tile(ds_tile.base + (kSpec.p_in_registers() ? 0 : ScoreTile::kBytes));
  float* const statistics_base = reinterpret_cast<float*>(shared + (p_tile.base + ScoreTile::kBytes - k_tile.base));
  uint32* const kept_words = reinterpret_cast<uint32*>(statistics_base + kSpec.stages * 2 * kBlockQ);  // of one tile
  const auto q_tile = [&](int stage) { return QTile(q_base + stage * QTile::kBytes); };
  const auto dout_tile = [&](int stage) { return DoutTile(dout_base + stage * DoutTile::kBytes); };
  using TileStatistics = Statistics<kBlockQ, kSpec.bias != kNoBias || Mods::kScore>;
  const auto statistics = [&](int stage) { return TileStatistics{statistics_base + stage * 2 * kBlockQ}; };

  uint32 index = blockIdx.x;
  if constexpr (kSpec.deterministic) {  // a block may only wait for blocks that have started
    __shared__ uint32 ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(p.turn, 1u);
    __syncthreads();
    index = ticket;
  }
  const Work work = find_tile<kSpec.varlen, kKeyTiles>(p.sizes, p.segments, kBlockK, index);
  if (kSpec.varlen && work.batch < 0) return;
  const auto place = place_of<kSpec.varlen>(p.sizes, p.segments, work.batch);
  const Sizes& s = sizes_in(p.sizes, place);

  const Band band(s);
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, kSpec.bias != kNoBias || kSpec.mask, Mods>;
  const Change change = {p.score, s};
  const int first_key = work.tile * kBlockK;
  const Range keys = {first_key, min(first_key + kBlockK, s.seqlen_k) - 1};
  const Range seen = queries_of_any(band, keys), seen_by_all = queries_of_all(band, keys);
  const int first_tile = seen.first / kBlockQ,
            tiles = seen.last < seen.first ? 0 : seen.last / kBlockQ - first_tile + 1;

  const int q_tiles = (s.seqlen_q + kBlockQ - 1) / kBlockQ, first_head = work.head * s.group;
  const auto of_queries = [&](int head, int first_query) {  // the key tiles that they see
    return ShownTiles<kSpec.blocks, kBlockK>::of(p.blocks, work.batch, head, first_query);
  };
  const auto load_queries = [&](int stage, int head, int tile) {
    load_tile<kThreads, kAccess>(q_tile(stage), head_of(p.q, place.q(), head, s.seqlen_q, s.head_dim), tile * kBlockQ);
    load_tile<kThreads, kAccess>(dout_tile(stage), head_of(p.dout, place.q(), head, s.seqlen_q, s.head_dim_v),
                                 tile * kBlockQ);
  };

  Accumulator<kGradCols> dk[kGradRows / 16];
  Accumulator<kGradColsV> dv[kGradRows / 16];
#pragma unroll
  for (int t = 0; t < kGradRows / 16; ++t) dk[t].clear(), dv[t].clear();

  int remaining = tiles * s.group, stage = 0, tile = first_tile, head = first_head;
  static_assert(!kSpec.blocks || kMaskTile % kBlockK == 0, "the keys have the same blocks");
  QueryTiles<kSpec.blocks, kBlockQ> shown;
  if constexpr (kSpec.blocks) {
    const Range range = {first_tile, first_tile + tiles - 1};
    shown.begin(p.key_blocks, range, work.batch, first_key, first_head, s.group);
    remaining = shown.left(), tile = shown.tile, head = shown.head;
  }
  if (remaining > 0) {
    load_tile<kThreads, kAccess>(k_tile, head_of(p.k, place.k(), work.head, s.seqlen_k, s.head_dim), first_key);
    load_tile<kThreads, kAccess>(v_tile, head_of(p.v, place.k(), work.head, s.seqlen_k, s.head_dim_v), first_key);
    load_queries(0, head, tile);
    commit_copies();
    statistics(0).put(TileStatistics::fetch(p, s, place.q(), head, tile * kBlockQ));
  }

#pragma unroll 1
  for (; remaining > 0; --remaining) {
    const bool last_of_head = tile == first_tile + tiles - 1;
    int next_tile = last_of_head ? first_tile : tile + 1, next_head = last_of_head ? head + 1 : head;
    if constexpr (kSpec.blocks) {
      shown.next(p.key_blocks);
      next_tile = shown.tile, next_head = shown.head;
      if (shown.left()) remaining = 2;  // or more
    }
    const int next_stage = kSpec.stages == 2 ? stage ^ 1 : 0;
    if constexpr (kSpec.dropout)  // the barrier behind dS stands between the reads of the tile before and these
      Dropping{p.dropout, work.batch, head}.decide<kBlockQ, kBlockK, kThreads>(kept_words, tile * kBlockQ, first_key);
    wait_copies<0>();
    __syncthreads();  // this tile has landed, and every warp is done with the previous one and with dS
    if (kSpec.stages == 2 && remaining > 1) load_queries(next_stage, next_head, next_tile);
    commit_copies();

    Accumulator<kScoreCols> prob[kScoreRows / 16];
#pragma unroll
    for (int t = 0; t < kScoreRows / 16; ++t) prob[t].clear();
    product<T, kDim / 16>(prob, Left(k_tile, score_row), RightTransposed(q_tile(stage), score_col));

    const int first_query = tile * kBlockQ;
    const float slope = change.slope(work.batch, head);
    const auto kept = [&](int t) {
      KeptFragment<Rows::kKeys, kScoreCols> fragment;
      fragment.template read<kBlockK>(kept_words, score_row + 16 * t, score_col);
      return fragment;
    };
    Weights<kScoreCols> weights[kScoreRows / 16];
    const bool keys_exist = first_key + kBlockK <= s.seqlen_k;
    const bool masked = !keys_exist || first_query < seen_by_all.first || first_query + kBlockQ - 1 > seen_by_all.last;
    const auto visible = [&](int key) { return band.queries(key); };
    const bool in_part = of_queries(head, first_query).in_part(work.tile);
    if constexpr (Change::kAny) {
#pragma unroll
      for (int t = 0; t < kScoreRows / 16; ++t) {
        const int first_row = first_key + score_row + 16 * t;
        const Slant slant = change.slant(
            first_query + score_col, [&](int half) { return first_row + prob[t].row(half) - place.diagonal(p.score); },
            [&](int) { return slope; });
        const auto minus_lse = [&](int j, int i) {
          const float2 lse = statistics(stage).lse_of(score_col + 8 * j + prob[t].col());
          return i % 2 ? -lse.y : -lse.x;
        };
        if constexpr (Change::kModded) {
          auto places =
              mod::Places<Rows::kKeys, kScoreCols>::from(s, work.batch, head, first_row, first_query + score_col);
          places.whole = kSpec.blocks && !kSpec.mask && !in_part;
          if constexpr (kSpec.bias != kNoBias) {
            using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
            const Items bias = Items::of_transposed(p.bias, work.batch, head, first_row, first_query + score_col, s);
            change.template weigh_mods<T, false, 1>(
                prob[t], weights[t], slant, p.mods, places,
                [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)); }, minus_lse);
          } else {
            change.template weigh_mods<T, false>(
                prob[t], weights[t], slant, p.mods, places, [](int, int) { return 0.f; }, minus_lse);
          }
        } else if constexpr (kSpec.bias != kNoBias) {
          using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
          const Items bias = Items::of_transposed(p.bias, work.batch, head, first_row, first_query + score_col, s);
          change.template weigh<T, false, 1>(prob[t], weights[t], slant, [&](int j, int i) {
            return minus_lse(j, i) + bias_log2<kSpec.bias>(bias(j, i));
          });
        } else {
          change.template weigh<T, false>(prob[t], weights[t], slant, minus_lse);
        }
        if (masked) change.hide(prob[t], weights[t], first_row, first_query + score_col, visible);
        if constexpr (kSpec.mask)
          if (in_part)
            change.hide_masked(prob[t], weights[t],
                               LogitItems<unsigned char>::of_transposed(p.mask, work.batch, head, first_row,
                                                                        first_query + score_col, s));
        if constexpr (kSpec.dropout && Change::kDerived) kept(t).drop(weights[t].prob);
        if constexpr (Change::kDerived && !kSpec.p_in_registers())
          p_tile.store(weights[t].prob, score_row + 16 * t, score_col);
      }
    } else {
      if (masked) {
#pragma unroll
        for (int t = 0; t < kScoreRows / 16; ++t)
          prob[t].hide(first_key + score_row + 16 * t, first_query + score_col, hidden_score(s), visible);
      }
#pragma unroll
      for (int j = 0; j < kScoreCols / 8; ++j) {
        const float2 lse = statistics(stage).lse_of(score_col + 8 * j + prob[0].col());
#pragma unroll
        for (int t = 0; t < kScoreRows / 16; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            prob[t].x[j][i] = exp2f(fmaf(prob[t].x[j][i], s.scale_log2, i % 2 ? -lse.y : -lse.x));
      }
    }
    Accumulator<kScoreCols> ds[kScoreRows / 16];
#pragma unroll
    for (int t = 0; t < kScoreRows / 16; ++t) ds[t].clear();
    product<T, kDimV / 16>(ds, Left(v_tile, score_row), RightTransposed(dout_tile(stage), score_col));
    if constexpr (kSpec.dropout)
#pragma unroll
      for (int t = 0; t < kScoreRows / 16; ++t) kept(t).drop(ds[t]);
#pragma unroll
    for (int j = 0; j < kScoreCols / 8; ++j) {
      const float2 delta = statistics(stage).delta_of(score_col + 8 * j + prob[0].col());
#pragma unroll
      for (int t = 0; t < kScoreRows / 16; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float of_row = i % 2 ? delta.y : delta.x;
          if constexpr (kSpec.dropout)
            ds[t].x[j][i] = prob[t].x[j][i] * fmaf(ds[t].x[j][i], p.dropout.scale, -of_row);
          else
            ds[t].x[j][i] = prob[t].x[j][i] * (ds[t].x[j][i] - of_row);
        }
    }
#pragma unroll
    for (int t = 0; t < kScoreRows / 16; ++t) {
      ds_tile.template store<T>(ds[t], score_row + 16 * t, score_col);
      if constexpr (kSpec.dropout && !Change::kDerived) kept(t).drop(prob[t]);
    }

    if constexpr (kSpec.p_in_registers()) {
      const auto held = [&](uint32(&a)[4], int t, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = weights[t].prob[step][i];
      };
      if constexpr (Change::kDerived)
        product<T, kBlockQ / 16>(dv, held, Right(dout_tile(stage), grad_col_v));
      else
        product<T, kBlockQ / 16>(dv, rounded<T>(prob), Right(dout_tile(stage), grad_col_v));
      product<T, kBlockQ / 16>(dk, rounded<T>(ds), Right(q_tile(stage), grad_col));
      __syncthreads();  // dS is complete
    } else {
      if constexpr (!Change::kDerived)
#pragma unroll
        for (int t = 0; t < kScoreRows / 16; ++t) p_tile.template store<T>(prob[t], score_row + 16 * t, score_col);
      __syncthreads();  // P and dS are complete
      product<T, kBlockQ / 16>(dv, Left(p_tile, grad_row), Right(dout_tile(stage), grad_col_v));
      product<T, kBlockQ / 16>(dk, Left(ds_tile, grad_row), Right(q_tile(stage), grad_col));
    }
    typename TileStatistics::Row next_row = {kInfinity, 0.f};  // on its way while dq is computed
    if (remaining > 1) next_row = TileStatistics::fetch(p, s, place.q(), next_head, next_tile * kBlockQ);

    Accumulator<kDqCols> dq[kDqRows / 16];
#pragma unroll
    for (int t = 0; t < kDqRows / 16; ++t) dq[t].clear();
    product<T, kBlockK / 16>(dq, LeftTransposed(ds_tile, dq_row), Right(k_tile, dq_col));

    const int64 first_block = place.block(s, head);
    const auto turn = [&] {
      return p.turn + 1 +
             (kSpec.varlen ? place.block(s, opaque(head)) : (int64(work.batch) * s.heads_q + opaque(head)) * q_tiles) +
             opaque(tile);
    };
    if constexpr (kSpec.deterministic) {
      const Range rows = {first_query, min(first_query + kBlockQ, s.seqlen_q) - 1};
      const int before = keys_of_any(band, rows).first / kBlockK;
      wait_for_turn(turn(), of_queries(head, first_query).count({before, work.tile - 1}));
    }
    const int q_blocks = (s.seqlen_q + 15) / 16;
#pragma unroll
    for (int t = 0; t < kDqRows / 16; ++t) {
      const int block = (first_query + dq_row) / 16 + t;
      float* target = p.dq_sum + ((first_block + block) * (kDim / 8) + dq_col / 8) * 128 + 4 * lane_index();
      if (block < q_blocks) {
#pragma unroll
        for (int j = 0; j < kDqCols / 8; ++j) reduce_add(target + 128 * j, dq[t].x[j]);
      }
    }
    if constexpr (kSpec.deterministic) pass_turn_on(turn());

    if constexpr (kSpec.stages == 1) {
      __syncthreads();  // every warp is done with the tile
      if (remaining > 1) load_queries(0, next_head, next_tile);
      commit_copies();
    }
    statistics(next_stage).put(next_row);
    stage = next_stage, tile = next_tile, head = next_head;
  }

  const Matrix dk_target = head_of(p.dk, place.k(), work.head, s.seqlen_k, s.head_dim);
  const Matrix dv_target = head_of(p.dv, place.k(), work.head, s.seqlen_k, s.head_dim_v);
  __syncthreads();  // every warp is done with k and v, whose places dk and dv take
#pragma unroll
  for (int t = 0; t < kGradRows / 16; ++t) {
    dk[t].scale_rows(s.scale, s.scale);
    if constexpr (kSpec.dropout) dv[t].scale_rows(p.dropout.scale, p.dropout.scale);
    if constexpr (kAccess < 16) {
      store_direct<T, kAccess>(dk[t], dk_target, first_key + grad_row + 16 * t, grad_col);
      store_direct<T, kAccess>(dv[t], dv_target, first_key + grad_row + 16 * t, grad_col_v);
    } else {
      k_tile.template store<T>(dk[t], grad_row + 16 * t, grad_col);
      v_tile.template store<T>(dv[t], grad_row + 16 * t, grad_col_v);
    }
  }
  if constexpr (kAccess == 16) {
    __syncthreads();
    store_tile<kThreads>(k_tile, dk_target, first_key);
    store_tile<kThreads>(v_tile, dv_target, first_key);
  }
}

}  // namespace cupyflash
