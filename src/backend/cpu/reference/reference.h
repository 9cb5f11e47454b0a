// A complete backend of plain kernels in a fixed order, the yardstick of every other one. The scalar is a template parameter, so the
// same code runs in fp32, bf16 (values widened to fp32 and rounded on store) and fp64. Files hold a family of kernels each.
#pragma once

#include <utility>

#include "backend/caching_allocator.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

class CpuReference : public Backend {
 public:
  CpuReference();
  const char* name() const override { return "cpu_reference"; }
  bool computes_fp64() const override { return true; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  AllocatorStats allocator_stats() const override;
  bool host_memory() const override { return true; }
  void upload(const void* from, const Tensor& to) override;
  void download(const Tensor& from, void* to) override;
  void synchronize() override {}  // a kernel returns when it has ended

 protected:
#define MANTISSA_EXECUTE(Kernel) void execute(const Kernel& k) override;
  MANTISSA_KERNELS(MANTISSA_EXECUTE)
#undef MANTISSA_EXECUTE
  // Norms with a branch, and their gradients with another one: compositions of an addition and the same kernel without.
  template <class Norm>
  void add_and_normalize(Norm k) {
    execute(Add{.a = k.x, .b = k.branch, .out = k.sum});
    k.x = std::exchange(k.sum, {}), k.branch = {};
    execute(k);
  }
  template <class NormBackward>
  void differentiate_and_add(NormBackward k) {
    const Tensor other = std::exchange(k.other, {});
    execute(k);
    execute(Add{.a = other, .b = k.dx, .out = k.dx});
  }

 private:
  std::shared_ptr<CachingAllocator> allocator_ =
      std::make_shared<CachingAllocator>(host_memory_source());  // shared with every block handed out
};

}  // namespace mantissa
