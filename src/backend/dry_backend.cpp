#include "backend/dry_backend.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "backend/caching_allocator.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

constexpr uintptr_t kFirstAddress = uintptr_t{1} << 62;  // x86-64 gives a process addresses below 2^56

class MissingMemory final : public MemorySource {
 public:
  std::byte* take(int64_t bytes) override {
    return reinterpret_cast<std::byte*>(std::exchange(next_, next_ + static_cast<uintptr_t>(bytes)));
  }
  void give_back(std::byte*) noexcept override {}

 private:
  uintptr_t next_ = kFirstAddress;
};

class DryBackend final : public Backend {
 public:
  explicit DryBackend(int64_t expert_ranks) : expert_ranks_(expert_ranks) {}
  const char* name() const override { return "dry"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return allocator_->allocate(bytes); }
  AllocatorStats allocator_stats() const override { return allocator_->stats(); }
  bool host_memory() const override { return true; }  // ranks exchange tensors where they lie
  void upload(const void*, const Tensor&) override {}
  void download(const Tensor& from, void* to) override {
    if (from.device_bytes() == offsets_) return write_offsets({static_cast<int32_t*>(to), static_cast<size_t>(from.elements())});
    std::memset(to, 0, static_cast<size_t>(from.bytes()));
  }
  void synchronize() override {}
  bool computes_fp64() const override { return false; }
  AttentionDevice attention_device() const override {  // takes any choice
    return {.architecture = 90, .library = kSupposedCudnn, .by = Backend::attention_device().by};
  }

 protected:
#define MANTISSA_DRY(Kernel) \
  void execute(const Kernel& k) override { dry(k); }
  MANTISSA_KERNELS(MANTISSA_DRY)
#undef MANTISSA_DRY

 private:
  template <class Kernel>
  void dry(const Kernel&) {}
  void dry(const Gemm& k) { allocate(gemm_scratch(k)); }
  void dry(const GroupedGemm& k) { allocate(gemm_scratch(k)); }
  void dry(const GroupedWeightGradient& k) { allocate(gemm_scratch(k)); }
  void dry(const DispatchTable& k) {
    offsets_ = k.offsets.device_bytes();
    assignments_ = k.experts.elements();
    capacity_ = k.capacity, multiple_ = k.multiple;
  }

  void write_offsets(std::span<int32_t> offsets) const {
    const int64_t experts = std::ssize(offsets) - 1, each = experts / expert_ranks_, of_rank = assignments_ / expert_ranks_;
    offsets[0] = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t given = of_rank / each + (e % each < of_rank % each ? 1 : 0),
                    taken = capacity_ > 0 ? std::min(given, capacity_) : given;
      offsets[static_cast<size_t>(e + 1)] = offsets[static_cast<size_t>(e)] + static_cast<int32_t>(round_up(taken, multiple_));
    }
  }

  std::shared_ptr<CachingAllocator> allocator_ = std::make_shared<CachingAllocator>(std::make_unique<MissingMemory>());
  int64_t expert_ranks_;
  // Operands and options of the latest dispatch.
  const std::byte* offsets_ = nullptr;
  int64_t assignments_ = 0, capacity_ = 0, multiple_ = 1;
};

}  // namespace

std::unique_ptr<Backend> dry_backend(int64_t expert_ranks) { return std::make_unique<DryBackend>(expert_ranks); }

bool is_dry(const std::byte* bytes) { return reinterpret_cast<uintptr_t>(bytes) >= kFirstAddress; }

}  // namespace mantissa
