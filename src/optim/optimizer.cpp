#include "mantissa/optim/optimizer.h"

#include <array>
#include <cmath>
#include <numeric>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {
namespace {

int64_t norm_bands(const Part& part) { return ceil_div(part.end - part.begin, 32); }

// What a rank tells in the one message of a step that decides it: these, then its losses, its counts of choices, and its partial norms. All
// fp64.
enum class Told { flag, vote, seconds, gradients, parameters, activations, control, other, count };
constexpr auto kTold = static_cast<int64_t>(Told::count);

std::array<double, kTold> told(const FinishGradients& finish, const StepLosses& step, const Traffic& sent) {
  const auto number = [](int64_t bytes) { return static_cast<double>(bytes); };
  return {static_cast<double>(to_host<int32_t>(finish.flags)[0]),
          static_cast<double>(step.vote),
          step.seconds,
          number(sent.gradients),
          number(sent.parameters),
          number(sent.activations),
          number(sent.control),
          number(sent.other)};
}

void add(const std::array<double, kTold>& from, UpdateResult& to) {
  const auto number = [&](Told what) { return static_cast<int64_t>(from[static_cast<size_t>(what)]); };
  to.vote = std::max(to.vote, static_cast<int>(number(Told::vote)));
  to.seconds.push_back(from[static_cast<size_t>(Told::seconds)]);
  to.sent.gradients += number(Told::gradients);
  to.sent.parameters += number(Told::parameters);
  to.sent.activations += number(Told::activations);
  to.sent.control += number(Told::control);
  to.sent.other += number(Told::other);
}

// Every rank decides by the partial norms, losses and flags of all.
void exchange_control(const Shards& shards, const StepLosses& step, FinishGradients& finish, UpdateResult& result) {
  const Communicator& world = shards.mesh().world;
  const int tensor_ranks = shards.mesh().tensor.size();
  const int64_t losses = finish.losses.elements(), choices = std::ssize(step.choices);
  std::vector<int64_t> counts, bytes;
  for (int r = 0; r < world.size(); ++r) {
    counts.push_back(kTold + losses + choices + shards.norm_bands(r));
    bytes.push_back(counts.back() * static_cast<int64_t>(sizeof(double)));
  }
  std::vector<double> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  auto own = all.begin() + std::accumulate(counts.begin(), counts.begin() + world.rank(), int64_t{0});
  own = std::ranges::copy(told(finish, step, world.traffic()), own).out;
  own = std::ranges::copy(to_host<double>(finish.losses), own).out;
  own = std::ranges::copy(step.choices, own).out;
  std::ranges::copy(to_host<double>(finish.partials), own);
  world.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);

  std::vector<int32_t> flags;
  std::vector<double> all_losses;
  std::vector<std::vector<double>> partials;
  result.choices.assign(step.choices.size(), 0.0);
  auto next = all.cbegin();
  for (int r = 0; r < world.size(); ++r) {
    const auto end = next + counts[static_cast<size_t>(r)];
    std::array<double, kTold> said{};
    std::copy_n(next, kTold, said.begin());
    add(said, result);
    flags.push_back(said[static_cast<size_t>(Told::flag)] != 0.0 ? 1 : 0);
    const auto its_choices = next + kTold + losses, norms = its_choices + choices;
    if (r % tensor_ranks == 0) {  // the others have the same
      all_losses.insert(all_losses.end(), next + kTold, its_choices);
      std::transform(its_choices, norms, result.choices.begin(), result.choices.begin(), std::plus());
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

}  // namespace

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config, const Mesh& mesh, int64_t bucket_bytes)
    : parameters_(parameters), shards_(parameters, mesh, bucket_bytes), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  int64_t bands = 0;
  for (const Part& part : shards_.own()) {
    states_.push_back({.part = part, .master = {}, .first_moment = {}, .second_moment = {}});
    bands += norm_bands(part);
  }
  allocate();
  partials_ = empty(parameters.device(), Dtype::f64, {bands});
  step_ = zeros(parameters.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  outcome_ = zeros(parameters.device(), Dtype::f64, {static_cast<int64_t>(StepOutcome::count)});
}

void Optimizer::allocate() {
  const Dtype dtype = parameters_.master_dtype();
  Arena masters(dtype), first(dtype), second(dtype);
  for (const State& state : states_) {
    if (!parameters_.value_is_master(*state.part.of)) masters.reserve(state.part.shape());
    first.reserve(state.part.shape());
    second.reserve(state.part.shape());
  }
  for (Arena* arena : {&masters, &first, &second}) arena->allocate(parameters_.device());
  for (State& state : states_) {
    const Shape shape = state.part.shape();
    state.master = parameters_.value_is_master(*state.part.of) ? parameters_.room_for_master(state.part) : masters.take(shape);
    state.first_moment = first.take(shape);
    state.second_moment = second.take(shape);
  }
}

void Optimizer::initialise(uint64_t seed) {
  for (const State& state : states_) parameters_.draw_initial(state.part, seed, state.master);
  store_masters();
}

void Optimizer::store_masters() {
  shards_.arrive();
  parameters_.clear_nonfinite();
  for (const State& state : states_) parameters_.store(state.part, state.master);
  shards_.gather();
}

void Optimizer::finish_gradients(double lr, const StepLosses& losses, UpdateResult& result) {
  Backend& device = parameters_.device();
  std::array<float, static_cast<size_t>(StepValue::count)> step{};
  const auto set = [&](StepValue index, double value) { step[static_cast<size_t>(index)] = static_cast<float>(value); };
  const auto n = static_cast<double>(updates_ + 1);
  set(StepValue::lr, lr);
  set(StepValue::inverse_bias_correction1, 1.0 / (1.0 - std::pow(config_.beta1, n)));
  set(StepValue::inverse_bias_correction2, 1.0 / (1.0 - std::pow(config_.beta2, n)));
  device.upload(step.data(), step_);
  int64_t begin = 0;
  for (const State& state : states_) {
    const int64_t end = begin + norm_bands(state.part);
    device.run(SquaredNorm{.x = state.part.gradient(), .partials = partials_.slice(begin, end)});
    begin = end;
  }
  FinishGradients finish{.partials = partials_,
                         .losses = losses.losses,
                         .flags = parameters_.nonfinite(),
                         .step = step_,
                         .outcome = outcome_,
                         .clip = config_.grad_clip,
                         .pairwise = losses.pairwise};
  result.vote = losses.vote;
  result.choices = losses.choices;
  if (shards_.mesh().world.size() > 1) exchange_control(shards_, losses, finish, result);
  device.run(finish);
}

void Optimizer::apply_to(const State& state) {
  const Tensor rounding = parameters_.rounding_target(state.part);
  parameters_.device().run(AdamW{.master = state.master,
                                 .m = state.first_moment,
                                 .v = state.second_moment,
                                 .grad = state.part.gradient(),
                                 .step = step_,
                                 .beta1 = config_.beta1,
                                 .beta2 = config_.beta2,
                                 .eps = config_.eps,
                                 .weight_decay = state.part.of->decays() ? config_.weight_decay : 0.0,
                                 .value = rounding});
  parameters_.quantise(state.part, rounding);
}

// What is done of a bucket is on its way while the next is updated.
void Optimizer::apply() {
  size_t next = 0;
  for (size_t bucket = 0; bucket < shards_.buckets(); ++bucket) {
    for (; next < shards_.own_end(bucket); ++next) apply_to(states_[next]);
    shards_.gather(bucket);
  }
}

UpdateResult Optimizer::update(double lr, const StepLosses& losses) {
  UpdateResult result{};
  shards_.reduce_gradients();
  finish_gradients(lr, losses, result);
  apply();
  const std::vector<double> outcome = to_host<double>(outcome_);
  const auto get = [&](StepOutcome index) { return outcome[static_cast<size_t>(index)]; };
  result.loss = get(StepOutcome::loss);
  result.gradient_norm = get(StepOutcome::gradient_norm);
  result.bad_weights = get(StepOutcome::bad_weights) != 0.0;
  result.skipped = get(StepOutcome::skip) != 0.0;
  if (!result.skipped) ++updates_;
  return result;
}

Optimizer::Nonfinite Optimizer::first_nonfinite_gradient() const {
  return first_found([](const State& state) { return nonfinite_text(state.part, state.part.gradient()); });
}

Optimizer::Nonfinite Optimizer::first_nonfinite_weight() const {
  return first_found([](const State& state) { return nonfinite_weight(state.part, state.master); });
}

Optimizer::Nonfinite Optimizer::first_found(const std::function<std::string(const State&)>& search) const {
  for (const State& state : states_) {
    const std::string found = search(state);
    if (found.empty()) continue;
    size_t parameter = 0;
    while (&parameters_.all()[parameter] != state.part.of) ++parameter;
    const std::vector<Part::Slab> slabs = state.part.slabs();
    return {.text = found, .parameter = parameter, .row = slabs.empty() ? state.part.begin : slabs.front().row};
  }
  return {};
}

}  // namespace mantissa
