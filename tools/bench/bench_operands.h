// Operands of the benches: tensors of normal data, and workloads that call one kernel on them.
#pragma once

#include <map>
#include <vector>

#include "mantissa/backend/functions.h"
#include "tools/bench/bench_harness.h"

namespace mantissa::tools {

// Returns the kernel with copies of its operands in other memory.
template <class Kernel>
Kernel with_own_operands(Kernel k) {
  std::map<const std::byte*, Tensor> copies;  // operands in place share theirs
  const Contract contract = k.contract();
  for (const Contract::Operand& operand : contract.operands()) {
    auto& tensor = const_cast<Tensor&>(*operand.tensor);
    Tensor& copy = copies[Bytes(tensor).data];
    if (!copy.defined()) {
      copy = empty_like(tensor);
      tensor.device().run(Convert{.x = tensor, .out = copy});
    }
    tensor = copy;
  }
  return k;
}

// Returns `k`, and on a device as many copies of it as together move four times what its cache may hold, so that no call finds there what
// an earlier one has moved; 128 MiB are the most that a GPU has today. Few bytes are in the cache in a step, too.
template <class Kernel>
std::vector<Kernel> beyond_the_cache(Backend& device, const Kernel& k, int64_t bytes) {
  constexpr int64_t kCache = int64_t{128} << 20, kFew = int64_t{8} << 20;
  std::vector<Kernel> out{k};
  if (device.host_memory() || bytes < kFew) return out;
  while (std::ssize(out) * bytes <= 4 * kCache) out.push_back(with_own_operands(k));
  return out;
}

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

  // One call. Those that follow take other operands where a cache would have these.
  template <class Kernel>
  Workload workload(const char* bench, std::string shape, const Kernel& k) const {
    const int64_t bytes = bytes_moved(k, k.contract());
    const auto run = [device = &device_, all = beyond_the_cache(device_, k, bytes), next = size_t{0}]() mutable {
      device->run(all[next++ % all.size()]);
    };
    return {.bench = bench, .shape = std::move(shape), .dtype = dtype_, .bytes = static_cast<double>(bytes), .run = run};
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
