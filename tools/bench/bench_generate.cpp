// Measures generation of a configured model from random weights: the bytes of weights that one token reads, against a memory copy.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/cpu_level.h"
#include "base/parallel.h"
#include "config/open_device.h"
#include "mantissa/base/text.h"
#include "mantissa/train/load_config.h"
#include "tools/bench/bench_harness.h"
#include "train/generate.h"

namespace mantissa::tools {
namespace {

// Returns the bytes of each element as forward reads them, with those of scales.
double bytes_per_element(const Recipe& recipe) {
  const OperandChoice weight = choose_operands(recipe, GemmRole::fprop).second;
  if (weight.source == OperandSource::high || weight.source == OperandSource::simulated)
    return static_cast<double>(dtype_bytes(recipe.compute));
  const Quantization& how = weight.source == OperandSource::codes ? weight.how : recipe.weight_fake_quant;
  return (is_four_bit(how.format) ? 0.5 : 1.0) + 1.0 / static_cast<double>(how.block_rows * how.block_cols);
}

// Returns how many elements of a module's weight so many tokens read: rows of a table, and the matrices of the experts that they go to, as
// if no two went to the same.
int64_t elements_read(const ModuleShape& module, bool tied, int64_t tokens) {
  if (module.kind == ModuleKind::embedding && !(tied && module.path == "embed")) return module.in * tokens;
  return module.weight_elements() / module.matrices * std::min(module.matrices, module.active * tokens);
}

class GenerationRun {
 public:
  GenerationRun(const RunConfig& config, const GenerationShape& shape)
      : config_(config),
        plan_(resolve_plan(config)),
        device_(make_backend(config.training.device)),
        model_(config.model, *device_, plan_, {.gradients = false}),
        shape_(shape) {
    ParameterSet& parameters = model_.parameters();
    for (const ParameterShard& shard : parameters.whole_shards()) {
      const Tensor master = parameters.room_for_master(shard);
      parameters.draw_initial(shard, config.training.seed, master);
      parameters.store(shard, master);
    }
    for (int64_t i = 0; i < shape.batch; ++i) prompts_.push_back({static_cast<int32_t>(i % *config.model.vocab_size)});
  }

  Backend& device() { return *device_; }
  int64_t tokens() const { return shape_.batch * shape_.new_tokens; }

  // Returns the bytes of weights that one step of the batch reads.
  double step_bytes() const {
    double bytes = 0.0;
    for (const ModulePrecision& module : plan_.modules()) {
      const auto elements = static_cast<double>(elements_read(module.module, config_.model.tie_word_embeddings, shape_.batch));
      bytes += elements * bytes_per_element(module.recipe) + static_cast<double>(module.module.bias * dtype_bytes(module.recipe.compute));
    }
    return bytes;
  }

  Workload workload(const std::string& name) {
    return {.bench = name,
            .shape = text("B", shape_.batch, " +", shape_.new_tokens),
            .dtype = config_.precision.dtype,
            .bytes = step_bytes() * static_cast<double>(shape_.new_tokens),
            .run = [this] { generate_batch(model_, prompts_, {.max_new_tokens = shape_.new_tokens, .temperature = 0.0}); },
            .tokens = static_cast<double>(tokens())};
  }

  void report(const std::string& name, const Measurement& copy) const {
    const std::string step = shape_.batch == 1 ? "token" : text("step of ", shape_.batch, " tokens");
    std::printf("%s: %.2f ms a %s, %.1f tokens/s, %.1f MB of weights a step, read at %.3f of the copy rate, %s, %s\n", name.c_str(),
                copy.seconds.median * 1e3 / static_cast<double>(shape_.new_tokens), step.c_str(),
                static_cast<double>(tokens()) / copy.seconds.median, step_bytes() * 1e-6, copy.ratio.median, mantissa::name(cpu_level()),
                count_text(num_threads(), "thread").c_str());
  }

 private:
  RunConfig config_;
  PrecisionPlan plan_;
  std::unique_ptr<Backend> device_;
  Gpt model_;
  GenerationShape shape_;
  std::vector<std::vector<int32_t>> prompts_;
};

}  // namespace

void bench_generate(const RunConfig& config, const GenerationShape& shape, const Opponent& other, const BenchOptions& options) {
  const std::string name = printable(*config.logging.run_name);
  GenerationRun run(config, shape);
  Harness harness(run.device(), options);
  harness.expect(other.config ? 2 : 1);
  Workload workload = run.workload("generate." + name);
  const Measurement copy = harness.measure(workload);
  run.report(name, copy);
  if (!other.config) return;
  GenerationRun opponent(*other.config, shape);
  const Workload against = opponent.workload(other.name);
  workload.against = &against;
  const double ratio = harness.measure(workload).ratio.median, bytes = opponent.step_bytes() / run.step_bytes();
  std::printf("%s: %.3f of the speed with %s, which reads %.3f of the bytes: %.3f of that ratio\n", name.c_str(), ratio, other.name.c_str(),
              bytes, ratio / bytes);
}

}  // namespace mantissa::tools
