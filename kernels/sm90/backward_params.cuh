// The argument of the backward kernels that the copy engine feeds; NumPy twin in cupyflash/structs.py.
#pragma once

#include "any/mask_words.cuh"
#include "core/params.cuh"
#include "sm90/logits.cuh"

namespace cupyflash {

// The kernels around the backward take as much of it as they know: the first part.
struct HopperBackwardParams : BackwardParams {
  TensorMap q_map, k_map, v_map, dout_map;
  Order keys, queries;  // tiles of keys for dk and dv, and of queries for a kernel of dq
  int rotated;          // the tiles of keys of a head begin with different queries
  LogitMap bias_map, mask_map;
  MaskWords words;  // of keys by queries
};

}  // namespace cupyflash
