// A device whose memory only its own kernels, upload() and download() may touch: whatever else reads or writes it ends in a segmentation
// fault. Its kernels are those of the CPU, so its results have the CPU's bits.
#pragma once

#include <sys/mman.h>

#include "backend/caching_allocator.h"
#include "mantissa/backend/backend.h"

namespace mantissa::test {

// Blocks of one reserved range, page by page; closed unless a kernel runs.
class ClosedMemory final : public MemorySource {
 public:
  ClosedMemory() {
    void* const range = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(range != MAP_FAILED, "no address range for the memory of a device");
    begin_ = static_cast<std::byte*>(range);
  }
  ~ClosedMemory() override { munmap(begin_, kBytes); }
  std::byte* take(int64_t bytes) override {
    const size_t size = (static_cast<size_t>(bytes) + 4095) / 4096 * 4096;
    require(used_ + size <= kBytes, "the memory of the device is used up");
    std::byte* const block = begin_ + used_;
    used_ += size;
    if (depth_ > 0) protect(PROT_READ | PROT_WRITE);
    return block;
  }
  void give_back(std::byte*) noexcept override {}

  void open() {
    if (depth_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--depth_ == 0) protect(PROT_NONE);
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 32;
  void protect(int access) const {
    if (used_ > 0) require(mprotect(begin_, used_, access) == 0, "cannot change the protection of memory");
  }

  std::byte* begin_ = nullptr;
  size_t used_ = 0;
  int depth_ = 0;
};

class IsolatedDevice final : public Backend {
 public:
  IsolatedDevice() : IsolatedDevice(std::make_unique<ClosedMemory>()) {}

  const char* name() const override { return "isolated"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return allocator_->allocate(bytes); }
  AllocatorStats allocator_stats() const override { return allocator_->stats(); }
  int64_t fp32_gemms() const override { return kernels_->fp32_gemms(); }
  bool host_memory() const override { return false; }
  bool computes_fp64() const override { return kernels_->computes_fp64(); }
  void upload(const void* from, const Tensor& to) override {
    ++uploads_;
    const Open open(*memory_);
    kernels_->upload(from, to);
  }
  void download(const Tensor& from, void* to) override {
    ++downloads_;
    const Open open(*memory_);
    kernels_->download(from, to);
  }

  void synchronize() override { kernels_->synchronize(); }

  int64_t uploads() const { return uploads_; }
  int64_t downloads() const { return downloads_; }

 protected:
#define MANTISSA_ON_OPEN_MEMORY(Kernel)    \
  void execute(const Kernel& k) override { \
    const Open open(*memory_);             \
    kernels_->run(k);                      \
  }
  MANTISSA_KERNELS(MANTISSA_ON_OPEN_MEMORY)
#undef MANTISSA_ON_OPEN_MEMORY

 private:
  struct Open {
    explicit Open(ClosedMemory& memory) : memory_(memory) { memory_.open(); }
    ~Open() { memory_.close(); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    ClosedMemory& memory_;
  };

  explicit IsolatedDevice(std::unique_ptr<ClosedMemory> memory)
      : memory_(memory.get()), allocator_(std::make_shared<CachingAllocator>(std::move(memory))) {}

  ClosedMemory* memory_;  // owned by the allocator
  std::shared_ptr<CachingAllocator> allocator_;
  std::unique_ptr<Backend> kernels_ = make_backend("cpu");
  int64_t uploads_ = 0, downloads_ = 0;
};

}  // namespace mantissa::test
