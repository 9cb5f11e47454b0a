// Parts of parameters in what they are read from.
#pragma once

#include <vector>

#include "mantissa/checkpoint/checkpoint_manifest.h"
#include "mantissa/checkpoint/weight_source.h"
#include "mantissa/nn/parameter.h"

namespace mantissa {

// Where a slab of a part lies in the whole tensor.
Box box_of(const Part& part, const Part::Slab& slab);

// A master in fp32; rows of padding become zeros.
void read_part(WeightSource& weights, const Part& part, const Tensor& master);

// All of the parameters, in parts whose masters fit into some megabytes.
std::vector<Part> slabs_of(ParameterSet& parameters);

}  // namespace mantissa
