// Runs of train() with the kernels of CUDA on the executor of the host, beside runs on the CPU and of ranks that are threads. No two runs
// of a process have the same orders of lanes, blocks and threads: each launch draws another from MANTISSA_SIMT_SEED.
#pragma once

#include <algorithm>
#include <utility>

#include "checkpoint/saved_model.h"
#include "training_on_ranks.h"

namespace mantissa::test {

struct CudaModel {
  std::string name;
  double loss;      // largest relative difference of the first loss to that of the CPU
  double gradient;  // largest relative difference of the first gradient of any parameter
  std::vector<std::string> sets;
  std::vector<std::string> layouts = {};  // layouts of two ranks
};
inline void PrintTo(const CudaModel& model, std::ostream* out) { *out << model.name; }

class TrainingOnCuda : public TrainingOnRanks, public ::testing::WithParamInterface<CudaModel> {
 protected:
  using Sets = std::vector<std::string>;
  static constexpr int64_t kSteps = 2, kMiddle = 1;

  // Settings with sequences of 19 letters, of which there are 8, padded to 12. Two ranks divide the matrices in blocks of 32.
  LoadedConfig cuda_config(const std::string& name, const Sets& more) const {
    Sets sets = {"model.hidden_size=64",
                 "model.intermediate_size=192",
                 "model.num_attention_heads=4",
                 "model.num_key_value_heads=2",
                 "model.head_dim=32",
                 "model.max_position_embeddings=19",
                 "model.pad_vocab_to=12",
                 "precision.dtype=bf16",
                 "optimizer.lr=3e-3",
                 "schedule.warmup_steps=0",
                 text("training.steps=", kSteps),
                 "training.seq_len=19",
                 "training.micro_batch_size=1",
                 "training.grad_accum=null",
                 "training.global_batch_size=4",
                 "training.accumulation=tree",
                 "training.threads=1",
                 "logging.interval=1",
                 text("eval.interval=", kSteps),
                 "eval.iters=2",
                 text(R"(eval.samples={"prompts":["ab"],"max_new_tokens":4,"interval":)", kSteps, '}'),
                 "checkpoint.interval=1",
                 "checkpoint.keep_every=1"};
    sets.insert(sets.end(), GetParam().sets.begin(), GetParam().sets.end());
    sets.insert(sets.end(), more.begin(), more.end());
    return config(name, std::move(sets));
  }

  // Returns what rank 0 was told. The state that the run starts with is saved as step 0.
  TrainedRun run_on_device(const std::string& device, const std::string& name, const Sets& more = {},
                           const MakeDeviceLink& make_link = {}) const {
    const LoadedConfig loaded = cuda_config(name, more);
    const int ranks = static_cast<int>(loaded.config.parallel.data * loaded.config.parallel.tensor);
    TrainedRun out;
    const auto on_rank = [&](const Communicator& world) {
      const auto save_at_once = [next = Request::save]() mutable { return std::exchange(next, Request::none); };
      TrainedRun own = run(loaded, save_at_once, world, [&] { return make_backend(device); });
      if (world.rank() == 0) out = std::move(own);
    };
    const auto errors = run_ranks(ranks, on_rank, {}, make_link);
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty())) << name;
    return out;
  }

  // Expects the same bits at the start, and values near each other afterward. Prints how near they are.
  void expect_near(const std::string& a, const TrainedRun& expected, const std::string& b, const TrainedRun& found,
                   const std::string& but = "") const {
    SCOPED_TRACE(b);
    std::printf("%s %s:", GetParam().name.c_str(), b.c_str());
    expect_same_checkpoints(a, b, 0, but);
    expect_near_losses(expected, found);
    expect_near_gradients(a, b, GetParam().gradient + std::sqrt(other_choices(expected, found, 1)));
    // A token that is near a tie may choose other experts, and more do so as weights part: up to one in six was seen.
    const double others = other_choices(expected, found, kSteps);
    EXPECT_LE(others, 0.2);
    std::printf(", %.1e of the choices", others);
    std::printf("\n");
  }
  // Later losses follow from weights that differ, and from other choices of experts: 0.016 without them and 0.053 with them was seen.
  void expect_near_losses(const TrainedRun& expected, const TrainedRun& found) const {
    ASSERT_EQ(expected.losses.size(), size_t{kSteps});
    ASSERT_EQ(found.losses.size(), size_t{kSteps});
    const double most = expected.steps[0].routing.empty() ? 0.03 : 0.1;
    for (size_t i = 0; i < kSteps; ++i) {
      const double bound = GetParam().loss * expected.losses[i], difference = std::abs(found.losses[i] - expected.losses[i]);
      EXPECT_LE(difference, i == 0 ? bound : std::min(10 * bound, most)) << "step " << i + 1;
      std::printf(" %.1e", difference);
    }
    EXPECT_NEAR(found.norms[0], expected.norms[0], 1e-2 * expected.norms[0]);
    std::printf(", norm %.1e", std::abs(found.norms[0] / expected.norms[0] - 1));
  }
  // Compares both moments of the first step: the gradient, and its square, which is off by twice as much. If the gradients of n tokens are
  // equally long and have nothing to do with each other, k tokens that come or go make a distance of sqrt(k / n); so k choices among n that
  // were others may add as much.
  void expect_near_gradients(const std::string& a, const std::string& b, double most) const {
    double farthest = 0.0;
    for (const std::string& parameter : parameters(a, 1)) {
      const auto distance_of = [&](const std::string& of) { return distance(tensor(a, 1, of + parameter), tensor(b, 1, of + parameter)); };
      EXPECT_LE(distance_of("m."), most) << parameter;
      EXPECT_LE(distance_of("v."), 2 * most) << parameter;
      farthest = std::max(farthest, distance_of("m."));
    }
    std::printf(", gradients %.1e", farthest);
  }
  // Returns how far the loads of experts are apart in the first steps, as a share of all choices: one that is another counts twice.
  static double other_choices(const TrainedRun& expected, const TrainedRun& found, size_t steps) {
    int64_t others = 0, all = 0;
    for (size_t step = 0; step < steps; ++step) {
      EXPECT_EQ(found.steps.at(step).routing.size(), expected.steps.at(step).routing.size());
      for (size_t layer = 0; layer < expected.steps[step].routing.size(); ++layer) {
        const std::vector<int64_t>&a = expected.steps[step].routing[layer].load, &b = found.steps[step].routing.at(layer).load;
        for (size_t e = 0; e < a.size(); ++e) others += std::abs(a[e] - b.at(e)), all += a[e];
      }
    }
    return all == 0 ? 0.0 : static_cast<double>(others) / static_cast<double>(all);
  }
  // The norm of the difference, divided by that of the expected values.
  static double distance(const std::vector<float>& expected, const std::vector<float>& found) {
    double squares = 0.0, difference = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
      squares += double{expected[i]} * double{expected[i]};
      difference += (double{found[i]} - double{expected[i]}) * (double{found[i]} - double{expected[i]});
    }
    return difference == 0.0 ? 0.0 : std::sqrt(difference / squares);
  }

  // The codes of the device are those that the CPU makes of the saved masters.
  void expect_codes_of_masters(const std::string& name) const {
    CheckpointReader reader(checkpoint(name, kSteps));
    EXPECT_NO_THROW(verify_codes(reader, *make_backend("cpu")));
  }

  // Expects a run near the CPU's, and the same bits when orders are others, like those of ranks, and after a stop.
  TrainedRun expect_the_course_of_the_cpu() const {
    const TrainedRun cuda = run_on_device("cuda", "cuda");
    expect_near("cpu", run_on_device("cpu", "cpu"), "cuda", cuda);
    expect_codes_of_masters("cuda");
    if (GetParam().layouts.empty()) {
      expect_same_course(cuda, run_on_device("cuda", "again"));
      expect_same_checkpoints("cuda", "again", kSteps);
    }
    const TrainedRun rest = run_on_device("cuda", "rest", {"checkpoint.resume=" + checkpoint("cuda", kMiddle)});
    EXPECT_EQ(rest.losses, std::vector(cuda.losses.begin() + kMiddle, cuda.losses.end()));
    expect_same_checkpoints("cuda", "rest", kSteps);
    return cuda;
  }

  // Data and expert ranks have the bits of one; tensor ranks add in another order.
  void expect_ranks_like_one(const TrainedRun& alone) const {
    for (const std::string& name : GetParam().layouts) {
      if (name.starts_with("tp2")) {
        const Sets sets = {"parallel.tensor=2", text("parallel.sequence_parallel=", name == "tp2sp" ? "true" : "false")};
        expect_near("cuda", alone, name, run_on_device("cuda", name, sets), "plan");
      } else {
        expect_same_course(alone, run_on_device("cuda", name, {"parallel.data=2", text("parallel.expert=", name == "ep2" ? 2 : 1)}));
        expect_same_checkpoints("cuda", name, kSteps);
      }
      expect_codes_of_masters(name);
    }
  }
};

struct CudaPreset {
  std::string name;
  double loss, gradient;
  std::vector<std::string> sets;
  std::string inner = "64";  // channels of an expert
};

// Presets with different options of models, which have kernels or operands of their own.
inline std::vector<CudaPreset> cuda_presets() {
  return {{"fp32", 1e-6, 5e-6, {"precision.recipe=fp32", "precision.dtype=fp32", "model.attention_sinks=true", "model.sliding_window=6"}},
          {"bf16", 1e-3, 0.015, {"precision.recipe=bf16", "precision.dtype=fp32", "model.qk_norm=true"}},
          {"high", 1e-3, 0.015, {"model.norm=layer", "model.norm_bias=true", "model.attention_bias=all", "model.position=learned"}},
          {"mxfp8", 5e-3, 0.15, {"precision.recipe=mxfp8", "training.recompute=selective"}},
          {"gather", 5e-3, 0.15, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full"}},
          {"mxfp8_te", 5e-3, 0.15, {"precision.recipe=mxfp8_te"}},
          {"mxfp8_weights", 5e-3, 0.15, {"precision.recipe=mxfp8_weights", "model.tie_word_embeddings=true"}},
          {"fp8_block",
           5e-3,
           0.15,
           {"precision.recipe=fp8_block", "model.hidden_size=256", "model.intermediate_size=256", "model.num_key_value_heads=4",
            "model.head_dim=64"},
           "256"},
          {"mxfp4_qat", 5e-3, 0.15, {"precision.recipe=mxfp4_qat", "training.recompute=full"}},
          {"mxfp4_qat_mxfp8_act", 5e-3, 0.15, {"precision.recipe=mxfp4_qat_mxfp8_act"}},
          // Where bf16 is rounded otherwise, an input has another code of 4 bits, a quarter of it away. With precision.dtype=fp32,
          // gradients of the dense model are within 6e-7.
          {"mxfp4_qat_mxfp4_act", 5e-3, 0.25, {"precision.recipe=mxfp4_qat_mxfp4_act"}},
          {"nvfp4_qat", 5e-3, 0.15, {"precision.recipe=nvfp4_qat"}},
          {"nvfp4_qat_nvfp4_act", 5e-3, 0.25, {"precision.recipe=nvfp4_qat_nvfp4_act"}}};
}

enum class Experts { none, softmax, sigmoid };

inline CudaModel cuda_model(const CudaPreset& preset, Experts experts) {
  const char* const kinds[] = {"dense", "softmax", "sigmoid"};
  CudaModel out{preset.name + "_" + kinds[static_cast<size_t>(experts)], preset.loss, preset.gradient, preset.sets, {"dp2", "tp2"}};
  const auto add = [&](const std::vector<std::string>& sets) { out.sets.insert(out.sets.end(), sets.begin(), sets.end()); };
  if (experts == Experts::none) return out;
  out.gradient *= 2;  // each gets fewer tokens
  add({"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=" + preset.inner});
  if (experts == Experts::softmax) {
    add({"model.moe.aux_loss_coef=0.01", "model.moe.z_loss_coef=0.001", "model.moe.seq_aux_loss_coef=0.01",
         "model.moe.shared_intermediate_size=" + preset.inner});
    out.layouts = {"ep2", "tp2sp"};
  } else {
    add({"model.moe.score=sigmoid", "model.moe.bias_update_rate=0.05", "model.moe.capacity_factor=1.1", "model.moe.dense_layers=[0]"});
    out.layouts = {"ep2"};
  }
  return out;
}

}  // namespace mantissa::test
