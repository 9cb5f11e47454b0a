// Reads shards of parameters from a checkpoint or a folder.
#pragma once

#include <vector>

#include "mantissa/checkpoint/checkpoint_manifest.h"
#include "mantissa/checkpoint/tensor_reader.h"
#include "mantissa/nn/parameter.h"

namespace mantissa {

// Returns the box of a shard's chunk in the whole tensor.
Box box_of(const ParameterShard& shard, const ParameterShard::Chunk& chunk);

// Reads a master in fp32; padding becomes zeros. Returns nonfinite_read() of its first element that is NaN or Inf.
std::string read_shard(TensorReader& weights, const ParameterShard& shard, const Tensor& master);

// Divides a shard, or all parameters, into shards whose masters fit into some megabytes.
std::vector<ParameterShard> chunks_of(const ParameterShard& shard);
std::vector<ParameterShard> chunks_of(ParameterSet& parameters);

}  // namespace mantissa
