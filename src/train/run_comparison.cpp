#include "train/run_comparison.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint_search.h"
#include "hf/hf_weights.h"
#include "mantissa/backend/functions.h"
#include "train/run.h"

namespace mantissa {
namespace {

std::string model_hash(const std::string& path) {
  return is_published_model(path) ? HfWeights(path).fingerprint() : open_checkpoint(path).hash();
}

}  // namespace

RunInputs run_inputs(const LoadedConfig& loaded) {
  LoadedConfig copy = loaded;
  const Data data = open_run_data(copy, {});
  RunInputs inputs;
  for (const auto* const files : {&data.fingerprints.train, &data.fingerprints.valid})
    for (const FileFingerprint& file : *files) inputs[printable(file.path)] = text(file.bytes, " bytes with xxh64 ", file.hash);
  if (data.tokenizer) inputs["data.tokenizer"] = xxh64(data.tokenizer->to_json()).text();
  const RunConfig& config = loaded.config;
  if (config.checkpoint.init_from) inputs["checkpoint.init_from"] = model_hash(*config.checkpoint.init_from);
  if (config.teacher) inputs["training.teacher"] = model_hash(*config.teacher_path());
  return inputs;
}

Gradients first_gradients(const LoadedConfig& loaded) {
  set_num_threads(loaded.config.training.threads);
  const Mesh alone;
  Run run(loaded, {}, alone, {});
  start(run);
  const int64_t rows = run.config.training.micro_batch_size;
  const Batch batch = run.batches.take(0).rows;
  RouterStatistics routing(RouterFigures::counts, run.config.model.expert_layers() * run.accumulator.losses().elements());
  run.accumulator.accumulate(
      [&](int64_t i) {
        const RoundingScope scope({.seed = run.config.training.seed, .step = run.state.step, .token = i * rows * batch.length});
        return forward_and_backward(run.model, to_device(run.model, batch, i * rows, rows), std::max<int64_t>(1, batch.target_count),
                                    routing, teaching(run.config, run.teacher.get()));
      },
      run.optimizer.shards());
  Gradients out;
  for (const Parameter& parameter : run.model.parameters().all()) {
    const ModuleShape& module = run.plan.module_of(parameter.name).module;
    if (!has_gemm(module.kind) || parameter.name != module.weight_name() || !parameter.trained()) continue;
    std::vector<float> values = to_host<float>(parameter.leaf.grad);
    require(std::ranges::all_of(values, [](float value) { return std::isfinite(value); }), ExitCode::numerical, parameter.name,
            ": its gradient of the first step is not finite");
    out.emplace(parameter.name, std::move(values));
  }
  return out;
}

std::map<std::string, double> gradient_cosines(const Gradients& gradients, const Gradients& baseline) {
  std::map<std::string, double> out;
  for (const auto& [name, a] : gradients) {
    const auto found = baseline.find(name);
    if (found == baseline.end()) continue;
    const std::vector<float>& b = found->second;
    require(a.size() == b.size(), name, ": gradients of ", a.size(), " and ", b.size(), " elements");
    double product = 0.0, square_a = 0.0, square_b = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      product += double{a[i]} * double{b[i]};
      square_a += double{a[i]} * double{a[i]};
      square_b += double{b[i]} * double{b[i]};
    }
    if (square_a > 0.0 && square_b > 0.0) out.emplace(name, product / std::sqrt(square_a * square_b));
  }
  return out;
}

}  // namespace mantissa
