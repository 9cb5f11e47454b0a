// Calls that kernels refuse: every operand of every case of a kernel missing, of another dtype, shape or in the memory of another one; then
// faults of indices, sizes and formats.
#include "contract_check.h"
#include "faulty_calls.h"
#include "files.h"
#include "kernel_cases.h"
#include "left_open.h"

namespace mantissa::test::contracts_test {

class Contracts : public ::testing::TestWithParam<std::string> {};

TEST_P(Contracts, RefuseEveryFaultOfEveryOperandByName) {
  static const std::set<std::string> without_fp64_values{
      "Fill",          "Quantize",  "Dequantize",    "FakeQuantize", "QuantizationError", "RequantizeColumns",
      "SwizzleScales", "SumCounts", "DispatchTable", "ArrivalTable", "FinishGradients",   "Simulate"};
  FaultyCalls device(GetParam());
  for (const KernelCase& c : kernel_cases()) {
    if (c.kernel != GetParam()) continue;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      SCOPED_TRACE(c.variant);
      Operands operands(device, dtype);
      c.run(operands);
    }
  }
  EXPECT_GT(device.calls(), 0);
  const auto open = left_open().find(GetParam());
  EXPECT_EQ(device.accepted(), open == left_open().end() ? std::set<std::string>() : open->second);
  EXPECT_EQ(device.accepts_fp64(), !without_fp64_values.contains(GetParam()));
  EXPECT_EQ(device.copies_fp64(), GetParam() == "Convert");
}

// Kernel names where the kernels of the CPU are tested, else none: no backend takes part.
std::vector<std::string> kernels_with_contracts() {
  return tested_backends().front() == "cpu" ? kernel_names() : std::vector<std::string>();
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Contracts);
INSTANTIATE_TEST_SUITE_P(, Contracts, ::testing::ValuesIn(kernels_with_contracts()), [](const auto& c) { return c.param; });

constexpr HeadLayout kLayout{4, 2, 6};

INSTANTIATE_TEST_SUITE_P(, ContractCheck, ::testing::ValuesIn(all_backends()), backend_of);

TEST_P(ContractCheck, ExpectedDtypeAndShapeAreNamed) {
  refuses(SwiGluForward{.x = f32({4, 7}), .out = f32({4, 3})}, "swiglu", {"x is fp32 [4, 7], expected fp32 [4, 2C]"});
  refuses(SwiGluForward{.x = f32({4, 6}), .out = f32({4, 3}), .limit = -1}, "swiglu", {"limit is -1"});
  refuses(SwiGluForward{.x = f32({4, 6}), .out = bf16s({3, 4})}, "swiglu", {"out is bf16 [3, 4], expected fp32 [4, 3]"});
  refuses(SumRows{.x = bf16s({4, 3}), .out = bf16s({3}), .accumulate = false}, "sum_rows", {"out is bf16 [3], expected fp32 [3]"});
  refuses(Convert{.x = f32({4, 3}), .out = bf16s({4, 4})}, "convert", {"out is bf16 [4, 4], expected fp32, bf16 or fp64 [4, 3]"});
  refuses(Fill{.out = {}, .value = 1.0}, "fill", {"out is missing"});
}

TEST_P(ContractCheck, MemoryMayLieSideBySide) {
  const Tensor x = f32({4, 3});
  accepts(Convert{.x = x.slice(0, 2), .out = x.slice(2, 4)});
  accepts(Convert{.x = x.slice(2, 4), .out = x.slice(0, 2)});
  refuses(Convert{.x = x.slice(0, 3), .out = x.slice(1, 4)}, "convert", {"out overlaps x"});
}

TEST_P(ContractCheck, InPlaceIsAllOfOneInput) {
  const Tensor x = f32({4, 3});
  const auto contract = [&](const Tensor& input, const Tensor& other) {
    Contract("some kernel").input("x", input, "[N, C]").in_place("y", x, "[M, C]").in_place("z", other, "[K, C]");
  };
  EXPECT_NO_THROW(contract(x, f32({4, 3})));
  EXPECT_THROW(contract(x.slice(0, 2), f32({4, 3})), Error) << "a part of it";
  EXPECT_THROW(contract(f32({4, 3}), x), Error) << "in the place of another";
}

TEST_P(ContractCheck, Fp64IsNeitherReadNorWrittenWhereItIsNotComputed) {
  const Tensor wide = f64({4, 3}), narrow = f32({4, 3});
  const Convert reads{.x = wide, .out = narrow}, writes{.x = narrow, .out = wide};
  if (device().computes_fp64()) {
    accepts(reads), accepts(writes);
  } else {
    refuses(reads, "convert", {text("x is fp64, which the backend ", device().name(), " does not compute")});
    refuses(writes, "convert", {text("out is fp64, which the backend ", device().name(), " does not compute")});
  }
  accepts(Convert{.x = wide, .out = empty_like(wide)});  // a copy
}

TEST_P(ContractCheck, ASumMayReplaceBothItsOperands) {
  const Tensor a = f32({4, 3});
  accepts(Add{.a = a, .b = a, .out = a});
}

TEST_P(ContractCheck, RandomNumbersHaveIndicesOfTheirOwn) {
  const RandomNormal good{.out = f32({2, 3}), .key = {}, .what = 0, .first_index = 0, .std = 1.0, .row_stride = 3};
  accepts(good);
  RandomNormal bad = good;
  bad.first_index = -1;
  refuses(bad, "random_normal", {"first_index", "-1"});
  bad = good;
  for (const int64_t stride : {2, -1}) {
    bad.row_stride = stride;
    refuses(bad, "random_normal", {text("row_stride is ", stride), "[2, 3]"});
  }
}

Gemm product(Operand a, Operand b, const Tensor& out, bool accumulate = false, const Tensor& bias = {}) {
  return {.a = std::move(a), .b = std::move(b), .out = out, .accumulate = accumulate, .bias = bias};
}

TEST_P(ContractCheck, GemmsFitTogether) {
  const Tensor a = f32({5, 3}), b = f32({3, 7}), out = f32({5, 7});
  accepts(product({a}, {b}, out, false, f32({7})));
  accepts(product({b, true}, {a, true}, f32({7, 5})));
  refuses(product({a}, {b, true}, out), "gemm", {"[5, 3]", "[7, 3]"});
  refuses(product({f64({5, 3})}, {b}, out), "gemm", {"fp64", "fp32"});
}

TEST_P(ContractCheck, GemmsOfCodesFitTogether) {
  const QuantizedTensor a = codes({32, 64}, {Format::e4m3}), b = codes({96, 64}, {Format::e4m3});
  accepts(product({a}, {b, true}, f32({32, 96}), true));
  accepts(product({a}, {b, true}, bf16s({32, 96}), false, f32({96})));
  accepts(product({a}, {b, true}, bf16s({32, 96}), false, bf16s({96})));
  accepts(product({bf16s({5, 64})}, {b, true}, bf16s({5, 96})));
  refuses(product({bf16s({5, 64})}, {b, true}, bf16s({5, 96}), false, f32({96})), "gemm", {"bias is fp32"});
  refuses(product({f32({5, 64})}, {b, true}, bf16s({5, 96})), "gemm", {"out is bf16"});
  refuses(product({a}, {b}, f32({32, 96})), "gemm", {"[32, 64]", "[96, 64]"});
  refuses(product({a}, {b, true}, bf16s({32, 96}), true), "gemm", {"accumulate"});
  QuantizedTensor torn = b;
  torn.scales = u8({96, 3});
  refuses(product({a}, {torn, true}, f32({32, 96})), "gemm", {"b is u8 [96, 3]", "[96, 2]"});
  torn = b;
  torn.how.format = Format::none;
  refuses(product({a}, {torn, true}, f32({32, 96})), "gemm", {"b has no format"});
}

TEST_P(ContractCheck, CodesAreOfTheRowsOfX) {
  const Quantization rows{Format::e4m3}, columns = rows.transposed();
  const Tensor x = f32({64, 32});
  accepts(Quantize{.x = x, .out = codes({64, 32}, rows), .second = codes({64, 32}, columns)});
  accepts(Quantize{.x = x, .out = codes({64, 32}, rows), .second = codes({32, 64}, rows)});
  accepts(Quantize{.x = f32({33, 32}), .out = codes({64, 32}, columns)});
  refuses(Quantize{.x = f32({32, 32}), .out = codes({64, 32}, columns)}, "quantize", {"[32, 32]", "[64, 32]"});
  refuses(Quantize{.x = x, .out = codes({32, 32}, rows)}, "quantize", {"[64, 32]", "[32, 32]"});
  refuses(Quantize{.x = x, .out = codes({64, 64}, rows)}, "quantize", {"[64, 32]", "[64, 64]"});
  refuses(Quantize{.x = x, .out = {}}, "quantize", {"out has no format"});
  refuses(Quantize{.x = x, .out = codes({64, 32}, rows), .second = codes({64, 32}, rows)}, "quantize", {"second is e4m3 1x32"});
  refuses(Quantize{.x = x, .out = codes({64, 32}, rows), .second = codes({96, 32}, columns)}, "quantize", {"[64, 32]", "[96, 32]"});
  refuses(Quantize{.x = x, .out = codes({64, 32}, columns), .second = codes({64, 32}, rows)}, "quantize", {"one pass"});
  Quantization fake{Format::e2m1, 1, 32, ScaleRule::flashinfer}, ranged = rows;
  refuses(Quantize{.x = x, .out = codes({64, 32}, fake)}, "quantize", {"flashinfer", "fp32"});
  fake.range = {1, 254};
  refuses(Quantize{.x = bf16s({64, 32}), .out = codes({64, 32}, fake)}, "quantize", {"flashinfer needs the whole range"});
  for (const ScaleRange range : {ScaleRange{105, 252}, {127, 127}}) {
    ranged.range = range;
    accepts(Quantize{.x = x, .out = codes({64, 32}, ranged)});
  }
  for (const ScaleRange range : {ScaleRange{128, 254}, {0, 126}, {0, 255}}) {
    ranged.range = range;
    refuses(Quantize{.x = x, .out = codes({64, 32}, ranged)}, "quantize", {"the range of scales must contain 127"});
  }
}

TEST_P(ContractCheck, DequantizedColumnsAreWholeBlocks) {
  const QuantizedTensor x = codes({64, 32}, {Format::e5m2, 32, 32}), wide = codes({64, 96}, {Format::e5m2, 32, 32});
  accepts(Dequantize{.x = x, .out = bf16s({64, 32})});
  accepts(Dequantize{.x = wide, .out = f32({64, 32}), .first_col = 64});
  refuses(Dequantize{.x = wide, .out = f32({64, 32}), .first_col = 16}, "dequantize", {"[16, 48)", "begin and end with blocks"});
  refuses(Dequantize{.x = wide, .out = f32({64, 16}), .first_col = 32}, "dequantize", {"[32, 48)", "begin and end with blocks"});
  refuses(Dequantize{.x = wide, .out = f32({64, 64}), .first_col = 64}, "dequantize", {"[64, 128)", "[64, 96]"});
  refuses(Dequantize{.x = wide, .out = f32({64, 32}), .first_col = -32}, "dequantize", {"[-32, 0)"});
  const QuantizedTensor edge = codes({64, 80}, {Format::e5m2, 32, 32});
  accepts(Dequantize{.x = edge, .out = f32({64, 16}), .first_col = 64});
  refuses(Dequantize{.x = edge, .out = f32({64, 48}), .first_col = 0}, "dequantize", {"[0, 48)", "begin and end with blocks"});
  refuses(Dequantize{.x = edge, .out = f32({64, 32}), .first_col = 64}, "dequantize", {"[64, 96)", "[64, 80]"});
}

TEST_P(ContractCheck, FakeQuantizedValuesKeepDtypeAndShape) {
  const Tensor x = f32({4, 64});
  const Quantization how{Format::e2m1, 1, 16}, flashinfer{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  accepts(FakeQuantize{.x = x, .out = f32({4, 64}), .how = how});
  refuses(FakeQuantize{.x = x, .out = f32({4, 64}), .how = flashinfer}, "fake_quantize", {"flashinfer", "fp32"});
  accepts(FakeQuantize{.x = f32({4, 24}), .out = f32({4, 24}), .how = how});
  EXPECT_THROW((FakeQuantize{.x = f32({4, 25}), .out = f32({4, 25}), .how = how}.contract()), Error) << "half a byte";
}

TEST_P(ContractCheck, MseIsForCodesOnly) {
  accepts(Quantize{.x = f32({64, 32}), .out = codes({64, 32}, {Format::e2m1, 1, 32, ScaleRule::mse, {105, 254}})});
  const Simulation how{.element = {2, 1}, .rule = ScaleRule::mse};
  refuses(Simulate{.x = f32({64, 32}), .out = f32({64, 32}), .how = how}, "simulate", {"the rule mse is for codes only"});
}

TEST_P(ContractCheck, ColumnwiseCodesComeFromRowwiseOnes) {
  const Quantization how{Format::e4m3}, fp4{Format::e2m1};
  accepts(RequantizeColumns{.x = codes({64, 32}, how), .out = codes({64, 32}, how.transposed())});
  refuses(RequantizeColumns{.x = codes({64, 32}, how), .out = codes({64, 32}, how)}, "requantize_columns", {"out is e4m3 1x32"});
  accepts(RequantizeColumns{.x = codes({64, 32}, how), .out = codes({32, 64}, how)});
  refuses(RequantizeColumns{.x = codes({64, 32}, how), .out = codes({64, 64}, how.transposed())}, "requantize_columns", {"[64, 64]"});
  refuses(RequantizeColumns{.x = codes({64, 32}, fp4), .out = codes({64, 32}, fp4.transposed())}, "requantize_columns", {"e2m1"});
}

TEST_P(ContractCheck, TilesHaveNoSwizzledScales) {
  accepts(SwizzleScales{.x = codes({64, 32}, {Format::e4m3}), .out = u8({512})});
  refuses(SwizzleScales{.x = codes({64, 32}, {Format::e4m3, 32, 32}), .out = u8({512})}, "swizzle_scales", {"tiles"});
}

TEST_P(ContractCheck, ErrorsAreOfTheRowsOfX) {
  const QuantizedTensor q = codes({64, 32}, {Format::e4m3});
  const Tensor out = f64({QuantizationError::size});
  accepts(QuantizationError{.x = f32({64, 32}), .q = q, .out = out});
  accepts(QuantizationError{.x = bf16s({33, 32}), .q = q, .out = out});
  refuses(QuantizationError{.x = f32({32, 32}), .q = q, .out = out}, "quantization_error", {"[32, 32]", "[64, 32]"});
  refuses(QuantizationError{.x = f32({64, 32}), .q = {}, .out = out}, "quantization_error", {"q has no format"});
  accepts(QuantizationError{.x = f32({64, 32}), .q = q, .out = out, .rows = i32({64})});
  const QuantizedTensor tiles = codes({64, 32}, {Format::e4m3, 32, 32});
  accepts(QuantizationError{.x = f32({64, 32}), .q = tiles, .out = out, .rows = i32({64})});
  refuses(QuantizationError{.x = f32({64, 32}), .q = tiles, .out = out, .rows = i32({63})}, "quantization_error", {"rows is i32 [63]"});
}

TEST_P(ContractCheck, IdsAreInTheVocabulary) {
  const EmbeddingForward forward{.ids = i32({4}), .weight = f32({5, 3}), .out = f32({4, 3})};
  const EmbeddingBackward backward{.ids = forward.ids, .dy = f32({4, 3}), .dweight = f32({5, 3}), .accumulate = false};
  accepts(forward);
  accepts(backward);
  for (const int32_t id : {-1, 5, 1 << 30}) {
    set_value(forward.ids, 2, id);
    refuses(forward, "embedding", {"ids[2]", std::to_string(id), "5"}, ExitCode::data);
    refuses(backward, "embedding backward", {"ids[2]", std::to_string(id), "5"}, ExitCode::data);
  }
}

TEST_P(ContractCheck, PartsOfATableLieInIt) {
  const TableRows good{.first = 6, .rows = 11};
  const EmbeddingForward forward{.ids = i32({4}), .weight = f32({5, 3}), .out = f32({4, 3}), .part = good};
  const EmbeddingBackward backward{.ids = forward.ids, .dy = f32({4, 3}), .dweight = f32({5, 3}), .accumulate = false, .part = good};
  accepts(forward);
  accepts(backward);
  for (const TableRows part : {TableRows{-1, 11}, TableRows{7, 11}, TableRows{0, 4}, TableRows{1, 0}}) {
    EmbeddingForward bad = forward;
    EmbeddingBackward bad_backward = backward;
    bad.part = bad_backward.part = part;
    refuses(bad, "embedding", {text("from ", part.first), "5", text(part.rows)});
    refuses(bad_backward, "embedding backward", {text("from ", part.first), "5", text(part.rows)});
  }
  const Quantization how{Format::e4m3, 1, 32};
  const Permute of_codes{.x = codes({5, 64}, how), .out = codes({4, 64}, how), .assignments = forward.ids, .per_row = 1, .part = good};
  accepts(of_codes);
  for (const TableRows part : {TableRows{-1, 11}, TableRows{7, 11}, TableRows{0, 4}, TableRows{1, 0}}) {
    Permute bad = of_codes;
    bad.part = part;
    refuses(bad, "permute", {text("from ", part.first), "5", text(part.rows)});
  }
  Permute several = of_codes;
  several.per_row = 2;
  refuses(several, "permute", {"per_row is 2"});
  for (const int32_t id : {-1, 11}) {
    set_value(forward.ids, 2, id);
    refuses(forward, "embedding", {"ids[2]", std::to_string(id), "11"}, ExitCode::data);
    refuses(backward, "embedding backward", {"ids[2]", std::to_string(id), "11"}, ExitCode::data);
    refuses(of_codes, "embedding", {"ids[2]", std::to_string(id), "11"}, ExitCode::data);
  }
}

TEST_P(ContractCheck, QueryHeadsShareKeyHeadsEvenly) {
  const Shape row{3, kLayout.row()};
  const QkNormForward good{
      .x = f32(row), .q_weight = f32({6}), .k_weight = f32({6}), .y = f32(row), .rstd = f32({3, 6}), .layout = kLayout, .eps = 1e-6};
  accepts(good);
  QkNormForward bad = good;
  for (const int64_t kv_heads : {3, 0, -1}) {
    bad.layout.kv_heads = kv_heads;
    refuses(bad, "qk_norm", {"4 query heads", text(kv_heads, " key heads")});
  }
  bad.layout.kv_heads = 1;
  refuses(bad, "qk_norm", {"[3, 36]"});
}

TEST_P(ContractCheck, PositionsAreInTheTableOfRotations) {
  const Shape row{3, kLayout.row()};
  const Rope good{.x = f32(row), .table = f32({5, 6}), .positions = i32({3}), .y = f32(row), .layout = kLayout, .inverse = false};
  accepts(good);
  Rope bad = good;
  bad.layout = {8, 4, 3};
  bad.table = f32({5, 3});
  refuses(bad, "rope", {"head_dim is 3"});
  for (const int32_t position : {-1, 5}) {
    set_value(good.positions, 1, position);
    refuses(good, "rope", {"positions[1]", std::to_string(position)});
  }
}

TEST_P(ContractCheck, SegmentsStartInTheirSequence) {
  const AttentionForward forward{.qkv = f32({6, kLayout.row()}),
                                 .out = f32({6, 24}),
                                 .lse = f32({2, 4, 3}),
                                 .batch = 2,
                                 .layout = kLayout,
                                 .scale = 1.0,
                                 .segment_starts = i32({6})};
  const AttentionBackward backward{.qkv = forward.qkv,
                                   .out = forward.out,
                                   .lse = forward.lse,
                                   .dout = f32({6, 24}),
                                   .dqkv = f32({6, kLayout.row()}),
                                   .batch = 2,
                                   .layout = kLayout,
                                   .scale = 1.0,
                                   .segment_starts = forward.segment_starts};
  accepts(forward);
  accepts(backward);
  AttentionForward bad = forward;
  bad.window = -1;
  refuses(bad, "attention", {"window is -1"});
  bad = forward;
  for (const int64_t batch : {4, 0, -2}) {
    bad.batch = batch;
    refuses(bad, "attention", {"6 rows", text(batch, " sequences")});
  }
  for (const int32_t start : {-1, 2}) {
    set_value(forward.segment_starts, 4, start);  // position 1 of the second sequence
    refuses(forward, "attention", {"segment_starts[4]", std::to_string(start)});
    refuses(backward, "attention backward", {"segment_starts[4]", std::to_string(start)});
  }
}

TEST_P(ContractCheck, CachedPositionsAreInTheCache) {
  const CachedAttention good{.qkv = f32({2, kLayout.row()}),
                             .keys = f32({9, 12}),
                             .values = f32({9, 12}),
                             .out = f32({2, 24}),
                             .first = 7,
                             .layout = kLayout,
                             .scale = 1.0};
  accepts(good);
  CachedAttention bad = good;
  bad.window = -1;
  refuses(bad, "cached_attention", {"window is -1"});
  bad = good;
  for (const int64_t first : {-1, 8}) {
    bad.first = first;
    refuses(bad, "cached_attention", {std::to_string(first), "9"});
  }
}

TEST_P(ContractCheck, TargetsAreInTheVocabulary) {
  const CrossEntropy good{.logits = f32({4, 8}), .targets = i32({4}), .loss = f32({4}), .vocab = 5, .scale = 1.0, .dlogits = f32({4, 8})};
  accepts(good);
  CrossEntropy bad = good;
  for (const int64_t vocab : {0, 9}) {
    bad.vocab = vocab;
    refuses(bad, "cross_entropy", {"vocab is " + std::to_string(vocab)});
  }
  for (const int32_t target : {5, 7, 1 << 30}) {
    set_value(good.targets, 3, target);
    refuses(good, "cross_entropy", {"targets[3]", std::to_string(target), "5"}, ExitCode::data);
  }
}

TEST_P(ContractCheck, TargetsOfSharesAreInTheWholeVocabulary) {
  const Tensor targets = i32({4});
  const CrossEntropyShare share{.logits = f32({4, 8}), .targets = targets, .sums = f32({4, 2}), .first = 16, .vocab = 5};
  const CrossEntropyOfShares whole{.logits = share.logits,
                                   .targets = targets,
                                   .sums = f32({3, 4, 2}),
                                   .loss = f32({4}),
                                   .first = 16,
                                   .vocab = 5,
                                   .scale = 1.0,
                                   .dlogits = f32({4, 8})};
  accepts(share);
  accepts(whole);
  for (const auto& [first, vocab] : {std::pair<int64_t, int64_t>{-1, 5}, {0, 0}}) {
    CrossEntropyShare bad = share;
    CrossEntropyOfShares bad_whole = whole;
    bad.first = bad_whole.first = first, bad.vocab = bad_whole.vocab = vocab;
    refuses(bad, "cross_entropy_share", {text("from ", first), text("of ", vocab)});
    refuses(bad_whole, "cross_entropy_of_shares", {text("from ", first), text("of ", vocab)});
  }
  set_value(targets, 3, 5);
  refuses(share, "cross_entropy_share", {"targets[3]", "5"}, ExitCode::data);
  refuses(whole, "cross_entropy_of_shares", {"targets[3]", "5"}, ExitCode::data);
}

TEST_P(ContractCheck, DistillationHasATemperatureAndAShareOfTheLoss) {
  const Tensor targets = i32({4});
  const DistillationShare share{
      .logits = f32({4, 8}), .teacher = f32({4, 8}), .targets = targets, .sums = f32({4, 5}), .first = 16, .vocab = 5, .temperature = 2.0};
  const DistillationOfShares whole{.logits = share.logits,
                                   .teacher = share.teacher,
                                   .targets = targets,
                                   .sums = f32({3, 4, 5}),
                                   .loss = f32({4}),
                                   .first = 16,
                                   .vocab = 5,
                                   .temperature = 2.0,
                                   .weight = 1.0,
                                   .scale = 1.0,
                                   .dlogits = f32({4, 8})};
  accepts(share);
  accepts(whole);
  DistillationShare bad = share;
  DistillationOfShares bad_whole = whole;
  bad.temperature = bad_whole.temperature = 0.0;
  refuses(bad, "distillation_share", {"temperature is 0"});
  refuses(bad_whole, "distillation_of_shares", {"temperature is 0"});
  for (const double weight : {0.0, 1.5}) {
    bad_whole = whole;
    bad_whole.weight = weight;
    refuses(bad_whole, "distillation_of_shares", {text("weight is ", weight)});
  }
  for (const auto& [first, vocab] : {std::pair<int64_t, int64_t>{-1, 5}, {0, 0}}) {
    bad = share, bad_whole = whole;
    bad.first = bad_whole.first = first, bad.vocab = bad_whole.vocab = vocab;
    refuses(bad, "distillation_share", {text("from ", first), text("of ", vocab)});
    refuses(bad_whole, "distillation_of_shares", {text("from ", first), text("of ", vocab)});
  }
  set_value(targets, 3, 5);
  refuses(share, "distillation_share", {"targets[3]", "5"}, ExitCode::data);
  refuses(whole, "distillation_of_shares", {"targets[3]", "5"}, ExitCode::data);
}

TEST_P(ContractCheck, PartialSumsAreOf32Rows) {
  refuses(SquaredNorm{.x = f32({33, 7}), .partials = f64({1})}, "squared_norm", {"partials", "[2]"});
  refuses(SquaredNorm{.x = f32({}), .partials = f64({1})}, "squared_norm", {"x is fp32 []", "[N, ...]"});
}

TEST_P(ContractCheck, LossesArePairsOfPairs) {
  const FinishGradients good{
      .partials = f64({3}), .losses = f64({4}), .flags = i32({1}), .step = f32({5}), .outcome = f64({4}), .clip = 1.0, .pairwise = true};
  accepts(good);
  FinishGradients odd = good;
  odd.losses = f64({3});
  refuses(odd, "finish_gradients", {"power of two", "3"});
  odd.losses = f64({0});
  refuses(odd, "finish_gradients", {"power of two", "0"});
  odd.losses = f64({3});
  odd.pairwise = false;
  accepts(odd);
}

TEST_P(ContractCheck, OnlyTheReferenceComputesFp64) {
  const Add add{.a = f64({3}), .b = f64({3}), .out = f64({3})};
  EXPECT_EQ(device().computes_fp64(), GetParam() == reference().name());
  if (device().computes_fp64()) {
    accepts(add);
  } else {
    refuses(add, "add", {"fp64"});
  }
  accepts(Fill{.out = f64({2}), .value = 1.0});
  accepts(Sum{.x = f32({7}), .out = f64({1}), .factor = 1.0});
  accepts(SquaredNorm{.x = f32({32, 7}), .partials = f64({1})});
}

}  // namespace mantissa::test::contracts_test
