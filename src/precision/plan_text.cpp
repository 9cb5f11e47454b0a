#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "mantissa/base/bytes_text.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/printable.h"
#include "mantissa/precision/plan.h"

namespace mantissa {
namespace {

using nlohmann::json;

constexpr std::array kRoles = {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad};

const char* kind_name(ModuleKind kind) {
  switch (kind) {
    case ModuleKind::embedding: return "embedding";
    case ModuleKind::norm: return "norm";
    case ModuleKind::linear: return "linear";
    case ModuleKind::router: return "router";
    case ModuleKind::output: return "output";
    case ModuleKind::sinks: return "sinks";
  }
  return "unknown";
}

json to_json(const Quantization& how) {
  if (!how) return nullptr;
  return {{"format", format_name(how.format)}, {"block", {how.block_rows, how.block_cols}}, {"rule", scale_rule_name(how.rule)}};
}

json shape_json(const ModuleShape& module) {
  if (module.in == 0) return json{module.out};
  return module.matrices > 1 ? json{module.matrices, module.out, module.in} : json{module.out, module.in};
}

json to_json(const ModulePrecision& entry) {
  const ModuleShape& module = entry.module;
  const Recipe& recipe = entry.recipe;
  json gemms = nullptr;
  for (const GemmRole role : kRoles) {
    if (has_gemm(module.kind)) gemms[gemm_name(role)] = gemm_text(recipe, role);
  }
  json parts = json::array();
  for (const ModulePart& part : module.parts) parts.push_back({{"name", part.name}, {"out", part.out}});
  return {{"module", module.path},
          {"kind", kind_name(module.kind)},
          {"shape", shape_json(module)},
          {"parts", parts},
          {"bias", module.bias},
          {"rule", entry.rule.empty() ? json() : json(entry.rule)},
          {"match", entry.match.empty() ? json() : json(entry.match)},
          {"recipe", recipe.name},
          {"compute", dtype_name(recipe.compute)},
          {"weight", to_json(recipe.weight)},
          {"input", to_json(recipe.input)},
          {"output_grad", to_json(recipe.output_grad)},
          {"weight_fake_quant", to_json(recipe.weight_fake_quant)},
          {"gemms", gemms},
          {"storage", stored_type_name(entry.storage)},
          {"wire", stored_type_name(entry.wire)},
          {"export", stored_type_name(entry.exported)},
          {"bytes", entry.bytes}};
}

using Cells = std::vector<std::string>;

std::string shape_text(const ModuleShape& module) {
  if (module.out == 0) return text("[?, ", module.in, ']');
  if (module.matrices > 1) return text('[', module.matrices, ", ", module.out, ", ", module.in, ']');
  return module.in == 0 ? text('[', module.out, ']') : text('[', module.out, ", ", module.in, ']');
}

// "[8/2, 384/4, 64]": 8 experts over 2 ranks, and of each 384 rows over 4.
std::string divided_shape_text(const ModuleShape& module, const RanksPerWeight& ranks) {
  const ModuleShape held = module.on_rank(ranks);
  const auto size = [](int64_t whole, int64_t on_rank) { return whole == on_rank ? text(whole) : text(whole, '/', whole / on_rank); };
  const std::string rows = module.out == 0 ? "?" : size(module.out, held.out);
  if (module.in == 0) return text('[', rows, ']');
  return text('[', module.matrices > 1 ? size(module.matrices, held.matrices) + ", " : "", rows, ", ", size(module.in, held.in), ']');
}

// "rows [192, 64]": how the weight is divided, and what one rank has of it.
std::string share_text(const ModuleShape& module, const RanksPerWeight& ranks) {
  const std::string held = shape_text(module.on_rank(ranks));
  const bool experts = module.matrices > 1 && ranks.expert > 1, divided = module.split != Split::none && ranks.tensor > 1;
  if (!experts && !divided) return "whole";
  return text(experts ? "experts " : "", !divided ? "" : module.split == Split::rows ? "rows " : "columns ", held);
}

// All but path and bytes.
Cells cells_of(const ModulePrecision& entry, PlanTable form, const RanksPerWeight& ranks) {
  const std::string rule = entry.rule.empty() ? "-" : entry.rule;
  const std::string shape = form == PlanTable::wide ? shape_text(entry.module) : divided_shape_text(entry.module, ranks);
  Cells cells = {shape, entry.match.empty() ? rule : rule + " \"" + entry.match + "\"", entry.recipe.name};
  for (const GemmRole role : kRoles) cells.push_back(has_gemm(entry.module.kind) ? gemm_text(entry.recipe, role) : "-");
  for (const StoredType type : {entry.storage, entry.wire, entry.exported}) cells.emplace_back(stored_type_name(type));
  if (form == PlanTable::wide && ranks.several()) cells.push_back(share_text(entry.module, ranks));
  return cells;
}

// Modules of several layers that differ in nothing but the layer.
struct Group {
  std::vector<std::string> paths;
  Cells cells;
  int64_t bytes = 0;
};

std::vector<Group> grouped(const std::vector<ModulePrecision>& modules, PlanTable form, const RanksPerWeight& ranks) {
  std::vector<Group> groups;
  std::map<Cells, size_t> known;
  for (const ModulePrecision& entry : modules) {
    Cells key = cells_of(entry, form, ranks);
    key.push_back(any_layer(entry.module.path));
    const auto [found, added] = known.insert({key, groups.size()});
    if (added) groups.push_back({.paths = {}, .cells = {key.begin(), key.end() - 1}});
    groups[found->second].paths.push_back(entry.module.path);
    groups[found->second].bytes += entry.bytes;
  }
  return groups;
}

std::vector<size_t> widths_of(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  return widths;
}

constexpr size_t kGap = 2;  // between columns

std::string aligned(const std::vector<Cells>& rows) {
  const std::vector<size_t> widths = widths_of(rows);
  std::string out;
  for (const Cells& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) out += row[i] + std::string(widths[i] - row[i].size() + kGap, ' ');
    out += std::string(widths.back() - row.back().size(), ' ') + row.back() + '\n';  // numbers stand to the right
  }
  return out;
}

// Behind them in the wide table what a rank holds, if ranks share weights; then the bytes.
constexpr std::array kHeads = {"module", "shape", "rule", "recipe", "fprop", "dgrad", "wgrad", "storage", "wire", "export"};
constexpr std::array<size_t, 6> kNarrow = {0, 1, 3, 2, 7, 8};  // of these the narrow table has, and the bytes
constexpr size_t kModule = 0, kRecipe = 2, kRule = 3;          // the columns of the narrow table that may be cut

Cells heads(PlanTable form, const RanksPerWeight& ranks) {
  Cells cells = {kHeads.begin(), kHeads.end()};
  if (ranks.several() && form == PlanTable::wide) cells.emplace_back("on a rank");
  if (ranks.several() && form == PlanTable::narrow) cells[1] += "/ranks";
  cells.emplace_back("bytes");
  return cells;
}

// "layers.{0,2,...,998}.mlp.up": without some layers.
std::string cut_module(const std::string& path, size_t most) {
  if (path.size() <= most || path.find(',') == std::string::npos) return without_middle(path, most);
  const std::string end = ",..." + path.substr(path.rfind(','));
  const size_t begin = path.rfind(',', most - std::min(most, end.size()));
  return begin == std::string::npos ? without_middle(path, most) : path.substr(0, begin) + end;
}

// `rules.7 "lay...up"`: without some of the pattern, and without all of it where there is room for the key alone.
std::string cut_rule(const std::string& rule, size_t most) {
  constexpr size_t kLeast = 7;  // of a pattern in its quotes
  const size_t key = std::min(rule.find(' '), rule.size());
  if (rule.size() <= most || most < key + 1 + kLeast) return without_middle(rule.size() <= most ? rule : rule.substr(0, key), most);
  return rule.substr(0, key + 1) + without_middle(std::string_view(rule).substr(key + 1), most - key - 1);
}

// Takes from the column that is most above its floor until all fit; below the floors, which only shapes beyond all models need, from the
// module, of which most is left.
std::vector<size_t> narrow_widths(const std::vector<Cells>& rows) {
  constexpr std::array<std::pair<size_t, int64_t>, 3> kFloors = {{{kModule, 30}, {kRecipe, 8}, {kRule, 8}}};
  std::vector<size_t> widths = widths_of(rows);
  const auto above = [&](const auto& column) { return static_cast<int64_t>(widths[column.first]) - column.second; };
  size_t total = std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
  for (; total > kNarrowColumns; --total) {
    const auto most = std::max_element(kFloors.begin(), kFloors.end(), [&](const auto& a, const auto& b) { return above(a) < above(b); });
    --widths[above(*most) > 0 ? most->first : kModule];
  }
  return widths;
}

// Rules lack "precision.".
std::vector<Cells> narrowed(const std::vector<Cells>& wide) {
  constexpr std::string_view kSection = "precision.";
  std::vector<Cells> rows;
  for (const Cells& all : wide) {
    Cells row;
    for (const size_t column : kNarrow) row.push_back(printable(all[column]));
    row.push_back(all.back());
    if (row[kRule].starts_with(kSection)) row[kRule].erase(0, kSection.size());
    rows.push_back(std::move(row));
  }
  const std::vector<size_t> widths = narrow_widths(rows);
  for (Cells& row : rows) {
    row[kModule] = cut_module(row[kModule], widths[kModule]);
    row[kRecipe] = without_middle(row[kRecipe], widths[kRecipe]);
    row[kRule] = cut_rule(row[kRule], widths[kRule]);
  }
  return rows;
}

void warn_of_rows(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  int64_t count = 0, extra = 0, sent = 0;
  bool shifted = false;
  for (const ModulePrecision& entry : modules) {
    const Quantization& weight = entry.recipe.weight;
    if (!entry.recipe.reads_weight_codes() || !weight.rowwise()) continue;
    ++count;
    const int64_t more =
        entry.module.weight_elements() / weight.block() - entry.module.weight_elements() / (weight.block() * weight.block());
    extra += more;
    sent += entry.stores_only_codes() ? more : 0;
    shifted = shifted || entry.recipe.gemms.dgrad;
  }
  if (count == 0) return;
  std::string warning = text(count, " weights are quantised in rows of blocks, not tiles: ", extra, " bytes more of scales in memory");
  if (sent > 0) warning += sent == extra ? " and on the wire" : text(", ", sent, " of them on the wire, too");
  if (shifted) warning += ", and dgrad multiplies by codes shifted to columns, not by those along rows";
  warnings.push_back(warning);
}

void warn_of_gather(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  int64_t linears = 0, high = 0, copies = 0, saved = 0;
  bool gathers = false;
  for (const ModulePrecision& entry : modules) {
    if (entry.module.kind != ModuleKind::linear) continue;
    const bool codes = entry.stores_only_codes();
    gathers = gathers || codes;
    ++linears;
    high += codes ? 0 : 1;
    if (codes || !entry.recipe.reads_only_weight_codes()) continue;
    ++copies;
    if (entry.storage == StoredType::bf16) saved += 2 * entry.module.weight_elements();  // an fp32 weight is the master
  }
  if (gathers && high > 0) {
    warnings.push_back(
        text("precision.fp8_param_gather: ", high, " of ", linears, " linears have no quantised weight and are gathered as they are"));
  }
  if (saved > 0) {
    warnings.push_back(text("precision.fp8_param_gather is off: ", copies,
                            " quantised weights are held and gathered in high precision, too; on, ", saved,
                            " bytes less beside the masters"));
  }
}

// What a recipe quantises and no GEMM reads, and GEMMs that are listed and read nothing quantised.
void warn_of_idle_parts(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  std::set<std::string> seen;
  for (const ModulePrecision& entry : modules) {
    const Recipe& recipe = entry.recipe;
    if (entry.module.kind == ModuleKind::output || !seen.insert(recipe.name).second) continue;
    const auto unread = [&](const char* operand, const Quantization& how, bool read) {
      if (how && !read) warnings.push_back(text("recipe \"", recipe.name, "\" quantises ", operand, ", which none of its gemms reads"));
    };
    unread("weight", recipe.weight, recipe.gemms.fprop || recipe.gemms.dgrad);
    unread("input", recipe.input, recipe.gemms.fprop || recipe.gemms.wgrad);
    unread("output_grad", recipe.output_grad, recipe.gemms.dgrad || recipe.gemms.wgrad);
    for (const GemmRole role : kRoles) {
      const GemmOperands operands = choose_operands(recipe, role);
      if (recipe.gemms.holds(role) && !operands.first.is_codes() && !operands.second.is_codes()) {
        warnings.push_back(text("recipe \"", recipe.name, "\" lists ", gemm_name(role), ", which has no quantised operand"));
      }
    }
  }
}

// Servers fuse all expert weights of a layer: one scheme for both.
void warn_of_split_experts(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  const std::string kDown = ".moe.experts.down";
  for (const ModulePrecision& down : modules) {
    const std::string& path = down.module.path;
    if (!path.ends_with(kDown)) continue;
    const std::string up_path = path.substr(0, path.size() - 4) + "gate_up";
    const auto up =
        std::find_if(modules.begin(), modules.end(), [&](const ModulePrecision& entry) { return entry.module.path == up_path; });
    if (up == modules.end() || (up->recipe.weight == down.recipe.weight && up->recipe.weight_fake_quant == down.recipe.weight_fake_quant))
      continue;
    warnings.push_back(text(up_path, " (", up->rule, ") and ", path, " (", down.rule,
                            ") have different weight formats, but servers fuse them: a packed export will refuse"));
  }
}

// Other biases sum their gradient before it is quantized.
void warn_of_bias_gradients(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  std::vector<std::string> paths;
  for (const ModulePrecision& entry : modules) {
    const bool codes_move = choose_operands(entry.recipe, GemmRole::wgrad).first.source == OperandSource::shifted;
    if (entry.module.path.ends_with(".moe.experts.down") && entry.module.bias > 0 && codes_move) paths.push_back(entry.module.path);
  }
  if (paths.empty()) return;
  warnings.push_back(text("model.moe.expert_mlp_bias: the gradient of the bias of ", joined_path(paths),
                          " sums codes of the output gradient, as tokens travel with these: it is 2 to 4 % off that of unquantized ones"));
}

}  // namespace

json PrecisionPlan::to_json() const {
  json entries = json::array();
  for (const ModulePrecision& entry : modules_) entries.push_back(mantissa::to_json(entry));
  return {{"hash", Hash64{hash()}.text()},
          {"modules", entries},
          {"parameters", parameters()},
          {"active_parameters", active_parameters()},
          {"bytes", bytes()}};
}

std::string PrecisionPlan::table(PlanTable form, const RanksPerWeight& ranks) const {
  std::vector<Cells> rows = {heads(form, ranks)};
  for (const Group& group : grouped(modules_, form, ranks)) {
    Cells row = {joined_path(group.paths)};
    row.insert(row.end(), group.cells.begin(), group.cells.end());
    row.push_back(form == PlanTable::wide ? std::to_string(group.bytes) : bytes_text(group.bytes));
    rows.push_back(std::move(row));
  }
  return aligned(form == PlanTable::wide ? rows : narrowed(rows));
}

std::vector<std::string> PrecisionPlan::warnings() const {
  std::vector<std::string> warnings = idle_keys_;
  warn_of_rows(modules_, warnings);
  warn_of_gather(modules_, warnings);
  warn_of_idle_parts(modules_, warnings);
  warn_of_split_experts(modules_, warnings);
  warn_of_bias_gradients(modules_, warnings);
  return warnings;
}

}  // namespace mantissa
