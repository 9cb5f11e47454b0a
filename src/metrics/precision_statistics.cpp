#include "metrics/precision_statistics.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "mantissa/backend/functions.h"
#include "metrics/weight_errors.h"
#include "ops/quantization_observer.h"

namespace mantissa {
namespace {

using Sum = QuantizationError::Part;

// Measures operands on the device, and hands out what it found when all of it was downloaded, in the order of measuring.
class Measurements {
 public:
  using Take = std::function<void(std::span<const double> parts)>;  // QuantizationError

  void add(const Tensor& x, const QuantizedTensor& codes, const Tensor& rows, Take take) {
    const Tensor out = empty(x.device(), Dtype::f64, {Sum::size});
    x.device().run(QuantizationError{.x = converted(x, Dtype::bf16), .q = codes, .out = out, .rows = rows});
    if (codes.how.format != Format::nvfp4) return add_measured(out, std::move(take));
    add_measured(out, [how = codes.how, next = std::move(take)](std::span<const double> parts) { next(with_exponents(parts, how)); });
  }
  void add_measured(const Tensor& parts, Take take) {
    measured_.push_back(parts);
    takers_.push_back(std::move(take));
  }
  // Calls `next` when all that was added until now was handed out.
  void then(std::function<void()> next) {
    if (takers_.empty()) return next();
    takers_.back() = [before = std::move(takers_.back()), after = std::move(next)](std::span<const double> parts) {
      before(parts);
      after();
    };
  }

  void hand_out() {
    if (measured_.empty()) return;
    Backend& device = measured_.front().device();
    const Tensor all = empty(device, Dtype::f64, {std::ssize(measured_), Sum::size});
    for (int64_t i = 0; i < all.dim(0); ++i)
      device.run(Convert{.x = measured_[static_cast<size_t>(i)].view({1, Sum::size}), .out = all.slice(i, i + 1)});
    const std::vector<double> parts = to_host<double>(all);
    for (size_t i = 0; i < takers_.size(); ++i) takers_[i](std::span(parts).subspan(i * Sum::size, Sum::size));
    measured_.clear(), takers_.clear();
  }

 private:
  std::vector<Tensor> measured_;
  std::vector<Take> takers_;  // one for each of `measured_`
};

// Measures the weights of a grouped weight expert by expert.
class ExpertErrors {
 public:
  ExpertErrors(int64_t experts, int64_t rows) : rows_(rows), experts_(static_cast<size_t>(experts)) {}
  int64_t rows() const { return rows_; }  // rows of each expert

  void add(int64_t expert, std::span<const double> parts) {
    experts_[static_cast<size_t>(expert)].signal += parts[Sum::signal];
    experts_[static_cast<size_t>(expert)].noise += parts[Sum::noise];
  }

  // Compares over the ranks, in their order; all call it together. Takes the first of the worst.
  std::optional<WorstExpert> worst(const Communicator& ranks) const {
    const size_t count = experts_.size(), size = static_cast<size_t>(ranks.size());
    std::vector<Energy> all(count * size), sums(count);
    std::ranges::copy(experts_, all.begin() + static_cast<std::ptrdiff_t>(count) * ranks.rank());
    const std::vector<int64_t> bytes(size, static_cast<int64_t>(count * sizeof(Energy)));
    ranks.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);
    for (size_t i = 0; i < all.size(); ++i) {
      sums[i % count].signal += all[i].signal;
      sums[i % count].noise += all[i].noise;
    }
    std::optional<WorstExpert> out;
    for (size_t e = 0; e < count; ++e) {
      const std::optional<double> db = decibels(sums[e].signal, sums[e].noise);
      if (db && (!out || *db < out->sqnr_db)) out = {.expert = static_cast<int64_t>(e), .sqnr_db = *db};
    }
    return out;
  }

 private:
  struct Energy {
    double signal = 0.0, noise = 0.0;
  };

  int64_t rows_;
  std::vector<Energy> experts_;
};

// Measures rows [begin, end) of the parameter, in a shard of it.
void measure(const Optimizer::State& state, int64_t begin, int64_t end, Measurements& measurements, Measurements::Take take) {
  const ParameterShard& shard = state.shard;
  const QuantizedTensor codes = slice(shard.of->codes(), begin, end);
  const Tensor rounded = converted(state.master.slice(begin - shard.begin, end - shard.begin), Dtype::bf16);
  measurements.add(rounded.view(codes.shape), codes, {}, std::move(take));
}

// Measures a shard of a grouped weight expert by expert; adds the total of all experts to `sums`.
void measure(const Optimizer::State& state, ExpertErrors& experts, Measurements& measurements, ErrorSums& sums) {
  const auto whole = std::make_shared<ErrorSums>();
  for (const ParameterShard::Chunk& chunk : state.shard.chunks()) {
    for (int64_t row = chunk.row; row < chunk.row + chunk.end - chunk.begin;) {
      const int64_t expert = row / experts.rows(), end = std::min((expert + 1) * experts.rows(), chunk.row + chunk.end - chunk.begin);
      const int64_t moved = chunk.begin - chunk.row;
      measure(state, row + moved, end + moved, measurements, [&experts, whole, expert](std::span<const double> parts) {
        experts.add(expert, parts);
        whole->add(parts);
      });
      row = end;
    }
  }
  measurements.then([&sums, whole] { sums.add(*whole); });
}

}  // namespace

std::vector<PrecisionEvent> measure_precision(const ParameterSet& parameters, const PrecisionPlan& plan, const Optimizer& optimizer,
                                              int64_t step, const std::function<void()>& body) {
  std::map<std::pair<const Leaf*, OperandRole>, ErrorSums> sums;
  std::map<const Leaf*, ExpertErrors> grouped_weights;  // expert weights that are kept as codes
  for (const Parameter& parameter : parameters.all()) {
    if (!parameter.quantized) continue;
    const ModuleShape& module = plan.module_of(parameter.name).module;
    if (module.matrices > 1) grouped_weights.emplace(&parameter.leaf, ExpertErrors(module.matrices, module.out));
  }
  Measurements measurements;
  const auto taker = [](ErrorSums& target) { return [&target](std::span<const double> parts) { target.add(parts); }; };
  for (const Optimizer::State& state : optimizer.states()) {
    const ParameterShard& shard = state.shard;
    if (!shard.of->quantized || shard.of->sharding.is_copy()) continue;
    ErrorSums& all = sums[{&shard.of->leaf, OperandRole::weight}];
    const auto grouped = grouped_weights.find(&shard.of->leaf);
    if (grouped == grouped_weights.end()) {
      measure(state, shard.begin, shard.end, measurements, taker(all));
    } else {
      measure(state, grouped->second, measurements, all);
    }
  }
  {
    std::map<const Leaf*, const Parameter*> weights;
    for (const Parameter& parameter : parameters.all()) weights[&parameter.leaf] = &parameter;
    const ObserverScope scope([&](const QuantizedOperand& operand) {
      if (operand.weight == nullptr) return;  // not trained
      const Sharding& sharding = weights.at(operand.weight)->sharding;
      const int rows = operand.role == OperandRole::input ? 1 : sharding.row_ranks(),
                columns = operand.role == OperandRole::output_grad ? 1 : sharding.column_ranks();
      // One that all ranks sharing the weight quantize alike is counted on the first.
      if (rows * columns == 1 && !operand.own_tokens && sharding.ranks.tensor_rank != 0) return;
      const Measurements::Take take = taker(sums[{operand.weight, operand.role}]);
      operand.error.defined() ? measurements.add_measured(operand.error, take)
                              : measurements.add(operand.x, operand.codes, operand.rows, take);
    });
    body();
  }
  measurements.hand_out();
  std::vector<PrecisionEvent> events;
  const Communicator& world = optimizer.shards().mesh().world;
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.shape.rank() < 2) continue;  // no operand of a GEMM
    for (const OperandRole role : {OperandRole::weight, OperandRole::input, OperandRole::output_grad}) {
      ErrorSums all;
      for (const ErrorSums& each : world.all(sums[{&parameter.leaf, role}])) all.add(each);
      if (all.none()) continue;
      PrecisionEvent& event =
          events.emplace_back(PrecisionEvent{.step = step, .module = plan.module_of(parameter.name).module.path, .role = role_name(role)});
      all.write(event);
      const auto grouped = grouped_weights.find(&parameter.leaf);
      if (role == OperandRole::weight && grouped != grouped_weights.end()) event.worst_expert = grouped->second.worst(world);
    }
  }
  return events;
}

std::optional<PrecisionSummary> summary_of(const std::vector<PrecisionEvent>& events) {
  if (events.empty()) return {};
  PrecisionSummary summary;
  double sum = 0.0, count = 0.0;
  for (const PrecisionEvent& event : events) {
    if (!event.sqnr_db) continue;
    sum += *event.sqnr_db;
    count += 1.0;
    if (!summary.worst.empty() && *event.sqnr_db >= summary.worst_db) continue;
    summary.worst = event.module;
    summary.worst_db = *event.sqnr_db;
  }
  if (count > 0.0) summary.sqnr_db = sum / count;
  return summary;
}

}  // namespace mantissa
