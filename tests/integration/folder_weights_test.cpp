// What is read of folders of Hugging Face's form: parts of tensors, forms that they cannot have, and codes of several chunks.
#include "exports.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/hf/load_model.h"

namespace mantissa::folder_weights_test {

using test::HfFolder;
using test::kShape;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class FolderWeights : public test::ExportTest {
 protected:
  // A run by a recipe, packed.
  HfFolder packed_run(const std::string& recipe, const std::vector<std::string>& more = {}) {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=" + recipe});
    sets.insert(sets.end(), more.begin(), more.end());
    run("run", sets);
    pack_to(checkpoint("run", 3), "packed");
    return HfFolder(path("packed"));
  }
  // "x[1, 2]" as a number that counts the elements of a tensor of this shape.
  static size_t flat_index(const std::string& element, const std::vector<int64_t>& shape) {
    const std::vector<std::string> index = split(element.substr(element.find('[') + 1), ' ');
    EXPECT_EQ(index.size(), shape.size()) << element;
    size_t flat = 0;
    for (size_t i = 0; i < shape.size(); ++i) flat = flat * static_cast<size_t>(shape[i]) + static_cast<size_t>(std::stoll(index[i]));
    return flat;
  }
  void expect_parts_of_the_whole(const HfFolder& folder, HfWeights& weights, const ParameterShape& parameter, uint64_t seed) const;
};

void FolderWeights::expect_parts_of_the_whole(const HfFolder& folder, HfWeights& weights, const ParameterShape& parameter,
                                              uint64_t seed) const {
  const int64_t rows = parameter.shape[0], columns = parameter.shape.with_dim0(1).elements();
  const bool matrix = parameter.shape.rank() > 1;
  const auto box_of = [&](int64_t row, int64_t height, int64_t column, int64_t width) {
    return matrix ? Box{.start = {row, column}, .size = {height, width}} : Box{.start = {row}, .size = {height}};
  };
  std::vector<float> whole(static_cast<size_t>(rows * columns));
  weights.read_fp32(parameter.name, box_of(0, rows, 0, columns), whole);
  for (uint64_t draw = 0; draw < 8; ++draw) {
    const auto words = random_words({.seed = seed, .stream = RngStream::test}, 3, draw);
    const int64_t row = words[0] % rows, height = 1 + words[1] % (rows - row), column = words[2] % columns;
    const int64_t width = matrix ? 1 + words[3] % (columns - column) : 1;
    std::vector<float> part(static_cast<size_t>(height * width));
    weights.read_fp32(parameter.name, box_of(row, height, column, width), part);
    for (int64_t i = 0; i < height * width; ++i)
      ASSERT_EQ(part[static_cast<size_t>(i)], whole[static_cast<size_t>((row + i / width) * columns + column + i % width)])
          << parameter.name << " row " << row << " of " << rows << ", column " << column << " of " << columns << ", element " << i;
    const std::string element = weights.element(parameter.name, row, column), name = element.substr(0, element.find('['));
    EXPECT_EQ(folder.values(name).at(flat_index(element, folder.shape(name))), whole[static_cast<size_t>(row * columns + column)])
        << element << " of " << parameter.name;
  }
}

TEST_F(FolderWeights, APartOfAParameterIsThatOfTheWholeAndHasItsPlaceInTheFile) {
  uint64_t seed = 0;
  for (const std::string architecture : test::kArchitectureTypes) {
    const HfFolder folder(path(architecture), architecture, "BF16 F32 F16");
    HfWeights weights(path(architecture));
    for (const ParameterShape& parameter : parameter_shapes(model_shape(weights.config().model)))
      expect_parts_of_the_whole(folder, weights, parameter, ++seed);
    EXPECT_THAT(test::error_of([&] { weights.element("final_norm.weight", 96, 0); }).what(), HasSubstr("final_norm.weight has no row 96"));
  }
}

TEST_F(FolderWeights, FormsThatTensorsCannotHaveAreRefusedByName) {
  const HfFolder codes = packed_run("mxfp8");
  const std::string down = "model.layers.1.mlp.down_proj.weight", norm = "model.norm.weight", table = "model.embed_tokens.weight";
  const auto refused = [&](const HfFolder& folder, ExitCode code, const std::string& what) {
    folder.write(path("bad"));
    const Error error = folder_error("bad");
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(what));
  };
  refused(codes.as(down, FileDtype::f8_e5m2, {64, 96}), ExitCode::usage, down + " is F8_E5M2 with scales in U8; mantissa reads");
  refused(codes.as(down + "_scale", FileDtype::f8_e4m3, {64, 3}), ExitCode::usage, down + " is F8_E4M3 with scales in F8_E4M3; mantissa");
  refused(codes.as(down, FileDtype::u8, {64, 96}), ExitCode::usage, down + " is U8 with scales in U8; mantissa reads");

  const HfFolder values(path("values"), "llama", "F32", {{"intermediate_size", 80}});
  refused(values.as(norm, FileDtype::i32, {96}), ExitCode::usage, norm + " is I32; mantissa reads F32, BF16, F16 and");
  refused(values.with(down + "_scale", {96, 1}).as(down + "_scale", FileDtype::u8, {96, 2}), ExitCode::data,
          down + " has 80 columns, no whole blocks of 32");
  const HfFolder tied(path("tied"), "qwen3", "BF16");
  refused(tied.with("lm_head.weight", {260, 96}), ExitCode::data, "lm_head.weight is another tensor than the embeddings");
  const HfFolder gpt2(path("gpt2"), "gpt2", "BF16");
  const std::string prefix = "transformer.", name = prefix + "wte.weight";
  ASSERT_TRUE(gpt2.names().contains(name));
  refused(gpt2.copy(name, name.substr(prefix.size())), ExitCode::data, "holds " + name + " twice, with and without its prefix");
}

// config.json lies beside the weights of other programs as well.
TEST_F(FolderWeights, AFolderWithAManifestIsACheckpoint) {
  HfFolder(path("folder"), "llama", "BF16");
  EXPECT_TRUE(is_hf_folder(path("folder")));
  test::write_file(path("folder/manifest.json"), "{}");
  EXPECT_FALSE(is_hf_folder(path("folder")));
}

TEST_F(FolderWeights, GemmsOfCodesAreThoseOfAServerAndTheirInputGradients) {
  packed_run("mxfp8");
  const PrecisionPlan plan = resolve_plan(HfWeights(path("packed")).run_config());
  const Recipe& recipe = plan.of("layers.1.mlp.down").recipe;
  EXPECT_TRUE(recipe.gemms.fprop && recipe.gemms.dgrad);
  EXPECT_FALSE(recipe.gemms.wgrad);
}

// Codes and scales are read 8 MiB of codes at once.
TEST_F(FolderWeights, CodesOfSeveralChunksAreThoseOfTheFile) {
  const HfFolder packed =
      packed_run("mxfp8", {"model.hidden_size=128", "model.num_layers=1", "model.intermediate_size=70016", "training.threads=2"});
  const std::string up = "model.layers.0.mlp.up_proj.weight", scale = up + "_scale";
  ASSERT_GT(packed.bytes(up).size(), size_t{8} << 20);
  pack_to(path("packed"), "again");
  EXPECT_TRUE(all_bytes("again") == all_bytes("packed"));
  const size_t at = 69000 * 4 + 2;
  const auto with_scale = [&](int value) {
    packed.flip(scale, at, static_cast<char>(packed.bytes(scale)[at] ^ value)).write(path("bad"));
    return std::string(folder_error("bad").what());
  };
  EXPECT_THAT(with_scale(255), HasSubstr(up + "[69000, 64] is NaN or Inf"));
  EXPECT_THAT(with_scale(254), ::testing::AllOf(HasSubstr(up + "[69000, "), HasSubstr(" is NaN or Inf")));

  // 448 * 2^119 is the largest finite value.
  const size_t first = size_t{69000} * 128 + 64;
  const HfFolder largest = packed.flip(up, first, static_cast<char>(packed.bytes(up)[first] ^ 0x7E));
  const auto largest_with = [&](int value) { return largest.flip(scale, at, static_cast<char>(packed.bytes(scale)[at] ^ value)); };
  largest_with(247).write(path("bad"));
  EXPECT_THAT(folder_error("bad").what(), HasSubstr(up + "[69000, 64] is NaN or Inf"));
  largest_with(246).write(path("good"));
  EXPECT_NO_THROW(test::require_usable(path("good")));
}

// Better before training than when its export, or the first text from it, needs them. Evaluation does not.
TEST_F(FolderWeights, FilesOfTokensThatCannotBeReadAreRefused) {
  const HfFolder folder(path("model"), "llama", "F32");
  for (const char* const bad : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [1, 2.5]})", R"({"eos_token_id")"}) {
    test::write_file(path("model/generation_config.json"), bad);
    const Error error = folder_error("model");
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), HasSubstr(path("model/generation_config.json") + ":")) << bad;
    const LoadedModel loaded = load_model(path("model"), make_backend("cpu"));
    EXPECT_EQ(test::error_of([&] { loaded.end_tokens(); }).code(), ExitCode::data) << bad;
  }
  std::filesystem::remove(path("model/generation_config.json"));
  auto config = nlohmann::json::parse(test::read_file(path("model/config.json")));
  config["bos_token_id"] = "x";
  test::write_file(path("model/config.json"), config.dump());
  EXPECT_EQ(folder_error("model").code(), ExitCode::data);
  EXPECT_THAT(folder_error("model").what(), HasSubstr(path("model/config.json") + ": bos_token_id: must be a token id"));
}

// An export of a run of bytes whose tokenizer.json, generation_config.json and end tokens are those of somebody else.
class TokenizerOfAModel : public FolderWeights {
 protected:
  TokenizerOfAModel() {
    run("first", with({"data.tokenizer=byte", "training.steps=1"}));
    export_to(checkpoint("first", 1), "own");
    std::filesystem::copy(path("own"), path("bpe"));
    test::write_file(path("bpe/tokenizer.json"), R"({"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})");
    test::write_file(path("bpe/generation_config.json"), R"({"eos_token_id": 5})");
    auto config = nlohmann::json::parse(test::read_file(path("bpe/config.json")));
    config["eos_token_id"] = {5, 6};
    test::write_file(path("bpe/config.json"), config.dump());
  }
  static std::vector<std::string> with(std::vector<std::string> more) {
    more.insert(more.begin(), kShape.begin(), kShape.end());
    return more;
  }
  std::vector<std::string> from(const std::string& model, std::vector<std::string> more) const {
    more.insert(more.begin(), {"checkpoint.init_from=" + path(model), "data.tokenizer=byte", "training.steps=1"});
    return with(more);
  }
  // The same text as token ids, which no tokenizer of mantissa has to make.
  std::vector<std::string> from_ids(const std::string& model, std::vector<std::string> more) const {
    std::string ids;
    for (const char letter : test::read_file(path("text.txt"))) ids += std::string{letter, '\0'};
    test::write_file(path("ids.bin"), ids);
    more.insert(more.begin(), {"data.tokenizer=null", "data.path=" + path("ids.bin"), "data.dtype=u16", "model.vocab_size=256"});
    return from(model, more);
  }
};

TEST_F(TokenizerOfAModel, IsRefusedBesideAnotherInTheData) {
  std::filesystem::copy(path("bpe"), path("gpt2"));
  std::filesystem::remove(path("gpt2/tokenizer.json"));
  test::write_file(path("gpt2/vocab.json"), R"({"a": 0})");
  for (const char* model : {"bpe", "gpt2"}) {
    const Error error = test::error_of([&] { run("refused", from(model, {})); });
    EXPECT_EQ(error.code(), ExitCode::usage) << model;
    EXPECT_THAT(error.what(), HasSubstr(path(model) + " came with another tokenizer than data.tokenizer byte"));
    EXPECT_THAT(error.what(), HasSubstr("checkpoint.allow_tokenizer_change"));
    EXPECT_FALSE(std::filesystem::exists(run_folder("refused")));
  }
}

TEST_F(TokenizerOfAModel, OfMantissaIsKnownAgainAlsoAfterOthersSavedIt) {
  auto tokenizer = nlohmann::json::parse(test::read_file(path("own/tokenizer.json")));
  tokenizer["model"]["ignore_merges"] = false;  // as newer programs write
  test::write_file(path("own/tokenizer.json"), tokenizer.dump());
  EXPECT_EQ(run("second", from("own", {})).losses.size(), 1U);
  tokenizer["model"]["vocab"]["!"] = 200;
  test::write_file(path("own/tokenizer.json"), tokenizer.dump());
  EXPECT_EQ(test::error_of([&] { run("third", from("own", {})); }).code(), ExitCode::usage);
}

// Tokenizer and ids of a model come out of what was trained from it on token files, also after a resume.
TEST_F(TokenizerOfAModel, GoesAlongThroughTraining) {
  run("second", from_ids("bpe", {}));
  std::vector<std::string> resumed = from_ids("bpe", {"training.steps=2", "checkpoint.resume=auto"});
  run("second", resumed);
  export_to(checkpoint("second", 2), "again");
  for (const char* name : {"tokenizer.json", "generation_config.json"})
    EXPECT_EQ(test::read_file(path("again/") + name), test::read_file(path("bpe/") + name));
  EXPECT_EQ(nlohmann::json::parse(test::read_file(path("again/config.json")))["eos_token_id"], nlohmann::json({5, 6}));
}

// What an export then has is the tokenizer that training used; nothing in it speaks of the ids of the other one.
TEST_F(TokenizerOfAModel, IsLeftBehindWhereItMayChange) {
  const std::string allowed = "checkpoint.allow_tokenizer_change=true";
  run("second", from("bpe", {allowed, "checkpoint.interval=1", "checkpoint.export={}"}));
  run("second", from("bpe", {"checkpoint.resume=auto", "training.steps=2"}));
  export_to(checkpoint("second", 2), "again");
  for (const std::string& folder : {path("again"), run_folder("second") + "/exports/" + checkpoint_name(1)}) {
    EXPECT_EQ(test::read_file(folder + "/tokenizer.json"), test::read_file(path("own/tokenizer.json"))) << folder;
    EXPECT_FALSE(std::filesystem::exists(folder + "/generation_config.json")) << folder;
    EXPECT_TRUE(nlohmann::json::parse(test::read_file(folder + "/config.json"))["eos_token_id"].is_null()) << folder;
  }
  run("third", with({"checkpoint.init_from=" + checkpoint("second", 2), "data.tokenizer=char", "model.vocab_size=256", allowed,
                     "training.steps=1"}));
  EXPECT_EQ(test::error_of([&] {
              run("fourth", with({"checkpoint.init_from=" + checkpoint("second", 2), "data.tokenizer=char", "model.vocab_size=256"}));
            }).code(),
            ExitCode::usage);
}

}  // namespace mantissa::folder_weights_test
