#include "optim/step_control.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// The numbers that a rank reports before its losses.
struct Reported {
  double flag, vote, seconds;
  Traffic sent;
};
using ReportedNumbers = std::array<double, kReportedNumbers>;

Traffic operator+(const Traffic& a, const Traffic& b) {
  return {a.gradients + b.gradients, a.parameters + b.parameters, a.activations + b.activations, a.control + b.control, a.other + b.other};
}

}  // namespace

// Sizes change only with the number of micro batches.
const Tensor& StepControl::begin(Backend& device, const StepLosses& step) {
  report_ = {};
  const int64_t figures = step.figures.defined() ? step.figures.elements() : 0;
  const int64_t sizes[] = {static_cast<int64_t>(StepOutcome::count), figures, 1, step.losses.elements(),
                           shards_.norm_blocks(shards_.mesh().world.rank())};
  const int64_t all = std::accumulate(std::begin(sizes), std::end(sizes), int64_t{0});
  if (all_.defined() && all_.elements() == all && figures_.elements() == figures) return partials_;
  all_ = empty(device, Dtype::f64, {all});
  int64_t first = 0;
  Tensor* const parts[] = {&outcome_, &figures_, &flag_, &losses_, &partials_};
  for (size_t i = 0; i < std::size(parts); ++i) {
    *parts[i] = all_.slice(first, first + sizes[i]);
    first += sizes[i];
  }
  return partials_;
}

void StepControl::decide(const StepLosses& step, const Tensor& flags, const Tensor& values, double clip) {
  Backend& device = all_.device();
  FinishGradients finish{.partials = partials_,
                         .losses = step.losses,
                         .flags = flags,
                         .step = values,
                         .outcome = outcome_,
                         .clip = clip,
                         .pairwise = step.pairwise};
  if (step.figures.defined()) device.run(Convert{.x = step.figures.view(figures_.shape()), .out = figures_});
  report_.vote = step.vote;
  if (shards_.mesh().world.size() > 1) exchange(step, finish);
  device.run(finish);
  outcome_here_ = device.begin_download(of_host());
}

Tensor StepControl::of_host() const {
  return all_.slice(0, outcome_.elements() + (shards_.mesh().world.size() == 1 ? figures_.elements() : 0));
}

// Every rank decides by the partial norms, losses and flags of all.
void StepControl::exchange(const StepLosses& step, FinishGradients& finish) {
  const Communicator& world = shards_.mesh().world;
  Backend& device = all_.device();
  device.run(Convert{.x = step.losses, .out = losses_});
  device.run(SumCounts{.counts = finish.flags.view({1, 1}), .out = flag_});
  const std::vector<double> read = to_host<double>(all_.slice(outcome_.elements(), all_.elements()));
  const auto flag = read.begin() + figures_.elements(), own_losses = flag + 1, own_partials = own_losses + losses_.elements();
  report_.figures.assign(read.begin(), flag);
  if (step.assignments) report_.assignments = step.assignments(report_.figures);
  const int64_t losses = losses_.elements(), assignments = std::ssize(report_.assignments);
  std::vector<int64_t> counts, bytes;
  for (int r = 0; r < world.size(); ++r) {
    counts.push_back(kReportedNumbers + losses + assignments + shards_.norm_blocks(r));
    bytes.push_back(counts.back() * static_cast<int64_t>(sizeof(double)));
  }
  std::vector<double> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  auto own = all.begin() + std::accumulate(counts.begin(), counts.begin() + world.rank(), int64_t{0});
  const Reported report{
      .flag = *flag, .vote = static_cast<double>(step.vote), .seconds = step.seconds ? step.seconds() : 0.0, .sent = world.traffic()};
  own = std::ranges::copy(std::bit_cast<ReportedNumbers>(report), own).out;
  own = std::copy(own_losses, own_partials, own);
  own = std::ranges::copy(std::exchange(report_.assignments, std::vector<double>(static_cast<size_t>(assignments))), own).out;
  std::copy(own_partials, read.end(), own);
  world.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);

  std::vector<int32_t> flags;
  std::vector<double> all_losses;
  std::vector<std::vector<double>> partials;
  auto next = all.cbegin();
  for (int r = 0; r < world.size(); ++r) {
    const auto its_losses = next + kReportedNumbers, its_assignments = its_losses + losses, norms = its_assignments + assignments,
               end = next + counts[static_cast<size_t>(r)];
    ReportedNumbers numbers{};
    std::copy(next, its_losses, numbers.begin());
    const auto said = std::bit_cast<Reported>(numbers);
    report_.vote = std::max(report_.vote, static_cast<int>(said.vote));
    report_.seconds.push_back(said.seconds);
    report_.sent = report_.sent + said.sent;
    flags.push_back(said.flag != 0.0 ? 1 : 0);
    if (r % shards_.mesh().tensor.size() == 0) {  // the others have the same
      all_losses.insert(all_losses.end(), its_losses, its_assignments);
      std::transform(its_assignments, norms, report_.assignments.begin(), report_.assignments.begin(), std::plus());
    }
    partials.emplace_back(norms, end);
    next = end;
  }
  const auto on_device = [&](const std::vector<double>& values) {
    return from_host(device, Dtype::f64, {std::ssize(values)}, values.data());
  };
  finish.partials = on_device(shards_.in_order(partials));
  finish.losses = on_device(all_losses);
  finish.flags = from_host(device, Dtype::i32, {std::ssize(flags)}, flags.data());
}

UpdateResult StepControl::result(const StepLosses& step) {
  const bool alone = shards_.mesh().world.size() == 1;
  std::vector<double> read(static_cast<size_t>(of_host().elements()));
  std::exchange(outcome_here_, nullptr)(read.data());
  if (alone) {
    report_.figures.assign(read.begin() + outcome_.elements(), read.end());
    if (step.assignments) report_.assignments = step.assignments(report_.figures);
  }
  const auto get = [&](StepOutcome index) { return read[static_cast<size_t>(index)]; };
  UpdateResult result{std::exchange(report_, {})};
  result.loss = get(StepOutcome::loss);
  result.gradient_norm = get(StepOutcome::gradient_norm);
  result.bad_weights = get(StepOutcome::bad_weights) != 0.0;
  result.skipped = get(StepOutcome::skip) != 0.0;
  return result;
}

}  // namespace mantissa
