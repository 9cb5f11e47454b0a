// A numeric gradient check for every operation of ops.h. A new operation without a case here fails EveryOperationHasACheck.
#include <set>

#include "gradient_check.h"
#include "mantissa/ops/ops.h"

namespace mantissa::test::ops_gradient_test {

struct OpCase {
  std::string op, variant;
  std::function<void(Backend&)> check;
};

void PrintTo(const OpCase& c, std::ostream* out) { *out << c.op << '_' << c.variant; }

CheckedInput activation(Backend& device, Shape shape, uint32_t what) {
  return {"x" + std::to_string(what), random_tensor(device, Dtype::f64, shape, what), Role::activation};
}

CheckedInput parameter(Backend& device, const char* name, Shape shape, uint32_t what, double mean = 0.0) {
  return {name, random_tensor(device, Dtype::f64, shape, what, 0.5, mean), Role::parameter};
}

void embedding_case(Backend& device) {
  const Tensor ids = tensor_of(device, Dtype::i32, {5}, {3, 0, 3, 6, 3});
  expect_gradients({parameter(device, "weight", {7, 3}, 1)}, [&](const std::vector<Var>& v) { return embedding(ids, v[0]); });
}

void linear_case(Backend& device, bool with_bias) {
  std::vector<CheckedInput> inputs{activation(device, {5, 3}, 1), parameter(device, "weight", {7, 3}, 2)};
  if (with_bias) inputs.push_back(parameter(device, "bias", {7}, 3));
  expect_gradients(inputs, [&](const std::vector<Var>& v) { return linear(v[0], v[1], with_bias ? v[2] : Var()); });
}

// The activation is saved as a recipe by linear, and made again in backward.
void linear_of_recipe_case(Backend& device) {
  expect_gradients({activation(device, {5, 6}, 1), parameter(device, "weight", {4, 3}, 2)},
                   [&](const std::vector<Var>& v) { return linear(swiglu(v[0], Keep::nothing), v[1], Var()); });
}

void layer_norm_case(Backend& device, bool with_bias) {
  std::vector<CheckedInput> inputs{activation(device, {3, 7}, 1), parameter(device, "weight", {7}, 2, 1.0)};
  if (with_bias) inputs.push_back(parameter(device, "bias", {7}, 3));
  expect_gradients(inputs, [&](const std::vector<Var>& v) { return layer_norm(v[0], v[1], with_bias ? v[2] : Var(), 1e-5); });
}

void qk_norm_case(Backend& device, HeadLayout layout) {
  expect_gradients({activation(device, {3, layout.row()}, 1), parameter(device, "q_weight", {layout.head_dim}, 2, 1.0),
                    parameter(device, "k_weight", {layout.head_dim}, 3, 1.0)},
                   [&](const std::vector<Var>& v) { return qk_norm(v[0], v[1], v[2], layout, 1e-6); });
}

void rope_case(Backend& device, HeadLayout layout) {
  const Tensor table =
      random_tensor(device, Dtype::f32, {9, layout.head_dim}, 5);  // need not be a rotation for the gradient to be the transpose
  const Tensor positions = tensor_of(device, Dtype::i32, {4}, {8, 0, 1, 5});
  expect_gradients({activation(device, {4, layout.row()}, 1)},
                   [&](const std::vector<Var>& v) { return rope(v[0], table, positions, layout); });
}

void attention_case(Backend& device, HeadLayout layout, const std::vector<double>& starts, int64_t window = 0) {
  const int64_t batch = 2, length = 5;
  const Tensor segment_starts = starts.empty() ? Tensor() : tensor_of(device, Dtype::i32, {batch * length}, starts);
  expect_gradients({activation(device, {batch * length, layout.row()}, 1)},
                   [&](const std::vector<Var>& v) { return attention(v[0], batch, layout, segment_starts, window); });
}

void attention_with_sinks_case(Backend& device, HeadLayout layout, int64_t window) {
  expect_gradients({activation(device, {10, layout.row()}, 1), parameter(device, "sinks", {layout.heads}, 2)},
                   [&](const std::vector<Var>& v) { return attention(v[0], 2, layout, {}, window, v[1]); });
}

void cross_entropy_case(Backend& device, int64_t vocab, const std::vector<double>& targets) {
  const int64_t rows = static_cast<int64_t>(targets.size());
  const Tensor target_ids = tensor_of(device, Dtype::i32, {rows}, targets);
  const LossOptions options{.vocab = vocab, .target_count = 3, .logits_dtype = Dtype::f64, .chunk_elements = 64 * 8};  // chunks of 64 rows
  expect_gradients(
      {activation(device, {rows, 3}, 1), parameter(device, "weight", {8, 3}, 2)},
      [&](const std::vector<Var>& v) { return cross_entropy(v[0], v[1], target_ids, options); }, Output::loss);
}

template <class Op>
void one_activation_case(Backend& device, Shape shape, Op op) {
  expect_gradients({activation(device, shape, 1)}, [&](const std::vector<Var>& v) { return op(v[0]); });
}

std::vector<OpCase> row_cases() {
  return {
      {"embedding", "repeated_ids", embedding_case},
      {"add", "two_inputs",
       [](Backend& d) {
         expect_gradients({activation(d, {3, 5}, 1), activation(d, {3, 5}, 2)}, [](const auto& v) { return add(v[0], v[1]); });
       }},
      {"add", "same_input_twice",
       [](Backend& d) {
         one_activation_case(d, {3, 5}, [](const Var& x) { return add(x, add(x, x)); });
       }},
      {"linear", "without_bias", [](Backend& d) { linear_case(d, false); }},
      {"linear", "with_bias", [](Backend& d) { linear_case(d, true); }},
      {"linear", "of_a_recipe", linear_of_recipe_case},
      {"rms_norm", "odd_rows",
       [](Backend& d) {
         expect_gradients({activation(d, {3, 7}, 1), parameter(d, "weight", {7}, 2, 1.0)},
                          [](const auto& v) { return rms_norm(v[0], v[1], 1e-5); });
       }},
      {"layer_norm", "without_bias", [](Backend& d) { layer_norm_case(d, false); }},
      {"layer_norm", "with_bias", [](Backend& d) { layer_norm_case(d, true); }},
      {"cross_entropy", "all_columns",
       [](Backend& d) {
         cross_entropy_case(d, 8, {0, 7, 3});
       }},
      {"cross_entropy", "padded_vocab_ignored_targets",
       [](Backend& d) {
         cross_entropy_case(d, 5, {4, -1, 0, 2, -100});
       }},
      {"cross_entropy", "several_chunks",
       [](Backend& d) {
         std::vector<double> targets(130);  // two chunks of 64 rows and a short one
         for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<double>(i % 8);
         cross_entropy_case(d, 8, targets);
       }},
  };
}

std::vector<OpCase> activation_cases() {
  return {
      {"swiglu", "value",
       [](Backend& d) {
         one_activation_case(d, {3, 10}, [](const Var& x) { return swiglu(x, Keep::value); });
       }},
      {"swiglu", "recipe",
       [](Backend& d) {
         one_activation_case(d, {3, 10}, [](const Var& x) { return swiglu(x, Keep::nothing); });
       }},
      {"swiglu", "clamped",  // within a limit that a third of what is normal exceeds
       [](Backend& d) {
         one_activation_case(d, {6, 20}, [](const Var& x) { return swiglu(x, Keep::value, 1.0); });
       }},
      {"swiglu", "clamped_recipe",
       [](Backend& d) {
         one_activation_case(d, {3, 10}, [](const Var& x) { return swiglu(x, Keep::nothing, 1.0); });
       }},
      {"gelu", "tanh",
       [](Backend& d) {
         one_activation_case(d, {3, 5}, [](const Var& x) { return gelu(x, GeluForm::tanh, Keep::value); });
       }},
      {"gelu", "erf",
       [](Backend& d) {
         one_activation_case(d, {3, 5}, [](const Var& x) { return gelu(x, GeluForm::erf, Keep::value); });
       }},
      {"gelu", "erf_recipe",
       [](Backend& d) {
         one_activation_case(d, {3, 5}, [](const Var& x) { return gelu(x, GeluForm::erf, Keep::nothing); });
       }},
  };
}

std::vector<OpCase> head_cases() {
  static constexpr HeadLayout plain{2, 2, 4}, grouped{6, 2, 4}, one_key_head{3, 1, 2};
  return {
      {"qk_norm", "plain", [](Backend& d) { qk_norm_case(d, plain); }},
      {"qk_norm", "grouped", [](Backend& d) { qk_norm_case(d, grouped); }},
      {"rope", "plain", [](Backend& d) { rope_case(d, plain); }},
      {"rope", "one_key_head", [](Backend& d) { rope_case(d, one_key_head); }},
      {"attention", "plain", [](Backend& d) { attention_case(d, plain, {}); }},
      {"attention", "grouped", [](Backend& d) { attention_case(d, grouped, {}); }},
      {"attention", "one_key_head_segments",
       [](Backend& d) {
         attention_case(d, one_key_head, {0, 0, 2, 2, 2, 0, 1, 2, 3, 3});
       }},
      {"attention", "sinks", [](Backend& d) { attention_with_sinks_case(d, grouped, 0); }},
      {"attention", "sinks_window", [](Backend& d) { attention_with_sinks_case(d, one_key_head, 3); }},
      {"attention", "window", [](Backend& d) { attention_case(d, grouped, {}, 2); }},
      {"attention", "window_segments",
       [](Backend& d) {
         attention_case(d, one_key_head, {0, 0, 0, 0, 3, 0, 0, 2, 2, 2}, 2);
       }},
  };
}

// 5 tokens of 4 experts, two each; the third has none, the last is chosen by all.
Dispatch five_tokens(Backend& device) { return dispatch(tensor_of(device, Dtype::i32, {5, 2}, {0, 3, 1, 3, 0, 3, 1, 3, 0, 3}), 4, 4); }

void route_case(Backend& device, const RoutingRule& rule) {
  expect_gradients({activation(device, {5, 6}, 1)}, [&](const std::vector<Var>& v) { return route(v[0], {.rule = rule}).weights; });
}

void dispatched_swiglu_case(Backend& device, Keep keep, double limit = 0.0) {
  const Dispatch to = five_tokens(device);
  expect_gradients({activation(device, {5, 3}, 1), activation(device, {5, 2}, 2), parameter(device, "gate_up", {4 * 6, 3}, 3)},
                   [&](const std::vector<Var>& v) {
                     return dispatched_swiglu(v[0], v[1], v[2], Var(), to, {.compute = Dtype::f64},
                                              {.keep = keep, .as_codes = true, .limit = limit});
                   });
}

void combined_linear_case(Backend& device) {
  const Dispatch from = five_tokens(device);
  expect_gradients({activation(device, {from.assignments.dim(0), 3}, 1), parameter(device, "down", {4 * 5, 3}, 2)},
                   [&](const std::vector<Var>& v) { return combined_linear(v[0], v[1], Var(), from, {.compute = Dtype::f64}); });
}

// Both GEMMs, the second of an activation that is made again in backward.
void experts_case(Backend& device) {
  const Dispatch by = five_tokens(device);
  expect_gradients({activation(device, {5, 3}, 1), activation(device, {5, 2}, 2), parameter(device, "gate_up", {4 * 6, 3}, 3),
                    parameter(device, "down", {4 * 2, 3}, 4)},
                   [&](const std::vector<Var>& v) {
                     const Var inner =
                         dispatched_swiglu(v[0], v[1], v[2], Var(), by, {.compute = Dtype::f64}, {.keep = Keep::nothing, .as_codes = true});
                     return combined_linear(inner, v[3], Var(), by, {.compute = Dtype::f64});
                   });
}

// What ranks that share tokens send each other has its check in split_ops_test.cpp.
void tokens_case(Backend& d, Var (*op)(const Var&, const TensorParallel&)) {
  expect_gradients({activation(d, {3, 2}, 1)}, [op](const std::vector<Var>& v) { return op(v[0], {}); });
}

// The bias of down is multiplied by the weights, too.
void biased_experts_case(Backend& device, Keep keep, int64_t capacity) {
  const Dispatch by = dispatch(tensor_of(device, Dtype::i32, {5, 2}, {0, 3, 1, 3, 0, 3, 1, 3, 0, 3}), 4, 4, capacity);
  expect_gradients(
      {activation(device, {5, 3}, 1), activation(device, {5, 2}, 2), parameter(device, "gate_up", {4 * 6, 3}, 3),
       parameter(device, "gate_up_bias", {4 * 6}, 4), parameter(device, "down", {4 * 2, 3}, 5), parameter(device, "down_bias", {4 * 2}, 6)},
      [&](const std::vector<Var>& v) {
        const Var inner = dispatched_swiglu(v[0], v[1], v[2], v[3], by, {.compute = Dtype::f64}, {.keep = keep, .as_codes = true});
        return combined_linear(inner, v[4], v[5], by, {.compute = Dtype::f64});
      });
}

std::vector<OpCase> expert_cases() {
  using enum RouterScore;
  const auto routed = [](RoutingRule rule) { return [rule](Backend& d) { route_case(d, rule); }; };
  return {
      {"convert", "same",
       [](Backend& d) {
         one_activation_case(d, {3, 5}, [](const Var& x) { return convert(x, Dtype::f64); });
       }},
      {"route", "softmax", routed({.top_k = 2, .score = softmax, .softmax_after_topk = false, .renormalize = false, .scale = 1.5})},
      {"route", "renormalized", routed({.top_k = 3, .score = softmax, .softmax_after_topk = false, .renormalize = true, .scale = 1.0})},
      {"route", "after_choice", routed({.top_k = 2, .score = softmax, .softmax_after_topk = true, .renormalize = false, .scale = 1.0})},
      {"route", "sigmoid", routed({.top_k = 2, .score = sigmoid, .softmax_after_topk = false, .renormalize = true, .scale = 2.5})},
      {"route", "all_experts", routed({.top_k = 6, .score = softmax, .softmax_after_topk = false, .renormalize = false, .scale = 1.0})},
      {"dispatched_swiglu", "value", [](Backend& d) { dispatched_swiglu_case(d, Keep::value); }},
      {"dispatched_swiglu", "recipe", [](Backend& d) { dispatched_swiglu_case(d, Keep::nothing); }},
      {"dispatched_swiglu", "clamped", [](Backend& d) { dispatched_swiglu_case(d, Keep::value, 0.5); }},
      {"gathered_tokens", "alone", [](Backend& d) { tokens_case(d, gathered_tokens); }},
      {"own_tokens", "alone", [](Backend& d) { tokens_case(d, own_tokens); }},
      {"combined_linear", "rows", combined_linear_case},
      {"combined_linear", "of_dispatched_swiglu", experts_case},
      {"combined_linear", "with_biases", [](Backend& d) { biased_experts_case(d, Keep::value, 0); }},
      {"combined_linear", "with_biases_dropping", [](Backend& d) { biased_experts_case(d, Keep::nothing, 2); }},
  };
}

const std::vector<OpCase>& cases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> joined = row_cases();
    for (const OpCase& c : activation_cases()) joined.push_back(c);
    for (const OpCase& c : head_cases()) joined.push_back(c);
    for (const OpCase& c : expert_cases()) joined.push_back(c);
    return joined;
  }();
  return all;
}

class OpsGradient : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpsGradient, EqualsCentralDifferences) {
  const auto device = make_backend("cpu_reference");
  GetParam().check(*device);
}

INSTANTIATE_TEST_SUITE_P(, OpsGradient, ::testing::ValuesIn(cases()), [](const auto& c) { return c.param.op + "_" + c.param.variant; });

TEST(OpsGradientTable, EveryOperationHasACheck) {
  const std::vector<std::string> ops = declared_in("include/mantissa/ops/ops.h", R"(\n(?:Var|Routing) (\w+)\()");
  ASSERT_GE(ops.size(), 11U) << "the header is no longer understood";
  std::set<std::string> checked;
  for (const OpCase& c : cases()) checked.insert(c.op);
  for (const std::string& op : ops) EXPECT_TRUE(checked.count(op)) << op << " has no numeric gradient check";
}

}  // namespace mantissa::test::ops_gradient_test
