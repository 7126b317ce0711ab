// The argument of the kernels that multiply halves of float32; NumPy twins in cupyflash/structs.py.
#pragma once

#include "precise/params.cuh"
#include "sm90/ptx.cuh"

namespace cupyflash {

struct HopperPreciseForwardParams : HalvesParams<false> {
  TensorMap q_map, k_map, v_map;  // of the halves
  Order order;
};

struct HopperPreciseBackwardParams : HalvesParams<true> {
  TensorMap q_map, k_map, v_map, dout_map;
};

}  // namespace cupyflash
