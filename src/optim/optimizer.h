// AdamW over the shards of a model, Muon over those of matrices that a rule gives it, the global gradient norm and its clipping, and the
// learning rate. It owns the fp32 masters and the moments.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/config/run_config.h"
#include "optim/muon.h"
#include "optim/step_control.h"

namespace mantissa {

struct OptimizerNumerics {
  Dtype directions = Dtype::f32;  // in which Muon computes; fp64 where the masters are
  uint64_t seed = 0;              // decides how moments of bf16 are rounded
};

class Optimizer {
 public:
  // The moments start at 0 and the masters undefined: initialize() or store_masters() comes before the first update. The set must be
  // allocated with gradients and outlive the optimizer. Among several ranks this one owns its Shards; all ranks then call initialize(),
  // store_masters() and update() together.
  Optimizer(ParameterSet& parameters, const OptimizerConfig& config, const Mesh& mesh = {}, std::optional<int64_t> least_bucket = {},
            const OptimizerNumerics& numerics = {});
  Shards& shards() { return shards_; }
  const Shards& shards() const { return shards_; }

  // Draws the initial masters, and makes values and codes from them.
  void initialize(uint64_t seed);
  // Makes values and codes from masters that were written from outside.
  void store_masters();

  // Makes update number updates() + 1, unless it is skipped: gradients are reduced to their owners, and forward's weights are gathered. The
  // norm is that of all gradients, without those of frozen parameters, which have none, summed in fp64 per 32 rows, then in the order of
  // the parameters; it is NaN or Inf if and only if an element is. Decay applies to parameters of two or more dimensions. Everything is
  // decided on the device. The host waits for it once, for the result; among several ranks also before, for what they tell each other.
  UpdateResult update(double lr, const StepLosses& losses);

  // Counts the updates of the parameters; the bias corrections follow it.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

  // A shard with its state, in its shape; the fp32 master is the value where that is fp32. A frozen one has no moments, one of Muon has the
  // first, which is its momentum.
  struct State {
    ParameterShard shard;
    Tensor master, first_moment, second_moment;
  };
  const std::vector<State>& states() const { return states_; }  // in the order of the parameters, then of the rows

  // Returns "layers.0.mlp.down.weight[3, 5] = nan" for the first element of a gradient, or of a weight as forward reads it, in the own
  // shards that is not finite; "" if all are. Parameter and row of the shard order what several ranks found.
  struct Nonfinite {
    std::string text = {};
    size_t parameter = std::numeric_limits<size_t>::max();
    int64_t row = 0;
  };
  enum class Checked { gradients, weights };
  Nonfinite first_nonfinite(Checked values) const;

 private:
  // Rows of a shard whose moments are rounded with numbers that follow each other; all rows where moments are not rounded.
  struct Run {
    int64_t begin, end;
    MomentRounding rounding;
  };
  std::vector<Run> runs(const ParameterShard& shard) const;
  const Tensor& step_of(const State& state) const;
  double decay_of(const State& state) const;
  Tensor momentum(const State& state) const;
  void apply(size_t begin, size_t end, std::vector<Tensor>& directions);
  void update_by_muon(size_t index, const Tensor& direction, const Tensor& rounding) const;
  std::vector<AdamW> by_adamw(const State& state, const Tensor& rounding) const;

  ParameterSet& parameters_;
  Shards shards_;
  OptimizerConfig config_;
  uint64_t seed_;
  int64_t updates_ = 0;
  std::vector<State> states_;
  Muon muon_;
  Tensor step_;                      // StepValue
  std::map<double, Tensor> scaled_;  // step_ with another learning rate, by its factor
  StepControl control_{shards_};
};

// The learning rate of `step`, counted from 0, of a run of `steps` steps; it has no state, so a resumed run needs none. With W =
// warmup_steps, D = decay_steps and low = peak * min_lr_ratio:
//
//   step < W   peak * (step + 1) / (W + 1), as nanoGPT: the first step already learns, and step W is the first at the peak
//   cosine     low + (peak - low) * (1 + cos(pi * r)) / 2, r = (step - W) / D, then low; as nanoGPT with lr_decay_iters = W + D
//   linear     peak + (low - peak) * r, then low
//   constant   peak
//   wsd        peak until the last D steps of the run, then linear down to low (Megatron's WSD)
//
// D null: cosine, linear and wsd decay from the end of the warm-up to the end of the run.
double learning_rate(const ScheduleConfig& schedule, double peak, int64_t steps, int64_t step);

}  // namespace mantissa
