#include "train/recipe_losses.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/checkpoint_reader.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "train/evaluate.h"
#include "train/training_step.h"

namespace mantissa {
namespace {

// Adds the differences of rows of logits whose target counts, row by row, so that parts change no bit.
void add_differences(RecipeLoss& all, const Tensor& p, const Tensor& q, std::span<const int32_t> targets, int64_t vocab) {
  const Tensor wide_p = converted(p, Dtype::f32), wide_q = converted(q, Dtype::f32);
  const HostBytes bytes_p(wide_p), bytes_q(wide_q);
  const auto* const first_p = reinterpret_cast<const float*>(bytes_p.get().data());
  const auto* const first_q = reinterpret_cast<const float*>(bytes_q.get().data());
  const auto row_of = [vocab](const float* first, int64_t row, int64_t width) {
    return std::span(first + row * width, static_cast<size_t>(vocab));
  };
  std::vector<TokenDifference> rows(targets.size());
  parallel_for(std::ssize(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (targets[static_cast<size_t>(row)] == kNoTarget) continue;
      rows[static_cast<size_t>(row)] = token_difference(row_of(first_p, row, wide_p.dim(1)), row_of(first_q, row, wide_q.dim(1)));
    }
  });
  for (size_t row = 0; row < rows.size(); ++row) {
    if (targets[row] == kNoTarget) continue;
    all.kl += rows[row].kl;
    all.equal_greedy += rows[row].equal_greedy ? 1.0 : 0.0;
  }
}

}  // namespace

TokenDifference token_difference(std::span<const float> p, std::span<const float> q) {
  const auto most_p = std::ranges::max_element(p), most_q = std::ranges::max_element(q);
  const auto top_p = double{*most_p}, top_q = double{*most_q};
  double sum_p = 0.0, sum_q = 0.0, cross = 0.0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double weight = std::exp(double{p[i]} - top_p);
    sum_p += weight;
    sum_q += std::exp(double{q[i]} - top_q);
    cross += weight * ((double{p[i]} - top_p) - (double{q[i]} - top_q));
  }
  const double kl = cross / sum_p - std::log(sum_p) + std::log(sum_q);
  return {.kl = kl < 0.0 ? 0.0 : kl, .equal_greedy = most_p - p.begin() == most_q - q.begin()};  // rounding may go below 0; NaN stays
}

RecipeLosses::RecipeLosses(Gpt& high, const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters,
                           std::function<void()> progressed, int64_t logits_of_part)
    : high_(high),
      data_(data),
      micro_batch_size_(micro_batch_size),
      iters_(iters),
      progressed_(std::move(progressed)),
      logits_of_part_(logits_of_part) {
  require_targets(data_, micro_batch_size_, iters_);
  loss_ = evaluated(high_, &hidden_states_);
}

RecipeLoss RecipeLosses::of(Gpt& model) const { return evaluated(model, nullptr); }

// kept: gets the hidden states of this model; null: it is compared with those of the model in high precision.
RecipeLoss RecipeLosses::evaluated(Gpt& model, std::vector<Tensor>* kept) const {
  const Tape::Scope paused(nullptr);
  const int64_t vocab = *model.config().vocab_size;
  RecipeLoss all{.kl = 0.0, .equal_greedy = 0.0};
  size_t number = 0;
  for (int set = 0; set < data_.sets(); ++set) {
    double loss_of_set = 0.0;
    const int64_t windows = windows_to_read(data_, set, micro_batch_size_, iters_);
    for (int64_t first = 0; first < windows; first += micro_batch_size_, ++number) {
      if (progressed_) progressed_();
      const Batch batch = data_.batch(set, first, std::min(micro_batch_size_, windows - first));
      if (kept) kept->emplace_back();
      if (batch.target_count == 0) continue;
      const DeviceBatch rows = to_device(model, batch, 0, batch.sequences);
      const Tensor states = model.hidden_states(rows.tokens);
      if (kept) kept->back() = states;
      const int64_t tokens = states.dim(0), grain = 64,
                    step = std::max(grain, logits_of_part_ / model.config().padded_vocab_size() / grain * grain);
      const Tensor losses = empty(model.device(), stats_dtype(states.dtype()), {tokens});
      for (int64_t begin = 0; begin < tokens; begin += step) {
        const int64_t end = std::min(tokens, begin + step);
        const Tensor logits = model.logits_of(states.slice(begin, end));
        model.device().run(CrossEntropy{
            .logits = logits, .targets = rows.targets.slice(begin, end), .loss = losses.slice(begin, end), .vocab = vocab, .scale = 1.0});
        if (kept) continue;
        const auto targets = std::span(batch.targets).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
        add_differences(all, high_.logits_of(hidden_states_[number].slice(begin, end)), logits, targets, vocab);
      }
      const Tensor loss = empty(model.device(), Dtype::f64, {1});
      model.device().run(Sum{.x = losses, .out = loss, .factor = 1.0});
      loss_of_set += to_host<double>(loss)[0];
      all.targets += batch.target_count;
    }
    all.loss += loss_of_set;
  }
  const auto count = static_cast<double>(all.targets);
  return {.loss = all.loss / count,
          .targets = all.targets,
          .kl = kept ? 0.0 : all.kl / count,
          .equal_greedy = kept ? 1.0 : all.equal_greedy / count};
}

std::unique_ptr<Gpt> with_plan(Gpt& from, const PrecisionPlan& plan) {
  auto out = std::make_unique<Gpt>(from.config(), from.device(), plan, GptOptions{.gradients = false});
  ParameterSet &old = from.parameters(), &made = out->parameters();
  for (const Parameter& parameter : made.all()) {
    if (parameter.dtype != Dtype::bf16 && old.all()[parameter.number()].dtype == Dtype::bf16) return nullptr;
  }
  for (const ParameterShard& chunk : chunks_of(made)) {
    const Tensor& value = old.all()[chunk.of->number()].value();
    const Tensor master = made.room_for_master(chunk);
    from.device().run(Convert{.x = chunk.of_rows(value), .out = master});
    made.store(chunk, master);
  }
  for (size_t i = 0; i < made.buffers().size(); ++i)
    from.device().run(Convert{.x = old.buffers()[i].value, .out = made.buffers()[i].value});
  return out;
}

}  // namespace mantissa
