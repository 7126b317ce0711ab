// What is fixed at compile time: the C++ twins of cupyflash/spec.py, field by field.
#pragma once

namespace cupyflash {

struct ForwardSpec {
  int head_dim, head_dim_v;  // padded: multiples of 16
  int block_q, block_k;      // rows and keys of one tile
  int warps;                 // each owns block_q / warps rows
  int stages;                // K and V tiles in flight: 1 or 2
  int blocks_per_sm;         // promised to the compiler, bounds the registers
  bool q_in_registers;
  bool float32_out;
  int access;  // bytes of one global load or store: 16, 8, 4 or 2

  __device__ constexpr int rows_per_warp() const { return block_q / warps; }
};

struct HopperForwardSpec {
  int head_dim, head_dim_v;
  int block_k;
  int groups;      // warpgroups that compute, 64 queries each
  int stages;      // K and V tiles in flight
  bool ping_pong;  // the warpgroups take turns at the tensor cores
  bool float32_out;
  int access;  // of the stores of out
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

  // P and dS stay in registers where the warp that made them is the one that needs them.
  __device__ constexpr bool p_in_registers() const { return score_warps_k == warps && grad_warps_k == warps; }
};

struct HopperBackwardSpec {
  int head_dim, head_dim_v;  // 64 or 128
  int block_q, block_k;      // block_k = 64 * groups
  int groups;                // warpgroups that compute, 64 keys each
  int stages;                // tiles of q and dout in flight
  int access;                // of the stores of dk and dv
};

struct PrepareSpec {
  int head_dim, head_dim_v;
  bool float32_out;
  int access;
};

}  // namespace cupyflash
