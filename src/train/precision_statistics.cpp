#include "mantissa/train/precision_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <span>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/quantization_observer.h"

namespace mantissa {
namespace {

using Sum = QuantizationError::Part;

// Of one module and role, over everything added.
class Sums {
 public:
  void add(const Tensor& x, const QuantizedTensor& codes) {
    const Tensor out = empty(x.device(), Dtype::f64, {Sum::size});
    x.device().run(QuantizationError{.x = converted(x, Dtype::bf16), .q = codes, .out = out});
    const std::vector<double> parts = to_host<double>(out);
    add(parts, static_cast<double>(x.elements()));
  }
  void add(std::span<const double> parts, double elements) {
    const double amax = std::isnan(parts_[Sum::amax]) ? parts_[Sum::amax] : std::max(parts[Sum::amax], parts_[Sum::amax]);
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i] += parts[i];
    parts_[Sum::amax] = amax;
    elements_ += elements;
  }
  bool none() const { return elements_ == 0.0; }

  // Of this rank, and then of all, in their order.
  Sums of_ranks(const Communicator& ranks) const {
    Sums out;
    for (const Sums& each : ranks.all(*this)) out.add(each.parts_, each.elements_);
    return out;
  }

  void write(PrecisionEvent& event) const {
    const double signal = parts_[Sum::signal], noise = parts_[Sum::noise];
    if (noise > 0.0 && std::isfinite(noise)) event.sqnr_db = 10.0 * std::log10(signal / noise);
    event.clipped = parts_[Sum::clipped] / elements_;
    event.flushed = parts_[Sum::flushed] / elements_;
    if (std::isfinite(parts_[Sum::amax])) event.amax = parts_[Sum::amax];
    for (uint16_t code = 0; code < 256; ++code) {
      const auto blocks = static_cast<int64_t>(parts_[static_cast<size_t>(Sum::scales + code)]);
      if (blocks > 0) event.scales[code] = blocks;
    }
  }

 private:
  std::array<double, Sum::size> parts_{};
  double elements_ = 0.0;
};

// What all ranks that share a weight quantise alike is counted on the first.
bool counted_here(const QuantizedOperand& operand, Split split, const Communicator& tensor) {
  const bool alike = operand.role == OperandRole::input ? split == Split::rows && !operand.own_tokens : split == Split::columns;
  return !alike || tensor.rank() == 0;
}

std::string module_of(const Parameter& parameter) { return parameter.name.substr(0, parameter.name.rfind('.')); }

}  // namespace

std::vector<PrecisionEvent> measure_precision(const ParameterSet& parameters, const Optimizer& optimizer, int64_t step,
                                              const std::function<void()>& body) {
  std::map<std::pair<const Leaf*, OperandRole>, Sums> sums;
  for (const Optimizer::State& state : optimizer.states()) {
    const Part& part = state.part;
    if (!part.of->quantised) continue;
    const QuantizedTensor codes = slice(part.of->codes(), part.begin, part.end);
    sums[{&part.of->leaf, OperandRole::weight}].add(converted(state.master, Dtype::bf16).view(codes.shape), codes);
  }
  {
    std::map<const Leaf*, Split> splits;
    for (const Parameter& parameter : parameters.all()) splits[&parameter.leaf] = parameter.split;
    const ObserverScope scope([&](const QuantizedOperand& operand) {
      if (!counted_here(operand, splits.at(operand.weight), optimizer.shards().mesh().tensor)) return;
      sums[{operand.weight, operand.role}].add(operand.x, operand.codes);
    });
    body();
  }
  std::vector<PrecisionEvent> events;
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.shape.rank() < 2) continue;  // no operand of a product
    for (const OperandRole role : {OperandRole::weight, OperandRole::input, OperandRole::output_grad}) {
      const Sums all = sums[{&parameter.leaf, role}].of_ranks(optimizer.shards().mesh().world);
      if (all.none()) continue;
      all.write(events.emplace_back(PrecisionEvent{.step = step, .module = module_of(parameter), .role = role_name(role)}));
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
