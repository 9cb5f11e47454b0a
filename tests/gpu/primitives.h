// Functions that device code is written with (gpu/device.h), each alone: nvcc compiles primitives.cu for a GPU, g++ for the executor of the
// host.
#pragma once

#include <string>
#include <vector>

namespace mantissa::gpu {

struct Primitive {
  const char* name;
  std::string (*difference)();  // runs it; empty: as it should be, else what is not
};
const std::vector<Primitive>& primitives();

}  // namespace mantissa::gpu
