#include "tools/analyze/analysis.h"

#include <algorithm>
#include <cmath>
#include <iostream>

#include "mantissa/base/text.h"
#include "mantissa/precision/rules.h"
#include "plan/plan_table.h"

namespace mantissa::tools {
namespace {

std::string db_text(const std::optional<double>& db) { return db ? rounded(*db, 2) : "-"; }

// The errors of the same module of several layers, or of one, under one recipe.
struct Pooled {
  std::vector<std::string> paths;
  double signal = 0.0, noise = 0.0, elements = 0.0, clipped = 0.0, flushed = 0.0;
  std::optional<double> worst_db, worst_block_db;
  std::string worst;  // the module with the least ratio
  std::optional<ErrorParts> parts;
  int64_t bytes = 0;

  void add(const WeightError& error) {
    const PrecisionEvent& figures = error.figures;
    const auto count = static_cast<double>(error.elements);
    paths.push_back(figures.module);
    signal += error.signal, noise += error.noise, elements += count;
    clipped += figures.clipped * count, flushed += figures.flushed * count;
    bytes += error.bytes;
    if (figures.sqnr_db && (!worst_db || *figures.sqnr_db < *worst_db)) worst_db = figures.sqnr_db, worst = figures.module;
    if (const auto& block = error.worst_block; block && (!worst_block_db || block->sqnr_db < *worst_block_db))
      worst_block_db = block->sqnr_db;
    if (!error.parts) return;
    if (!parts) parts.emplace();
    parts->add(*error.parts);
  }
  bool exact() const { return signal > 0.0 && noise == 0.0; }
  std::string sqnr() const { return exact() ? "exact" : db_text(decibels(signal, noise)); }
};

// Pools equal modules of all layers, or none; the order is that of the model.
std::vector<Pooled> pooled(const Analysis& analysis, size_t recipe, bool each) {
  std::vector<Pooled> pools;
  for (const ExaminedWeight& weight : analysis.weights) {
    if (!weight.errors[recipe]) continue;
    const auto same = [&](const Pooled& pool) { return any_layer(pool.paths.front()) == any_layer(weight.module); };
    auto pool = each ? pools.end() : std::ranges::find_if(pools, same);
    if (pool == pools.end()) pool = pools.insert(pools.end(), Pooled());
    pool->add(*weight.errors[recipe]);
  }
  return pools;
}

std::string share_text(double part, double whole) { return whole > 0.0 ? rounded(100.0 * part / whole, 2) + "%" : "-"; }

std::string table_of(const Analysis& analysis, size_t recipe, bool wide) {
  std::vector<std::vector<std::string>> rows = {
      {"module", "SQNR dB", "worst", "block", "clipped", "flushed", "scale", "dead zone", "grid", "bytes"}};
  for (const Pooled& pool : pooled(analysis, recipe, wide)) {
    const ErrorParts parts = pool.parts.value_or(ErrorParts{});
    const double error = parts.total();
    rows.push_back({joined_path(pool.paths), pool.sqnr(), db_text(pool.worst_db), db_text(pool.worst_block_db),
                    share_text(pool.clipped, pool.elements), share_text(pool.flushed, pool.elements), share_text(parts.scale, error),
                    share_text(parts.dead_zone, error), share_text(parts.grid, error), bytes_text(pool.bytes)});
  }
  return aligned(rows);
}

void print_recipe(const Analysis& analysis, size_t number, bool wide) {
  const ExaminedRecipe& recipe = analysis.recipes[number];
  if (!recipe.fits) {
    std::cout << '\n' << printable(recipe.name) << " | fits no linear of this model: " << printable(recipe.problem, "\n  ") << '\n';
    return;
  }
  Pooled all;
  for (const Pooled& pool : pooled(analysis, number, true)) {
    all.signal += pool.signal, all.noise += pool.noise;
    if (pool.worst_db && (!all.worst_db || *pool.worst_db < *all.worst_db)) all.worst_db = pool.worst_db, all.worst = pool.worst;
    all.paths.push_back(pool.paths.front());
  }
  const StoredSize linears = stored_size(recipe.plan, true), size = stored_size(recipe.plan, false);
  std::cout << '\n'
            << printable(recipe.name) << " | " << count_text(all.paths.size(), "weight") << " | SQNR " << all.sqnr()
            << (all.exact() ? "" : " dB | worst " + (all.worst.empty() ? "-" : text(all.worst, ' ', db_text(all.worst_db), " dB"))) << " | "
            << rounded(linears.bits(), 3) << " bits per weight of the linears | model " << bytes_text(size.bytes) << ", in high precision "
            << bytes_text(stored_size(analysis.high.plan, false).bytes) << '\n';
  if (!recipe.misfits.empty())
    std::cout << printable(recipe.name) << " | " << count_text(recipe.misfits.size(), "linear")
              << " in high precision: " << printable(recipe.problem, "\n  ") << '\n';
  if (!all.paths.empty()) std::cout << printable(table_of(analysis, number, wide), "\n");
}

Json json_of(const WeightError& error) {
  const PrecisionEvent& figures = error.figures;
  Json out = {{"module", figures.module},   {"elements", error.elements}, {"bytes", error.bytes},
              {"sqnr_db", figures.sqnr_db}, {"clipped", figures.clipped}, {"flushed", figures.flushed},
              {"amax", figures.amax},       {"signal", error.signal},     {"noise", error.noise}};
  Json::Members scales;
  for (const auto& [code, blocks] : figures.scales) scales[std::to_string(code)] = blocks;
  out.add("scales", std::move(scales));
  if (const auto& parts = error.parts)
    out.add("parts", Json{{"dead_zone", parts->dead_zone}, {"scale", parts->scale}, {"grid", parts->grid}});
  if (const auto& block = error.worst_block)
    out.add("worst_block", Json{{"sqnr_db", block->sqnr_db}, {"row", block->row}, {"column", block->column}});
  if (const auto& expert = figures.worst_expert) out.add("worst_expert", Json{{"expert", expert->expert}, {"sqnr_db", expert->sqnr_db}});
  return out;
}

Json json_of(const StoredSize& size) { return {{"elements", size.elements}, {"bytes", size.bytes}, {"bits_per_weight", size.bits()}}; }

void add_loss(Json& entry, const RecipeLoss& loss) {
  entry.add("loss", loss.loss);
  entry.add("kl", loss.kl);
  entry.add("equal_greedy", loss.equal_greedy);
}

Json recipes_json(const Analysis& analysis) {
  Json::Entries recipes;
  for (size_t i = 0; i < analysis.recipes.size(); ++i) {
    const ExaminedRecipe& recipe = analysis.recipes[i];
    Json::Entries weights;
    for (const ExaminedWeight& weight : analysis.weights) {
      if (weight.errors[i]) weights.push_back(json_of(*weight.errors[i]));
    }
    Json entry = {{"recipe", recipe.name},
                  {"fits", recipe.fits},
                  {"set", recipe.values},
                  {"linears", json_of(stored_size(recipe.plan, true))},
                  {"model", json_of(stored_size(recipe.plan, false))},
                  {"misfits", recipe.misfits},
                  {"weights", weights}};
    if (!recipe.problem.empty()) entry.add("problem", recipe.problem);
    if (analysis.high_loss && recipe.fits) add_loss(entry, analysis.losses[i]);
    recipes.push_back(std::move(entry));
  }
  return recipes;
}

std::string change_text(const RecipeLoss& loss, const RecipeLoss& high) {
  const double change = 100.0 * (std::exp(loss.loss - high.loss) - 1.0);
  return (change < 0.0 ? "" : "+") + rounded(change, 2) + "%";
}

std::vector<std::string> loss_cells(const std::string& name, const RecipeLoss& loss, const RecipeLoss& high) {
  return {name,
          rounded(loss.loss, 5),
          rounded(std::exp(loss.loss), 3),
          change_text(loss, high),
          rounded(loss.kl, 5),
          share_text(loss.equal_greedy, 1.0)};
}

void print_losses(const Analysis& analysis) {
  const RecipeLoss& high = *analysis.high_loss;
  std::cout << '\n' << printable(analysis.data) << " | " << high.targets << " targets | seq_len " << analysis.window << '\n';
  std::vector<std::vector<std::string>> rows = {{"recipe", "loss", "perplexity", "change", "KL", "equal greedy", "bits per weight"}};
  const auto add = [&](const ExaminedRecipe& recipe, const RecipeLoss& loss) {
    rows.push_back(loss_cells(recipe.name, loss, high));
    rows.back().push_back(rounded(stored_size(recipe.plan, true).bits(), 3));
  };
  add(analysis.high, high);
  for (size_t i = 0; i < analysis.recipes.size(); ++i)
    if (analysis.recipes[i].fits) add(analysis.recipes[i], analysis.losses[i]);
  std::cout << printable(aligned(rows), "\n");
}

void print_parts(const Analysis& analysis) {
  size_t linears = 0;
  for (const ModelPart& part : analysis.parts) linears += part.modules.size();
  const bool table = !analysis.parts.empty() && analysis.parts.back().modules.front() == "embed";
  std::cout << '\n'
            << count_text(analysis.parts.size(), "part") << " of " << count_text(linears - (table ? 1 : 0), "linear")
            << (table ? " and the embedding" : "") << ", each alone in a recipe, all others in high precision, by KL\n";
  std::vector<std::vector<std::string>> rows = {{"part", "recipe", "loss", "perplexity", "change", "KL", "equal greedy", "saved"}};
  for (const PartLoss& alone : analysis.part_losses) {
    const ModelPart& part = analysis.parts[alone.part];
    std::vector<std::string> cells = loss_cells(alone.recipe, alone.loss, *analysis.high_loss);
    cells.insert(cells.begin(), joined_path(part.modules));
    cells.push_back(bytes_text(std::max<int64_t>(0, part.high_bytes - alone.bytes)));
    rows.push_back(std::move(cells));
  }
  std::cout << printable(aligned(rows), "\n");
  for (const auto& [recipe, problem] : analysis.without_table)
    std::cout << "embed is not measured in " << printable(recipe) << ": " << printable(problem, "\n  ") << '\n';
}

void print_proposal(const Analysis& analysis) {
  const auto& [proposal, file, loss] = *analysis.proposed;
  std::cout << "\nproposal | " << rounded(proposal.bits, 3) << " bits per weight of the linears | loss " << rounded(loss.loss, 5)
            << " | perplexity " << rounded(std::exp(loss.loss), 3) << ", " << change_text(loss, *analysis.high_loss) << " | KL "
            << rounded(loss.kl, 5) << ", predicted " << rounded(proposal.cost, 5) << " | equal greedy "
            << share_text(loss.equal_greedy, 1.0) << '\n';
}

Json parts_json(const Analysis& analysis) {
  Json::Entries entries;
  for (const PartLoss& alone : analysis.part_losses) {
    Json entry = {{"modules", analysis.parts[alone.part].modules}, {"recipe", alone.recipe}, {"bytes", alone.bytes}};
    add_loss(entry, alone.loss);
    entries.push_back(std::move(entry));
  }
  return entries;
}

Json proposal_json(const ProposedRules& proposed) {
  Json entry = {{"bits_per_weight", proposed.proposal.bits}, {"predicted_kl", proposed.proposal.cost}};
  add_loss(entry, proposed.loss);
  entry.add("file", parse_json(proposed.file, "proposal", ExitCode::internal));
  return entry;
}

}  // namespace

Json analysis_json(const Analysis& analysis) {
  Json high = json_of(stored_size(analysis.high.plan, false));
  if (analysis.high_loss) add_loss(high, *analysis.high_loss);
  Json out = {{"model", analysis.model}, {"step", analysis.step}};
  if (analysis.high_loss) {
    out.add("data", analysis.data);
    out.add("seq_len", analysis.window);
    out.add("targets", analysis.high_loss->targets);
  }
  out.add("high", std::move(high));
  out.add("recipes", recipes_json(analysis));
  if (!analysis.parts.empty()) out.add("parts", parts_json(analysis));
  for (const auto& [recipe, problem] : analysis.without_table) out["embed_not_measured"].add(recipe, problem);
  if (analysis.proposed) out.add("proposal", proposal_json(*analysis.proposed));
  return out;
}

void print_analysis(const Analysis& analysis, bool wide) {
  const StoredSize high = stored_size(analysis.high.plan, false);
  std::cout << printable(analysis.model) << (analysis.step ? text(" of step ", *analysis.step) : "") << " | " << high.elements
            << " parameters\n";
  for (size_t i = 0; i < analysis.recipes.size(); ++i) print_recipe(analysis, i, wide);
  if (analysis.high_loss) print_losses(analysis);
  if (!analysis.parts.empty()) print_parts(analysis);
  if (analysis.proposed) print_proposal(analysis);
}

}  // namespace mantissa::tools
