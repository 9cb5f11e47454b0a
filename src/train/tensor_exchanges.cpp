#include "train/tensor_exchanges.h"

#include <algorithm>

#include "mantissa/base/integers.h"
#include "mantissa/ops/ops.h"

namespace mantissa {
namespace {

constexpr int64_t kPartial = 4;                        // bytes of an element of a partial sum, fp32
constexpr int64_t kTwoSums = 8;                        // bytes that a share of the vocabulary tells of a row
enum class Pass { forward_alone, forward, backward };  // forward_alone: nothing is kept for backward

class Count {
 public:
  explicit Count(const RunConfig& config)
      : ranks_(config.parallel.tensor),
        tokens_(config.training.micro_batch_size * config.training.seq_len),
        element_(dtype_bytes(config.precision.dtype)),
        sequence_(config.parallel.sequence_parallel) {}
  const TensorExchanges& all() const { return all_; }

  void linear(const ModulePrecision& entry, Pass pass) {
    const ModuleShape& of = entry.module;
    if (of.split == Split::rows) pass == Pass::backward ? summed(of.in * kPartial) : gathered(input_bytes(entry.recipe, of.in, pass));
    if (of.split == Split::columns) pass == Pass::backward ? gathered(of.out * element_) : summed(of.out * kPartial);
  }
  // All ranks but one add zeros, in the dtype of the table.
  void embedding(int64_t hidden) {
    summed(hidden * element_);
    gathered(hidden * element_);  // backward
  }
  void loss(const Recipe& recipe, int64_t hidden, int64_t rows) {
    gathered(input_bytes(recipe, hidden, Pass::forward));
    const int64_t chunks = ceil_div(tokens_, chunk_rows(rows / ranks_, recipe)), of_one = (ranks_ - 1) * tokens_ * kTwoSums;
    add(chunks, ranks_ * of_one, of_one);
    summed(hidden * kPartial);  // the gradient of its input
  }

 private:
  // What gathered_input() of src/ops/linear_products.cpp sends of a token.
  int64_t input_bytes(const Recipe& recipe, int64_t in, Pass pass) const {
    const OperandChoice choice = choose_operands(recipe, GemmRole::fprop).first;
    if (!choice.is_codes() || (!saves_input_codes(recipe) && pass == Pass::forward)) return in * element_;
    return codes_shape({1, in}, choice.how).elements() + scales_shape({1, in}, choice.how).elements();
  }
  // Each rank's share of the tokens to all.
  void gathered(int64_t row_bytes) {
    if (sequence_) shared(row_bytes);
  }
  // The sum of all ranks' rows, to the rank that has a share of them, without sequence parallelism then to all.
  void summed(int64_t row_bytes) { shared(sequence_ ? row_bytes : 2 * row_bytes); }
  void shared(int64_t row_bytes) {
    const int64_t least = tokens_ / ranks_, most = ceil_div(tokens_, ranks_);
    add(1, (ranks_ - 1) * tokens_ * row_bytes, std::max(tokens_ - least, (ranks_ - 1) * most) * row_bytes);
  }
  void add(int64_t calls, int64_t bytes, int64_t busiest) {
    all_.calls += calls;
    all_.bytes += bytes;
    all_.busiest += busiest;
  }

  int64_t ranks_, tokens_, element_;
  bool sequence_;
  TensorExchanges all_;
};

}  // namespace

TensorExchanges tensor_exchanges(const RunConfig& config, const PrecisionPlan& plan) {
  if (config.parallel.tensor == 1) return {};
  const bool twice = config.training.recompute == Recompute::full;
  Count count(config);
  const ModulePrecision* const output = plan.find("output");
  const ModuleShape& table = plan.of("embed").module;
  count.embedding(table.in);
  for (const ModulePrecision& entry : plan.modules()) {
    if (entry.module.kind != ModuleKind::linear) continue;
    if (twice) count.linear(entry, Pass::forward_alone);
    count.linear(entry, Pass::forward);
    count.linear(entry, Pass::backward);
  }
  count.loss(output ? output->recipe : Recipe{}, table.in, table.out);
  return count.all();
}

}  // namespace mantissa
