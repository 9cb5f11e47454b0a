// Checks that every collective must pass on any transport: each runs on all ranks of a world and throws where it does not hold.
#pragma once

#include <gmock/gmock.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "comm/mesh.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::test {

using Bytes = std::vector<std::byte>;

inline void expect_on_ranks(int ranks, const std::function<void(const Communicator&)>& body) {
  EXPECT_THAT(run_ranks(ranks, body), ::testing::Each(::testing::IsEmpty())) << ranks << " ranks";
}

inline std::byte pattern(int from, int to, int64_t i) { return static_cast<std::byte>(from * 131 + to * 31 + i % 251); }

// Random counts, which are the same on all ranks; about one in three is 0.
inline std::vector<int64_t> random_counts(std::mt19937& random, size_t count, int64_t largest) {
  std::vector<int64_t> out(count);
  for (int64_t& c : out) c = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(largest + 1));
  return out;
}

inline int64_t total(std::span<const int64_t> counts) {
  int64_t out = 0;
  for (const int64_t c : counts) out += c;
  return out;
}

// Bytes of a gather: all of `which` ranks filled in, or only this one (-1: all).
inline Bytes gathered(std::span<const int64_t> counts, int which) {
  Bytes out;
  for (size_t r = 0; r < counts.size(); ++r) {
    for (int64_t i = 0; i < counts[r]; ++i) {
      out.push_back(which < 0 || which == static_cast<int>(r) ? pattern(static_cast<int>(r), 0, i) : std::byte{0xee});
    }
  }
  return out;
}

inline Tensor uploaded(Backend& device, const Bytes& bytes) { return from_host(device, Dtype::u8, {std::ssize(bytes)}, bytes.data()); }
inline Bytes downloaded(const Tensor& tensor) {
  const std::vector<uint8_t> bytes = to_host<uint8_t>(tensor);
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

// Checks memory of a device, or of the host where there is none.
inline void check_all_gather(const Communicator& world, uint32_t seed, int64_t largest, Backend* device = nullptr) {
  std::mt19937 random(seed);
  const auto size = static_cast<size_t>(world.size());
  const auto codes = random_counts(random, size, largest), scales = random_counts(random, size, largest / 32 + 1);
  Bytes a = gathered(codes, world.rank()), b = gathered(scales, world.rank());
  if (device != nullptr) {
    const Tensor there = uploaded(*device, a), beside = uploaded(*device, b);
    const Communicator::Gather parts[] = {{there, codes}, {beside, scales}};
    world.all_gather(parts, Purpose::parameters);
    a = downloaded(there), b = downloaded(beside);
  } else {
    const Communicator::Gather parts[] = {{a, codes}, {b, scales}};
    world.all_gather(parts, Purpose::parameters);
  }
  require(a == gathered(codes, -1) && b == gathered(scales, -1), "all_gather: seed ", seed);
}

inline void check_all_to_all(const Communicator& world, uint32_t seed, int64_t largest, Backend* device = nullptr) {
  std::mt19937 random(seed);
  const int size = world.size(), rank = world.rank();
  const auto n = static_cast<size_t>(size);
  const auto matrix = random_counts(random, n * n, largest);  // [from, to]
  std::vector<int64_t> in_counts, out_counts;
  Bytes in, expected;
  for (int peer = 0; peer < size; ++peer) {
    in_counts.push_back(matrix[static_cast<size_t>(rank * size + peer)]);
    out_counts.push_back(matrix[static_cast<size_t>(peer * size + rank)]);
    for (int64_t i = 0; i < in_counts.back(); ++i) in.push_back(pattern(rank, peer, i));
    for (int64_t i = 0; i < out_counts.back(); ++i) expected.push_back(pattern(peer, rank, i));
  }
  Bytes out(expected.size());
  if (device != nullptr) {
    const Tensor from = uploaded(*device, in), to = uploaded(*device, out);
    const Communicator::Exchange part{.in = from, .in_counts = in_counts, .out = to, .out_counts = out_counts};
    world.all_to_all({&part, 1}, Purpose::other);
    out = downloaded(to);
  } else {
    world.all_to_all(in, in_counts, out, out_counts, Purpose::other);
  }
  require(out == expected, "all_to_all: seed ", seed);
}

// The addends of a rank, in a wide range of magnitudes, so that another order of a sum shows.
inline std::vector<double> addends(int rank, int64_t count, uint32_t seed) {
  std::vector<double> out = random_values(count, seed * 64 + static_cast<uint32_t>(rank));
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::ldexp(out[i], static_cast<int>(i % 13) * (rank % 3));
  return out;
}

// Sums element by element: operands at distance 1, then 2, then 4.
template <class T>
std::vector<T> tree(std::vector<std::vector<T>> operands) {
  for (size_t distance = 1; distance < operands.size(); distance *= 2) {
    for (size_t i = 0; i + distance < operands.size(); i += 2 * distance) {
      for (size_t e = 0; e < operands[i].size(); ++e) operands[i][e] += operands[i + distance][e];
    }
  }
  return operands.at(0);
}

template <class T>
std::vector<T> tree_of_ranks(int ranks, int64_t count, uint32_t seed) {
  std::vector<std::vector<T>> operands;
  for (int r = 0; r < ranks; ++r) {
    const std::vector<double> values = addends(r, count, seed);
    operands.emplace_back(values.begin(), values.end());
  }
  return tree(std::move(operands));
}

template <class T>
void check_sum(Backend& device, const Communicator& world, int64_t count, uint32_t seed) {
  const std::vector<double> own = addends(world.rank(), count, seed);
  const std::vector<T> values(own.begin(), own.end());
  const Tensor tensor = from_host(device, DtypeOf<T>::value, {count}, values.data());
  world.sum(tensor, Purpose::gradients);
  const std::vector<T> actual = to_host<T>(tensor), expected = tree_of_ranks<T>(world.size(), count, seed);
  require(actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(T)) == 0, "sum of ", count, " elements");
}

inline void check_sum_scatter(Backend& device, const Communicator& world, uint32_t seed, int64_t largest) {
  std::mt19937 random(seed);
  const auto counts = random_counts(random, static_cast<size_t>(world.size()), largest);
  const int64_t count = total(counts);
  const std::vector<double> own = addends(world.rank(), count, seed);
  const std::vector<float> values(own.begin(), own.end());
  const Tensor tensor = from_host(device, Dtype::f32, {count}, values.data());
  const Tensor lent = seed % 2 == 0 ? Tensor() : empty(device, Dtype::f32, {world.scratch_elements(counts) + seed % 3});
  world.sum_scatter(tensor, counts, Purpose::gradients, lent);
  const std::vector<float> actual = to_host<float>(tensor), sums = tree_of_ranks<float>(world.size(), count, seed);
  const int64_t begin = total(std::span(counts).first(static_cast<size_t>(world.rank())));
  for (int64_t i = begin; i < begin + counts[static_cast<size_t>(world.rank())]; ++i) {
    const auto at = static_cast<size_t>(i);
    require(actual[at] == sums[at], "sum_scatter: seed ", seed, ", element ", i);
  }
}

inline void check_small(const Communicator& world) {
  for (int root = 0; root < world.size(); ++root) {
    Bytes bytes = world.rank() == root ? Bytes(77, pattern(root, 1, 5)) : Bytes(77);
    world.broadcast(bytes, root, Purpose::other);
    require(bytes == Bytes(77, pattern(root, 1, 5)), "broadcast from ", root);
  }
  require(world.sum(int64_t{1} << world.rank()) == (int64_t{1} << world.size()) - 1, "sum of integers");
  int64_t sums[] = {-world.rank(), int64_t{1} << 62};
  world.sum(sums);
  require(sums[0] == -world.size() * (world.size() - 1) / 2, "sum of negative integers");
  require(static_cast<uint64_t>(sums[1]) == static_cast<uint64_t>(world.size()) << 62, "sum modulo 2^64");
  world.sum(std::span<int64_t>());
  const std::vector<int> ranks = world.all(world.rank() * 3);
  for (size_t r = 0; r < ranks.size(); ++r) require(ranks[r] == static_cast<int>(r) * 3, "all");
  world.barrier();
}

// Splits into groups of neighbors, of every second rank and of random colors, and these into groups.
inline void check_split(const Communicator& world, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int> colors;
  for (int r = 0; r < world.size(); ++r) colors.push_back(static_cast<int>(random() % 3) - 1);
  const int color = colors[static_cast<size_t>(world.rank())];
  const Communicator group = world.split(color);
  std::vector<int> members;
  for (int r = 0; r < world.size(); ++r) {
    if (colors[static_cast<size_t>(r)] == color) members.push_back(r);
  }
  require(group.all(world.rank()) == members && members[static_cast<size_t>(group.rank())] == world.rank(), "members: seed ", seed);
  check_all_gather(group, seed, 100);
  check_small(world);
  check_all_to_all(group.split(group.rank() % 2), seed, 100);
}

}  // namespace mantissa::test
