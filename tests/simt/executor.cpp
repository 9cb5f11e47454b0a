#include "simt/executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "mantissa/base/error.h"
#include "simt/watcher.h"

namespace mantissa::simt {
namespace {

using boost::context::detail::fcontext_t, boost::context::detail::jump_fcontext, boost::context::detail::make_fcontext,
    boost::context::detail::transfer_t;

constexpr size_t kStackBytes = size_t{128} << 10, kGuardBytes = 4096;
constexpr unsigned kMostThreads = 1024;

// Orders what came before a barrier before what comes after it. Two tags take turns: with one, a thread that comes to the next barrier
// first would be ordered before those that still leave this one.
class Order {
 public:
  void come() { release(&tags_[turn_]); }
  void go(unsigned turn) { acquire(&tags_[turn]); }
  unsigned turn() const { return turn_; }
  void next() { turn_ ^= 1U; }

 private:
  char tags_[2] = {};
  unsigned turn_ = 0;
};

// Stacks of this thread's fibers, each above a page that nobody may touch.
class Stacks {
 public:
  ~Stacks() {
    for (std::byte* stack : all_) {
      Watcher::begin_stack(stack + kGuardBytes, kStackBytes);  // others may have this memory next
      munmap(stack, kGuardBytes + kStackBytes);
    }
  }
  std::byte* operator[](size_t i) {
    while (all_.size() <= i) {
      void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      require(memory != MAP_FAILED && mprotect(memory, kGuardBytes, PROT_NONE) == 0, "no stack for a thread of a block");
      all_.push_back(static_cast<std::byte*>(memory));
    }
    return all_[i] + kGuardBytes;
  }

 private:
  std::vector<std::byte*> all_;
};

struct Fiber {
  enum State : uint8_t { ready, waiting, returned };

  fcontext_t context = nullptr;
  std::byte* stack = nullptr;
  Watcher watcher;
  State state = ready;
  Sync kind{};
  unsigned mask = 0, from = 0;
  uint64_t value = 0;
  std::vector<Copy> open;                // copies of no group yet
  std::vector<std::vector<Copy>> ended;  // groups
};

// State that the blocks of a launch share. Nothing orders one before another: the host learns of what all did when all are done.
struct Launch {
  int64_t blocks;
  unsigned threads;
  const std::function<void()>& body;
  size_t shared;
  char end = 0;  // a tag
};

class Block {
 public:
  Block(int64_t index, Launch& launch, Stacks& stacks, std::minstd_rand& random)
      : index_(index),
        launch_(launch),
        fibers_(launch.threads),
        orders_of_warps_(launch.threads / kWarp),
        by_turn_(launch.threads),
        turn_of_(launch.threads),
        ready_(launch.threads / kWarp),
        waiting_(launch.threads / kWarp),
        exchanged_(launch.threads / kWarp) {
    for (unsigned t = 0; t < launch.threads; ++t) {
      fibers_[t].stack = stacks[t];
      Watcher::begin_stack(fibers_[t].stack, kStackBytes);
      fibers_[t].watcher.begin_fiber();
      fibers_[t].context = make_fcontext(fibers_[t].stack + kStackBytes, kStackBytes, &Block::begin);
    }
    draw_order(random);
  }
  ~Block() {
    // Runs as a thread of the block, because the host must not learn of what they did.
    as(host_, fibers_.front().watcher, [this] {
      acquire(&launch_.end);
      shared_.clear();
      decltype(exchanged_)().swap(exchanged_);
      for (Fiber& fiber : fibers_) {
        decltype(fiber.open)().swap(fiber.open);
        decltype(fiber.ended)().swap(fiber.ended);
      }
    });
    for (Fiber& fiber : fibers_) fiber.watcher.end_fiber();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void run() {
    host_.is_host();
    release(&begin_);
    while (Fiber* const next = next_ready()) {
      resume(*next);
      if (failure_) std::rethrow_exception(failure_);
      if (next->state == Fiber::waiting) complete(*next);
    }
    const bool all = std::ranges::all_of(fibers_, [](const Fiber& fiber) { return fiber.state == Fiber::returned; });
    require(all, "block ", index_, " stands still: ", places());
  }

  int64_t index() const { return index_; }
  int64_t blocks() const { return launch_.blocks; }
  unsigned threads() const { return launch_.threads; }
  size_t launched_bytes() const { return launch_.shared; }
  unsigned running() const { return static_cast<unsigned>(running_ - fibers_.data()); }

  uint64_t sync(Sync kind, unsigned mask, uint64_t value, unsigned from) {
    Fiber& own = *running_;
    const unsigned lane = running() % kWarp;
    require(kind == Sync::barrier || (mask >> lane & 1U) != 0, "block ", index_, ", thread ", running(), ": its lane is not in mask ",
            mask);
    own.state = Fiber::waiting, own.kind = kind, own.mask = mask, own.value = value, own.from = from;
    Order* const order = order_of(own);
    const unsigned turn = order ? order->turn() : 0;
    if (order) order->come();
    switch_to_host(own, false);
    if (order) order->go(turn);
    return own.value;
  }

  const uint64_t* exchange(uint64_t value) {
    sync(Sync::exchange, ~0U, value, 0);
    return exchanged_[running() / kWarp].data();
  }
  Fiber& running_fiber() { return *running_; }

  std::byte* shared(const void* key, size_t bytes) {
    std::unique_ptr<std::byte[]>& memory = shared_[key];
    if (!memory) {
      as(running_->watcher, host_, [&] {  // no thread of the block has written it yet
        memory.reset(new std::byte[bytes]);
        std::memset(memory.get(), 0xff, bytes);
        release(&begin_);
      });
    }
    acquire(&begin_);
    return memory.get();
  }

 private:
  static void begin(transfer_t from);

  // Calls body() on the stack of `own` as if `other` did.
  template <class Body>
  static void as(const Watcher& own, const Watcher& other, Body body) {
    own.pass_for(other);
    body();
    other.pass_for(own);
  }

  // Warps in random order, and lanes within each.
  void draw_order(std::minstd_rand& random) {
    std::vector<unsigned> warps(fibers_.size() / kWarp);
    std::iota(warps.begin(), warps.end(), 0U);
    std::ranges::shuffle(warps, random);
    for (size_t w = 0; w < warps.size(); ++w) {
      const auto lanes = std::span(by_turn_).subspan(w * kWarp, kWarp);
      std::iota(lanes.begin(), lanes.end(), warps[w] * kWarp);
      std::ranges::shuffle(lanes, random);
    }
    for (unsigned turn = 0; turn < by_turn_.size(); ++turn) {
      turn_of_[by_turn_[turn]] = turn;
      set_ready(by_turn_[turn]);
    }
  }
  void set_ready(unsigned thread) { ready_[turn_of_[thread] / kWarp] |= 1U << turn_of_[thread] % kWarp; }
  // Takes the first that can run.
  Fiber* next_ready() {
    for (unsigned w = 0; w < ready_.size(); ++w) {
      if (ready_[w] == 0) continue;
      const auto turn = w * kWarp + static_cast<unsigned>(std::countr_zero(ready_[w]));
      ready_[w] &= ready_[w] - 1;
      return &fibers_[by_turn_[turn]];
    }
    return nullptr;
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    host_.leave(fiber.watcher, fiber.stack, kStackBytes);
    fiber.context = jump_fcontext(fiber.context, this).fctx;
    host_.arrive(nullptr, nullptr);
  }
  void switch_to_host(Fiber& own, bool last) {
    own.watcher.leave(host_, static_cast<const std::byte*>(host_stack_), host_stack_bytes_, last);
    host_context_ = jump_fcontext(host_context_, nullptr).fctx;
    own.watcher.arrive(&host_stack_, &host_stack_bytes_);
  }

  std::span<Fiber> warp_of(const Fiber& fiber) {
    const size_t t = static_cast<size_t>(&fiber - fibers_.data()) / kWarp * kWarp;
    return std::span(fibers_).subspan(t, kWarp);
  }
  Order* order_of(const Fiber& fiber) {
    if (fiber.kind == Sync::barrier) return &order_;
    if (fiber.kind != Sync::warp_barrier) return nullptr;
    return &orders_of_warps_[static_cast<size_t>(&fiber - fibers_.data()) / kWarp];
  }

  // Lets those go on that `last` was the last to join.
  void complete(Fiber& last) {
    if (last.kind == Sync::barrier) {
      if (++at_barrier_ < fibers_.size()) return;
      at_barrier_ = 0;
      order_.next();
      for (Fiber& each : fibers_) go_on(each);
      return;
    }
    const size_t own = static_cast<size_t>(&last - fibers_.data());
    waiting_[own / kWarp] |= 1U << own % kWarp;
    if ((last.mask & ~waiting_[own / kWarp]) != 0) return;
    const std::span<Fiber> warp = warp_of(last);
    std::array<Fiber*, kWarp> found{};
    size_t count = 0;
    for (unsigned lanes = last.mask; lanes != 0; lanes &= lanes - 1) {
      Fiber& each = warp[static_cast<size_t>(std::countr_zero(lanes))];
      if (each.kind != last.kind || each.mask != last.mask) return;
      found[count++] = &each;
    }
    const std::span<Fiber*> members(found.data(), count);
    if (Order* const order = order_of(last)) order->next();
    if (last.kind == Sync::shuffle) shuffle(members, warp);
    if (last.kind == Sync::ballot) vote(members, warp);
    if (last.kind == Sync::exchange) exchange(members, exchanged_[own / kWarp]);
    if (last.kind == Sync::mma) multiply(members);
    waiting_[own / kWarp] &= ~last.mask;
    for (Fiber* each : members) go_on(*each);
  }
  void go_on(Fiber& fiber) {
    fiber.state = Fiber::ready;
    set_ready(static_cast<unsigned>(&fiber - fibers_.data()));
  }
  void shuffle(std::span<Fiber*> members, std::span<Fiber> warp) {
    std::array<uint64_t, kWarp> given{};
    for (size_t lane = 0; lane < kWarp; ++lane) given[lane] = warp[lane].value;
    for (Fiber* each : members) {
      require(each->from < kWarp && (each->mask >> each->from & 1U) != 0, "block ", index_, ", thread ", each - fibers_.data(),
              ": a shuffle from lane ", each->from, ", which is not in mask ", each->mask);
      each->value = given[each->from];
    }
  }
  static void exchange(std::span<Fiber*> members, std::array<uint64_t, kWarp>& values) {
    for (size_t lane = 0; lane < kWarp; ++lane) values[lane] = members[lane]->value;
  }
  // Multiplies fragments that lie as in the PTX ISA (mma.m16n8k16).
  static void multiply(std::span<Fiber*> members) {
    std::array<std::array<float, 16>, 16> a{};         // rows
    std::array<std::array<float, 8>, 16> b{}, sums{};  // b by its depth
    const auto mma_of = [&](size_t lane) { return *std::bit_cast<const Mma*>(members[lane]->value); };
    const auto half = [](uint32_t pair, size_t odd) { return std::bit_cast<float>((odd != 0 ? pair >> 16 : pair & 0xffffU) << 16); };
    const auto sum_of = [&](size_t lane, size_t i) -> float& { return sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; };
    for (size_t lane = 0; lane < kWarp; ++lane) {
      const Mma own = mma_of(lane);
      const size_t row = lane / 4, col = lane % 4 * 2;
      for (size_t odd = 0; odd < 2; ++odd) {
        for (size_t word = 0; word < 4; ++word) a[row + word % 2 * 8][col + odd + word / 2 * 8] = half(own.a[word], odd);
        for (size_t word = 0; word < 2; ++word) b[col + odd + word * 8][row] = half(own.b[word], odd);
      }
      for (size_t i = 0; i < 4; ++i) sum_of(lane, i) = own.d[i];
    }
    for (size_t row = 0; row < 16; ++row) {
      for (size_t k = 0; k < 16; ++k) {
        for (size_t col = 0; col < 8; ++col) sums[row][col] += a[row][k] * b[k][col];
      }
    }
    for (size_t lane = 0; lane < kWarp; ++lane) {
      const Mma own = mma_of(lane);
      for (size_t i = 0; i < 4; ++i) own.d[i] = sum_of(lane, i);
    }
  }
  static void vote(std::span<Fiber*> members, std::span<Fiber> warp) {
    uint64_t bits = 0;
    for (const Fiber* each : members) bits |= uint64_t{each->value != 0} << (each - warp.data());
    for (Fiber* each : members) each->value = bits;
  }

  // "threads 0 to 31 at a barrier, 32 to 63 have returned"
  std::string places() const {
    std::string out;
    for (size_t first = 0, t = 0; t <= fibers_.size(); ++t) {
      if (t < fibers_.size() && place(fibers_[t]) == place(fibers_[first])) continue;
      out += text(out.empty() ? "" : ", ", "threads ", first, " to ", t - 1, " ", place(fibers_[first]));
      first = t;
    }
    return out;
  }
  static std::string place(const Fiber& fiber) {
    if (fiber.state == Fiber::returned) return "have returned";
    static constexpr const char* kNames[] = {"a barrier", "a barrier of a warp", "a shuffle",
                                             "a ballot",  "an exchange",         "a multiplication"};
    const auto name = kNames[static_cast<size_t>(fiber.kind)];
    return fiber.kind == Sync::barrier ? text("at ", name) : text("at ", name, " with mask ", fiber.mask);
  }

  int64_t index_;
  Launch& launch_;
  std::vector<Fiber> fibers_;
  Order order_;
  std::vector<Order> orders_of_warps_;
  std::vector<unsigned> by_turn_, turn_of_;  // threads in the order in which they would run
  std::vector<uint32_t> ready_;              // bits by turn
  std::vector<uint32_t> waiting_;            // bits of the lanes of a warp that wait for others of it
  size_t at_barrier_ = 0;
  std::vector<std::array<uint64_t, kWarp>> exchanged_;  // one for each warp
  std::map<const void*, std::unique_ptr<std::byte[]>> shared_;
  Fiber* running_ = nullptr;
  Watcher host_;
  fcontext_t host_context_ = nullptr;
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
  std::exception_ptr failure_;
  char begin_ = 0;  // a tag
};

thread_local Block* current = nullptr;
std::atomic<bool> next_launch_fails{false};

void Block::begin(transfer_t from) {
  Block& block = *static_cast<Block*>(from.data);
  Fiber& own = *block.running_;
  own.watcher.arrive(&block.host_stack_, &block.host_stack_bytes_);
  block.host_context_ = from.fctx;
  acquire(&block.begin_);
  try {
    block.launch_.body();
    const bool all = own.open.empty() && std::ranges::all_of(own.ended, [](const std::vector<Copy>& group) { return group.empty(); });
    require(all, "a thread ends before its copies into shared memory have come");
  } catch (...) {
    block.failure_ = std::current_exception();
  }
  release(&block.launch_.end);
  own.state = Fiber::returned;
  block.switch_to_host(own, true);
  std::abort();  // a fiber that is resumed now would end the process as if all were well: Boost.Context calls _exit(0)
}

}  // namespace

void fail_next_launch() { next_launch_fails = true; }

void run_blocks(int64_t blocks, unsigned threads, uint32_t seed, const std::function<void()>& body, size_t shared) {
  require(!next_launch_fails.exchange(false), "this launch was to fail");
  require(blocks > 0 && threads > 0 && threads % kWarp == 0 && threads <= kMostThreads, "a launch of ", blocks, " blocks of ", threads,
          " threads");
  thread_local Stacks stacks;
  std::minstd_rand random(seed);
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::ranges::shuffle(order, random);
  Launch launch{.blocks = blocks, .threads = threads, .body = body, .shared = shared};
  struct Leave {
    Launch& launch;
    ~Leave() {
      current = nullptr;
      acquire(&launch.end);
    }
  } const leave{launch};
  std::unique_ptr<Block> before;  // its shared memory stays where it is, so that the next block's lies elsewhere
  for (const int64_t index : order) {
    auto block = std::make_unique<Block>(index, launch, stacks, random);
    current = block.get();
    block->run();
    before = std::move(block);
  }
}

int64_t block() { return current->index(); }
int64_t blocks() { return current->blocks(); }
unsigned thread() { return current->running(); }
unsigned threads() { return current->threads(); }
size_t launched_bytes() { return current->launched_bytes(); }
uint64_t sync(Sync kind, unsigned mask, uint64_t value, unsigned from) { return current->sync(kind, mask, value, from); }
const uint64_t* exchange(uint64_t value) { return current->exchange(value); }
void mma(const Mma& own) { current->sync(Sync::mma, ~0U, std::bit_cast<uint64_t>(&own), 0); }
void copy_later(const Copy& copy) { current->running_fiber().open.push_back(copy); }
void commit() {
  Fiber& own = current->running_fiber();
  own.ended.push_back(std::exchange(own.open, {}));
}
std::vector<Copy> arrived(size_t left) {
  auto& groups = current->running_fiber().ended;
  std::vector<Copy> out;
  for (; groups.size() > left; groups.erase(groups.begin())) out.insert(out.end(), groups.front().begin(), groups.front().end());
  return out;
}
std::byte* block_shared(const void* key, size_t bytes) { return current->shared(key, bytes); }

}  // namespace mantissa::simt
