#include "mantissa/plan/run_warnings.h"

#include <algorithm>

#include "mantissa/hf/hugging_face.h"

namespace mantissa {
namespace {

// Returns why no architecture has the model, in one line; none: one has it.
std::optional<std::string> not_exportable(const ModelConfig& model) {
  try {
    architecture_of(model);
    return {};
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    std::string why;
    for (const std::string& line : split(error.what(), '\n')) {
      const std::string words = line.substr(std::min(line.find_first_not_of(' '), line.size()));
      why += (why.empty() ? "" : why.back() == ':' ? " " : "; ") + words;
    }
    return why;
  }
}

}  // namespace

std::vector<std::string> run_warnings(const RunConfig& config, const PrecisionPlan& plan) {
  std::vector<std::string> warnings = plan.warnings();
  const std::optional<std::string> advice = config.parallel.world() > 1 ? plan.gather_advice() : std::nullopt;
  if (advice) warnings.push_back(*advice);
  if (config.parallel.expert > 1 && plan.dispatch_advice()) warnings.push_back(*plan.dispatch_advice());
  const int64_t warmup = config.schedule.warmup_steps, steps = config.training.steps;
  if (warmup >= steps)
    warnings.push_back(text("schedule.warmup_steps ", warmup, ": the run ends after ", count_text(steps, "step"),
                            ", so the learning rate never reaches optimizer.lr"));
  if (const std::optional<std::string> why = not_exportable(config.model)) warnings.push_back("the model cannot be exported: " + *why);
  return warnings;
}

}  // namespace mantissa
