#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

#include "backend/cuda/values.h"
#include "gpu/primitives.h"
#include "gpu/runtime.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {
namespace {

constexpr unsigned kBlock = 128;  // threads
constexpr int64_t kBlocks = 3;
constexpr size_t kAll = kBlock * kBlocks;

// Memory of the device with these bits in it.
class Words {
 public:
  explicit Words(const std::vector<uint32_t>& words) : count_(words.size()), memory_(take_memory(bytes())) {
    copy_to_device(*stream_, memory_, reinterpret_cast<const std::byte*>(words.data()), bytes());
    wait();
  }
  ~Words() {
    drain(*stream_);
    give_memory(memory_);
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  uint32_t* data() const { return reinterpret_cast<uint32_t*>(memory_); }
  Stream& stream() const { return *stream_; }
  std::vector<uint32_t> read() const {
    std::vector<uint32_t> out(count_);
    copy_to_host(*stream_, reinterpret_cast<std::byte*>(out.data()), memory_, bytes());
    wait();
    return out;
  }

 private:
  void wait() const {
    const Event end = record(*stream_);
    while (!reached(end)) continue;
  }
  int64_t bytes() const { return static_cast<int64_t>(count_ * sizeof(uint32_t)); }

  const std::shared_ptr<Stream> stream_ = make_stream();
  const size_t count_;
  std::byte* const memory_;
};

struct Result {  // a word for each thread of all blocks
  uint32_t* words;
  __device__ uint32_t& own() const { return words[block() * threads() + thread()]; }
};

// Runs a kernel that fills the words of all threads, and holds each against expected(block, thread).
template <class Expected, class... Arguments>
std::string compare(void (*kernel)(Result, Arguments...), Expected expected, Arguments... arguments) {
  const Words words(std::vector<uint32_t>(kAll, 0xdeadbeefU));
  launch(words.stream(), kernel, {kBlocks, kBlock}, Result{words.data()}, arguments...);
  const std::vector<uint32_t> found = words.read();
  for (uint32_t b = 0; b < kBlocks; ++b) {
    for (uint32_t t = 0; t < kBlock; ++t) {
      const uint32_t word = found[b * kBlock + t], wanted = expected(b, t);
      if (word != wanted) return text("block ", b, ", thread ", t, ": ", word, " instead of ", wanted);
    }
  }
  return {};
}

__global__ void __launch_bounds__(kBlock) write_place(Result out) {
  out.own() = static_cast<uint32_t>(block() * 1000000 + blocks() * 100000 + threads() * 100) + warp() * 32 + lane() + (thread() << 24);
}
std::string place() {
  return compare(write_place,
                 [](uint32_t b, uint32_t t) { return b * 1000000 + uint32_t{kBlocks} * 100000 + kBlock * 100 + t + (t << 24); });
}

struct Numbers {
  uint32_t at[kBlock];
};
struct MoreNumbers {
  uint32_t at[kBlock];
};

// Each type has memory of its own, and a barrier hands it over from warp to warp.
__global__ void __launch_bounds__(kBlock) reverse_in_block(Result out) {
  auto& numbers = block_shared<Numbers>();
  auto& more = block_shared<MoreNumbers>();
  uint32_t sum = 0;
  for (uint32_t round = 0; round < 3; ++round) {
    numbers.at[thread()] = thread() + round;
    more.at[thread()] = 1000 * thread();
    barrier();
    sum += numbers.at[kBlock - 1 - thread()] + more.at[kBlock - 1 - thread()];
    barrier();
  }
  out.own() = sum;
}
std::string shared_memory() {
  return compare(reverse_in_block, [](uint32_t, uint32_t t) { return 3 * 1001 * (kBlock - 1 - t) + 3; });
}

__global__ void __launch_bounds__(kBlock) reverse_in_warp(Result out) {
  auto& numbers = block_shared<Numbers>();
  numbers.at[thread()] = 7 * thread();
  warp_barrier();
  out.own() = numbers.at[thread() ^ 31U];
}
std::string warp_hand_over() {
  return compare(reverse_in_warp, [](uint32_t, uint32_t t) { return 7 * (t ^ 31U); });
}

__global__ void __launch_bounds__(kBlock) shuffle_lanes(Result out) {
  const auto wide = shuffle(uint64_t{thread()} << 32, (lane() + 5) % kWarp);
  out.own() = static_cast<uint32_t>(wide >> 32) * 1000 + static_cast<uint32_t>(shuffle_xor(static_cast<double>(lane()), 6));
}
std::string shuffles() {
  return compare(shuffle_lanes, [](uint32_t, uint32_t t) { return (t / 32 * 32 + (t + 5) % 32) * 1000 + (t % 32 ^ 6U); });
}

__global__ void __launch_bounds__(kBlock) shuffle_some(Result out) {
  out.own() = lane() < 8 ? shuffle(lane() + 40, 3, 0xffU) + shuffle_xor(lane(), 4, 0xffU) + ballot(lane() < 2, 0xffU) : 9;
}
std::string shuffles_of_a_mask() {
  return compare(shuffle_some, [](uint32_t, uint32_t t) { return t % 32 < 8 ? 43 + (t % 32 ^ 4U) + 3 : 9; });
}

__global__ void __launch_bounds__(kBlock) vote(Result out) {
  const unsigned lanes = ballot(lane() % 5 == 2);
  out.own() = lanes ^ lowest_bit(lanes >> (lane() % 5));
}
std::string votes() {
  return compare(vote, [](uint32_t, uint32_t t) {
    uint32_t lanes = 0;
    for (uint32_t lane = 2; lane < 32; lane += 5) lanes |= 1U << lane;
    return lanes ^ static_cast<uint32_t>(std::countr_zero(lanes >> (t % 32 % 5)));
  });
}

struct alignas(16) FourWords {
  uint32_t at[4];
};
__global__ void __launch_bounds__(kBlock) move_vectors(Result out, const uint32_t* from, uint32_t* to) {
  auto four = load<FourWords>(from + 4 * thread());
  const auto same = load_constant<FourWords>(from + 4 * thread());
  four.at[1] += same.at[3] - same.at[2];
  thread() % 2 == 0 ? store(to + 4 * thread(), four) : store_wide(to + 4 * thread(), four);
  out.own() = to[4 * thread() + 1] + load<uint16_t>(from + 4 * thread());
}
std::string vectors() {
  std::vector<uint32_t> numbers(4 * kBlock);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i);
  const Words from(numbers), to(numbers);
  return compare(
      move_vectors, [](uint32_t, uint32_t t) { return 4 * t + 2 + 4 * t; }, static_cast<const uint32_t*>(from.data()), to.data());
}

__global__ void __launch_bounds__(kBlock) count_all(uint32_t* counters) {
  fetch_add(counters, 3U);
  fetch_or(counters + 1, 1U << lane());
}
std::string atomics() {
  const Words counters({0, 0, 77});
  launch(counters.stream(), count_all, {kBlocks, kBlock}, counters.data());
  const std::vector<uint32_t> found = counters.read(), wanted = {3 * kAll, ~0U, 77};
  return found == wanted ? "" : text("the counters are ", joined(found), " instead of ", joined(wanted));
}

// Bits of numbers of all magnitudes, subnormal ones among them.
std::vector<uint32_t> random_bits() {
  std::mt19937 random(7);
  std::vector<uint32_t> bits(kAll);
  for (uint32_t& each : bits) each = static_cast<uint32_t>(random()) & 0xbfffffffU;  // magnitudes below 2
  for (size_t i = 0; i < bits.size(); i += 3) bits[i] &= 0x807fffffU;
  return bits;
}

MANTISSA_HOST_DEVICE uint32_t bits_of(float value) { return value == value ? __builtin_bit_cast(uint32_t, value) : 0x7fc00000U; }

enum class Operation : uint8_t { contracted, quotient, root, once };
MANTISSA_HOST_DEVICE float calculated(Operation what, float a, float b, float c) {
  if (what == Operation::quotient) return a / b;
  if (what == Operation::root) return sqrtf(a < 0 ? -a : a);
  return a * b + c;
}
__global__ void __launch_bounds__(kBlock) calculate(Result out, Operation what, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  const int64_t i = block() * kBlock + thread();
  const auto x = __builtin_bit_cast(float, a[i]), y = __builtin_bit_cast(float, b[i]), z = __builtin_bit_cast(float, c[i]);
  out.own() = bits_of(what == Operation::once ? multiply_add(x, y, z) : calculated(what, x, y, z));
}
// Rounds as the host does, also where numbers are subnormal. A product and a sum are two roundings, multiply_add() is one or, where that
// would be a call, two.
std::string arithmetic(Operation what) {
  std::vector<uint32_t> a = random_bits(), b = a, c = a;
  std::rotate(b.begin(), b.begin() + 101, b.end()), std::rotate(c.begin(), c.begin() + 202, c.end());
  const Words da(a), db(b), dc(c);
  const auto number = [](uint32_t bits) { return std::bit_cast<float>(bits); };
  const auto wanted = [&](uint32_t block, uint32_t t) {
    const size_t i = block * kBlock + t;
    const float x = number(a[i]), y = number(b[i]), z = number(c[i]);
    return bits_of(kMultiplyAddRoundsOnce && what == Operation::once ? std::fma(x, y, z) : calculated(what, x, y, z));
  };
  return compare(calculate, wanted, what, static_cast<const uint32_t*>(da.data()), static_cast<const uint32_t*>(db.data()),
                 static_cast<const uint32_t*>(dc.data()));
}

__global__ void __launch_bounds__(kBlock) invert(Result out) {
  const auto i = static_cast<float>(block() * kBlock + thread());
  const float x = 1.0F + 0.37F * i, product = x * fast_reciprocal(x), nothing = fast_reciprocal(fast_exp2(200.0F));
  out.own() = product > 1.0F - 0x1p-22F && product < 1.0F + 0x1p-22F && nothing == 0.0F ? 1 : 0;
}
std::string reciprocals() {
  return compare(invert, [](uint32_t, uint32_t) { return 1U; });
}

struct alignas(16) Chunks {
  uint32_t at[kBlock][4];
};
// There are two groups, of which the second is waited for later; every third copy is of nothing.
__global__ void __launch_bounds__(kBlock) copy_beside(Result out, const uint32_t* from) {
  auto& first = block_shared<Chunks>();
  auto& second = block_shared<Numbers[4]>();
  copy_async16(first.at[thread()], from + 4 * thread(), thread() % 3 != 0);
  commit_copies();
  copy_async16(&second[thread() / 32].at[thread() % 32 * 4], from + 4 * (kBlock - 1 - thread()), true);
  commit_copies();
  wait_copies<1>();
  const uint32_t own = first.at[thread()][1];
  wait_copies<0>();
  barrier();
  out.own() = own * 10000 + second[(thread() ^ 1U) / 32].at[(thread() ^ 1U) % 32 * 4 + 2];
}
std::string copies_beside() {
  std::vector<uint32_t> numbers(4 * kBlock);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i);
  const Words from(numbers);
  return compare(
      copy_beside, [](uint32_t, uint32_t t) { return (t % 3 == 0 ? 0 : 4 * t + 1) * 10000 + 4 * (kBlock - 1 - (t ^ 1U)) + 2; },
      static_cast<const uint32_t*>(from.data()));
}

struct alignas(16) Matrices {
  uint16_t at[4][8][8];
};
// Element c of row r of matrix m is 100 m + 10 r + c.
__global__ void __launch_bounds__(kBlock) read_matrices(Result out, bool transposed, unsigned which) {
  auto& matrices = block_shared<Matrices>();
  for (unsigned i = thread(); i < 256; i += kBlock)
    matrices.at[i / 64][i / 8 % 8][i % 8] = static_cast<uint16_t>(100 * (i / 64) + 10 * (i / 8 % 8) + i % 8);
  barrier();
  uint32_t found[4];
  const void* const row = matrices.at[lane() / 8][lane() % 8];
  if (transposed) load_matrices_transposed(found, row);
  if (!transposed) load_matrices(found, row);
  MANTISSA_UNROLL
  for (unsigned m = 0; m < 4; ++m) {
    if (m == which) out.own() = found[m];
  }
}
std::string matrices() {
  for (const bool transposed : {false, true}) {
    for (uint32_t m = 0; m < 4; ++m) {
      const auto wanted = [&](uint32_t, uint32_t t) {
        const uint32_t row = t % 32 / 4, col = t % 4 * 2, step = transposed ? 10 : 1;
        const uint32_t first = 100 * m + (transposed ? 10 * col + row : 10 * row + col);
        return first | (first + step) << 16;
      };
      if (std::string wrong = compare(read_matrices, wanted, transposed, m); !wrong.empty()) return text("matrix ", m, ": ", wrong);
    }
  }
  return {};
}

// One element of a is 3 and one of b is 5, and so one of d is 15 more than the 7 that is there.
__global__ void __launch_bounds__(kBlock) multiply_one(Result out, unsigned row, unsigned k, unsigned col) {
  constexpr uint32_t kThree = 0x4040, kFive = 0x40a0;
  uint32_t a[4] = {}, b[2] = {};
  const auto at = [](unsigned odd, uint32_t value) { return odd != 0 ? value << 16 : value; };
  if (lane() == row % 8 * 4 + k % 8 / 2) {
    MANTISSA_UNROLL
    for (unsigned word = 0; word < 4; ++word) a[word] = word == row / 8 + k / 8 * 2 ? at(k % 2, kThree) : 0U;
  }
  if (lane() == col * 4 + k % 8 / 2) {
    MANTISSA_UNROLL
    for (unsigned word = 0; word < 2; ++word) b[word] = word == k / 8 ? at(k % 2, kFive) : 0U;
  }
  float d[4] = {7, 7, 7, 7};
  mma_bf16(d, a, b);
  out.own() = static_cast<uint32_t>(d[0] + 100 * d[1]) + (static_cast<uint32_t>(d[2] + 100 * d[3]) << 16);
}
std::string multiplications() {
  for (uint32_t row = 0; row < 16; row += 5) {
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t col = 0; col < 8; ++col) {
        const auto wanted = [&](uint32_t, uint32_t t) {
          const auto d = [&](uint32_t r, uint32_t c) { return r == row && c == col ? 22U : 7U; };
          const uint32_t r = t % 32 / 4, c = t % 4 * 2;
          return d(r, c) + 100 * d(r, c + 1) + ((d(r + 8, c) + 100 * d(r + 8, c + 1)) << 16);
        };
        if (std::string wrong = compare(multiply_one, wanted, row, k, col); !wrong.empty())
          return text("row ", row, ", depth ", k, ", column ", col, ": ", wrong);
      }
    }
  }
  return {};
}

}  // namespace

const std::vector<Primitive>& primitives() {
  static const std::vector<Primitive> all = {{"Place", place},
                                             {"SharedMemory", shared_memory},
                                             {"WarpHandOver", warp_hand_over},
                                             {"Shuffles", shuffles},
                                             {"ShufflesOfAMask", shuffles_of_a_mask},
                                             {"Votes", votes},
                                             {"Vectors", vectors},
                                             {"Atomics", atomics},
                                             {"CopiesBeside", copies_beside},
                                             {"Matrices", matrices},
                                             {"Multiplications", multiplications},
                                             {"ProductsAndSums", [] { return arithmetic(Operation::contracted); }},
                                             {"Quotients", [] { return arithmetic(Operation::quotient); }},
                                             {"Roots", [] { return arithmetic(Operation::root); }},
                                             {"Reciprocals", reciprocals},
                                             {"MultiplyAdd", [] { return arithmetic(Operation::once); }}};
  return all;
}

}  // namespace mantissa::gpu
