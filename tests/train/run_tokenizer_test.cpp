// The tokenizer.json of a run: into checkpoints and exports, and from the folder that a run starts from.
#include <gmock/gmock.h>

#include "hf/export.h"
#include "hf/load_model.h"
#include "text/bpe_trainer.h"
#include "train/run.h"
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
  // The run "second", of one step unless told otherwise, of a configuration that names neither model nor tokenizer.
  LoadedConfig started(const std::string& from, std::vector<std::string> more) const {
    const nlohmann::json json = {{"data", {{"path", folder_ / "text.txt"}}},
                                 {"training", {{"steps", 1}, {"seq_len", 16}, {"micro_batch_size", 2}}},
                                 {"schedule", {{"type", "constant"}, {"warmup_steps", 1}}},
                                 {"checkpoint", {{"init_from", from}}},
                                 {"logging", {{"dir", folder_ / "runs/%n"}, {"run_name", "second"}}}};
    return load_run_config({.file = folder_ / "run.json", .text = json.dump(), .set_files = {}, .sets = std::move(more)});
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
  const auto load = [&](std::vector<std::string> more) { return started(folder_ / "export", std::move(more)); };
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

// The ids of the weights keep their meaning, whatever the kind of the tokenizer.
TEST_F(RunTokenizerTest, IsThatOfTheRunWhichTheRunStartsFrom) {
  const std::string file = trained(270, "own.json");
  for (const std::string& tokenizer : {file, std::string("char"), std::string("byte")}) {
    SCOPED_TRACE(tokenizer);
    for (const char* const name : {"first", "second", "third"}) std::filesystem::remove_all(run_folder(name));
    run("first", sets({"data.tokenizer=" + tokenizer}));
    test::write_file(folder_ / "few.txt", test::repeated("hgfh", 1000));  // other letters would have other ids
    const LoadedConfig second = started(run_folder("first"), {"data.path=" + (folder_ / "few.txt")});
    EXPECT_EQ(second.config.data.tokenizer, tokenizer == "byte" ? tokenizer : run_folder("first"));
    EXPECT_EQ(second.report.origin("data.tokenizer"), "derived");
    const std::vector<int32_t> ids = load_model(checkpoint("first", 2), make_backend("cpu")).tokenizer->encode("hgf");
    run(second);
    const LoadedModel loaded = load_model(checkpoint("second", 1), make_backend("cpu"));
    EXPECT_EQ(loaded.tokenizer->encode("hgf"), ids);
    if (tokenizer == file) {
      EXPECT_EQ(loaded.tokenizer->files()->tokenizer, test::read_file(file));
    }
    // Its config.json can be run again, and goes on without the first run.
    const ConfigSources again{.file = run_folder("second") + "/config.json", .sets = {"logging.run_name=third"}};
    run(load_run_config(again));
    EXPECT_EQ(load_model(checkpoint("third", 1), make_backend("cpu")).tokenizer->encode("hgf"), ids);
    std::filesystem::remove_all(run_folder("first"));
    const ConfigSources rest{.file = run_folder("second") + "/config.json", .sets = {"training.steps=2"}};
    EXPECT_EQ(run(load_run_config(rest, Inputs::must_exist, 0, Start::resumed)).steps.size(), 1U);
  }
  run("first", sets({"data.tokenizer=" + file}));
  EXPECT_EQ(started(run_folder("first"), {"data.tokenizer=null"}).config.data.tokenizer, std::nullopt) << "token files alone";
  EXPECT_EQ(started(run_folder("first"), {"data.tokenizer=byte"}).config.data.tokenizer, "byte");
}

// A checkpoint has all that a run needs to go on but its data.
TEST_F(RunTokenizerTest, OfAFolderThatIsGoneIsTakenFromTheCheckpointAndSoIsTheModel) {
  const std::string file = trained(270, "own.json"), bytes = test::read_file(file), folder = folder_ / "export";
  run("first", sets({"data.tokenizer=" + file}));
  export_model(checkpoint("first", 2), folder, {}, make_backend("cpu"));
  const std::vector<std::string> more = {"training.steps=4", "checkpoint.interval=1"};
  const auto with = [&](std::vector<std::string> sets) {
    sets.insert(sets.begin(), more.begin(), more.end());
    return sets;
  };
  const std::string straight = text(run(started(folder, with({"logging.run_name=straight"}))).losses.at(3));
  run(started(folder, with({"training.steps=1"})));
  std::filesystem::remove_all(folder);
  EXPECT_THAT(test::error_of([&] {
                started(folder, {"logging.run_name=new", "checkpoint.resume=auto"});
              }).what(),
              HasSubstr("checkpoint.init_from: no such checkpoint or folder of a model"));
  const LoadedConfig resumed = started(folder, with({"checkpoint.resume=auto", "training.steps=2"}));
  EXPECT_EQ(resumed.config.data.tokenizer, folder) << "which is told, as it was";
  ASSERT_NE(resumed.tokenizer, nullptr);
  EXPECT_EQ(resumed.tokenizer->from, run_folder("second") + "/checkpoints");
  EXPECT_EQ(run(resumed).steps.size(), 1U);
  const ConfigSources own{.file = run_folder("second") + "/config.json", .sets = {"training.steps=3"}};
  EXPECT_EQ(run(load_run_config(own, Inputs::must_exist, 0, Start::resumed)).steps.size(), 1U);
  // The run goes on by the path of a checkpoint, and without its newest one.
  std::filesystem::resize_file(checkpoint("second", 3) + "/manifest.json", 100);
  EXPECT_EQ(run(started(folder, with({"checkpoint.resume=auto", "training.steps=3"}))).steps.size(), 1U);
  const std::vector<std::string> named =
      with({"checkpoint.init_from=null", "logging.run_name=third", "checkpoint.resume=" + checkpoint("second", 3)});
  EXPECT_EQ(text(run(started(folder, named)).losses.at(0)), straight);
  EXPECT_EQ(load_model(checkpoint("third", 4), make_backend("cpu")).tokenizer->files()->tokenizer, bytes);
}

// Only the name that the checkpoint was trained with stands for the checkpoint's own.
TEST_F(RunTokenizerTest, OfAResumeIsThatOfTheRunWhichIsNamed) {
  run("first", sets({"data.tokenizer=" + trained(270, "own.json")}));
  run("other", sets({"data.tokenizer=" + trained(265, "other.json")}));
  std::filesystem::copy(run_folder("first"), run_folder("copy"), std::filesystem::copy_options::recursive);
  run(started(run_folder("first"), {}));
  const auto resumed = [&](const std::string& tokenizer, const char* steps) {
    run(started(run_folder("first"), {"checkpoint.resume=auto", text("training.steps=", steps), "data.tokenizer=" + tokenizer}));
  };
  const Error other = test::error_of([&] { resumed(run_folder("other"), "2"); });
  EXPECT_EQ(other.code(), ExitCode::usage);
  EXPECT_THAT(other.what(), HasSubstr("a tokenizer that differs from data.tokenizer"));
  const Error none = test::error_of([&] { resumed(folder_ / "runs/furst", "2"); });
  EXPECT_EQ(none.code(), ExitCode::usage);
  EXPECT_THAT(none.what(), HasSubstr("data.tokenizer: there is no "));
  EXPECT_NO_THROW(resumed(run_folder("copy"), "2")) << "which has the same";
  EXPECT_NO_THROW(resumed(run_folder("first"), "3"));
}

TEST_F(RunTokenizerTest, PromptsOfSamplesThatBeginTwiceOrAreCutAreToldBefore) {
  test::write_file(folder_ / "own.json", R"({"version": "1.0", "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
      "special_tokens": {"<s>": {"ids": [3]}}}})");
  LoadedConfig loaded = config("run", {"data.tokenizer=" + (folder_ / "own.json"),
                                       R"(eval.samples={"prompts": ["<s>ab", "ab", "aaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaa"]})"});
  const Data data = open_run_data(loaded, {});
  EXPECT_THAT(prompt_warnings(loaded.config, data, encode_prompts(loaded.config.eval, data)),
              ::testing::ElementsAre(HasSubstr("eval.samples.prompts.0: the begin token"),
                                     HasSubstr("eval.samples.prompts.2: the prompt has 17 tokens, but the model has 16 positions")));
}

}  // namespace mantissa::run_tokenizer_test
