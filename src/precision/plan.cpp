#include "mantissa/precision/plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/hash.h"
#include "mantissa/backend/contract.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/precision/operands.h"

namespace mantissa {
namespace {

StoredType element_of(Format format) {
  switch (format) {
    case Format::none: break;
    case Format::e4m3: return StoredType::e4m3;
    case Format::e5m2: return StoredType::e5m2;
    case Format::e2m1: return StoredType::e2m1;
    case Format::nvfp4: return StoredType::nvfp4;
  }
  fail(ExitCode::internal, "high precision has no element format");
}

// Returns the bytes of a module, or of what a rank holds of it.
int64_t resident_bytes(const ModulePrecision& entry, const ModuleShape& held) {
  const int64_t elements = held.weight_elements(), values = held.bias + (entry.stores_only_codes() ? 0 : elements);
  const Quantization& how = entry.resident_codes();
  const int64_t codes = is_four_bit(how.format) ? elements / 2 : elements;
  const int64_t scales = ceil_div(held.rows(), how.block_rows) * ceil_div(held.in, how.block_cols);
  return dtype_bytes(entry.recipe.compute) * values + (how ? codes + scales : 0);
}

int64_t total(const std::vector<ModulePrecision>& modules, const auto& each) {
  int64_t sum = 0;
  for (const ModulePrecision& entry : modules) sum += each(entry);
  return sum;
}

// A size that does not fit, and why: "model.hidden_size 80" or "output size 100 of part k", "is not a multiple of 32, the block of recipe
// mxfp8".
struct UnfitSize {
  std::string size, reason;
};

// Returns ", 2 times model.intermediate_size 40," for a weight of gate and up, which both have the value of this key.
std::string of_equal_parts(const ModuleShape& module) {
  const std::vector<ModulePart>& parts = module.parts;
  const auto like_first = [&](const ModulePart& part) { return part.out_key == parts.front().out_key; };
  if (parts.empty() || parts.front().out_key.empty() || !std::ranges::all_of(parts, like_first)) return "";
  return text(", ", parts.size(), " times ", parts.front().out_key, ' ', parts.front().out, ',');
}

// Returns the first size of a weight that does not fit; none if all do. The last blocks of a row or column may be smaller, but blocks
// belong to one rank, tiles and columns of blocks to one expert, and two codes of E2M1 to a byte.
std::optional<UnfitSize> size_problem(const ModuleShape& module, const Recipe& recipe, int64_t tensor) {
  const Sharding by = module.sharding({.tensor = static_cast<int>(tensor)});
  const int64_t rows = by.row_ranks(), columns = by.column_ranks();
  std::optional<UnfitSize> first;
  const auto check = [&](const std::string& key, int64_t size, const std::string& name, int64_t ranks, int64_t block, const std::string& of,
                         bool whole = true) {
    if (first || size % (ranks * block) == 0 || (ranks == 1 && !whole)) return;
    first = UnfitSize{key.empty() ? name : text(key, ' ', size),
                      ranks == 1 ? text("is not a multiple of ", block, ", the block of ", of)
                                 : text("cannot be divided among the ", ranks, " ranks of parallel.tensor in multiples of ", block,
                                        ", the block of ", of, ": use fewer ranks")};
  };
  const std::string in = text("input size ", module.in);
  const auto check_in = [&](int64_t block, const std::string& of, bool whole = true) {
    check(module.in_key, module.in, in, columns, block, of, whole);
  };
  const auto check_out = [&](int64_t block, const std::string& of, bool whole = true, bool each_part = true) {
    for (const ModulePart& part : module.parts)
      check(part.out_key, part.out, text("output size ", part.out, " of part ", part.name), rows, block, of, each_part);
    check(module.out_key, module.out,
          text(module.is_token_table() ? "padded vocabulary " : "output size ", module.out, of_equal_parts(module)), rows, block, of,
          whole);
  };
  const int64_t fake = recipe.weight_fake_quant ? recipe.weight_fake_quant.block_cols : 1, block = recipe.block();
  const std::string name = "recipe " + recipe.name;
  if (fake > 1) check_in(fake, "weight_fake_quant in " + name, false);
  for (const auto& [operand, format] : {std::pair{"weight_fake_quant", recipe.weight_fake_quant.format}, {"input", recipe.input.format}}) {
    if (first || !is_four_bit(format) || module.in % 2 == 0) continue;
    first =
        UnfitSize{module.in_key.empty() ? in : text(module.in_key, ' ', module.in),
                  text("must be even, because a byte holds two codes of a row (", operand, " in ", name, " is ", format_name(format), ')')};
  }
  if (block > 0) check_in(block, name, false), check_out(block, name, module.experts && recipe.weight, false);
  const SimulatedLengths simulated = simulated_lengths(recipe);
  for (const int64_t length : simulated.in) check_in(length, "simulate in " + name);
  for (const int64_t length : simulated.out) check_out(length, "simulate in " + name);
  if (recipe.reads_weight_codes() || recipe.weight_fake_quant) {
    constexpr int64_t kCell = 32;  // tensor ranks hash the codes of their shares in such cells (checkpoint/precision_setup.h)
    if (columns > 1) check_in(round_up(kCell, std::max(fake, block)), "codes of " + name);
    if (rows > 1) check_out(kCell, "codes of " + name);
  }
  return first;
}

// A table of tokens has blocks along its rows, which are what forward looks up.
bool rounds_weight_alone(const Recipe& recipe) { return !recipe.quantizes_operands() && !recipe.simulated.any(); }

// Returns true if output gradients of experts may arrive as rowwise codes, made by their source rank.
bool can_requantize_output_grad(const ModuleShape& module, const Recipe& recipe) {
  return module.experts && module.role == ModuleRole::mlp_output && recipe.columns == ColumnSource::rows;
}

// Says whether tokens travel to these experts, or gradients back, as codes during training, where precision.quantized_dispatch lets them.
// Without a weight gradient nothing reads the values of tokens in backward, so those of frozen experts may.
bool can_move_codes(const ModulePrecision& entry) {
  if (!entry.module.experts) return false;
  if (entry.module.role != ModuleRole::mlp_output) return LinearOperands(entry.recipe).moves_input_codes(!entry.training.frozen());
  Recipe recipe = entry.recipe;
  recipe.requantizes_output_grad = can_requantize_output_grad(entry.module, recipe);
  return LinearOperands(recipe).takes_gradient_codes();
}

std::optional<std::string> advice_on_dispatch(const std::vector<ModulePrecision>& modules) {
  std::map<std::string, std::vector<std::string>> paths;  // any layer -> paths
  std::set<std::string> recipes;
  for (const ModulePrecision& entry : modules) {
    ModulePrecision from_rows = entry;
    from_rows.recipe.columns = ColumnSource::rows;
    if (can_move_codes(entry) || !can_move_codes(from_rows)) continue;
    paths[any_layer(entry.module.path)].push_back(entry.module.path);
    recipes.insert(text('"', entry.recipe.name, '"'));
  }
  if (paths.empty()) return {};
  return text("precision.quantized_dispatch: training dispatches rows of ",
              joined(paths, ", ", [](const auto& of) { return joined_path(of.second); }),
              " as values (tokens, and for down output gradients), because recipe ", joined(recipes), " quantizes columns from values");
}

constexpr const char* kIdleDispatch =
    "precision.quantized_dispatch false has no effect: tokens would not be dispatched to experts as codes anyway";

// Collects keys that were given and change nothing.
std::vector<std::string> idle_keys(const PrecisionConfig& config, const std::vector<ModulePrecision>& modules) {
  std::vector<std::string> idle;
  const bool quantizes = std::any_of(modules.begin(), modules.end(), [](const ModulePrecision& entry) { return entry.recipe.quantizes(); });
  if (config.report_interval > 0 && !quantizes) idle.emplace_back("precision.report_interval measures nothing: no module is quantized");
  const OutputProjectionConfig& output = config.fp8_output_proj;
  if (!output.enabled && !(output.fprop && output.dgrad && output.wgrad)) {
    idle.emplace_back("precision.fp8_output_proj is not enabled, so its fprop, dgrad and wgrad do nothing");
  }
  if (!config.quantized_dispatch && std::ranges::none_of(modules, can_move_codes)) idle.emplace_back(kIdleDispatch);
  return idle;
}

std::string key_of_recipe(const ModulePrecision& entry) { return entry.match.empty() ? entry.rule : entry.rule + ".recipe"; }

class Resolver {
 public:
  Resolver(const PrecisionConfig& config, const ModelShape& model, ConfigReport& report)
      : config_(config), model_(model), report_(report), recipes_(resolve_recipes(config, report)) {}

  std::vector<ModulePrecision> resolve() {
    const Recipe ambient = recipe("precision.recipe", config_.recipe);
    constexpr size_t kMostRules = 1000;  // each is compared with each module
    std::vector<RuleConfig> rules = config_.rules;
    if (rules.size() > kMostRules) {
      report_.error("precision.rules", text("has ", rules.size(), " rules, at most ", kMostRules, " are accepted"));
      rules.clear();
    }
    for (size_t i = 0; i < rules.size(); ++i) by_rule_.push_back(recipe(text("precision.rules.", i, ".recipe"), rules[i].recipe));
    std::vector<RuledModule> ruled;
    for (const ModuleShape& module : model_.modules) ruled.push_back({module.path, module.kind});
    const auto chosen = assign_rules(rules, ruled, report_);
    std::vector<ModulePrecision> entries;
    for (size_t i = 0; i < model_.modules.size(); ++i) entries.push_back(entry(model_.modules[i], chosen[i], ambient));
    report_problems();
    if (config_.fp8_output_proj.enabled) check_output(ambient);
    if (config_.fp8_param_gather && !report_.failed("precision")) check_gather(entries);
    return entries;
  }

 private:
  // Returns `high` if there is no such recipe; the error is reported once, here.
  Recipe recipe(const std::string& key, const std::string& name) {
    const auto found = recipes_.find(name);
    if (found != recipes_.end()) return found->second;
    if (name.empty()) {
      report_.error(key, "is missing: the name of a recipe");
    } else if (config_.recipes.count(name) == 0) {
      report_.error(key, [&] {
        std::vector<std::string> names = preset_names();
        for (const auto& [own, value] : config_.recipes) names.push_back(own);
        return "no recipe \"" + shortened(name) + "\"" + did_you_mean(name, names) + " (there are " + joined(names) + ")";
      });
    }
    return recipes_.at("high");
  }

  ModulePrecision entry(const ModuleShape& module, std::optional<size_t> rule, const Recipe& ambient) {
    ModulePrecision entry{.module = module, .rule = "", .match = "", .recipe = recipes_.at("high")};
    if (rule) {
      entry.rule = text("precision.rules.", *rule);
      entry.match = config_.rules[*rule].match;
      entry.recipe = by_rule_[*rule];
    } else if (module.kind == ModuleKind::linear) {
      entry.rule = "precision.recipe";
      entry.recipe = ambient;
    }
    if (module.kind == ModuleKind::router && !entry.recipe.quantizes())
      entry.recipe.compute = stats_dtype(config_.dtype);
    else if (module.kind == ModuleKind::output && config_.fp8_output_proj.enabled) {
      const OutputProjectionConfig& on = config_.fp8_output_proj;
      entry.rule = "precision.fp8_output_proj";
      entry.recipe = ambient;
      entry.recipe.compute = config_.dtype;
      entry.recipe.gemms = {.fprop = on.fprop, .dgrad = on.dgrad, .wgrad = on.wgrad};
    }
    entry.recipe.requantizes_output_grad = config_.quantized_dispatch && can_requantize_output_grad(module, entry.recipe);
    check_module(entry);
    // The recipe decides what is stored, sent and exported, and the bytes that it takes.
    const Recipe& recipe = entry.recipe;
    const StoredType high = recipe.compute == Dtype::f32 ? StoredType::fp32 : StoredType::bf16;
    const bool only_codes = config_.fp8_param_gather && module.kind != ModuleKind::output && recipe.reads_only_weight_codes();
    entry.storage = entry.wire = only_codes ? element_of(recipe.weight.format) : high;
    entry.exported = high;
    if (recipe.weight && recipe.gemms.fprop) entry.exported = element_of(recipe.weight.format);
    if (recipe.weight_fake_quant) entry.exported = element_of(recipe.weight_fake_quant.format);
    entry.bytes = resident_bytes(entry, module);
    return entry;
  }

  void check_module(const ModulePrecision& entry) {
    const ModuleKind kind = entry.module.kind;
    if (kind == ModuleKind::output) return;
    const auto add = [&](const std::string& reason, const std::string& size) {
      problems_[{key_of_recipe(entry), reason}][size][any_layer(entry.module.path)].push_back(entry.module.path);
    };
    const bool table = entry.module.is_token_table() && entry.recipe.quantizes();
    if (table && !rounds_weight_alone(entry.recipe)) {
      add(text("is looked up by rows, so its recipe may round the weight alone (weight_fake_quant), as mxfp4_qat does; \"",
               entry.recipe.name, "\" quantizes operands of GEMMs"),
          "");
    } else if (kind == ModuleKind::linear || kind == ModuleKind::router || table) {
      if (const auto unfit = size_problem(entry.module, entry.recipe, model_.tensor)) add(unfit->reason, unfit->size);
    } else if (entry.recipe.quantizes()) {
      add(text("has no GEMM, so \"", entry.recipe.name, "\" has nothing to quantize"), "");
    }
    const bool multiplied = kind == ModuleKind::linear || kind == ModuleKind::router;
    if (!multiplied && (table || !entry.recipe.quantizes()) && entry.recipe.compute != config_.dtype) {
      add(text("has no GEMM and computes in precision.dtype, ", config_.dtype, "; recipe \"", entry.recipe.name, "\" computes in ",
               entry.recipe.compute, ": use \"high\" for it"),
          "");
    }
  }

  using Modules = std::map<std::string, std::vector<std::string>>;  // path with any layer -> paths

  static std::string names_of(const Modules& modules) {
    return joined(modules, ", ", [](const auto& module) {
      const auto& [layers, paths] = module;
      return paths.size() == 1 ? paths.front() : layers;
    });
  }

  // Reports each reason once, for all modules and sizes that it refuses.
  void report_problems() {
    for (const auto& [problem, sizes] : problems_) {
      const auto& [size, modules] = *sizes.begin();
      if (sizes.size() > 1) {
        const std::string each =
            joined(sizes, ", ", [](const auto& unfit) { return text(unfit.first, " (", names_of(unfit.second), ')'); });
        report_.error(problem.key, text("modules do not fit their recipe: ", each, ": each ", problem.reason,
                                        "; change the sizes, or give the modules another recipe by a rule"));
        continue;
      }
      const std::string fit =
          text("does not fit its recipe: ", size, ' ', problem.reason, "; change the size, or give it another recipe by a rule");
      report_.error(problem.key, text(modules.size() > 1 ? "each of " : "", names_of(modules), ' ', size.empty() ? problem.reason : fit));
    }
  }

  void check_output(const Recipe& ambient) {
    const OutputProjectionConfig& on = config_.fp8_output_proj;
    const auto output = std::find_if(model_.modules.begin(), model_.modules.end(),
                                     [](const ModuleShape& module) { return module.kind == ModuleKind::output; });
    OutputProjection projection{.tied_embeddings = model_.tied_embeddings, .fp32_logits = model_.fp32_logits, .tensor = model_.tensor};
    if (output != model_.modules.end()) projection.rows = output->out;
    for (const std::string& problem : output_projection_problems(ambient, projection)) report_.error("precision.fp8_output_proj", problem);
    if (!on.fprop && !on.dgrad && !on.wgrad)
      report_.error("precision.fp8_output_proj", "is enabled, but fprop, dgrad and wgrad are all off");
  }

  void check_gather(const std::vector<ModulePrecision>& entries) {
    bool any = false;
    for (const ModulePrecision& entry : entries) {
      if (entry.module.kind == ModuleKind::output || !entry.recipe.weight) continue;
      any = true;
      if (entry.recipe.reads_only_weight_codes()) continue;
      const bool fprop = entry.recipe.gemms.fprop, dgrad = entry.recipe.gemms.dgrad;
      const std::string of = text(" of recipe \"", entry.recipe.name, "\" (", entry.module.path, ")");
      const std::string reader =  // the reader of values that keeps the weight from being its codes alone
          fprop && dgrad ? text("columns", of, " makes codes for dgrad from values: set columns to rows, or give weight tiles")
                         : text("gemms", of, " lacks ", fprop ? "" : "fprop", fprop || dgrad ? "" : " and ", dgrad ? "" : "dgrad");
      return report_.error("precision.fp8_param_gather",
                           text("keeps weights as codes only, so fprop and dgrad must both read codes; ", reader));
    }
    if (!any) report_.error("precision.fp8_param_gather", "needs a module with a quantized weight, and no recipe in use has one");
  }

  struct Problem {
    std::string key, reason;
    auto operator<=>(const Problem&) const = default;
  };

  const PrecisionConfig& config_;
  const ModelShape& model_;
  ConfigReport& report_;
  std::map<std::string, Recipe> recipes_;
  std::vector<Recipe> by_rule_;
  std::map<Problem, std::map<std::string, Modules>> problems_;  // by size; "": it is not of one
};

}  // namespace

const char* stored_type_name(StoredType type) {
  switch (type) {
    case StoredType::fp32: return "fp32";
    case StoredType::bf16: return "bf16";
    case StoredType::e4m3: return "e4m3";
    case StoredType::e5m2: return "e5m2";
    case StoredType::e2m1: return "e2m1";
    case StoredType::nvfp4: return "nvfp4";
  }
  return "unknown";
}

std::vector<std::string> output_projection_problems(const Recipe& ambient, const OutputProjection& output) {
  std::vector<std::string> problems;
  const auto is_mx_fp8 = [](const Quantization& how) {
    return (how.format == Format::e4m3 || how.format == Format::e5m2) && how.block() == 32;
  };
  if (ambient.simulated.any()) {
    problems.push_back(text("excludes an ambient recipe with simulated operands, as \"", ambient.name, "\" has"));
  } else if (!is_mx_fp8(ambient.weight) || !is_mx_fp8(ambient.input) || !is_mx_fp8(ambient.output_grad)) {
    problems.push_back(
        text("needs an ambient recipe that quantizes weight, input and output_grad to FP8 in blocks of 32, as mxfp8 does; \"", ambient.name,
             "\" has weight ", ambient.weight, ", input ", ambient.input, ", output_grad ", ambient.output_grad));
  }
  if (output.tied_embeddings) problems.push_back("needs an output projection of its own: model.tie_word_embeddings must be false");
  if (output.fp32_logits) problems.push_back("excludes model.logits_dtype fp32");
  const int64_t multiple = 32 * output.tensor;
  if (output.tensor > 1 && output.rows % multiple != 0)
    problems.push_back(text("needs a padded vocabulary in multiples of ", multiple, ", 32 for each rank of parallel.tensor, got ",
                            output.rows, ": set model.pad_vocab_to to ", multiple));
  return problems;
}

Sharding ModuleShape::sharding(ModelRanks ranks) const {
  if (!experts) ranks.expert = 1, ranks.expert_rank = 0;
  return {.split = split, .ranks = ranks};
}

Sharding ModuleShape::bias_sharding(ModelRanks ranks) const {
  Sharding by = sharding(ranks);
  if (by.split == Split::row_parallel) by.split = Split::none;
  return by;
}

ModuleShape ModuleShape::on_rank(const ModelRanks& ranks) const {
  const Sharding by = sharding(ranks);
  ModuleShape held = *this;
  held.matrices /= by.ranks.expert;
  held.in /= by.column_ranks();
  held.out /= by.row_ranks();
  held.bias /= by.ranks.expert * by.row_ranks();
  for (ModulePart& part : held.parts) part.out /= by.row_ranks();
  return held;
}

int64_t ModulePrecision::bytes_on_rank(const ModelRanks& ranks) const { return resident_bytes(*this, module.on_rank(ranks)); }

PrecisionPlan PrecisionPlan::resolve(const PrecisionConfig& config, const ModelShape& model, ConfigReport& report) {
  PrecisionPlan plan(config.dtype, Resolver(config, model, report).resolve());
  plan.idle_keys_ = idle_keys(config, plan.modules_);
  if (config.quantized_dispatch) plan.dispatch_advice_ = advice_on_dispatch(plan.modules_);
  plan.native_gemms_ = config.native_products == NativeProducts::automatic;
  plan.grouped_gemms_ = config.grouped_gemms == GroupedGemms::automatic;
  return plan;
}

PrecisionPlan::PrecisionPlan(Dtype compute, std::vector<ModulePrecision> modules) : compute_(compute), modules_(std::move(modules)) {
  for (size_t i = 0; i < modules_.size(); ++i) {
    const ModuleShape& module = modules_[i].module;
    by_path_.emplace(module.path, i);
    by_parameter_.emplace(module.weight_name(), i);
    if (module.bias > 0) by_parameter_.emplace(module.bias_name(), i);
  }
}

const ModulePrecision* PrecisionPlan::find(const std::string& path) const {
  const auto found = by_path_.find(path);
  return found == by_path_.end() ? nullptr : &modules_[found->second];
}

const ModulePrecision& PrecisionPlan::of(const std::string& path) const {
  const ModulePrecision* const found = find(path);
  require(found != nullptr, "the precision plan has no module ", path);
  return *found;
}

const ModulePrecision& PrecisionPlan::module_of(const std::string& parameter) const {
  const auto found = by_parameter_.find(parameter);
  require(found != by_parameter_.end(), "the precision plan has no module with the parameter ", parameter);
  return modules_[found->second];
}

int64_t PrecisionPlan::active_parameters() const {
  return total(modules_, [](const ModulePrecision& entry) { return entry.module.active_parameters(); });
}

int64_t PrecisionPlan::parameters() const {
  return total(modules_, [](const ModulePrecision& entry) { return entry.module.parameters(); });
}

int64_t PrecisionPlan::trained_parameters() const {
  return total(modules_, [](const ModulePrecision& entry) { return entry.training.frozen() ? 0 : entry.module.parameters(); });
}

void PrecisionPlan::set_training(const std::vector<ModuleTraining>& of) {
  require(of.size() == modules_.size(), "set_training: ", of.size(), " entries for ", modules_.size(), " modules");
  for (size_t i = 0; i < of.size(); ++i) modules_[i].training = of[i];
  // More moves as codes to frozen experts, never less.
  if (dispatch_advice_) dispatch_advice_ = advice_on_dispatch(modules_);
  if (std::ranges::any_of(modules_, can_move_codes)) std::erase(idle_keys_, kIdleDispatch);
}

bool PrecisionPlan::quantizes_operands() const {
  return std::ranges::any_of(modules_, [](const ModulePrecision& entry) { return entry.recipe.quantizes_operands(); });
}

int64_t PrecisionPlan::buffers() const {
  return total(modules_, [](const ModulePrecision& entry) { return entry.module.buffer; });
}

int64_t PrecisionPlan::bytes() const {
  return total(modules_, [](const ModulePrecision& entry) { return entry.bytes; });
}

int64_t PrecisionPlan::bytes_on_rank(const ModelRanks& ranks) const {
  return total(modules_, [&](const ModulePrecision& entry) { return entry.bytes_on_rank(ranks); });
}

int64_t PrecisionPlan::bytes_beside_masters() const {
  return total(modules_, [](const ModulePrecision& entry) {
    const int64_t values = entry.module.bias + (entry.storage == StoredType::fp32 ? entry.module.weight_elements() : 0);
    return entry.bytes - (entry.recipe.compute == Dtype::f32 ? 4 * values : 0);
  });
}

std::optional<RecipeProblem> PrecisionPlan::needs_cpu() const {
  const auto first = std::ranges::find_if(modules_, [](const ModulePrecision& entry) { return entry.recipe.simulated.any(); });
  if (first == modules_.end()) return {};
  return RecipeProblem{.key = key_of_recipe(*first),
                       .message = text("recipe \"", first->recipe.name, "\" of ", first->module.path,
                                       " simulates formats, which only the CPU backend supports")};
}

uint64_t PrecisionPlan::hash() const {
  std::string all;
  for (const ModulePrecision& entry : modules_) {
    const Recipe& recipe = entry.recipe;
    all += text(entry.module.path, " [", entry.module.matrices > 1 ? text(entry.module.matrices, ", ") : "", entry.module.out, ", ",
                entry.module.in, "] ", entry.module.bias, '|', recipe.compute, '|', recipe.weight_fake_quant, '|', recipe.weight, '|',
                recipe.input, '|', recipe.output_grad, '|', recipe.gemms.fprop, recipe.gemms.dgrad, recipe.gemms.wgrad,
                recipe.columns == ColumnSource::values ? "|values" : "", recipe.backward == BackwardOperands::quantized ? "" : "|backward ",
                recipe.backward == BackwardOperands::quantized ? "" : choice_name(recipe.backward),
                LinearOperands(recipe).takes_gradient_codes() ? "|shifted|" : "|", simulated_text(recipe), stored_type_name(entry.storage),
                '|', stored_type_name(entry.wire), '|', stored_type_name(entry.exported), '\n');
  }
  return xxh64(all).value;
}

}  // namespace mantissa
