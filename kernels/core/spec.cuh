// What is fixed at compile time: the C++ twins of cupyflash/spec.py, field by field.
#pragma once

namespace cupyflash {

struct ForwardSpec {
  int head_dim, head_dim_v;  // padded: multiples of 16
  int block_q, block_k;      // rows and keys of one tile
  int warps;                 // each owns block_q / warps rows of S
  int out_warps_q;           // warps along the queries in out; the others split the head dim
  int stages;                // K and V tiles in flight: 1 or 2
  int blocks_per_sm;         // promised to the compiler, bounds the registers
  bool q_in_registers;
  bool float32_out;
  int access;  // bytes of one global load or store: 16, 8, 4 or 2
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  bool blocks;
  bool varlen;

  __device__ constexpr int rows_per_warp() const { return block_q / warps; }
  // P stays in registers where the warp that made it is the one that needs it.
  __device__ constexpr bool p_in_registers() const { return out_warps_q == warps; }
};

struct HopperForwardSpec {
  int head_dim, head_dim_v;
  int block_k;
  int cluster;  // blocks that share the tiles of K and V
  int teams;    // each computes tiles of its own
  int groups;   // warpgroups of a team, 64 rows each
  int q_slots;  // tiles of Q, 64 rows each, in flight; if staged, each is the place of its out later
  int slots;    // tiles of K or V in flight, of a team
  bool packed;  // the rows of a tile are those of all heads that share a key head, query by query
  bool float32_out;
  int access;  // of the stores of out; 16: by the copy engine
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  int logit_slots;  // tiles of bias in flight, of a group
  bool blocks;
  bool bounded;  // by softcap, so that no maximum is needed
  bool varlen;
  bool
      steady;  // behind the first full tile of a row its sum takes the place of its maximum; a flag says if that failed
  bool only_if;  // nothing is computed where the flag is not set

  __device__ constexpr bool staged() const { return access == 16; }
  // One more warpgroup copies, and gives what it does not need of its registers to those that compute.
  __device__ constexpr int threads() const { return 128 * (teams * groups + 1); }
  __device__ constexpr int registers() const { return teams * groups == 2 ? 232 : teams * groups == 3 ? 160 : 112; }
  __device__ constexpr int copying_registers() const { return teams * groups == 2 ? 40 : 32; }
};

struct BackwardSpec {
  int head_dim, head_dim_v;
  int block_q, block_k;
  int warps;
  int score_warps_k;  // warps along the keys in S and dP; the others split the queries
  int grad_warps_k;   // warps along the keys in dK and dV; the others split the head dim
  int dq_warps_q;     // warps along the queries in dQ; the others split the head dim
  int stages;         // Q and dO tiles in flight: 1 or 2
  int blocks_per_sm;
  bool deterministic;
  int access;
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  bool blocks;
  bool varlen;

  // P and dS stay in registers where the warp that made them is the one that needs them.
  __device__ constexpr bool p_in_registers() const { return score_warps_k == warps && grad_warps_k == warps; }
};

struct HopperBackwardSpec {
  int head_dim, head_dim_v;  // 64 or 128; 64, 96 or 128
  int block_q;
  int groups;     // warpgroups that compute, 64 keys each
  int stages;     // tiles of q and dout in flight
  int key_slots;  // tiles of k and v in flight; 2: the products of one tile of keys go over into those of the next
  bool deterministic;
  int access;  // of the stores of dk and dv
  bool softcap, alibi, dropout;
  int bias;         // BiasType
  int logit_slots;  // tiles of it in flight
  bool mask;
  bool blocks;
  bool varlen;

  __device__ constexpr int block_k() const { return 64 * groups; }
  __device__ constexpr int threads() const { return 128 * (groups + 1); }
  __device__ constexpr int registers() const { return 240; }
  __device__ constexpr int copying_registers() const { return 24; }
};

struct HopperKeysSpec {      // of the kernel of dk and dv
  int head_dim, head_dim_v;  // 64, 128, 192 or 256
  int kept;                  // columns of k and v, in units of 64, that stay in registers
  int slots, slots_dout;     // tiles of q and of dout in flight
  int access;                // of the stores of dk and dv
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  int logit_slots;  // tiles of bias and mask in flight
  bool blocks;
  bool varlen;

  __device__ constexpr int threads() const { return 384; }
  __device__ constexpr int registers() const { return logit_slots > 0 ? 232 : 240; }
  __device__ constexpr int copying_registers() const { return logit_slots > 0 ? 40 : 24; }
};

struct HopperQueriesSpec {   // of the kernel of dq
  int head_dim, head_dim_v;  // 64, 128, 192 or 256
  int slots, slots_v;        // tiles of k and of v in flight
  int access;                // of the stores of dq
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  int logit_slots;  // tiles of bias and mask in flight
  bool blocks;
  bool dbias;  // stores dS: no element of dbias is a sum
  bool varlen;

  __device__ constexpr int threads() const { return 384; }
  __device__ constexpr int registers() const { return logit_slots > 0 ? 232 : 240; }
  __device__ constexpr int copying_registers() const { return logit_slots > 0 ? 40 : 24; }
};

struct ModGradientSpec {  // of the kernel of dscore_mod
  int head_dim, head_dim_v;
  int block_k;
  int warps;  // 16 queries each
  int access;
  int mods_at;  // bytes of the struct before the functions
  bool packed;  // delta as `statistic_of` says
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  bool blocks;
};

struct MaskWordsSpec {  // of the kernel that puts a mask into the order of accumulators
  int warps;
  bool along_rows;  // neighbours in memory are rows, not columns
};

struct SegmentsSpec {  // of the kernel that finds the tiles of packed sequences
  int warps;           // 32: a scan over them is one of a warp
};

struct SinkSpec {  // of the kernel of dsink
  int warps;       // 32, so that one of them adds what all have summed
  bool packed;     // delta as `statistic_of` says
  bool varlen;
};

struct BiasGradientSpec {  // of the kernel of dbias
  int head_dim, head_dim_v;
  int block_q, block_k;
  int warps;
  int warps_q;  // warps along the queries; the others split the keys
  int blocks_per_sm;
  bool summed;  // a tile of dbias is the sum of several tiles
  bool packed;  // delta as `statistic_of` says
  int access;
  bool softcap, alibi, dropout;
  int bias;  // BiasType
  bool mask;
  bool blocks;
  int mods_at;  // bytes of the struct before functions of the user
};

struct HopperBiasGradientSpec {  // of Hopper's
  int head_dim, head_dim_v;      // 64 or 128
  int cluster_q, cluster_k;      // blocks of a cluster along the queries and the keys, 128 of each
  int slots;                     // tiles of q and k, or of dout and v, in flight
  int box_k;                     // keys that come with one copy
  bool packed;                   // delta and lse as `statistic_of` says
  bool softcap, alibi;
  int bias;  // BiasType
  bool mask;
  int logit_slots;  // tiles of bias and mask in flight, of a group

  __device__ constexpr int cluster() const { return cluster_q * cluster_k; }
  __device__ constexpr int threads() const { return 384; }
  __device__ constexpr int registers() const { return 232; }
  __device__ constexpr int copying_registers() const { return 40; }
};

struct BiasSumSpec {  // of the kernel that adds its parts
  int warps;
  int bias;
};

struct PrepareSpec {
  int head_dim, head_dim_v;
  bool packed;  // delta and lse as `statistic_of` says
  bool float32_out;
  int access;
  bool varlen;

  // A row is read by 16 bytes a lane, and 64 lanes read neighbouring heads: whole kilobytes.
  __device__ constexpr int lanes() const { return head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32; }
  __device__ constexpr int heads() const { return 64 / lanes(); }
  __device__ constexpr int finished_cols() const { return head_dim % 64 == 0 ? 64 : 32; }  // of a warp afterwards
};

struct PreciseForwardSpec {
  int head_dim, head_dim_v;  // multiples of 32
  int item;                  // bytes of an element
  int block_q, block_k;
  int row_tiles;  // of 16 rows, that a warp owns
  int parts;      // of the columns of out: as many warps own the same rows, and compute their scores each
  int blocks_per_sm;
  int steps;     // of 8 columns, that are multiplied together
  int products;  // 3, or 1 in plain TF32 and in float64
  int access;    // bytes of one global load or store: 16, 8 or 4

  __device__ constexpr int warps() const { return block_q / (16 * row_tiles) * parts; }
};

struct PreciseKeysSpec {  // of the kernel of dk and dv; a warp owns 16 keys
  int head_dim, head_dim_v;
  int item;
  int block_q, block_k;
  int parts;   // of the columns of dk and dv
  int stages;  // tiles of q and dout in flight: 1 or 2
  int blocks_per_sm;
  int steps;  // of 8 columns, that are multiplied together
  int products;
  int access;

  __device__ constexpr int warps() const { return block_k / 16 * parts; }
};

struct PreciseQueriesSpec {  // of the kernel of dq; a warp owns 16 queries
  int head_dim, head_dim_v;
  int item;
  int block_q, block_k;
  int parts;   // of the columns of dq
  int stages;  // tiles of k and v in flight: 1 or 2
  int blocks_per_sm;
  int steps;  // of 8 columns, that are multiplied together
  int products;
  int access;

  __device__ constexpr int warps() const { return block_q / 16 * parts; }
};

struct PreciseDeltaSpec {  // of the kernel before both; a warp owns a row
  int warps;
  int item;
};

struct SplitSpec {  // of the kernels that split float32 into two float16
  int warps;
  int blocks_per_sm;
  int access;  // bytes of one load: 16, 8 or 4
  bool backward;

  __device__ constexpr int operands() const { return backward ? 4 : 3; }
};

struct HopperPreciseSpec {   // of Hopper's forward of float32
  int head_dim, head_dim_v;  // of a product: multiples of 16, and 64, 96 or 128
  int block_k;
  int groups;  // warpgroups, 64 rows each
  int slots;   // tiles of K, and of V, in flight
  int access;  // of the stores of out

  __device__ constexpr int threads() const { return 128 * (groups + 1); }
  __device__ constexpr int registers() const { return groups == 2 ? 240 : 160; }
  __device__ constexpr int copying_registers() const { return groups == 2 ? 24 : 32; }
};

struct HopperPreciseKeysSpec {  // of its kernel of dk and dv of float32
  int head_dim, head_dim_v;     // of a product: multiples of 32 up to 128
  int groups;                   // warpgroups that compute, 64 keys each
  int slots, slots_dout;        // tiles of q and of dout in flight
  int access;                   // of the stores of dk and dv

  __device__ constexpr int threads() const { return 128 * (groups + 1); }
  __device__ constexpr int registers() const { return groups == 2 ? 240 : 160; }
  __device__ constexpr int copying_registers() const { return groups == 2 ? 24 : 32; }
};

struct HopperPreciseQueriesSpec {  // of that of dq
  int head_dim, head_dim_v;
  int groups;          // 64 queries each
  int slots, slots_v;  // tiles of k and of v in flight
  int access;          // of the stores of dq

  __device__ constexpr int threads() const { return 128 * (groups + 1); }
  __device__ constexpr int registers() const { return groups == 2 ? 240 : 160; }
  __device__ constexpr int copying_registers() const { return groups == 2 ? 24 : 32; }
};

// Hopper: whether a block starts with the registers that its roles share later. Else the last to take its part waits
// forever.
template <class HopperSpec>
__device__ constexpr bool registers_suffice(HopperSpec spec) {
  const int warpgroups = spec.threads() / 128, of_a_thread = 65536 / spec.threads() / 8 * 8;
  return spec.copying_registers() + (warpgroups - 1) * spec.registers() <= warpgroups * of_a_thread;
}

}  // namespace cupyflash
