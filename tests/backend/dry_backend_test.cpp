// A backend without data counts what the CPU takes.
#include "backend/dry_backend.h"

#include <gtest/gtest.h>

#include <vector>

#include "mantissa/backend/functions.h"

namespace mantissa::dry_backend_test {

// Operands of a GEMM, its scratch and what an allocator rounds up.
AllocatorStats stats_of_a_gemm(Backend& device) {
  const Tensor x = zeros(device, Dtype::bf16, {96, 256});
  const QuantizedTensor weight =
      quantized(zeros(device, Dtype::bf16, {384, 256}), {.format = Format::e4m3, .block_rows = 32, .block_cols = 32});
  const Tensor out = empty(device, Dtype::bf16, {96, 384});
  device.run(Gemm{.a = {x}, .b = {weight, true}, .out = out, .accumulate = false});
  return device.allocator_stats();
}

// Statistics of gradients of codes, four groups of 32 rows.
AllocatorStats stats_of_grouped_gradients(Backend& device) {
  const auto codes = [&](int64_t columns) {
    return quantized(zeros(device, Dtype::bf16, {128, columns}), {.format = Format::e4m3, .block_rows = 32, .block_cols = 32});
  };
  const QuantizedTensor x = codes(1024), gradient = codes(2048);
  const std::vector<int32_t> ends = {0, 32, 64, 96, 128};
  const Tensor offsets = from_host(device, Dtype::i32, {5}, ends.data()), out = zeros(device, Dtype::f32, {4 * 2048, 1024});
  device.run(GroupedWeightGradient{.a = gradient, .b = x, .out = out, .offsets = offsets, .accumulate = true});
  return device.allocator_stats();
}

// Leaves out flags, each of which says whether an operand is exact in bf16.
void expect_counted_as_on_the_cpu(AllocatorStats (*stats_of)(Backend&), int flags) {
  const auto cpu = make_backend("cpu"), dry = dry_backend();
  const AllocatorStats expected = stats_of(*cpu), found = stats_of(*dry);
  EXPECT_NEAR(static_cast<double>(found.peak_in_use), static_cast<double>(expected.peak_in_use), 64 * flags);
  EXPECT_EQ(found.in_use, expected.in_use);
}

TEST(DryBackend, CountsWhatTheCpuTakes) {
  expect_counted_as_on_the_cpu(stats_of_a_gemm, 1);
  expect_counted_as_on_the_cpu(stats_of_grouped_gradients, 2);
}

TEST(DryBackend, HoldsTensorsThatNoMachineHolds) {
  const auto device = dry_backend();
  const Tensor huge = zeros(*device, Dtype::f32, {int64_t{1} << 40, 1 << 16});
  EXPECT_TRUE(is_dry(huge.device_bytes()));
  EXPECT_EQ(device->allocator_stats().in_use, int64_t{1} << 58);
  EXPECT_DEATH(std::fprintf(stderr, "%d", static_cast<int>(*huge.device_bytes())), "");
}

TEST(DryBackend, ChecksContracts) {
  const auto device = dry_backend();
  const Tensor a = empty(*device, Dtype::f32, {2, 3}), b = empty(*device, Dtype::f32, {3, 2});
  EXPECT_THROW(device->run(Add{.a = a, .b = b, .out = a}), Error);
}

std::vector<int32_t> offsets_of(int64_t tokens, int64_t experts, int64_t ranks, int64_t capacity = 0) {
  const auto device = dry_backend(ranks);
  const Tensor chosen = empty(*device, Dtype::i32, {tokens, 2}), offsets = empty(*device, Dtype::i32, {experts + 1});
  device->run(DispatchTable{.experts = chosen,
                            .offsets = offsets,
                            .rows = empty_like(chosen),
                            .assignments = empty(*device, Dtype::i32, {dispatch_rows(2 * tokens, experts, 1)}),
                            .multiple = 1,
                            .capacity = capacity});
  return to_host<int32_t>(offsets);
}

TEST(DryBackend, DividesAssignmentsEqually) {
  EXPECT_EQ(offsets_of(8, 4, 2), (std::vector<int32_t>{0, 4, 8, 12, 16}));
  EXPECT_EQ(offsets_of(3, 4, 2), (std::vector<int32_t>{0, 2, 3, 5, 6})) << "three to each rank";
  EXPECT_EQ(offsets_of(8, 4, 2, 3), (std::vector<int32_t>{0, 3, 6, 9, 12})) << "of at most three";
}

}  // namespace mantissa::dry_backend_test
