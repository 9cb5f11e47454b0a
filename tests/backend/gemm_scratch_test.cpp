// Memory that GEMMs take from the allocator, against gemm_scratch().
#include <gtest/gtest.h>

#include "backend/dry_backend.h"
#include "quantized_matrices.h"

namespace mantissa::gemm_scratch_test {

enum class Kind { fprop, dgrad, wgrad };

struct Case {
  Kind kind;
  Dtype dtype;
  bool a_quantized = false, b_quantized = false;
  int64_t rows, in, out;
  int64_t matrices = 1;
};

Value matrix(Backend& device, Shape shape, Dtype dtype, bool is_quantized) {
  const Tensor values = zeros(device, Dtype::bf16, shape);
  if (is_quantized) return quantized(values, test::tiles_of(Format::e4m3, 32));
  return converted(values, dtype);
}

struct Scratch {
  int64_t found, predicted;
};

// The most that a backend holds while it multiplies, beyond the operands. What making these took for a moment is filled up, so that the
// GEMM has the peak.
template <class Kernel>
Scratch scratch_of(Backend& device, const Kernel& product) {
  const AllocatorStats stats = device.allocator_stats();
  const Tensor filling = empty(device, Dtype::u8, {stats.peak_in_use - stats.in_use});
  const int64_t before = device.allocator_stats().in_use;
  device.run(product);
  return {.found = device.allocator_stats().peak_in_use - before, .predicted = gemm_scratch(product)};
}

Scratch scratch_of(const Case& c) {
  const std::unique_ptr<Backend> device = make_backend("cpu");
  const auto value = [&](int64_t rows, int64_t cols, bool is_quantized) { return matrix(*device, {rows, cols}, c.dtype, is_quantized); };
  if (c.kind == Kind::wgrad) {
    const Tensor gradient = zeros(*device, Dtype::f32, {c.out, c.in});
    const Value a = value(c.rows, c.out, c.a_quantized), b = value(c.rows, c.in, c.b_quantized);
    return scratch_of(*device, Gemm{.a = {a, true}, .b = {b}, .out = gradient, .accumulate = true});
  }
  const bool forward = c.kind == Kind::fprop;
  const Tensor out = empty(*device, c.dtype, {c.rows, forward ? c.out : c.in});
  const Value a = value(c.rows, forward ? c.in : c.out, c.a_quantized), b = value(c.matrices * c.out, c.in, c.b_quantized);
  if (c.matrices == 1) return scratch_of(*device, Gemm{.a = {a}, .b = {b, forward}, .out = out, .accumulate = false});
  std::vector<int32_t> offsets;
  for (int64_t g = 0; g <= c.matrices; ++g) offsets.push_back(static_cast<int32_t>(g * c.rows / c.matrices));
  const Tensor groups = from_host(*device, Dtype::i32, {c.matrices + 1}, offsets.data());
  return scratch_of(*device, GroupedGemm{.a = {a}, .b = {b, forward}, .out = out, .offsets = groups});
}

// Expects at least `least` of the prediction, and no more than it. Beside it there are flags, offsets, and what the allocator rounds up.
void expect_as_predicted(const Case& c, double least = 0.99) {
  const Scratch scratch = scratch_of(c);
  const auto found = static_cast<double>(scratch.found), most = static_cast<double>(scratch.predicted);
  const std::string what = text(static_cast<int>(c.kind), ' ', c.dtype, c.a_quantized ? " codes" : "", c.b_quantized ? " * codes" : "", ' ',
                                c.rows, " x ", c.in, " x ", c.out, ", ", c.matrices, " matrices");
  EXPECT_LE(found, 1.01 * most + 8192.0) << what;
  EXPECT_GE(found, least * most) << what;
}

TEST(GemmScratch, IsWhatTheAllocatorGives) {
  for (const Kind kind : {Kind::fprop, Kind::dgrad, Kind::wgrad}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const bool a_quantized : {false, true}) {
        for (const bool b_quantized : {false, true}) {
          expect_as_predicted({kind, dtype, a_quantized, b_quantized, 512, 256, 384});
          if (kind != Kind::wgrad) expect_as_predicted({kind, dtype, a_quantized, b_quantized, 512, 256, 384, 4});
        }
      }
    }
  }
}

// A large weight is dequantized a part at a time.
TEST(GemmScratch, OfALargeWeightOfCodesIsThatOfAPart) {
  for (const Kind kind : {Kind::fprop, Kind::dgrad}) {
    expect_as_predicted({kind, Dtype::bf16, false, true, 32, 2048, 6144}, 0.7);  // which columns are a part depends on the tiles
    expect_as_predicted({kind, Dtype::bf16, false, true, 32, 1024, 2048, 8});
    expect_as_predicted({kind, Dtype::bf16, false, true, 32, 1024, 1536, 8});
  }
}

}  // namespace mantissa::gemm_scratch_test
