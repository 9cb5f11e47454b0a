#include "train/run_inputs.h"

#include "base/hash.h"
#include "checkpoint/checkpoint_search.h"
#include "hf/hf_weights.h"
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

}  // namespace mantissa
