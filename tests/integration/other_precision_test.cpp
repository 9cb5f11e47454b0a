// Models that are used with other number formats than they were trained: the bits are those of a run in these formats that changed nothing.
#include "exports.h"
#include "hf/gguf_export.h"
#include "process.h"

namespace mantissa::other_precision_test {

using test::error_of;
using test::logits_of;
using test::ProcessResult;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Sets = std::vector<std::string>;

class OtherPrecision : public test::ExportTest {
 protected:
  // A run of one step from the weights of another, whose updates are smaller than half of the last bit of any weight but a zero.
  std::string run_from(const std::string& from, const std::string& name, Sets precision) const {
    precision.insert(precision.end(), {"checkpoint.init_from=" + from, "optimizer.lr=1e-30"});
    return trained(name, precision);
  }
  void export_in(const std::string& from, const std::string& name, const Sets& precision, const ExportOptions& options = {}) const {
    export_model(from, path(name), options, make_backend("cpu"), precision);
  }
};

TEST_F(OtherPrecision, HasTheBitsOfARunThatChangedNothing) {
  const std::string saved = trained("saved", {});
  export_to(saved, "folder");
  const std::vector<std::pair<std::string, Sets>> cases = {
      {"mxfp8", {"precision.recipe=mxfp8"}},
      {"mxfp4", {"precision.recipe=mxfp4_qat"}},
      {"mxfp4_act", {"precision.recipe=mxfp4_qat_mxfp8_act"}},
      {"mxfp4_both", {"precision.recipe=mxfp4_qat_mxfp4_act"}},
      {"rules", {"precision.recipe=mxfp8_weights", R"(precision.rules=[{"match": "layers.0.mlp.*", "recipe": "mxfp4_qat"}])"}},
      {"own",
       {R"(precision.recipes={"mine": {"base": "mxfp4_qat", "weight_fake_quant": {"format": "e2m1", "rule": "even"}}})",
        "precision.recipe=mine"}},
      {"output",
       {"precision.recipe=mxfp8", R"(precision.fp8_output_proj={"enabled": true})", "model.tie_word_embeddings=false",
        "model.pad_vocab_to=32"}}};
  const std::string untied = trained("untied", {"model.tie_word_embeddings=false"});
  export_to(untied, "untied folder");
  for (const auto& [name, precision] : cases) {
    SCOPED_TRACE(name);
    const std::string& from = name == "output" ? untied : saved;
    const std::string trained_so = run_from(from, name, precision);
    Sets use;
    std::ranges::copy_if(precision, std::back_inserter(use), [](const std::string& set) { return set.starts_with("precision."); });
    EXPECT_TRUE(logits_of(from, {.precision = use}) == logits_of(trained_so));
    EXPECT_FALSE(logits_of(from, {.precision = use}) == logits_of(from));
    export_in(from, name + " values", use);
    export_to(trained_so, name + " values of the run");
    EXPECT_TRUE(all_bytes(name + " values") == all_bytes(name + " values of the run"));
    export_in(from, name + " packed", use, {.weights = ExportWeights::packed});
    pack_to(trained_so, name + " packed of the run");
    EXPECT_TRUE(all_bytes(name + " packed") == all_bytes(name + " packed of the run"));
    EXPECT_EQ(difference(name + " packed", trained_so), std::nullopt);
    const std::string folder = path(&from == &untied ? "untied folder" : "folder");
    EXPECT_TRUE(logits_of(folder, {.precision = use}) == logits_of(run_from(folder, name + " of the folder", precision)));
  }
}

// Codes of a folder are numbers for another recipe, and the recipes that its files state are left out.
TEST_F(OtherPrecision, ReadsCodesOfAFolderAsNumbers) {
  const std::string saved = trained("saved", {"precision.recipe=mxfp4_qat"});
  pack_to(saved, "packed");
  export_to(saved, "values");
  EXPECT_TRUE(logits_of(path("packed"), {.precision = {"precision.recipe=high"}}) == logits_of(path("values")));
  export_in(path("packed"), "eight bits", {"precision.recipe=mxfp8_weights"}, {.weights = ExportWeights::packed});
  export_in(path("values"), "eight bits of values", {"precision.recipe=mxfp8_weights"}, {.weights = ExportWeights::packed});
  EXPECT_TRUE(all_bytes("eight bits") == all_bytes("eight bits of values"));
  // Also where the folder has codes in the same format: those of the rule ceil may have a larger scale for the same values.
  const auto eight_bits = [](const std::string& rule) {
    const std::string weight = R"({"format": "e4m3", "block": [1, 32], "rule": ")" + rule + "\"}";
    return Sets{R"(precision.recipes={"mine": {"base": "mxfp8_weights", "weight": )" + weight + "}}", "precision.recipe=mine"};
  };
  const std::string larger = trained("larger", eight_bits("ceil"));
  pack_to(larger, "larger packed");
  export_to(larger, "larger values");
  export_in(path("larger packed"), "again", eight_bits("rceil"), {.weights = ExportWeights::packed});
  export_in(path("larger values"), "again of values", eight_bits("rceil"), {.weights = ExportWeights::packed});
  EXPECT_TRUE(all_bytes("again") == all_bytes("again of values"));
  EXPECT_FALSE(all_bytes("again") == all_bytes("larger packed"));
  EXPECT_EQ(json_in("again/mantissa.json")["options"]["precision"], nlohmann::json(eight_bits("rceil")));
  export_gguf(path("values"), path("out.gguf"), {.weights = ExportWeights::packed, .allow_different = true}, make_backend("cpu"),
              {"precision.recipe=mxfp4_qat"});
  EXPECT_EQ(difference("packed", path("out.gguf")), std::nullopt) << "E2M1 of values of E2M1 are the same";
}

TEST_F(OtherPrecision, RefusesWhatIsNoPrecision) {
  const std::string saved = trained("saved", {});
  const auto refused = [&](const std::string& set) {
    const Error error = error_of([&] { logits_of(saved, {.precision = {set}}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    return std::string(error.what());
  };
  EXPECT_THAT(refused("model.rope_theta=1"), HasSubstr("--set model.rope_theta=1: a model is used with other values of section precision"));
  EXPECT_THAT(refused("precision.dtype=fp32"), HasSubstr("--dtype"));
  EXPECT_THAT(refused("precision.recipe=mxfp5"), AllOf(HasSubstr("precision.recipe"), HasSubstr("mxfp5")));
  EXPECT_THAT(refused("precision.recipee=mxfp8"), HasSubstr("precision.recipee"));
  EXPECT_THAT(refused("precision.fp8_param_gather=true"), HasSubstr("is of training alone"));
  EXPECT_THAT(refused("precision.report_interval=5"), HasSubstr("is of training alone"));
  EXPECT_THAT(refused("precision.recipes.mine.base=mxfp8"), HasSubstr("give a whole recipe"));
  EXPECT_THAT(refused("precisions.recipe=mxfp8"), HasSubstr("section precision"));
}

TEST_F(OtherPrecision, IsAnOptionOfTheCommands) {
  const std::string saved = trained("saved", {}), set = "precision.recipe=mxfp4_qat";
  const auto run = [&](std::vector<std::string> words) { return test::run_mantissa(words, folder_.path()); };
  const ProcessResult exported = run({"export", saved, "--output", "out", "--weights", "packed", "--set", set});
  EXPECT_EQ(exported.exit_code, 0) << exported.errors;
  EXPECT_THAT(exported.output, HasSubstr("of step 1, precision.recipe=mxfp4_qat, "));
  EXPECT_EQ(run({"verify", "out", "--against", saved}).exit_code, 1);
  const ProcessResult verified = run({"verify", "out", "--against", saved, "--set", set});
  EXPECT_EQ(verified.exit_code, 0) << verified.output << verified.errors;
  EXPECT_THAT(verified.output, HasSubstr(", precision.recipe=mxfp4_qat\n"));
  EXPECT_THAT(run({"verify", "out", "--set", set}).errors, HasSubstr("--set: says how --against is quantized"));
  const std::vector<std::string> ids = {"--prompt-ids", "1,2,3,4,5,6,7"};
  const auto loss = [&](std::vector<std::string> words) {
    words.insert(words.end(), ids.begin(), ids.end());
    const ProcessResult result = run(words);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output.substr(result.output.find(" | loss "));
  };
  EXPECT_EQ(loss({"eval", saved, "--set", set}), loss({"eval", "out"}));
  EXPECT_NE(loss({"eval", saved}), loss({"eval", "out"}));
}

}  // namespace mantissa::other_precision_test
