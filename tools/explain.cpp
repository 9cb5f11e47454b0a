#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "mantissa/base/printable.h"
#include "mantissa/data/open_data.h"
#include "mantissa/train/checkpoint.h"
#include "mantissa/train/estimate.h"

namespace mantissa::tools {
namespace {

struct ExplainArguments {
  ConfigSources sources;
  std::optional<int64_t> world;
  bool json = false, wide = false;
};

// CPUs have no MX matrix units.
constexpr const char* kEmulated = "emulated";

bool quantises_operands(const PrecisionPlan& plan) {
  const auto& modules = plan.modules();
  return std::any_of(modules.begin(), modules.end(), [](const ModulePrecision& entry) { return entry.recipe.quantises_operands(); });
}

void print_json(const PrecisionPlan& plan, const std::string& device, const RunConfig& config, const MemoryEstimate& memory) {
  nlohmann::json all = plan.to_json();
  all["device"] = device;
  all["quantised_gemms"] = quantises_operands(plan) ? nlohmann::json(kEmulated) : nlohmann::json();
  all["layout"] = {{"tensor", config.parallel.tensor}, {"data", config.parallel.data}, {"expert", 1}};
  all["memory"] = {{"masters", memory.masters},     {"weights", memory.values},          {"gradients", memory.gradients},
                   {"optimizer", memory.optimizer}, {"activations", memory.activations}, {"workspace", memory.workspace}};
  all["warnings"] = plan.warnings();
  std::cout << all.dump(1) << '\n';
}

void print_text(const PrecisionPlan& plan, const std::string& device, const RunConfig& config, const MemoryEstimate& memory,
                PlanTable form) {
  const auto print = [&](const std::string& line) { std::cout << (form == PlanTable::wide ? line + '\n' : folded(line, kNarrowColumns)); };
  print(text("device ", device, " | ranks ", config.parallel.world(), " | precision.dtype ", dtype_name(config.precision.dtype),
             " | precision.recipe ", printable(config.precision.recipe)));
  if (quantises_operands(plan)) {
    print(text("quantised GEMMs are ", kEmulated,
               " on this device: codes are dequantised, which is exact, and multiplied with fp32 accumulation"));
  }
  std::cout << '\n' << printable(plan.table(form), "\n") << '\n';
  const double per_parameter = static_cast<double>(plan.bytes()) / static_cast<double>(plan.parameters());
  print(text(plan.parameters(), " parameters | resident weights ", plan.bytes(), " B, ", std::fixed, std::setprecision(3), per_parameter,
             " B per parameter"));
  print(text("memory | masters ", memory.masters, " B | weights beside them ", memory.values, " B | gradients ", memory.gradients,
             " B | optimizer ", memory.optimizer, " B | activations ", memory.activations, " B | workspace ", memory.workspace, " B"));
  for (const std::string& warning : plan.warnings()) print("warning: " + printable(warning));
  print("plan " + plan.to_json().at("hash").get<std::string>());
}

ExitCode explain(const ExplainArguments& arguments) {
  RunConfig config = load_run_config(arguments.sources, Inputs::unchecked, ranks_of(arguments.world)).config;
  if (!config.model.vocab_size) config.model.vocab_size = make_tokenizer(config.data)->size();
  const PrecisionPlan plan = resolve_plan(config);
  const MemoryEstimate memory = estimate_memory(config, plan);
  const std::string device = make_backend(config.training.backend())->name();
  arguments.json ? print_json(plan, device, config, memory)
                 : print_text(plan, device, config, memory, arguments.wide ? PlanTable::wide : PlanTable::narrow);
  return ExitCode::ok;
}

}  // namespace

Command explain_command() {
  const auto arguments = std::make_shared<ExplainArguments>();
  std::vector<Option> options = config_options(arguments->sources);
  options.push_back(world_option(arguments->world));
  options.push_back(
      {.name = "--wide", .target = &arguments->wide, .description = "also the operands of each GEMM and the exported format; nothing cut"});
  options.push_back({.name = "--json", .target = &arguments->json, .description = "one JSON object, every module by itself"});
  return {.name = "explain",
          .summary = "show which number formats each module of a run computes, stores, sends and exports",
          .example = "mantissa explain configs/quickstart.json --set precision.recipe=mxfp8",
          .options = options,
          .run = [arguments] { return explain(*arguments); }};
}

}  // namespace mantissa::tools
