#include "plan/activation_exchanges.h"

#include <algorithm>

#include "mantissa/base/integers.h"
#include "mantissa/nn/moe.h"
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
  const Exchanges& all() const { return all_; }

  void linear(const ModulePrecision& entry, Pass pass) {
    const ModuleShape& of = entry.module;
    if (of.split == Split::column_parallel)
      pass == Pass::backward ? summed(of.in * kPartial) : gathered(input_bytes(entry.recipe, of.in, pass));
    if (of.split == Split::row_parallel) pass == Pass::backward ? gathered(of.out * element_) : summed(of.out * kPartial);
  }
  // Of the grouped weight of experts, rows of all assignments are summed as they are grouped, with their padding.
  void experts(const ModulePrecision& entry, int64_t rows, Pass pass) {
    constexpr int64_t kWeight = 4;  // bytes of the gradient of a row's weight
    const ModuleShape& of = entry.module;
    if (of.split == Split::column_parallel && pass != Pass::backward) gathered(of.in * element_);  // of all tokens, once
    if (of.split == Split::row_parallel && pass == Pass::backward) gathered(of.out * element_);
    const auto sum = [&](int64_t row_bytes) { add(1, 2 * (ranks_ - 1) * rows * row_bytes, busiest_of(rows) * 2 * row_bytes); };
    if (of.split == Split::row_parallel && pass != Pass::backward) sum(of.out * kPartial);
    if (of.split != Split::column_parallel || pass != Pass::backward) return;
    sum(kWeight);
    sum(of.in * kPartial);
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
  // Counts what gathered_input() of src/ops/linear_gemms.cpp sends of a token.
  int64_t input_bytes(const Recipe& recipe, int64_t in, Pass pass) const {
    const OperandChoice choice = choose_operands(recipe, GemmRole::fprop).first;
    if (!choice.is_codes() || (!saves_input_codes(recipe) && pass == Pass::forward)) return in * element_;
    return codes_shape({1, in}, choice.how).elements() + scales_shape({1, in}, choice.how).elements();
  }
  // Counts a gather of each rank's share of the tokens.
  void gathered(int64_t row_bytes) {
    if (sequence_) shared(row_bytes);
  }
  // Counts a reduction of rows to the rank that has a share of them; without sequence parallelism also the gather of the sums.
  void summed(int64_t row_bytes) { shared(sequence_ ? row_bytes : 2 * row_bytes); }
  void shared(int64_t row_bytes) { add(1, (ranks_ - 1) * tokens_ * row_bytes, busiest_of(tokens_) * row_bytes); }
  // Counts rows that the busiest rank sends or receives if each has a share.
  int64_t busiest_of(int64_t rows) const { return std::max(rows - rows / ranks_, (ranks_ - 1) * ceil_div(rows, ranks_)); }
  void add(int64_t calls, int64_t bytes, int64_t busiest) {
    all_.calls += calls;
    all_.bytes += bytes;
    all_.busiest += busiest;
  }

  int64_t ranks_, tokens_, element_;
  bool sequence_;
  Exchanges all_;
};

// Returns the rows of a dispatch on one rank: room for all assignments, or, among ranks that share experts, what arrives if every expert
// gets equally many.
int64_t rows_of_experts(const RunConfig& config, const PrecisionPlan& plan, const ModuleShape& grouped) {
  const std::string path = grouped.path.substr(0, grouped.path.rfind('.'));
  const int64_t assignments = config.training.micro_batch_size * config.training.seq_len * grouped.active;
  const int64_t multiple = row_multiple(plan.of(path + ".gate_up").recipe, plan.of(path + ".down").recipe);
  if (config.parallel.expert == 1) return dispatch_rows(assignments, grouped.matrices, multiple);
  return grouped.matrices * round_up(ceil_div(assignments, grouped.matrices), multiple);
}

int64_t row_bytes(const Quantization& how, int64_t columns) {
  return codes_shape({1, columns}, how).elements() + scales_shape({1, columns}, how).elements();
}

// Counts the bytes of a row in each direction, as src/ops/experts.cpp sends it. Weights are fp32.
struct RowBytes {
  RowBytes(const RunConfig& config, const Recipe& gate_up, const Recipe& down, int64_t hidden) {
    constexpr int64_t kWeight = 4;
    const int64_t values = hidden * dtype_bytes(config.precision.dtype);
    const OperandChoice input = choose_operands(gate_up, GemmRole::fprop).first, gradient = choose_operands(down, GemmRole::dgrad).first;
    const bool as_codes = config.precision.quantized_dispatch && input.is_codes();
    there_alone = (as_codes ? row_bytes(input.how, hidden) : values) + kWeight;
    there = as_codes && saves_input_codes(gate_up) ? there_alone : values + kWeight;
    back = values;
    const bool requantized = choose_operands(down, GemmRole::wgrad).first.source == OperandSource::requantized;
    gradient_there = requantized ? row_bytes(gradient.how, hidden) : values;
    gradient_back = values + kWeight;
  }
  int64_t there_alone, there, back, gradient_there, gradient_back;
};

}  // namespace

Exchanges tensor_exchanges(const RunConfig& config, const PrecisionPlan& plan) {
  if (config.parallel.tensor == 1) return {};
  const bool twice = config.training.recompute == Recompute::full;
  Count count(config);
  const ModulePrecision* const output = plan.find("output");
  const ModuleShape& table = plan.of("embed").module;
  count.embedding(table.in);
  for (const ModulePrecision& entry : plan.modules()) {
    if (entry.module.kind != ModuleKind::linear) continue;
    if (entry.module.experts) {
      const int64_t rows = rows_of_experts(config, plan, entry.module);
      if (twice) count.experts(entry, rows, Pass::forward_alone);
      count.experts(entry, rows, Pass::forward);
      count.experts(entry, rows, Pass::backward);
      continue;
    }
    if (twice) count.linear(entry, Pass::forward_alone);
    count.linear(entry, Pass::forward);
    count.linear(entry, Pass::backward);
  }
  count.loss(output ? output->recipe : Recipe{}, table.in, table.out);
  return count.all();
}

Exchanges expert_exchanges(const RunConfig& config, const PrecisionPlan& plan) {
  const int64_t ranks = config.parallel.expert;
  Exchanges all;
  if (ranks == 1) return all;
  const int64_t assignments = config.training.micro_batch_size * config.training.seq_len * config.model.moe->num_experts_per_tok;
  const auto away = [&](int64_t each) { return each * assignments * (ranks - 1) / ranks; };  // of a rank
  const auto add = [&](int64_t each) {
    ++all.calls;
    all.bytes += ranks * away(each);
    all.busiest += away(each);
  };
  for (const ModulePrecision& entry : plan.modules()) {
    const ModuleShape& of = entry.module;
    if (!of.experts || of.split != Split::column_parallel) continue;
    const Recipe& down = plan.of(of.path.substr(0, of.path.rfind('.')) + ".down").recipe;
    const RowBytes bytes(config, entry.recipe, down, entry.module.in);
    const auto forward = [&](int64_t there) {
      ++all.calls;
      all.control += (ranks - 1) * entry.module.matrices * static_cast<int64_t>(sizeof(int64_t));
      add(there);
      add(bytes.back);
    };
    if (config.training.recompute == Recompute::full) forward(bytes.there_alone);
    forward(bytes.there);
    add(bytes.gradient_there);
    add(bytes.gradient_back);
  }
  return all;
}

}  // namespace mantissa
