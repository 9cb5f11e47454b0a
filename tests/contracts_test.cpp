// What kernels refuse: every operand missing, of another dtype or of another shape, memory shared against the rules, indices out of range.
// A kernel of backend.h without a row in the table fails.
#include <map>

#include "contracts_quantized.h"
#include "contracts_step.h"
#include "kernel_cases.h"

namespace mantissa::test {
namespace {

constexpr HeadLayout kLayout{4, 2, 6};

void fill(ContractCheck& c) {
  c.accepts(Fill{.out = c.f32({3}), .value = 1.0});
  c.refuses(Fill{.out = {}, .value = 1.0}, "fill", {"out is missing"});
}

void convert(ContractCheck& c) {
  const Tensor x = c.f32({4, 3});
  c.refuses(Convert{.x = x, .out = c.f32({4, 4})}, "convert", {"out", "[4, 4]", "[4, 3]"});
  c.refuses(Convert{.x = x, .out = c.i32({4, 3})}, "convert", {"fp32", "i32"});
  c.refuses(Convert{.x = x, .out = x}, "convert", {"out overlaps x"});
  c.refuses(Convert{.x = x.slice(0, 3), .out = x.slice(1, 4)}, "convert", {"out overlaps x"});
  c.accepts(Convert{.x = x.slice(0, 2), .out = x.slice(2, 4)});
}

void random_normals(ContractCheck& c) {
  const RandomNormal good{.out = c.f32({3}), .key = {}, .what = 0, .first_index = 0, .std = 1.0};
  c.accepts(good);
  RandomNormal bad = good;
  bad.row_stride = 2;
  c.refuses(bad, "random_normal", {"row_stride", "2"});
  bad = good;
  bad.first_index = -1;
  c.refuses(bad, "random_normal", {"first_index", "-1"});
  bad = good;
  bad.out = c.i32({3});
  c.refuses(bad, "random_normal", {"out"});
}

void add(ContractCheck& c) {
  const Tensor a = c.f32({4, 3}), b = c.f32({4, 3});
  c.operands("add", Add{.a = a, .b = b, .out = c.f32({4, 3})}, {{"a", &Add::a}, {"b", &Add::b}, {"out", &Add::out}});
  c.accepts(Add{.a = a, .b = b, .out = a});
  c.accepts(Add{.a = a, .b = a, .out = a});
  c.refuses(Add{.a = a.slice(0, 3), .b = b.slice(0, 3), .out = a.slice(1, 4)}, "add", {"out overlaps a"});
}

void gemm(ContractCheck& c) {
  const Tensor a = c.f32({5, 3}), b = c.f32({3, 7}), out = c.f32({5, 7});
  const auto call = [](Operand left, Operand right, const Tensor& to, const Tensor& bias = {}) {
    return Gemm{.a = left, .b = right, .out = to, .accumulate = false, .bias = bias};
  };
  c.accepts(call({a}, {b}, out, c.f32({7})));
  c.accepts(call({b, true}, {a, true}, c.f32({7, 5})));
  c.refuses(call({a}, {b, true}, out), "gemm", {"[5, 3]", "[7, 3]"});
  c.refuses(call({a}, {b}, c.f32({7, 5})), "gemm", {"out", "[7, 5]", "[5, 7]"});
  c.refuses(call({a}, {b}, out, c.f32({5})), "gemm", {"bias", "[5]"});
  c.refuses(call({c.f64({5, 3})}, {b}, out), "gemm", {"fp64", "fp32"});
  c.refuses(call({a}, {b}, c.f64({5, 7})), "gemm", {"out is fp64"});
  c.refuses(call({c.f32({5, 3, 1})}, {b}, out), "gemm", {"a is fp32 [5, 3, 1]"});
  c.refuses(call({}, {b}, out), "gemm", {"a is missing"});
  const Tensor square = c.f32({3, 3});
  c.refuses(call({square}, {square}, square), "gemm", {"out overlaps"});
}

void gemms(ContractCheck& c) {
  gemm(c);
  gemm_of_codes(c);
}

void sum_rows(ContractCheck& c) {
  c.operands("sum_rows", SumRows{.x = c.f32({4, 3}), .out = c.f32({3}), .accumulate = false}, {{"out", &SumRows::out}});
}

void embedding(ContractCheck& c) {
  const EmbeddingForward good{.ids = c.i32({4}), .weight = c.f32({5, 3}), .out = c.f32({4, 3})};
  c.operands("embedding", good, {{"ids", &EmbeddingForward::ids}, {"out", &EmbeddingForward::out}});
  for (const int32_t id : {-1, 5, 1 << 30}) {
    good.ids.data<int32_t>()[2] = id;
    c.refuses(good, "embedding", {"ids[2]", std::to_string(id), "5"}, ExitCode::data);
  }
}

void embedding_backward(ContractCheck& c) {
  using K = EmbeddingBackward;
  const K good{.ids = c.i32({4}), .dy = c.f32({4, 3}), .dweight = c.f32({5, 3}), .accumulate = false};
  c.operands("embedding backward", good, {{"ids", &K::ids}, {"dy", &K::dy}});
  K bad = good;
  bad.dweight = c.f32({5, 4});
  c.refuses(bad, "embedding backward", {"dweight", "[5, 4]"});
  good.ids.data<int32_t>()[3] = 5;
  c.refuses(good, "embedding backward", {"ids[3]", "5"}, ExitCode::data);
}

void rms_norm(ContractCheck& c) {
  using K = RmsNormForward;
  const K good{.x = c.f32({4, 3}), .weight = c.f32({3}), .y = c.f32({4, 3}), .rstd = c.f32({4}), .eps = 1e-5};
  c.operands("rms_norm", good, {{"x", &K::x}, {"weight", &K::weight}, {"y", &K::y}, {"rstd", &K::rstd}});
  K bad = good;
  bad.y = bad.x;
  c.refuses(bad, "rms_norm", {"y overlaps x"});
}

void rms_norm_backward(ContractCheck& c) {
  using K = RmsNormBackward;
  const K good{.x = c.f32({4, 3}),
               .weight = c.f32({3}),
               .rstd = c.f32({4}),
               .dy = c.f32({4, 3}),
               .dx = c.f32({4, 3}),
               .dweight = c.f32({3}),
               .accumulate = false};
  c.operands("rms_norm backward", good,
             {{"x", &K::x}, {"weight", &K::weight}, {"rstd", &K::rstd}, {"dy", &K::dy}, {"dx", &K::dx}, {"dweight", &K::dweight}});
  K bad = good;
  bad.dx = bad.dy;
  c.refuses(bad, "rms_norm backward", {"dx overlaps dy"});
}

void layer_norm(ContractCheck& c) {
  using K = LayerNormForward;
  const K good{.x = c.f32({4, 3}),
               .weight = c.f32({3}),
               .y = c.f32({4, 3}),
               .mean = c.f32({4}),
               .rstd = c.f32({4}),
               .eps = 1e-5,
               .bias = c.f32({3})};
  c.operands("layer_norm", good, {{"x", &K::x}, {"weight", &K::weight}, {"y", &K::y}, {"mean", &K::mean}, {"rstd", &K::rstd}});
  c.optional_operands("layer_norm", good, {{"bias", &K::bias}});
}

void layer_norm_backward(ContractCheck& c) {
  using K = LayerNormBackward;
  const K good{.x = c.f32({4, 3}),
               .weight = c.f32({3}),
               .mean = c.f32({4}),
               .rstd = c.f32({4}),
               .dy = c.f32({4, 3}),
               .dx = c.f32({4, 3}),
               .dweight = c.f32({3}),
               .accumulate = false,
               .dbias = c.f32({3})};
  c.operands("layer_norm backward", good,
             {{"x", &K::x},
              {"weight", &K::weight},
              {"mean", &K::mean},
              {"rstd", &K::rstd},
              {"dy", &K::dy},
              {"dx", &K::dx},
              {"dweight", &K::dweight}});
  c.optional_operands("layer_norm backward", good, {{"dbias", &K::dbias}});
}

void qk_norm(ContractCheck& c) {
  using K = QkNormForward;
  const Shape row{3, kLayout.row()};
  const K good{.x = c.f32(row),
               .q_weight = c.f32({6}),
               .k_weight = c.f32({6}),
               .y = c.f32(row),
               .rstd = c.f32({3, 6}),
               .layout = kLayout,
               .eps = 1e-6};
  c.operands("qk_norm", good, {{"x", &K::x}, {"q_weight", &K::q_weight}, {"k_weight", &K::k_weight}, {"y", &K::y}, {"rstd", &K::rstd}});
  K bad = good;
  bad.layout.kv_heads = 3;
  c.refuses(bad, "qk_norm", {"4 query heads", "3 key heads"});
  bad.layout.kv_heads = 1;
  c.refuses(bad, "qk_norm", {"36"});
}

void qk_norm_backward(ContractCheck& c) {
  using K = QkNormBackward;
  const Shape row{3, kLayout.row()};
  const K good{.x = c.f32(row),
               .q_weight = c.f32({6}),
               .k_weight = c.f32({6}),
               .rstd = c.f32({3, 6}),
               .dy = c.f32(row),
               .dx = c.f32(row),
               .dq_weight = c.f32({6}),
               .dk_weight = c.f32({6}),
               .layout = kLayout,
               .accumulate = false};
  c.operands("qk_norm backward", good,
             {{"x", &K::x},
              {"q_weight", &K::q_weight},
              {"k_weight", &K::k_weight},
              {"rstd", &K::rstd},
              {"dy", &K::dy},
              {"dx", &K::dx},
              {"dq_weight", &K::dq_weight},
              {"dk_weight", &K::dk_weight}});
  K bad = good;
  bad.dk_weight = bad.dq_weight;
  c.refuses(bad, "qk_norm backward", {"dk_weight overlaps dq_weight"});
}

void rope(ContractCheck& c) {
  using K = Rope;
  const Shape row{3, kLayout.row()};
  const K good{.x = c.f32(row), .table = c.f32({5, 6}), .positions = c.i32({3}), .y = c.f32(row), .layout = kLayout, .inverse = false};
  c.operands("rope", good, {{"x", &K::x}, {"positions", &K::positions}, {"y", &K::y}});
  K bad = good;
  bad.table = c.f32({5, 4});
  c.refuses(bad, "rope", {"table", "[5, 4]"});
  bad = good;
  bad.layout = {8, 4, 3};
  c.refuses(bad, "rope", {"head_dim is 3"});
  for (const int32_t position : {-1, 5}) {
    good.positions.data<int32_t>()[1] = position;
    c.refuses(good, "rope", {"positions[1]", std::to_string(position)});
  }
}

void attention(ContractCheck& c) {
  using K = AttentionForward;
  const K good{.qkv = c.f32({6, kLayout.row()}),
               .out = c.f32({6, 24}),
               .lse = c.f32({2, 4, 3}),
               .batch = 2,
               .layout = kLayout,
               .scale = 1.0,
               .segment_starts = c.i32({6})};
  c.operands("attention", good, {{"qkv", &K::qkv}, {"out", &K::out}, {"lse", &K::lse}});
  c.optional_operands("attention", good, {{"segment_starts", &K::segment_starts}});
  K bad = good;
  bad.batch = 4;
  c.refuses(bad, "attention", {"6 rows", "4 sequences"});
  for (const int32_t start : {-1, 2}) {
    good.segment_starts.data<int32_t>()[4] = start;  // position 1 of the second sequence
    c.refuses(good, "attention", {"segment_starts[4]", std::to_string(start)});
  }
}

void attention_backward(ContractCheck& c) {
  using K = AttentionBackward;
  const K good{.qkv = c.f32({6, kLayout.row()}),
               .out = c.f32({6, 24}),
               .lse = c.f32({2, 4, 3}),
               .dout = c.f32({6, 24}),
               .dqkv = c.f32({6, kLayout.row()}),
               .batch = 2,
               .layout = kLayout,
               .scale = 1.0,
               .segment_starts = c.i32({6})};
  c.operands("attention backward", good, {{"qkv", &K::qkv}, {"out", &K::out}, {"lse", &K::lse}, {"dout", &K::dout}, {"dqkv", &K::dqkv}});
  c.optional_operands("attention backward", good, {{"segment_starts", &K::segment_starts}});
  good.segment_starts.data<int32_t>()[3] = 1;
  c.refuses(good, "attention backward", {"segment_starts[3]", "1"});
}

void cached_attention(ContractCheck& c) {
  using K = CachedAttention;
  const K good{.qkv = c.f32({2, kLayout.row()}),
               .keys = c.f32({9, 12}),
               .values = c.f32({9, 12}),
               .out = c.f32({2, 24}),
               .first = 7,
               .layout = kLayout,
               .scale = 1.0};
  c.operands("cached_attention", good, {{"qkv", &K::qkv}, {"keys", &K::keys}, {"values", &K::values}, {"out", &K::out}});
  K bad = good;
  for (const int64_t first : {-1, 8}) {
    bad.first = first;
    c.refuses(bad, "cached_attention", {std::to_string(first), "9"});
  }
}

void swiglu(ContractCheck& c) {
  using K = SwiGluForward;
  c.operands("swiglu", K{.x = c.f32({4, 6}), .out = c.f32({4, 3})}, {{"x", &K::x}, {"out", &K::out}});
  c.refuses(K{.x = c.f32({4, 7}), .out = c.f32({4, 3})}, "swiglu", {"7"});
}

void swiglu_backward(ContractCheck& c) {
  using K = SwiGluBackward;
  const K good{.x = c.f32({4, 6}), .dy = c.f32({4, 3}), .dx = c.f32({4, 6})};
  c.operands("swiglu backward", good, {{"x", &K::x}, {"dy", &K::dy}, {"dx", &K::dx}});
}

void gelu(ContractCheck& c) {
  using K = GeluForward;
  c.operands("gelu", K{.x = c.f32({4, 6}), .out = c.f32({4, 6}), .form = GeluForm::erf}, {{"x", &K::x}, {"out", &K::out}});
}

void gelu_backward(ContractCheck& c) {
  using K = GeluBackward;
  const K good{.x = c.f32({4, 6}), .dy = c.f32({4, 6}), .dx = c.f32({4, 6}), .form = GeluForm::tanh};
  c.operands("gelu backward", good, {{"x", &K::x}, {"dy", &K::dy}, {"dx", &K::dx}});
}

void cross_entropy(ContractCheck& c) {
  using K = CrossEntropy;
  const K good{.logits = c.f32({4, 8}), .targets = c.i32({4}), .loss = c.f32({4}), .vocab = 5, .scale = 1.0, .dlogits = c.f32({4, 8})};
  c.operands("cross_entropy", good, {{"logits", &K::logits}, {"targets", &K::targets}, {"loss", &K::loss}});
  c.optional_operands("cross_entropy", good, {{"dlogits", &K::dlogits}});
  K other = good;
  other.dlogits = other.logits;
  c.accepts(other);
  for (const int64_t vocab : {0, 9}) {
    other.vocab = vocab;
    c.refuses(other, "cross_entropy", {"vocab is " + std::to_string(vocab)});
  }
  for (const int32_t target : {5, 7, 1 << 30}) {
    good.targets.data<int32_t>()[3] = target;
    c.refuses(good, "cross_entropy", {"targets[3]", std::to_string(target), "5"}, ExitCode::data);
  }
}

const std::map<std::string, void (*)(ContractCheck&)>& table() {
  static const std::map<std::string, void (*)(ContractCheck&)> all{
      {"Fill", fill},
      {"Convert", convert},
      {"RandomNormal", random_normals},
      {"Add", add},
      {"Gemm", gemms},
      {"Quantize", quantize},
      {"Dequantize", dequantize},
      {"FakeQuantize", fake_quantize},
      {"RequantizeColumns", requantize_columns},
      {"SwizzleScales", swizzle_scales},
      {"QuantizationError", quantization_error},
      {"SumRows", sum_rows},
      {"EmbeddingForward", embedding},
      {"EmbeddingBackward", embedding_backward},
      {"RmsNormForward", rms_norm},
      {"RmsNormBackward", rms_norm_backward},
      {"LayerNormForward", layer_norm},
      {"LayerNormBackward", layer_norm_backward},
      {"QkNormForward", qk_norm},
      {"QkNormBackward", qk_norm_backward},
      {"Rope", rope},
      {"AttentionForward", attention},
      {"AttentionBackward", attention_backward},
      {"CachedAttention", cached_attention},
      {"SwiGluForward", swiglu},
      {"SwiGluBackward", swiglu_backward},
      {"GeluForward", gelu},
      {"GeluBackward", gelu_backward},
      {"CrossEntropy", cross_entropy},
      {"AdamW", adamw},
      {"Sum", sum},
      {"FinishGradients", finish_gradients},
      {"SquaredNorm", squared_norm},
  };
  return all;
}

class Contracts : public ::testing::TestWithParam<std::string> {};

TEST_P(Contracts, FaultyOperandsAreRefusedByName) {
  const auto row = table().find(GetParam());
  ASSERT_NE(row, table().end()) << "what " << GetParam() << " refuses is not tested";
  ContractCheck check;
  row->second(check);
}

INSTANTIATE_TEST_SUITE_P(, Contracts, ::testing::ValuesIn(kernel_names()), [](const auto& c) { return c.param; });

}  // namespace
}  // namespace mantissa::test
