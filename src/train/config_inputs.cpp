#include <filesystem>

#include "mantissa/data/dataset.h"
#include "mantissa/io/checkpoint_search.h"
#include "mantissa/train/config.h"

namespace mantissa {
namespace {

void check_data(const std::string& path, const std::string& key, ConfigReport& report) {
  if (report.failed(key)) return;
  try {
    expand_paths(path, key);
  } catch (const Error& error) {
    report.error(key, error.what());
  }
}

void check_checkpoint(const std::string& path, const std::string& key, ConfigReport& report) {
  std::error_code error;
  if (!report.failed(key) && !std::filesystem::exists(path, error))
    report.error(key, "no such checkpoint: \"" + path + "\"" + steps_beside(path));
}

bool continues(const CheckpointConfig& config) {
  std::error_code error;
  return config.resume == "auto" && std::filesystem::is_directory(config.dir, error) && !list_checkpoints(config.dir).empty();
}

void check_sets(const std::vector<WeightedPath>& sets, const std::string& key, ConfigReport& report) {
  for (size_t i = 0; i < sets.size(); ++i) check_data(sets[i].path, text(key, '.', i, ".path"), report);
}

}  // namespace

void check_inputs_exist(const RunConfig& config, ConfigReport& report) {
  if (config.data.path) check_data(*config.data.path, "data.path", report);
  check_sets(config.data.train, "data.train", report);
  check_sets(config.data.valid, "data.valid", report);
  const std::string& resume = config.checkpoint.resume;
  if (resume != "never" && resume != "auto") check_checkpoint(resume, "checkpoint.resume", report);
  if (config.checkpoint.init_from && !continues(config.checkpoint))
    check_checkpoint(*config.checkpoint.init_from, "checkpoint.init_from", report);
}

}  // namespace mantissa
