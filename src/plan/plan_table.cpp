#include "plan/plan_table.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <map>
#include <numeric>
#include <set>

#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

using Cells = std::vector<std::string>;
constexpr size_t kGap = 2;  // between columns

std::vector<size_t> widths_of(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  return widths;
}

}  // namespace

std::string rounded(double value, int digits) { return text(std::fixed, std::setprecision(digits), value); }

std::string aligned(const std::vector<Cells>& rows, Columns columns) {
  const std::vector<size_t> widths = widths_of(rows);
  std::string out;
  for (const Cells& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' '), gap(i > 0 ? kGap : 0, ' ');
      const bool right = i + 1 == row.size() || (i > 0 && columns == Columns::numbers);
      line += gap + (right ? space + row[i] : row[i] + space);
    }
    out += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return out;
}

namespace {

std::string shape_text(const ModuleShape& module) {
  if (module.out == 0) return text("[?, ", module.in, ']');
  if (module.matrices > 1) return text('[', module.matrices, ", ", module.out, ", ", module.in, ']');
  return module.in == 0 ? text('[', module.out, ']') : text('[', module.out, ", ", module.in, ']');
}

// Returns "[8/2, 384/4, 64]": 8 experts over 2 ranks, and of each 384 rows over 4.
std::string divided_shape_text(const ModuleShape& module, const ModelRanks& ranks) {
  const ModuleShape held = module.on_rank(ranks);
  const auto size = [](int64_t whole, int64_t on_rank) { return whole == on_rank ? text(whole) : text(whole, '/', whole / on_rank); };
  const std::string rows = module.out == 0 ? "?" : size(module.out, held.out);
  if (module.in == 0) return text('[', rows, ']');
  return text('[', module.matrices > 1 ? size(module.matrices, held.matrices) + ", " : "", rows, ", ", size(module.in, held.in), ']');
}

// Returns "rows [192, 64]": how the weight is divided, and the shape that one rank has of it.
std::string share_text(const ModuleShape& module, const ModelRanks& ranks) {
  const std::string held = shape_text(module.on_rank(ranks));
  const Sharding by = module.sharding(ranks);
  const bool experts = by.ranks.expert > 1, rows = by.row_ranks() > 1, columns = by.column_ranks() > 1;
  return experts || rows || columns ? text(experts ? "experts " : "", rows ? "rows " : columns ? "columns " : "", held) : "whole";
}

// Returns all cells but path and bytes.
Cells cells_of(const ModulePrecision& entry, PlanTable form, const ModelRanks& ranks) {
  const std::string rule = entry.rule.empty() ? "-" : entry.rule;
  const std::string shape = form == PlanTable::wide ? shape_text(entry.module) : divided_shape_text(entry.module, ranks);
  Cells cells = {shape, entry.match.empty() ? rule : rule + " \"" + entry.match + "\"", entry.recipe.name};
  const bool shown = has_gemm(entry.module.kind) || (entry.module.projects && entry.recipe.quantizes());
  for (const GemmRole role : kGemmRoles) cells.push_back(shown ? gemm_text(entry.recipe, role) : "-");
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

std::vector<Group> grouped(const std::vector<ModulePrecision>& modules, PlanTable form, const ModelRanks& ranks) {
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

// Heads of the columns. Behind them, the wide table has the share of a rank, if ranks share weights; then come the bytes.
constexpr std::array kHeads = {"module", "shape", "rule", "recipe", "fprop", "dgrad", "wgrad", "storage", "wire", "export"};
constexpr std::array<size_t, 6> kNarrow = {0, 1, 3, 2, 7, 8};  // columns of the narrow table, besides the bytes
constexpr size_t kModule = 0, kRecipe = 2, kRule = 3;          // the columns of the narrow table that may be cut

// Returns "layers.{0,2,...,998}.mlp.up": without some layers.
std::string cut_module(const std::string& path, size_t most) {
  if (path.size() <= most || path.find(',') == std::string::npos) return without_middle(path, most);
  const std::string end = ",..." + path.substr(path.rfind(','));
  const size_t begin = path.rfind(',', most - std::min(most, end.size()));
  return begin == std::string::npos ? without_middle(path, most) : path.substr(0, begin) + end;
}

// Returns `rules.7 "lay...up"`: without some of the pattern, and without all of it where there is room for the key alone.
std::string cut_rule(const std::string& rule, size_t most) {
  constexpr size_t kLeast = 7;  // characters of a pattern in its quotes
  const size_t key = std::min(rule.find(' '), rule.size());
  if (rule.size() <= most || most < key + 1 + kLeast) return without_middle(rule.size() <= most ? rule : rule.substr(0, key), most);
  return rule.substr(0, key + 1) + without_middle(std::string_view(rule).substr(key + 1), most - key - 1);
}

// Narrows the column that is most above its floor until all fit; below the floors, which only shapes beyond all models need, it narrows the
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

// Shortens the cells of the wide table. Rules lack "precision.".
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

}  // namespace

// Most recipes have one set of operands; the output projection and the second GEMM of experts may have others. A table of tokens has a line
// of its own.
std::vector<std::string> recipe_lines(const PrecisionPlan& plan) {
  std::vector<std::string> lines;
  std::set<std::string> known_recipes;
  std::set<Cells> known;
  for (const ModulePrecision& entry : plan.modules()) {
    const bool table = entry.module.is_token_table();
    if (!(entry.module.multiplies() || table) || !entry.recipe.quantizes()) continue;
    Cells key = {entry.recipe.name};
    std::string gemms;
    if (table) {
      key.push_back(operand_text(entry.recipe, choose_operands(entry.recipe, GemmRole::fprop).second));
      gemms = " | lookup " + key.back();
    }
    for (const GemmRole role : kGemmRoles) {
      if (!entry.module.multiplies()) continue;
      key.push_back(gemm_text(entry.recipe, role));
      gemms += text(" | ", gemm_name(role), ' ', key.back());
    }
    if (!known.insert(std::move(key)).second) continue;
    const std::string of = !table && known_recipes.insert(entry.recipe.name).second ? "" : " of " + entry.module.path;
    lines.push_back(text("recipe ", entry.recipe.name, of, gemms));
  }
  return lines;
}

std::string plan_table(const PrecisionPlan& plan, PlanTable form, const ModelRanks& ranks) {
  std::vector<Cells> rows = {Cells(kHeads.begin(), kHeads.end())};
  if (ranks.several() && form == PlanTable::wide) rows[0].emplace_back("on a rank");
  if (ranks.several() && form == PlanTable::narrow) rows[0][1] += "/ranks";
  rows[0].emplace_back("bytes");
  for (const Group& group : grouped(plan.modules(), form, ranks)) {
    Cells row = {joined_path(group.paths)};
    row.insert(row.end(), group.cells.begin(), group.cells.end());
    row.push_back(form == PlanTable::wide ? std::to_string(group.bytes) : bytes_text(group.bytes));
    rows.push_back(std::move(row));
  }
  return aligned(form == PlanTable::wide ? rows : narrowed(rows));
}

namespace {

GemmOperandForm operand_form(const Recipe& recipe, const OperandChoice& choice, GemmRole role, bool transposed) {
  return {.dtype = recipe.compute, .how = codes_read(recipe, choice, role), .transposed = transposed};
}

// Returns the rows of a micro batch; for an expert its share of them, if each gets as many.
int64_t rows_of(const RunConfig& config, const ModuleShape& module) {
  const int64_t tokens = config.training.micro_batch_size * config.training.seq_len;
  return module.experts ? ceil_div(tokens * module.active * config.parallel.expert, module.matrices) : tokens;
}

std::string before_text(const GemmRoute& route) {
  std::string out;
  const auto add = [&](int operands, const char* what) {
    if (operands > 0) out += text(out.empty() ? "" : ", ", operands, ' ', what);
  };
  add(route.dequantized, "dequantized");
  add(route.widened, "widened");
  add(route.transposed, "transposed");
  if (route.scales > 0) out += out.empty() ? "scales" : ", scales";
  return out.empty() ? "-" : out;
}

// Reasons, which the table has by number.
class Notes {
 public:
  std::string number_of(const PlannedGemm& gemm, const GemmDevice& device) {  // " (1)", or nothing
    if (gemm.route.obstacle == GemmObstacle::none) return "";
    const std::string why = obstacle_text(gemm.route.obstacle, gemm.form, device);
    const auto found = std::find(notes_.begin(), notes_.end(), why);
    const auto number = found - notes_.begin() + 1;
    if (found == notes_.end()) notes_.push_back(why);
    return text(" (", number, ')');
  }
  std::string text_of_all() const {
    std::string out;
    for (size_t i = 0; i < notes_.size(); ++i) out += text('(', i + 1, ") ", notes_[i], '\n');
    return out;
  }

 private:
  std::vector<std::string> notes_;
};

Cells cells_of(const PlannedGemm& gemm, const std::string& note, PlanTable form) {
  const GemmForm& f = gemm.form;
  Cells cells = {gemm_name(gemm.role), text(f.m, " x ", f.n, " x ", f.k), gemm_path_name(gemm.route.path) + note, before_text(gemm.route),
                 text(std::scientific, std::setprecision(1), gemm.route.bound)};
  if (form == PlanTable::wide) cells.insert(cells.begin() + 1, gemm.operands);
  return cells;
}

}  // namespace

GemmForm gemm_form(const Recipe& recipe, GemmRole role, const ModuleShape& held, int64_t rows) {
  const GemmOperands operands = choose_operands(recipe, role);
  const auto form = [&](bool first_transposed, bool second_transposed, Dtype out, int64_t m, int64_t n, int64_t k) {
    return GemmForm{.a = operand_form(recipe, operands.first, role, first_transposed),
                    .b = operand_form(recipe, operands.second, role, second_transposed),
                    .out = out,
                    .m = m,
                    .n = n,
                    .k = k};
  };
  if (role == GemmRole::fprop) return form(false, true, recipe.compute, rows, held.out, held.in);
  if (role == GemmRole::dgrad) return form(false, false, recipe.compute, rows, held.in, held.out);
  const int64_t block = recipe.block();
  return form(true, false, Dtype::f32, held.out, held.in, block > 0 ? round_up(rows, block) : rows);
}

std::vector<PlannedGemm> planned_gemms(const RunConfig& config, const PrecisionPlan& plan, const GemmDevice& device) {
  std::vector<PlannedGemm> out;
  const auto add = [&](const ModuleShape& module, const Recipe& recipe) {
    const ModuleShape held = module.on_rank(config.parallel.ranks());
    for (const GemmRole role : kGemmRoles) {
      const int64_t rows = rows_of(config, module), known = config.training.accumulation == Accumulation::running ? rows : 0;
      GemmForm form = gemm_form(recipe, role, held, rows);
      if (role == GemmRole::wgrad && !module.experts) form = along_rows(form, device);
      out.push_back({.module = module.path,
                     .operands = gemm_text(recipe, role),
                     .role = role,
                     .form = form,
                     .route = module.experts ? route_grouped_gemm(form, device, known) : route_gemm(form, device)});
    }
  };
  for (const ModulePrecision& entry : plan.modules()) {
    if (has_gemm(entry.module.kind)) add(entry.module, entry.recipe);
  }
  if (config.model.tie_word_embeddings) add(plan.of("embed").module, plan.of("embed").recipe);  // the output projection
  return out;
}

std::string gemm_device_text(const GemmDevice& device) {
  if (device.architecture == 0) return "cpu";
  return text("sm_", device.architecture, device.library == 0 ? " without cuBLASLt" : text(" with ", gemm_library_text(device.library)));
}

std::string gemm_table(const std::vector<PlannedGemm>& gemms, const GemmDevice& device, PlanTable form) {
  Notes notes;
  std::map<Cells, size_t> known;
  std::vector<Group> groups;
  for (const PlannedGemm& gemm : gemms) {
    const std::string note = notes.number_of(gemm, device);
    Cells key = cells_of(gemm, note, PlanTable::wide);
    key.push_back(any_layer(gemm.module));
    const auto [found, added] = known.insert({std::move(key), groups.size()});
    if (added) groups.push_back({.paths = {}, .cells = cells_of(gemm, note, form)});
    groups[found->second].paths.push_back(gemm.module);
  }
  constexpr size_t kNarrowModule = 30;
  std::vector<Cells> rows = {{"module", "GEMM", "m x n x k", "path", "written before", "bound"}};
  if (form == PlanTable::wide) rows[0].insert(rows[0].begin() + 2, "operands");
  for (const Group& group : groups) {
    const std::string module = printable(joined_path(group.paths));
    Cells row = {form == PlanTable::wide ? module : without_middle(module, kNarrowModule)};
    row.insert(row.end(), group.cells.begin(), group.cells.end());
    rows.push_back(std::move(row));
  }
  return aligned(rows) + notes.text_of_all();
}

}  // namespace mantissa
