// Kernels that a layer of experts runs: with codes that move, one quantization and one permutation each way, and no other pass over codes
// or scales between the quantization and the GEMM that reads them.
#include <gmock/gmock.h>

#include "backend/cpu/reference/reference.h"
#include "mantissa/backend/functions.h"
#include "mantissa/precision/config.h"
#include "ops/ops.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::test::moe_trace_test {

using ::testing::ElementsAre;

// The reference, which writes down what callers ask for; kernels that are made of others count as one. A permutation stands with its
// operand.
class TracingBackend : public CpuReference {
 public:
  std::vector<std::string> take() { return std::exchange(calls_, {}); }

 protected:
#define MANTISSA_TRACED(Kernel)                             \
  void execute(const Kernel& k) override {                  \
    if (depth_ == 0) calls_.push_back(name_of(k, #Kernel)); \
    ++depth_;                                               \
    CpuReference::execute(k);                               \
    --depth_;                                               \
  }
  MANTISSA_KERNELS(MANTISSA_TRACED)
#undef MANTISSA_TRACED

 private:
  template <class Kernel>
  static std::string name_of(const Kernel&, const char* name) {
    return name;
  }
  static std::string name_of(const Permute& k, const char*) {
    const auto* codes = std::get_if<QuantizedTensor>(&k.out);
    if (!codes) return text("Permute ", dtype_name(std::get<Tensor>(k.out).dtype()));
    return text("Permute ", codes->codes.bytes() / codes->shape[0], " + ", codes->scales.bytes() / codes->shape[0], " B a row");
  }

  std::vector<std::string> calls_;
  int depth_ = 0;
};

// 40 tokens of 64 channels, 4 experts of 32.
struct Layer {
  explicit Layer(Backend& device, const Communicator& ranks = {})
      : x(random_tensor(device, Dtype::bf16, {40, 64}, 1)),
        weights(random_tensor(device, Dtype::f32, {40, 2}, 2)),
        gate_up(random_tensor(device, Dtype::bf16, {4 / ranks.size() * 64, 64}, 3)),
        down(random_tensor(device, Dtype::bf16, {4 / ranks.size() * 64, 32}, 4)) {
    std::vector<int32_t> experts;
    for (int32_t t = 0; t < 40; ++t) experts.insert(experts.end(), {t % 3, 3});
    to = dispatch(from_host(device, Dtype::i32, {40, 2}, experts.data()), 4, 32, 0, ranks);
    gate_up_leaf.grad = empty(device, Dtype::f32, gate_up.shape());
    down_leaf.grad = empty(device, Dtype::f32, down.shape());
  }
  LinearWeight weight(const Tensor& value, Leaf& leaf, const Recipe& recipe) const {
    if (!recipe.weight) return Var(value, leaf);
    return {value, quantized(value, recipe.weight), &leaf};
  }

  Tensor x, weights, gate_up, down;
  Dispatch to;
  Leaf gate_up_leaf, down_leaf;
};

struct Calls {
  std::vector<std::string> forward, backward;
  int64_t forward_bytes = 0, backward_bytes = 0;  // to other ranks
};

int64_t sent(const Communicator& group) { return group.size() == 1 ? 0 : group.traffic().activations; }

Calls calls_of(const Recipe& recipe, bool as_codes, const Communicator& group = {}) {
  Recipe of_down = recipe;
  of_down.requantizes_output_grad = as_codes;
  TracingBackend device;
  Layer layer(device, group);
  const LinearWeight gate_up = layer.weight(layer.gate_up, layer.gate_up_leaf, recipe),
                     down = layer.weight(layer.down, layer.down_leaf, recipe);
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var x = tape.input(layer.x), weights = tape.input(layer.weights);
  device.take();
  const int64_t before = sent(group);
  const Var inner = dispatched_swiglu(x, weights, gate_up, Var(), layer.to, recipe, {.keep = Keep::value, .as_codes = as_codes});
  const Var y = combined_linear(inner, down, Var(), layer.to, of_down);
  Calls calls{.forward = device.take(), .backward = {}, .forward_bytes = sent(group) - before};
  tape.backward(y, layer.x);
  calls.backward = device.take();
  calls.backward_bytes = sent(group) - before - calls.forward_bytes;
  return calls;
}

TEST(MoeTrace, CodesAreMadeOnceAndMovedOnce) {
  const Calls calls = calls_of(preset_recipe("mxfp8"), true);
  EXPECT_THAT(calls.forward, ElementsAre("Quantize", "Permute 64 + 2 B a row", "Permute fp32", "GroupedGemm", "SwiGluForward", "Quantize",
                                         "GroupedGemm", "Unpermute"));
  EXPECT_THAT(calls.backward, ElementsAre("Quantize", "Permute 64 + 2 B a row", "RequantizeColumns", "RequantizeColumns",
                                          "GroupedWeightGradient", "GroupedGemm", "SwiGluBackward", "Quantize", "RequantizeColumns",
                                          "GroupedWeightGradient", "GroupedGemm", "Unpermute", "Permute fp32"));
}

TEST(MoeTrace, ValuesMoveWhereNothingReadsCodesOrTheyAreToMove) {
  const Calls high = calls_of(preset_recipe("high"), true), values = calls_of(preset_recipe("mxfp8"), false);
  EXPECT_THAT(high.forward, ElementsAre("Permute bf16", "Permute fp32", "GroupedGemm", "SwiGluForward", "GroupedGemm", "Unpermute"));
  EXPECT_THAT(high.backward, ElementsAre("Permute bf16", "GroupedWeightGradient", "GroupedGemm", "SwiGluBackward", "GroupedWeightGradient",
                                         "GroupedGemm", "Unpermute", "Permute fp32"));
  EXPECT_THAT(values.forward, ElementsAre("Permute bf16", "Permute fp32", "Quantize", "GroupedGemm", "SwiGluForward", "Quantize",
                                          "GroupedGemm", "Unpermute"));
  EXPECT_THAT(values.backward,
              ElementsAre("Permute bf16", "Quantize", "RequantizeColumns", "GroupedWeightGradient", "GroupedGemm", "SwiGluBackward",
                          "Quantize", "RequantizeColumns", "GroupedWeightGradient", "GroupedGemm", "Unpermute", "Permute fp32"));
}

// Two ranks with two experts each. Of the 80 assignments of a rank 27 go to the first rank, 53 to the second.
std::vector<Calls> calls_of_two(const Recipe& recipe, bool as_codes) {
  std::vector<Calls> calls(2);
  const auto errors =
      run_ranks(2, [&](const Communicator& world) { calls[static_cast<size_t>(world.rank())] = calls_of(recipe, as_codes, world); });
  EXPECT_THAT(errors, testing::Each(testing::IsEmpty()));
  return calls;
}

TEST(MoeTrace, CodesTravelBetweenRanksAsTheyMove) {
  constexpr int64_t kAway[] = {53, 27}, kArrived[] = {27, 53};  // rows of the other rank's tokens
  const std::vector<Calls> ranks = calls_of_two(preset_recipe("mxfp8"), true);
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    EXPECT_THAT(ranks[rank].forward,
                ElementsAre("Quantize", "Permute 64 + 2 B a row", "Permute fp32", "Permute 64 + 2 B a row", "Permute fp32", "GroupedGemm",
                            "SwiGluForward", "Quantize", "GroupedGemm", "Permute bf16", "Unpermute"));
    EXPECT_THAT(ranks[rank].backward,
                ElementsAre("Quantize", "Permute 64 + 2 B a row", "Permute 64 + 2 B a row", "RequantizeColumns", "RequantizeColumns",
                            "GroupedWeightGradient", "GroupedGemm", "SwiGluBackward", "Quantize", "RequantizeColumns",
                            "GroupedWeightGradient", "GroupedGemm", "Permute bf16", "Permute fp32", "Permute fp32", "Unpermute"));
    EXPECT_EQ(ranks[rank].forward_bytes, kAway[rank] * (64 + 2 + 4) + kArrived[rank] * 2 * 64);
    EXPECT_EQ(ranks[rank].backward_bytes, kAway[rank] * (64 + 2) + kArrived[rank] * (2 * 64 + 4));
  }
  const std::vector<Calls> values = calls_of_two(preset_recipe("mxfp8"), false);
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(values[rank].forward_bytes, kAway[rank] * (2 * 64 + 4) + kArrived[rank] * 2 * 64);
    EXPECT_EQ(values[rank].backward_bytes, kAway[rank] * 2 * 64 + kArrived[rank] * (2 * 64 + 4));
  }
}

}  // namespace mantissa::test::moe_trace_test
