// A numeric gradient check for every operation of ops.h, in fp64: the tape's gradients of sum(w * output), w random, against central
// differences. A new operation without a case here fails EveryOperationHasACheck.
#include <deque>
#include <set>

#include "ops/ops.h"
#include "testing.h"

namespace mantissa::test::ops_gradient_test {

using Operation = std::function<Var(const std::vector<Var>&)>;

struct CheckedInput {
  std::string name;
  Tensor value;  // fp64
  bool parameter;
};

// Gradients by input, in the inputs' order.
struct Gradients {
  std::vector<Tensor> of;
  std::deque<Leaf> leaves;  // one per input; activations leave theirs unused

  explicit Gradients(const std::vector<CheckedInput>& inputs) {
    for (const CheckedInput& input : inputs) leaves.push_back({.grad = empty_like(input.value)});
  }
};

enum class Activations { inputs, constants };

// One forward and backward on a tape of its own. Leaves keep what they had, so a second call accumulates.
void run_tape(const std::vector<CheckedInput>& inputs, const Operation& operation, const Tensor& w, Gradients& gradients,
              Activations activations) {
  Tape tape;
  const Tape::Scope scope(&tape);
  std::vector<Var> vars;
  for (size_t i = 0; i < inputs.size(); ++i) {
    vars.push_back(inputs[i].parameter                     ? Var(inputs[i].value, gradients.leaves[i])
                   : activations == Activations::constants ? Var(inputs[i].value)
                                                           : tape.input(inputs[i].value));
  }
  tape.backward(operation(vars), w);
  gradients.of.assign(inputs.size(), {});
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].parameter) {
      EXPECT_TRUE(gradients.leaves[i].written) << inputs[i].name;
      gradients.of[i] = gradients.leaves[i].grad;
    } else if (activations == Activations::inputs) {
      gradients.of[i] = tape.take_gradient(vars[i]);
    }
  }
}

// sum(w * output), or the output itself if it is the one number that backward starts from (w undefined).
double weighted_output(const std::vector<CheckedInput>& inputs, const Operation& operation, const Tensor& w) {
  std::vector<Var> vars;
  for (const CheckedInput& input : inputs) vars.emplace_back(input.value);
  const std::vector<double> out = values(operation(vars).value());
  if (!w.defined()) return out.at(0);
  const std::vector<double> weights = values(w);
  double sum = 0.0;
  for (size_t i = 0; i < out.size(); ++i) sum += weights[i] * out[i];
  return sum;
}

std::vector<double> numeric_gradient(const std::vector<CheckedInput>& inputs, size_t which, const Operation& operation, const Tensor& w) {
  const Tensor& x = inputs[which].value;
  std::vector<double> out;
  for (const double kept : values(x)) {
    const int64_t at = std::ssize(out);
    const double h = 1e-5 * std::max(1.0, std::abs(kept));
    set_value(x, at, kept + h);
    const double above = weighted_output(inputs, operation, w);
    set_value(x, at, kept - h);
    out.push_back((above - weighted_output(inputs, operation, w)) / (2.0 * h));
    set_value(x, at, kept);
  }
  return out;
}

enum class Output { tensor, loss };  // loss: one number, backward starts from 1

// Checks every element of every input and parameter. Then that a second pass adds to parameter gradients and that these are the same when
// the activations are constants. The error of a central difference here is near h^2 = 1e-10 of the third derivative and 1e-11 of the sum,
// both far below the tolerance.
void expect_gradients(const std::vector<CheckedInput>& inputs, const Operation& operation, Output output = Output::tensor) {
  std::vector<Var> plain;
  for (const CheckedInput& input : inputs) plain.emplace_back(input.value);
  const Tensor result = operation(plain).value();
  const Tensor w = output == Output::loss ? Tensor() : random_tensor(result.device(), Dtype::f64, result.shape(), 999);
  Gradients gradients(inputs), parameters_only(inputs);
  run_tape(inputs, operation, w, gradients, Activations::inputs);
  std::vector<std::vector<double>> once;
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_TRUE(gradients.of[i].defined()) << inputs[i].name << " got no gradient";
    once.push_back(values(gradients.of[i]));
    EXPECT_TRUE(close(once[i], numeric_gradient(inputs, i, operation, w), 1e-7)) << "gradient of " << inputs[i].name;
  }
  run_tape(inputs, operation, w, gradients, Activations::inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<double> expected = once[i];
    for (double& e : expected) e *= inputs[i].parameter ? 2.0 : 1.0;
    EXPECT_TRUE(close(values(gradients.of[i]), expected, 1e-12)) << inputs[i].name << " after a second micro batch";
  }
  if (std::ranges::none_of(inputs, &CheckedInput::parameter)) return;
  run_tape(inputs, operation, w, parameters_only, Activations::constants);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].parameter) {
      EXPECT_TRUE(close(values(parameters_only.of[i]), once[i], 1e-12)) << inputs[i].name << ", input constant";
    }
  }
}

// An input of a case, which is made on the device of the check.
struct Given {
  Shape shape;
  bool parameter = false;
  double mean = 0.0;
};
Given weight(Shape shape, double mean = 0.0) { return {.shape = shape, .parameter = true, .mean = mean}; }

struct OpCase {
  std::string op, variant;
  std::vector<Given> given;
  std::function<Var(Backend&, const std::vector<Var>&)> run;
  Output output = Output::tensor;
};
void PrintTo(const OpCase& c, std::ostream* out) { *out << c.op << '_' << c.variant; }

using V = const std::vector<Var>;

OpCase cross_entropy_case(const char* variant, int64_t vocab, const std::vector<double>& targets) {
  const int64_t rows = std::ssize(targets);
  const auto run = [=](Backend& d, V& v) {
    const LossOptions options{
        .vocab = vocab, .target_count = 3, .logits_dtype = Dtype::f64, .chunk_elements = 64 * 8};  // chunks of 64 rows
    return cross_entropy(v[0], v[1], tensor_of(d, Dtype::i32, {rows}, targets), options);
  };
  return {"cross_entropy", variant, {{{rows, 3}}, weight({8, 3})}, run, Output::loss};
}

// A teacher of two channels, and its share of the loss.
OpCase taught_case(const char* variant, int64_t vocab, const std::vector<double>& targets, double share, double temperature) {
  const int64_t rows = std::ssize(targets);
  const auto run = [=](Backend& d, V& v) {
    LossOptions options{.vocab = vocab, .target_count = 3, .logits_dtype = Dtype::f64, .chunk_elements = 2 * 64 * 8};
    options.teacher = {.x = random_tensor(d, Dtype::f64, {rows, 2}, 71),
                       .weight = Var(random_tensor(d, Dtype::f64, {8, 2}, 72)),
                       .share = share,
                       .temperature = temperature};
    return cross_entropy(v[0], v[1], tensor_of(d, Dtype::i32, {rows}, targets), options);
  };
  return {"cross_entropy", variant, {{{rows, 3}}, weight({8, 3})}, run, Output::loss};
}

std::vector<OpCase> row_cases() {
  std::vector<double> many(130);  // two chunks of 64 rows and a short one
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<double>(i % 8);
  return {
      {"embedding",
       "repeated_ids",
       {weight({7, 3})},
       [](Backend& d, V& v) {
         return embedding(tensor_of(d, Dtype::i32, {5}, {3, 0, 3, 6, 3}), v[0]);
       }},
      {"add", "two_inputs", {{{3, 5}}, {{3, 5}}}, [](Backend&, V& v) { return add(v[0], v[1]); }},
      {"add", "same_input_twice", {{{3, 5}}}, [](Backend&, V& v) { return add(v[0], add(v[0], v[0])); }},
      {"convert", "same", {{{3, 5}}}, [](Backend&, V& v) { return convert(v[0], Dtype::f64); }},
      {"linear", "without_bias", {{{5, 3}}, weight({7, 3})}, [](Backend&, V& v) { return linear(v[0], v[1], Var()); }},
      {"linear", "with_bias", {{{5, 3}}, weight({7, 3}), weight({7})}, [](Backend&, V& v) { return linear(v[0], v[1], v[2]); }},
      // The activation is saved as a recipe by linear, and made again in backward.
      {"linear",
       "of_a_recipe",
       {{{5, 6}}, weight({4, 3})},
       [](Backend&, V& v) { return linear(swiglu(v[0], Keep::nothing), v[1], Var()); }},
      {"rms_norm", "odd_rows", {{{3, 7}}, weight({7}, 1.0)}, [](Backend&, V& v) { return rms_norm(v[0], v[1], 1e-5); }},
      {"rms_norm",
       "of_a_sum_that_is_read_again",
       {{{3, 7}}, {{3, 7}}, weight({7}, 1.0)},
       [](Backend&, V& v) {
         const NormedSum both = rms_norm({v[0], v[1]}, v[2], 1e-5);
         return add(both.normed, both.sum);
       }},
      {"layer_norm",
       "of_a_sum_that_is_read_again",
       {{{3, 7}}, {{3, 7}}, weight({7}, 1.0), weight({7})},
       [](Backend&, V& v) {
         const NormedSum both = layer_norm({v[0], v[1]}, v[2], v[3], 1e-5);
         return add(both.sum, both.normed);
       }},
      {"layer_norm", "without_bias", {{{3, 7}}, weight({7}, 1.0)}, [](Backend&, V& v) { return layer_norm(v[0], v[1], Var(), 1e-5); }},
      {"layer_norm",
       "with_bias",
       {{{3, 7}}, weight({7}, 1.0), weight({7})},
       [](Backend&, V& v) { return layer_norm(v[0], v[1], v[2], 1e-5); }},
      cross_entropy_case("all_columns", 8, {0, 7, 3}),
      cross_entropy_case("padded_vocab_ignored_targets", 5, {4, -1, 0, 2, -100}),
      cross_entropy_case("several_chunks", 8, many),
      taught_case("of_a_teacher", 8, {0, 7, 3}, 1.0, 1.0),
      taught_case("of_a_warm_teacher", 5, {4, -1, 0, 2, -100}, 1.0, 2.5),
      taught_case("of_a_teacher_and_labels", 5, {4, -1, 0, 2, -100}, 0.75, 1.0),
      taught_case("of_a_cold_teacher_and_labels", 8, many, 0.25, 0.6),
      {"swiglu", "value", {{{3, 10}}}, [](Backend&, V& v) { return swiglu(v[0], Keep::value); }},
      {"swiglu", "recipe", {{{3, 10}}}, [](Backend&, V& v) { return swiglu(v[0], Keep::nothing); }},
      // The limit is one that a third of normal values exceeds.
      {"swiglu", "clamped", {{{6, 20}}}, [](Backend&, V& v) { return swiglu(v[0], Keep::value, 1.0); }},
      {"swiglu", "clamped_recipe", {{{3, 10}}}, [](Backend&, V& v) { return swiglu(v[0], Keep::nothing, 1.0); }},
      {"gelu", "tanh", {{{3, 5}}}, [](Backend&, V& v) { return gelu(v[0], GeluForm::tanh, Keep::value); }},
      {"gelu", "erf", {{{3, 5}}}, [](Backend&, V& v) { return gelu(v[0], GeluForm::erf, Keep::value); }},
      {"gelu", "erf_recipe", {{{3, 5}}}, [](Backend&, V& v) { return gelu(v[0], GeluForm::erf, Keep::nothing); }},
      // Exchanges of ranks that share tokens have their check in split_ops_test.cpp.
      {"gathered_tokens", "alone", {{{3, 2}}}, [](Backend&, V& v) { return gathered_tokens(v[0], {}); }},
      {"own_tokens", "alone", {{{3, 2}}}, [](Backend&, V& v) { return own_tokens(v[0], {}); }},
  };
}

std::vector<OpCase> head_cases() {
  static constexpr HeadLayout plain{2, 2, 4}, grouped{6, 2, 4}, one_key_head{3, 1, 2};
  const auto qk = [](const char* variant, HeadLayout layout) {
    return OpCase{
        "qk_norm", variant, {{{3, layout.row()}}, weight({layout.head_dim}, 1.0), weight({layout.head_dim}, 1.0)}, [=](Backend&, V& v) {
          return qk_norm(v[0], v[1], v[2], layout, 1e-6);
        }};
  };
  const auto turned = [](const char* variant, HeadLayout layout) {
    return OpCase{
        "rope", variant, {{{4, layout.row()}}}, [=](Backend& d, V& v) {
          const Tensor table = random_tensor(d, Dtype::f32, {9, layout.head_dim}, 5);  // its transpose is the gradient, rotation or not
          return rope(v[0], table, tensor_of(d, Dtype::i32, {4}, {8, 0, 1, 5}), layout);
        }};
  };
  const auto attends = [](const char* variant, HeadLayout layout, const std::vector<double>& starts, int64_t window, bool sinks = false) {
    std::vector<Given> given = {{{10, layout.row()}}};
    if (sinks) given.push_back(weight({layout.heads}));
    return OpCase{"attention", variant, given, [=](Backend& d, V& v) {
                    return attention(v[0], 2, layout, starts.empty() ? Tensor() : tensor_of(d, Dtype::i32, {10}, starts), window,
                                     sinks ? v[1] : Var());
                  }};
  };
  return {qk("plain", plain),
          qk("grouped", grouped),
          turned("plain", plain),
          turned("one_key_head", one_key_head),
          attends("plain", plain, {}, 0),
          attends("grouped", grouped, {}, 0),
          attends("one_key_head_segments", one_key_head, {0, 0, 2, 2, 2, 0, 1, 2, 3, 3}, 0),
          attends("sinks", grouped, {}, 0, true),
          attends("sinks_window", one_key_head, {}, 3, true),
          attends("window", grouped, {}, 2),
          attends("window_segments", one_key_head, {0, 0, 0, 0, 3, 0, 0, 2, 2, 2}, 2)};
}

// 5 tokens of 4 experts, two each; the third has none, the last is chosen by all.
Dispatch five_tokens(Backend& device, int64_t capacity = 0) {
  return dispatch(tensor_of(device, Dtype::i32, {5, 2}, {0, 3, 1, 3, 0, 3, 1, 3, 0, 3}), 4, 4, capacity);
}

std::vector<OpCase> expert_cases() {
  using enum RouterScore;
  const auto routed = [](const char* variant, const RoutingRule& rule) {
    return OpCase{"route", variant, {{{5, 6}}}, [=](Backend&, V& v) { return route(v[0], {.rule = rule}).weights; }};
  };
  static const Recipe recipe{.compute = Dtype::f64};
  const auto up = [](const char* variant, Keep keep, double limit = 0.0) {
    return OpCase{"dispatched_swiglu", variant, {{{5, 3}}, {{5, 2}}, weight({4 * 6, 3})}, [=](Backend& d, V& v) {
                    return dispatched_swiglu(v[0], v[1], v[2], Var(), five_tokens(d), recipe,
                                             {.keep = keep, .as_codes = true, .limit = limit});
                  }};
  };
  // Both GEMMs, with or without biases; the bias of down is multiplied by the weights, too.
  const auto both = [](const char* variant, Keep keep, bool biases, int64_t capacity) {
    std::vector<Given> given = {{{5, 3}}, {{5, 2}}, weight({4 * 6, 3}), weight({4 * 2, 3})};
    if (biases) given.insert(given.end(), {weight({4 * 6}), weight({4 * 2})});
    return OpCase{"combined_linear", variant, given, [=](Backend& d, V& v) {
                    const Dispatch by = five_tokens(d, capacity);
                    const Var inner =
                        dispatched_swiglu(v[0], v[1], v[2], biases ? v[4] : Var(), by, recipe, {.keep = keep, .as_codes = true});
                    return combined_linear(inner, v[3], biases ? v[5] : Var(), by, recipe);
                  }};
  };
  return {routed("softmax", {.top_k = 2, .score = softmax, .softmax_after_topk = false, .renormalize = false, .scale = 1.5}),
          routed("renormalized", {.top_k = 3, .score = softmax, .softmax_after_topk = false, .renormalize = true, .scale = 1.0}),
          routed("after_choice", {.top_k = 2, .score = softmax, .softmax_after_topk = true, .renormalize = false, .scale = 1.0}),
          routed("sigmoid", {.top_k = 2, .score = sigmoid, .softmax_after_topk = false, .renormalize = true, .scale = 2.5}),
          routed("all_experts", {.top_k = 6, .score = softmax, .softmax_after_topk = false, .renormalize = false, .scale = 1.0}),
          up("value", Keep::value),
          up("recipe", Keep::nothing),
          up("clamped", Keep::value, 0.5),
          both("of_dispatched_swiglu", Keep::nothing, false, 0),
          both("with_biases", Keep::value, true, 0),
          both("with_biases_dropping", Keep::nothing, true, 2)};
}

const std::vector<OpCase>& cases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> joined = row_cases();
    for (const auto& more : {head_cases(), expert_cases()}) joined.insert(joined.end(), more.begin(), more.end());
    return joined;
  }();
  return all;
}

class OpsGradient : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpsGradient, EqualsCentralDifferences) {
  const auto device = make_backend("cpu_reference");
  std::vector<CheckedInput> inputs;
  for (const Given& given : GetParam().given) {
    const auto number = static_cast<uint32_t>(inputs.size() + 1);
    inputs.push_back({text("input ", number),
                      random_tensor(*device, Dtype::f64, given.shape, number, given.parameter ? 0.5 : 1.0, given.mean), given.parameter});
  }
  expect_gradients(
      inputs, [&](const std::vector<Var>& v) { return GetParam().run(*device, v); }, GetParam().output);
}

INSTANTIATE_TEST_SUITE_P(, OpsGradient, ::testing::ValuesIn(cases()), [](const auto& c) { return c.param.op + "_" + c.param.variant; });

// A gradient check does not see logits of wrong rows, which loss and gradient have alike.
TEST(TaughtCrossEntropy, HasTheLossesOfOneChunkInSeveral) {
  const auto device = make_backend("cpu_reference");
  constexpr int64_t kRows = 130;
  std::vector<double> targets(kRows);
  for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<double>(i % 8);
  const auto losses = [&](int64_t chunk_elements) {
    LossOptions options{.vocab = 8, .target_count = kRows, .logits_dtype = Dtype::f64, .chunk_elements = chunk_elements};
    options.row_losses = empty(*device, Dtype::f64, {kRows});
    options.teacher = {.x = random_tensor(*device, Dtype::f64, {kRows, 2}, 71),
                       .weight = Var(random_tensor(*device, Dtype::f64, {8, 2}, 72))};
    cross_entropy(Var(random_tensor(*device, Dtype::f64, {kRows, 3}, 1)), Var(random_tensor(*device, Dtype::f64, {8, 3}, 2)),
                  tensor_of(*device, Dtype::i32, {kRows}, targets), options);
    return to_host<double>(options.row_losses);
  };
  EXPECT_EQ(losses(1), losses(int64_t{1} << 20));
}

TEST(Rope, OverwritesOnlyValuesThatNobodyElseHolds) {
  const auto device = make_backend("cpu_reference");
  constexpr HeadLayout kLayout{2, 1, 4};
  const Tensor table = random_tensor(*device, Dtype::f32, {9, 4}, 5), positions = tensor_of(*device, Dtype::i32, {3}, {8, 0, 5}),
               x = random_tensor(*device, Dtype::f64, {3, kLayout.row()}, 6);
  const std::vector<double> before = values(x), apart = values(rope(Var(x), table, positions, kLayout).value());
  EXPECT_EQ(values(x), before);
  Tensor last = tensor_of(*device, Dtype::f64, x.shape(), before);
  const std::byte* const memory = last.device_bytes();
  const Tensor within = rope(Var(std::move(last)), table, positions, kLayout).value();
  EXPECT_EQ(within.device_bytes(), memory);
  EXPECT_EQ(values(within), apart);
}

TEST(OpsGradientTable, EveryOperationHasACheck) {
  const std::vector<std::string> ops = declared_in("src/ops/ops.h", R"(\n(?:Var|Routing) (\w+)\()");
  ASSERT_GE(ops.size(), 11U) << "the header is no longer understood";
  std::set<std::string> checked;
  for (const OpCase& c : cases()) checked.insert(c.op);
  for (const std::string& op : ops) EXPECT_TRUE(checked.count(op)) << op << " has no numeric gradient check";
}

}  // namespace mantissa::test::ops_gradient_test
