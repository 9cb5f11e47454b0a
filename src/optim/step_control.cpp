#include "optim/step_control.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// Numbers that a rank reports before its losses in the one message that decides a step.
enum class Reported { flag, vote, seconds, gradients, parameters, activations, control, other, count };
static_assert(static_cast<int64_t>(Reported::count) == kReportedNumbers);

std::array<double, kReportedNumbers> reported(double flag, const StepLosses& step, const Traffic& sent) {
  const auto number = [](int64_t bytes) { return static_cast<double>(bytes); };
  return {flag,
          static_cast<double>(step.vote),
          step.seconds ? step.seconds() : 0.0,
          number(sent.gradients),
          number(sent.parameters),
          number(sent.activations),
          number(sent.control),
          number(sent.other)};
}

void add(const std::array<double, kReportedNumbers>& from, UpdateResult& to) {
  const auto number = [&](Reported what) { return static_cast<int64_t>(from[static_cast<size_t>(what)]); };
  to.vote = std::max(to.vote, static_cast<int>(number(Reported::vote)));
  to.seconds.push_back(from[static_cast<size_t>(Reported::seconds)]);
  to.sent.gradients += number(Reported::gradients);
  to.sent.parameters += number(Reported::parameters);
  to.sent.activations += number(Reported::activations);
  to.sent.control += number(Reported::control);
  to.sent.other += number(Reported::other);
}

}  // namespace

void exchange_control(const Shards& shards, const StepLosses& step, const OwnReport& says, FinishGradients& finish, UpdateResult& result) {
  const Communicator& world = shards.mesh().world;
  const int tensor_ranks = shards.mesh().tensor.size();
  const int64_t losses = std::ssize(says.losses), assignments = std::ssize(says.assignments);
  std::vector<int64_t> counts, bytes;
  for (int r = 0; r < world.size(); ++r) {
    counts.push_back(kReportedNumbers + losses + assignments + shards.norm_blocks(r));
    bytes.push_back(counts.back() * static_cast<int64_t>(sizeof(double)));
  }
  std::vector<double> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  auto own = all.begin() + std::accumulate(counts.begin(), counts.begin() + world.rank(), int64_t{0});
  own = std::ranges::copy(reported(says.flag, step, world.traffic()), own).out;
  own = std::ranges::copy(says.losses, own).out;
  own = std::ranges::copy(says.assignments, own).out;
  std::ranges::copy(says.partials, own);
  world.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);

  std::vector<int32_t> flags;
  std::vector<double> all_losses;
  std::vector<std::vector<double>> partials;
  result.assignments.assign(says.assignments.size(), 0.0);
  auto next = all.cbegin();
  for (int r = 0; r < world.size(); ++r) {
    const auto end = next + counts[static_cast<size_t>(r)];
    std::array<double, kReportedNumbers> said{};
    std::copy_n(next, kReportedNumbers, said.begin());
    add(said, result);
    flags.push_back(said[static_cast<size_t>(Reported::flag)] != 0.0 ? 1 : 0);
    const auto its_assignments = next + kReportedNumbers + losses, norms = its_assignments + assignments;
    if (r % tensor_ranks == 0) {  // the others have the same
      all_losses.insert(all_losses.end(), next + kReportedNumbers, its_assignments);
      std::transform(its_assignments, norms, result.assignments.begin(), result.assignments.begin(), std::plus());
    }
    partials.emplace_back(norms, end);
    next = end;
  }
  Backend& device = finish.partials.device();
  const auto on_device = [&](const std::vector<double>& values) {
    return from_host(device, Dtype::f64, {static_cast<int64_t>(values.size())}, values.data());
  };
  finish.partials = on_device(shards.in_order(partials));
  finish.losses = on_device(all_losses);
  finish.flags = from_host(device, Dtype::i32, {static_cast<int64_t>(flags.size())}, flags.data());
}

}  // namespace mantissa
