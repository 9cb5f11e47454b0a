// Reads of folders of Hugging Face's form: parts of tensors, codes of several chunks, and the tokenizer that goes with a model.
#include "block_fp8_folders.h"
#include "checkpoint/checkpoint_directory.h"
#include "models/model_shape.h"

namespace mantissa::folder_weights_test {

using test::HfFolder;
using test::kShape;
using test::read_file;
using test::write_file;
using ::testing::HasSubstr;

class FolderWeights : public test::BlockFp8 {
 protected:
  // "x[1, 2]" as a number that counts the elements of a tensor of this shape.
  static size_t flat_index(const std::string& element, const std::vector<int64_t>& shape) {
    const std::vector<std::string> index = split(element.substr(element.find('[') + 1), ' ');
    EXPECT_EQ(index.size(), shape.size()) << element;
    size_t flat = 0;
    for (size_t i = 0; i < shape.size(); ++i) flat = flat * static_cast<size_t>(shape[i]) + static_cast<size_t>(std::stoll(index[i]));
    return flat;
  }
  static void expect_parts_of_the_whole(const HfFolder& folder, HfWeights& weights, const ParameterShape& parameter, uint64_t seed);
};

void FolderWeights::expect_parts_of_the_whole(const HfFolder& folder, HfWeights& weights, const ParameterShape& parameter, uint64_t seed) {
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

// Codes and scales are read 8 MiB of codes at once.
TEST_F(FolderWeights, CodesOfSeveralChunksAreThoseOfTheFile) {
  const HfFolder codes =
      mx_folder("codes", test::kMxfp8Config, {{"hidden_size", 128}, {"num_hidden_layers", 1}, {"intermediate_size", 66048}});
  const std::string up = "model.layers.0.mlp.up_proj.weight", scale = up + "_scale";
  ASSERT_GT(codes.bytes(up).size(), size_t{8} << 20);
  pack_to(path("codes"), "again");
  EXPECT_TRUE(all_bytes("again") == all_bytes("codes"));
  constexpr size_t kRow = 66000, kScale = kRow * 4 + 2, kCode = kRow * 128 + 64;
  const auto with = [](const HfFolder& folder, const std::string& name, size_t at, int value) {
    return folder.flip(name, at, static_cast<char>(folder.bytes(name)[at] ^ value));
  };
  const auto error_of = [&](const HfFolder& folder) {
    folder.write(path("bad"));
    return std::string(folder_error("bad").what());
  };
  EXPECT_THAT(error_of(with(codes, scale, kScale, 255)), HasSubstr(up + "[66000, 64] is NaN or Inf"));
  // 448 * 2^119 is the largest finite value.
  const HfFolder largest = with(codes, up, kCode, 0x7E);
  EXPECT_THAT(error_of(with(largest, scale, kScale, 247)), HasSubstr(up + "[66000, 64] is NaN or Inf"));
  with(largest, scale, kScale, 246).write(path("good"));
  EXPECT_NO_THROW(test::require_usable(path("good")));
}

// A plan of another rule or range makes codes of the values, as training would.
TEST_F(FolderWeights, CodesAreThoseOfTheFileWhereThePlanHasTheirForm) {
  const HfFolder codes = mx_folder("codes", test::kMxfp8Config, {{"hidden_size", 64}, {"intermediate_size", 96}, {"head_dim", 32}});
  const std::string down = "layers.1.mlp.down.weight";
  HfWeights source(path("codes"));
  const auto scales_under = [&](const std::string& weight) {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=own",
                             R"(precision.recipes={"own": {"base": "mxfp8_weights", "weight": {"block": [1, 32])" + weight + "}}}"});
    RunConfig changed = source.run_config();
    changed.precision = config("plan", sets).config.precision;
    const PrecisionPlan plan = resolve_plan(changed);
    ForwardWeights weights(source, plan, make_backend("cpu"));
    const std::vector<std::byte> scales = weights.scales(down, 0, 64);
    return std::string(reinterpret_cast<const char*>(scales.data()), scales.size());
  };
  const std::string of_file = codes.bytes(test::kDownWeight + "_scale");
  EXPECT_TRUE(scales_under("") == of_file);
  EXPECT_FALSE(scales_under(R"(, "rule": "ceil")") == of_file) << "which has larger ones";
  const std::string clamped = scales_under(R"(, "scale_range": [-14, 127])");
  EXPECT_TRUE(std::ranges::any_of(of_file, [](char scale) { return scale < 127 - 14; }));
  EXPECT_TRUE(std::ranges::all_of(clamped, [](char scale) { return scale >= 127 - 14; }));
}

// An export of a run of bytes whose tokenizer.json, generation_config.json and end tokens are those of somebody else.
class TokenizerOfAModel : public FolderWeights {
 protected:
  TokenizerOfAModel() {
    export_to(trained("first", {"data.tokenizer=byte"}), "own");
    std::filesystem::copy(path("own"), path("bpe"));
    write_file(path("bpe/tokenizer.json"), R"({"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})");
    write_file(path("bpe/generation_config.json"), R"({"eos_token_id": 5})");
    auto config = nlohmann::json::parse(read_file(path("bpe/config.json")));
    config["eos_token_id"] = {5, 6};
    write_file(path("bpe/config.json"), config.dump());
  }
  static std::vector<std::string> with(std::vector<std::string> more) {
    more.insert(more.begin(), kShape.begin(), kShape.end());
    return more;
  }
  std::vector<std::string> from(const std::string& model, std::vector<std::string> more) const {
    more.insert(more.begin(), {"checkpoint.init_from=" + path(model), "data.tokenizer=byte", "training.steps=1"});
    return with(more);
  }
  // Settings for the same text as token ids, which no tokenizer of mantissa has to make.
  std::vector<std::string> from_ids(const std::string& model, std::vector<std::string> more) const {
    std::string ids;
    for (const char letter : read_file(path("text.txt"))) ids += std::string{letter, '\0'};
    write_file(path("ids.bin"), ids);
    more.insert(more.begin(), {"data.tokenizer=null", "data.path=" + path("ids.bin"), "data.dtype=u16", "model.vocab_size=256"});
    return from(model, more);
  }
};

TEST_F(TokenizerOfAModel, IsRefusedBesideAnotherInTheData) {
  std::filesystem::copy(path("bpe"), path("gpt2"));
  std::filesystem::remove(path("gpt2/tokenizer.json"));
  write_file(path("gpt2/vocab.json"), R"({"a": 0})");
  for (const char* model : {"bpe", "gpt2"}) {
    const Error error = test::error_of([&] { run("refused", from(model, {})); });
    EXPECT_EQ(error.code(), ExitCode::usage) << model;
    EXPECT_THAT(error.what(), HasSubstr(path(model) + " has a tokenizer that differs from data.tokenizer byte"));
    EXPECT_THAT(error.what(), HasSubstr("checkpoint.allow_tokenizer_change"));
    EXPECT_FALSE(std::filesystem::exists(run_folder("refused")));
  }
}

TEST_F(TokenizerOfAModel, OfMantissaIsKnownAgainAlsoAfterOthersSavedIt) {
  auto tokenizer = nlohmann::json::parse(read_file(path("own/tokenizer.json")));
  tokenizer["model"]["ignore_merges"] = false;  // like newer programs write
  write_file(path("own/tokenizer.json"), tokenizer.dump());
  EXPECT_EQ(run("second", from("own", {})).losses.size(), 1U);
  tokenizer["model"]["vocab"]["!"] = 200;
  write_file(path("own/tokenizer.json"), tokenizer.dump());
  EXPECT_EQ(test::error_of([&] { run("third", from("own", {})); }).code(), ExitCode::usage);
}

// Tokenizer and ids of a model come out of what was trained from it on token files, also after a resume.
TEST_F(TokenizerOfAModel, GoesAlongThroughTraining) {
  run("second", from_ids("bpe", {}));
  std::vector<std::string> resumed = from_ids("bpe", {"training.steps=2", "checkpoint.resume=auto"});
  run("second", resumed);
  export_to(checkpoint("second", 2), "again");
  for (const char* name : {"tokenizer.json", "generation_config.json"})
    EXPECT_EQ(read_file(path("again/") + name), read_file(path("bpe/") + name));
  EXPECT_EQ(nlohmann::json::parse(read_file(path("again/config.json")))["eos_token_id"], nlohmann::json({5, 6}));
}

// An export then has the tokenizer that training used; nothing in it speaks of the ids of the other one.
TEST_F(TokenizerOfAModel, IsLeftBehindWhereItMayChange) {
  const std::string allowed = "checkpoint.allow_tokenizer_change=true";
  run("second", from("bpe", {allowed, "checkpoint.interval=1", "checkpoint.export={}"}));
  run("second", from("bpe", {"checkpoint.resume=auto", "training.steps=2"}));
  export_to(checkpoint("second", 2), "again");
  for (const std::string& folder : {path("again"), run_folder("second") + "/exports/" + checkpoint_name(1)}) {
    EXPECT_EQ(read_file(folder + "/tokenizer.json"), read_file(path("own/tokenizer.json"))) << folder;
    EXPECT_FALSE(std::filesystem::exists(folder + "/generation_config.json")) << folder;
    EXPECT_TRUE(nlohmann::json::parse(read_file(folder + "/config.json"))["eos_token_id"].is_null()) << folder;
  }
  run("third", with({"checkpoint.init_from=" + checkpoint("second", 2), "data.tokenizer=char", "model.vocab_size=256", allowed,
                     "training.steps=1"}));
  EXPECT_EQ(test::error_of([&] {
              run("fourth", with({"checkpoint.init_from=" + checkpoint("second", 2), "data.tokenizer=char", "model.vocab_size=256"}));
            }).code(),
            ExitCode::usage);
}

}  // namespace mantissa::folder_weights_test
