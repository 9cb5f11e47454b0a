#include "mantissa/plan/gemm_table.h"

#include <algorithm>
#include <iomanip>
#include <map>

#include "mantissa/base/integers.h"
#include "mantissa/base/printable.h"
#include "mantissa/plan/plan_table.h"
#include "plan/columns.h"

namespace mantissa {
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
  add(route.transposed, "transposed");
  add(route.scales, "of scales");
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

// Modules of several layers that differ in nothing but the layer.
struct EqualGemms {
  std::vector<std::string> paths;
  Cells cells;
};

constexpr size_t kNarrowModule = 30;

std::string bound_text(double bound) { return text(std::scientific, std::setprecision(1), bound); }

Cells cells_of(const PlannedGemm& gemm, const std::string& note, PlanTable form) {
  const GemmForm& f = gemm.form;
  Cells cells = {gemm_name(gemm.role), text(f.m, " x ", f.n, " x ", f.k), gemm_path_name(gemm.route.path) + note, before_text(gemm.route),
                 bound_text(gemm.route.bound)};
  if (form == PlanTable::wide) cells.insert(cells.begin() + 1, gemm.operands);
  return cells;
}

// Modules of several layers have the same key if they differ in nothing but the layer.
Cells gemm_group_key(const PlannedGemm& gemm, const std::string& note) {
  Cells key = cells_of(gemm, note, PlanTable::wide);
  key.push_back(any_layer(gemm.module));
  return key;
}

Cells gemm_heads(PlanTable form) {
  if (form == PlanTable::wide) return {"module", "GEMM", "operands", "m x n x k", "path", "written before", "bound"};
  return {"module", "GEMM", "m x n x k", "path", "written before", "bound"};
}

Cells gemm_row(const EqualGemms& group, PlanTable form) {
  const std::string module = printable(joined_path(group.paths));
  Cells row = {form == PlanTable::wide ? module : without_middle(module, kNarrowModule)};
  row.insert(row.end(), group.cells.begin(), group.cells.end());
  return row;
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
      const GemmForm form = gemm_form(recipe, role, held, rows);
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
  if (config.model.tie_word_embeddings) add(plan.of("embed").module, {.compute = plan.compute()});  // the output projection
  return out;
}

std::string gemm_device_text(const GemmDevice& device) {
  if (device.architecture == 0) return "cpu";
  return text("sm_", device.architecture, device.library == 0 ? " without cuBLASLt" : text(" with ", gemm_library_text(device.library)));
}

std::string gemm_table(const std::vector<PlannedGemm>& gemms, const GemmDevice& device, PlanTable form) {
  Notes notes;
  std::map<Cells, size_t> known;
  std::vector<EqualGemms> groups;
  for (const PlannedGemm& gemm : gemms) {
    const std::string note = notes.number_of(gemm, device);
    const auto [found, added] = known.insert({gemm_group_key(gemm, note), groups.size()});
    if (added) groups.push_back({.paths = {}, .cells = cells_of(gemm, note, form)});
    groups[found->second].paths.push_back(gemm.module);
  }
  std::vector<Cells> rows = {gemm_heads(form)};
  for (const EqualGemms& group : groups) rows.push_back(gemm_row(group, form));
  return aligned(rows) + notes.text_of_all();
}

}  // namespace mantissa
