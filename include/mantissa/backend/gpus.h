// The GPUs of this host, as this build finds them.
#pragma once

#include <string>

namespace mantissa {

struct Gpus {
  bool usable;           // make_backend("cuda") opens one
  std::string text;      // driver, runtime and each GPU, or what is missing
  int architecture = 0;  // ten times the compute capability of the first GPU
};
Gpus find_gpus();

// The GPU that make_backend("cuda") opens in this process, by its number on this host; 0 at first. Ranks of one host take one each.
void set_default_gpu(int index);
int default_gpu();

}  // namespace mantissa
