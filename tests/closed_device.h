// Devices whose memory the host cannot touch: whatever reads or writes it but kernels, upload() and download() ends in a segmentation
// fault. Their kernels are those of the CPU, so their results have the CPU's bits.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>

#include "backend/caching_allocator.h"
#include "mantissa/backend/backend.h"

namespace mantissa::test {

// Blocks of one reserved range. The addresses that it gives are never open; kernels find the bytes behind them at another place.
class ClosedMemory final : public MemorySource {
 public:
  ClosedMemory() {
    void* const range = mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(range != MAP_FAILED, "no address range for the memory of a device");
    begin_ = static_cast<std::byte*>(range);
    require(mprotect(opened(begin_), kBytes, PROT_READ | PROT_WRITE) == 0, "cannot open the memory of a device");
  }
  ~ClosedMemory() override { munmap(begin_, 2 * kBytes); }
  std::byte* take(int64_t bytes) override {
    const size_t size = (static_cast<size_t>(bytes) + 4095) / 4096 * 4096;
    require(used_ + size <= kBytes, "the memory of the device is used up");
    return begin_ + std::exchange(used_, used_ + size);
  }
  void give_back(std::byte*) noexcept override {}

  // Returns where the bytes are, for kernels; of any device in this process.
  static std::byte* opened(std::byte* address) { return address + kBytes; }

 private:
  static constexpr size_t kBytes = size_t{1} << 32;

  std::byte* begin_ = nullptr;
  size_t used_ = 0;
};

// Freed memory and what a download is to fill hold this, which is NaN in all formats.
inline void poison(void* bytes, int64_t count) { std::memset(bytes, 0xff, static_cast<size_t>(count)); }

// A device that does everything when it is asked. Several threads may call it, each in its own lane.
class ClosedDevice : public Backend {
 public:
  const char* name() const override { return "closed"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override {
    const Lane lane = current_lane();
    auto block = part(lane).allocator->allocate(bytes);
    std::byte* const address = block.get();
    // The block is free in its lane behind all that the lane was asked for, as on a device.
    const auto give_back = [this, lane, bytes, held = std::move(block)](std::byte* memory) mutable {
      submit(lane, [at = ClosedMemory::opened(memory), bytes] { poison(at, bytes); });
      held.reset();
    };
    return {address, give_back};
  }
  AllocatorStats allocator_stats() const override {
    AllocatorStats sum;
    for (const LaneParts& each : parts_) {
      const AllocatorStats stats = each.allocator->stats();
      sum.in_use += stats.in_use, sum.peak_in_use += stats.peak_in_use, sum.reserved += stats.reserved;
      sum.system_calls += stats.system_calls;
    }
    return sum;
  }
  int64_t fp32_gemms() const override {
    int64_t sum = 0;
    for (const LaneParts& each : parts_) sum += each.kernels->fp32_gemms();
    return sum;
  }
  bool host_memory() const override { return false; }
  bool computes_fp64() const override { return false; }
  void upload(const void* from, const Tensor& to) override {
    ++uploads_;
    const auto* const bytes = static_cast<const std::byte*>(from);
    submit(current_lane(), [staged = std::vector<std::byte>(bytes, bytes + to.bytes()), at = ClosedMemory::opened(to.device_bytes())] {
      std::ranges::copy(staged, at);
    });
  }
  void download(const Tensor& from, void* to) override {
    poison(to, from.bytes());
    begin_download(from)(to);
  }
  std::function<void(void* to)> begin_download(const Tensor& from) override {
    const Lane lane = current_lane();
    // The lane may come to it after an interrupt has ended the wait.
    const auto staged = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(from.bytes()));
    submit(lane, [staged, at = ClosedMemory::opened(from.device_bytes())] { std::copy_n(at, staged->size(), staged->begin()); });
    return [this, lane, staged, copied = mark()](void* to) {
      ++count_of_waits(lane);
      wait_for(copied);
      std::ranges::copy(*staged, static_cast<std::byte*>(to));
    };
  }
  void synchronize() override {
    for (const Lane lane : {Lane::compute, Lane::communication}) {
      const LaneScope scope(lane);
      ++count_of_waits(lane);
      wait_for(mark());
    }
  }

  // Does `work` in this thread's lane.
  void in_lane(std::function<void()> work) { submit(current_lane(), std::move(work)); }
  // Keeps the memory of the device, beyond its end.
  std::shared_ptr<const void> memory() const {
    return std::make_shared<const std::array<std::shared_ptr<const void>, 2>>(
        std::array{std::shared_ptr<const void>(parts_[0].allocator), std::shared_ptr<const void>(parts_[1].allocator)});
  }

  int64_t uploads() const { return uploads_; }
  int64_t waits(Lane lane) const { return waits_[static_cast<size_t>(lane)]; }  // waits of the host: download() and synchronize()

 protected:
  // Does `work` in the lane, behind what the lane was asked for before.
  virtual void submit(Lane, std::function<void()> work) { work(); }
  virtual void wait_for(const Mark&) {}

#define MANTISSA_OPENED(Kernel) \
  void execute(const Kernel& k) override { submit_opened(k); }
  MANTISSA_KERNELS(MANTISSA_OPENED)
#undef MANTISSA_OPENED

 private:
  struct LaneParts {
    std::shared_ptr<CachingAllocator> allocator = std::make_shared<CachingAllocator>(std::make_unique<ClosedMemory>());
    std::unique_ptr<Backend> kernels = make_backend("cpu");
  };
  LaneParts& part(Lane lane) { return parts_[static_cast<size_t>(lane)]; }
  std::atomic<int64_t>& count_of_waits(Lane lane) { return waits_[static_cast<size_t>(lane)]; }

  // Runs a copy whose operands lie where the bytes are, and own nothing: what the host frees meanwhile is free.
  template <class Kernel>
  void submit_opened(const Kernel& k) {
    const Lane lane = current_lane();
    Backend& kernels = *part(lane).kernels;
    const auto copy = std::make_shared<Kernel>(k);
    const Contract contract = copy->contract();
    for (const Contract::Operand& operand : contract.operands()) {
      auto& tensor = const_cast<Tensor&>(*operand.tensor);
      if (&tensor.device() == &kernels) continue;  // it was declared twice
      std::byte* const at = ClosedMemory::opened(tensor.device_bytes());
      tensor = Tensor(kernels, std::shared_ptr<std::byte>(std::shared_ptr<void>(), at), true, tensor.dtype(), tensor.shape());
    }
    submit(lane, [&kernels, copy] { kernels.run(*copy); });
  }

  std::array<LaneParts, 2> parts_;
  std::atomic<int64_t> uploads_{0};
  std::array<std::atomic<int64_t>, 2> waits_{};  // by lane
};

}  // namespace mantissa::test
