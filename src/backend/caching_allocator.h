// Caches the memory of a backend. Blocks come from a source once and are kept by size class when their last handle goes, so a loop that
// asks for the same sizes again never returns to it. A size of which there is no block takes one that is up to half as large again, so that
// sizes that change a little from step to step share their blocks. It does not touch pages: on the host, the thread that first uses a page
// decides where it lies.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/backend/backend.h"

namespace mantissa {

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual std::byte* take(int64_t bytes) = 0;  // aligned to CachingAllocator::kAlignment; null: there is no more
  virtual void give_back(std::byte* block) noexcept = 0;
  // Called when the first `bytes` of a block of `size` bytes are lent; 0: it is kept. Tools that watch memory learn from it which bytes
  // nobody may touch.
  virtual void lend(std::byte* /*block*/, int64_t /*bytes*/, int64_t /*size*/) noexcept {}
  // Waits until no work uses a block that is kept, and may throw: give_back() might wait for that and heed nobody.
  virtual void settle() {}
  virtual void make_room() {}                        // asks others that keep blocks of the same memory to give them back
  virtual std::string limits() const { return {}; }  // says what bounds the memory, to end an error: "; ..." or empty
};

std::unique_ptr<MemorySource> host_memory_source();

// Thread-safe. Create by std::make_shared: every block keeps the allocator alive, and returns to it on whichever thread drops the last
// handle.
class CachingAllocator : public std::enable_shared_from_this<CachingAllocator> {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit CachingAllocator(std::unique_ptr<MemorySource> source) : source_(std::move(source)) {}
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  // Returns at least `bytes` (zero gives a block too). When the source is exhausted, returns the kept blocks to it, has others do so, and
  // asks again; then throws Error(environment) with the size.
  std::shared_ptr<std::byte> allocate(int64_t bytes);

  // in_use counts the bytes that were asked for; reserved counts whole blocks, in use and kept. A block is up to an eighth larger than the
  // size that it was taken for, and up to half as large again as the size class that it is lent to. A size whose block is lent that way
  // takes another one from the source: of each size class there are at most as many blocks as handles for sizes from two thirds of it lived
  // at once.
  AllocatorStats stats() const;

  // Returns the kept blocks to the source, unless another thread allocates just now.
  void release_kept();

  // Rounds `bytes` up to a multiple of 64, and to three bits below its leading one: at most an eighth is lost.
  static int64_t size_class(int64_t bytes);

 private:
  // Memory of a size class; a block that was kept may be larger than the class that was asked for.
  struct Block {
    std::byte* memory;
    int64_t size;
  };
  Block take(int64_t size);
  Block from_source(int64_t size);
  void give_back(const Block& block, int64_t bytes) noexcept;
  void release_cached();

  std::unique_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<std::byte*>> cached_;  // by size class; each vector has room for every block of its class
  std::map<int64_t, size_t> blocks_;                   // taken from the source and not returned to it, by size class
  AllocatorStats stats_;
};

}  // namespace mantissa
