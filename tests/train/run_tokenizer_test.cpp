// The tokenizer.json of a run: into checkpoints and exports, and from the folder that a run starts from.
#include <gmock/gmock.h>

#include "mantissa/hf/export.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/text/bpe_trainer.h"
#include "training.h"

namespace mantissa::run_tokenizer_test {

using ::testing::HasSubstr;

class RunTokenizerTest : public test::TrainingTest {
 protected:
  std::string trained(int64_t size, const std::string& name) const {
    BpeTrainer trainer;
    trainer.add(test::read_file(folder_ / "text.txt"), {});
    trainer.end_text({});
    test::write_file(folder_ / name, trainer.train(size));
    return folder_ / name;
  }
  std::vector<std::string> sets(std::vector<std::string> more) const {
    more.insert(more.end(), {"training.steps=2", "model.pad_vocab_to=8"});
    return more;
  }
};

TEST_F(RunTokenizerTest, GoesIntoCheckpointsAndExports) {
  const std::string file = trained(270, "own.json"), other = trained(280, "other.json"), bytes = test::read_file(file);
  run("run", sets({"data.tokenizer=" + file}));
  const LoadedModel loaded = load_model(checkpoint("run", 2), make_backend("cpu"));
  ASSERT_TRUE(loaded.tokenizer.has_value());
  EXPECT_EQ(loaded.tokenizer->files()->tokenizer, bytes);
  EXPECT_EQ(*loaded.config.model.vocab_size, Tokenizer::from_path(file).size());

  export_model(checkpoint("run", 2), folder_ / "export", {}, make_backend("cpu"));
  EXPECT_EQ(test::read_file(folder_ / "export/tokenizer.json"), bytes);
  EXPECT_THAT(test::read_file(folder_ / "export/tokenizer_config.json"), HasSubstr("<|endoftext|>"));
  const LoadedModel from_export = load_model(folder_ / "export", make_backend("cpu"));
  EXPECT_EQ(from_export.tokenizer->files()->tokenizer, bytes);
  const int32_t end = *loaded.tokenizer->end_token();
  EXPECT_THAT(loaded.end_tokens(), ::testing::ElementsAre(end));
  EXPECT_THAT(from_export.end_tokens(), ::testing::ElementsAre(end));
  EXPECT_THAT(test::read_file(folder_ / "export/config.json"), HasSubstr(text("\"eos_token_id\": ", end)));

  std::vector<std::string> resumed = {"data.tokenizer=" + file, "checkpoint.resume=auto", "training.steps=3", "model.pad_vocab_to=8"};
  EXPECT_EQ(run("run", resumed).summary.steps, 3);
  EXPECT_EQ(test::read_file(folder_ / "own.json"), load_model(checkpoint("run", 3), make_backend("cpu")).tokenizer->files()->tokenizer);
  resumed[0] = "data.tokenizer=" + other;
  resumed[2] = "training.steps=4";
  resumed.push_back(text("model.vocab_size=", Tokenizer::from_path(file).size()));
  EXPECT_EQ(test::error_of([&] { run("run", resumed); }).code(), ExitCode::usage) << "the ids of another tokenizer";
}

TEST_F(RunTokenizerTest, IsThatOfTheFolderWhichTheRunStartsFrom) {
  const std::string file = trained(270, "own.json");
  run("first", sets({"data.tokenizer=" + file}));
  export_model(checkpoint("first", 2), folder_ / "export", {}, make_backend("cpu"));
  const std::string from = "checkpoint.init_from=" + (folder_ / "export");
  nlohmann::json json = {{"data", {{"path", folder_ / "text.txt"}}},
                         {"training", {{"steps", 1}, {"seq_len", 16}, {"micro_batch_size", 2}}},
                         {"logging", {{"dir", folder_ / "runs/%n"}, {"run_name", "second"}}}};
  const auto load = [&](std::vector<std::string> more) {
    more.push_back(from);
    return load_run_config({.file = folder_ / "run.json", .text = json.dump(), .set_files = {}, .sets = std::move(more)});
  };
  EXPECT_EQ(load({}).config.data.tokenizer, folder_ / "export");
  EXPECT_EQ(load({"data.tokenizer=null"}).config.data.tokenizer, std::nullopt) << "token files alone";
  EXPECT_EQ(load({"data.tokenizer=byte"}).config.data.tokenizer, "byte");
  run(load({}));
  EXPECT_EQ(load_model(checkpoint("second", 1), make_backend("cpu")).tokenizer->files()->tokenizer, test::read_file(file));
  test::write_file(folder_ / "export/tokenizer.json", R"({"model":{"type":"WordPiece"}})");
  const Error unusable = test::error_of([&] { load({}); });
  EXPECT_EQ(unusable.code(), ExitCode::usage);
  EXPECT_THAT(unusable.what(), HasSubstr("WordPiece"));
  EXPECT_EQ(load({"data.tokenizer=null"}).config.data.tokenizer, std::nullopt) << "the data may be tokens";
  EXPECT_FALSE(load_model(folder_ / "export", make_backend("cpu")).tokenizer.has_value());
}

}  // namespace mantissa::run_tokenizer_test
