// Operands of the benches: tensors of normal data, and workloads that call one kernel on them.
#pragma once

#include <vector>

#include "mantissa/backend/functions.h"
#include "tools/bench/bench_harness.h"

namespace mantissa::tools {

class BenchOperands {
 public:
  BenchOperands(Backend& device, Dtype dtype) : device_(device), dtype_(dtype) {}

  Tensor values(Shape shape) { return normal(dtype_, shape); }
  Tensor stats(Shape shape) { return normal(Dtype::f32, shape); }
  Tensor ids(int64_t count, int64_t limit) {
    std::vector<int32_t> data(static_cast<size_t>(count));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<int32_t>(random_words({.seed = 2, .stream = RngStream::test}, what_, i)[0] % static_cast<uint64_t>(limit));
    }
    ++what_;
    return from_host(device_, Dtype::i32, {count}, data.data());
  }

  // One call.
  template <class Kernel>
  Workload workload(const char* bench, std::string shape, const Kernel& k) const {
    Workload out{.bench = bench, .shape = std::move(shape), .dtype = dtype_, .run = [device = &device_, k] { device->run(k); }};
    out.bytes = static_cast<double>(bytes_moved(k, k.contract()));
    return out;
  }

 private:
  Tensor normal(Dtype dtype, Shape shape) {
    Tensor out = empty(device_, Dtype::f32, shape);
    device_.run(RandomNormal{.out = out, .key = {.seed = 1, .stream = RngStream::test}, .what = what_++, .first_index = 0, .std = 1.0});
    return converted(out, dtype);
  }

  Backend& device_;
  Dtype dtype_;
  uint32_t what_ = 0;
};

}  // namespace mantissa::tools
