#include <optional>

#include "base/file.h"
#include "json/json_fields.h"
#include "tools/report/report_page.h"

namespace mantissa::tools {
namespace {

constexpr int64_t kLargest = int64_t{64} << 20;  // 10,000 weights in several recipes are a tenth of it

struct StoredBits {
  int64_t bytes = 0;
  double bits_per_weight = 0.0;

  void fields(auto& v) {
    v("bytes", bytes, "", limits::not_negative);
    v("bits_per_weight", bits_per_weight, "", limits::not_negative);
  }
};

struct MeasuredLoss {  // none without data
  std::optional<double> loss, kl, equal_greedy;

  void fields(auto& v) {
    v("loss", loss, "", limits::later);
    v("kl", kl, "", limits::later);
    v("equal_greedy", equal_greedy, "", limits::later);
  }
};

struct HighPrecision : MeasuredLoss, StoredBits {
  void fields(auto& v) {
    StoredBits::fields(v);
    MeasuredLoss::fields(v);
  }
};

struct WeightFigures {
  std::string module;
  int64_t bytes = 0;
  std::optional<double> sqnr_db, amax;  // null: exact; not finite
  double clipped = 0.0, flushed = 0.0, signal = 0.0, noise = 0.0;

  void fields(auto& v) {
    v("module", module, "");
    v("bytes", bytes, "", limits::not_negative);
    v("sqnr_db", sqnr_db, "");
    v("amax", amax, "");
    v("clipped", clipped, "");
    v("flushed", flushed, "");
    v("signal", signal, "");
    v("noise", noise, "");
  }
};

struct RecipeFigures : MeasuredLoss {
  std::string recipe;
  bool fits = true;                    // some linear; else it has no losses
  std::optional<std::string> problem;  // why some linears stay in high precision
  StoredBits linears, model;
  std::vector<WeightFigures> weights;

  void fields(auto& v) {
    v("recipe", recipe, "");
    v("fits", fits, "", limits::later);
    v("problem", problem, "", limits::later);
    v("linears", linears, "");
    v("model", model, "");
    MeasuredLoss::fields(v);
    v("weights", weights, "");
  }
};

struct PartFigures : MeasuredLoss {
  std::vector<std::string> modules;
  std::string recipe;
  int64_t bytes = 0;

  void fields(auto& v) {
    v("modules", modules, "");
    v("recipe", recipe, "");
    v("bytes", bytes, "", limits::not_negative);
    MeasuredLoss::fields(v);
  }
};

struct ProposalFigures : MeasuredLoss {
  double bits_per_weight = 0.0, predicted_kl = 0.0;
  std::string file;

  void fields(auto& v) {
    v("bits_per_weight", bits_per_weight, "", limits::not_negative);
    v("predicted_kl", predicted_kl, "");
    MeasuredLoss::fields(v);
    v("file", file, "", limits::json);
  }
};

struct SavedAnalysis {
  std::string model;
  std::optional<int64_t> step, seq_len, targets;  // step: of a checkpoint; the others: with data
  std::optional<std::string> data;
  HighPrecision high;
  std::vector<RecipeFigures> recipes;
  std::vector<PartFigures> parts;           // with --modules or --budget
  std::optional<ProposalFigures> proposal;  // with --budget

  void fields(auto& v) {
    v("model", model, "");
    v("step", step, "");
    v("data", data, "", limits::later);
    v("seq_len", seq_len, "", limits::later);
    v("targets", targets, "", limits::later);
    v("high", high, "");
    v("recipes", recipes, "");
    v("parts", parts, "", limits::later);
    v("proposal", proposal, "", limits::later);
  }
};

// With data, every loss is there; without, none is.
void check_losses(const MeasuredLoss& of, bool measured, const std::string& source, const std::string& where) {
  require((of.loss && of.kl && of.equal_greedy) == measured && (of.loss || of.kl || of.equal_greedy) == measured, ExitCode::data, source,
          ": ", where, ": must have loss, kl and equal_greedy if, and only if, there is data");
}

}  // namespace

Json read_analysis(const std::filesystem::path& file) {
  const std::string source = file.string();
  const auto analysis = from_json<SavedAnalysis>(File::open_input(file).content(kLargest), source);
  const bool measured = analysis.data.has_value();
  require(analysis.seq_len.has_value() == measured && analysis.targets.has_value() == measured, ExitCode::data, source,
          ": must have data, seq_len and targets together");
  check_losses(analysis.high, measured, source, "high");
  for (const RecipeFigures& recipe : analysis.recipes) check_losses(recipe, measured && recipe.fits, source, "recipes");
  for (const PartFigures& part : analysis.parts) {
    check_losses(part, true, source, "parts");
    require(!part.modules.empty(), ExitCode::data, source, ": parts: a part has no module");
  }
  require(measured || (analysis.parts.empty() && !analysis.proposal), ExitCode::data, source, ": parts and a proposal need data");
  if (analysis.proposal) check_losses(*analysis.proposal, true, source, "proposal");
  return parse_json(json_text(analysis), source);
}

}  // namespace mantissa::tools
