// Broken configurations through the real binary: exit code 2, the key with line and column, nothing left behind. And the configurations
// that are shipped: valid, and described by the committed schema.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/config/run_config.h"
#include "process.h"

namespace mantissa::config_errors_test {

using test::ProcessResult;
using test::read_file;
using test::repeated;
using test::run_mantissa;
using test::run_process;
using test::TemporaryFolder;
using test::write_file;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kData = R"("data": {"path": "text.txt", "tokenizer": "byte"})";

struct Broken {
  std::string sections;               // members of the config beside kData, or a whole text that starts with '!'
  std::vector<std::string> expected;  // what standard error must hold
};

const std::vector<Broken> kBrokenConfigs = {
    // Names.
    {R"("optimizer": {"weight_deacy": 0.1})", {"optimizer.weight_deacy: unknown key; did you mean 'weight_decay'?", "c.json:2:15"}},
    {R"("optimzer": {"lr": 0.1})", {"optimzer: unknown key; did you mean 'optimizer'?", "c.json:2:1"}},
    {R"("training": {"warmup_steps": 5})", {"did you mean 'schedule.warmup_steps'?", "c.json:2:14"}},
    {R"("training": {"train-iters": 5})", {"here it is 'training.steps'", "c.json:2:14"}},
    {R"("model": {"n_embd": 64})", {"here it is 'model.hidden_size'", "c.json:2:11"}},
    {R"("model": {"mob": null})", {"model.mob: unknown key", "c.json:2:11"}},
    {R"("eval": {"samples": {"promts": []}})", {"did you mean 'prompts'?", "c.json:2:22"}},
    {R"("training": {"device": "cuda"}, "precision": {"recipe": "own", "recipes": {"own": {"gemms": ["fprop"],
       "simulate": {"input": {"format": "e3m2"}}}}})",
     {"precision.recipe: recipe \"own\" of layers.0.attn.qkv simulates formats, which only CPUs do: set training.device to cpu",
      "c.json:2:"}},
    // Types.
    {R"("training": {"steps": "100"})", {"training.steps: must be an integer, got \"100\"", "c.json:2:23"}},
    {R"("training": {"steps": 1.5})", {"training.steps: must be an integer, got 1.5", "c.json:2:23"}},
    {R"("optimizer": {"lr": "fast"})", {"optimizer.lr: must be a number", "c.json:2:21"}},
    {R"("optimizer": {"lr": null})", {"optimizer.lr: must be a number, got null", "c.json:2:21"}},
    {R"("model": {"qk_norm": 1})", {"model.qk_norm: must be true or false, got 1", "c.json:2:22"}},
    {R"("model": [])", {"model: must be an object, got []", "c.json:2:10"}},
    {R"("eval": {"samples": {"prompts": "Once"}})", {"eval.samples.prompts: must be a list", "c.json:2:33"}},
    {R"("checkpoint": {"dir": 3})", {"checkpoint.dir: must be a string, got 3", "c.json:2:23"}},
    {R"("precision": {"dtype": "fp16"})", {"precision.dtype: must be one of fp32, bf16, got \"fp16\"", "c.json:2:24"}},
    {R"("model": {"norm": "rmsnorm"})", {"must be one of rms, layer", "did you mean 'rms'?", "c.json:2:19"}},
    // Ranges.
    {R"("optimizer": {"lr": -1})", {"optimizer.lr: must be positive, got -1", "c.json:2:21"}},
    {R"("optimizer": {"beta1": 1})", {"optimizer.beta1: must be below 1, got 1", "c.json:2:24"}},
    {R"("training": {"steps": 0})", {"training.steps: must be at least 1, got 0", "c.json:2:23"}},
    {R"("schedule": {"warmup_steps": 9223372036854775807})", {"schedule.warmup_steps: must be at most 1000000000000, got", "c.json:2:30"}},
    {R"("eval": {"iters": 9223372036854775807})", {"eval.iters: must be at most 1000000000 or null, got", "c.json:2:19"}},
    {R"("training": {"seed": -1})", {"training.seed: must be in [0, 18446744073709551615]", "c.json:2:22"}},
    {R"("training": {"threads": 9223372036854775808})", {"training.threads: must be at most 4096", "c.json:2:25"}},
    {R"("checkpoint": {"keep_latest": 1})", {"checkpoint.keep_latest: must be at least 2, got 1", "c.json:2:31"}},
    {R"("model": {"num_layers": -2})", {"model.num_layers: must be at least 1, got -2", "c.json:2:25"}},
    // Numbers that are none.
    {R"("optimizer": {"lr": 1e400})", {"number overflow", "c.json:2:21"}},
    {R"("optimizer": {"lr": NaN})", {"invalid literal", "c.json:2:21"}},
    {R"("training": {"seed": 18446744073709551616})", {"training.seed: integer beyond 64 bits", "c.json:2:22"}},
    // Text that is not JSON.
    {R"("optimizer": {"lr": 1, "lr": 2})", {"optimizer.lr: duplicate key \"lr\"", "c.json:2:24"}},
    {R"("model": {}, "model": {})", {"model: duplicate key", "c.json:2:14"}},
    {R"("training": {"steps": 3,})", {"comma after the last entry", "c.json:2:25"}},
    {"!\xef\xbb\xbf{}", {"c.json:1:1", "byte order mark"}},
    {"!{\n\"model\": {}", {"c.json:2:12", "unexpected end of input"}},
    {"!{} {}", {"c.json:1:4"}},
    {"!\n  To be, or not to be", {"c.json: is no configuration", "--set data.path=c.json"}},
    {"!", {"c.json:1:1"}},
    {"![1]", {"c.json:1:1: a config must be an object"}},
    {"!{\"a\": " + std::string(100'000, '[') + "}", {"nested more than 32 levels deep", "c.json:1:38"}},
    // Several keys.
    {R"("training": {"micro_batch_size": 4, "grad_accum": 3, "global_batch_size": 64})", {"4 * 3 = 12, not 64", "c.json:2:75"}},
    {R"("training": {"accumulation": "tree", "grad_accum": 3})", {"training.accumulation: tree needs a power of two", "c.json:2:30"}},
    {R"("model": {"hidden_size": 100})", {"model.hidden_size: must be a multiple", "c.json:2:26"}},
    {R"("training": {"seq_len": 4096})", {"training.seq_len: must be at most model.max_position_embeddings 1024", "c.json:2:25"}},
    // What no export could hold.
    {R"("model": {"norm": "layer"}, "checkpoint": {"export": {}})",
     {"checkpoint.export: no model of Hugging Face has these options", "model.position must be learned", "c.json:2:54"}},
    {R"("precision": {"recipe": "mxfp4_qat"}, "checkpoint": {"export": {"weights": "packed", "convention": "sglang"}})",
     {"checkpoint.export: ", "take the convention compressed-tensors"}},
    {R"("checkpoint": {"export": {"convention": "modelopt"}})",
     {"checkpoint.export: convention modelopt is of packed weights, and these are dequantized: drop it, or take weights packed",
      "c.json:2:26"}},
    {R"("model": {"moe": {"force_balance": true}}, "checkpoint": {"export": {}})",
     {"model.moe.force_balance: the architecture chooses by scores"}},
    {R"("precision": {"dtype": "fp32"}, "checkpoint": {"export": {"dtype": "bf16"}})",
     {"checkpoint.export.dtype: bf16 does not hold embed, which computes in fp32: take auto or fp32", "c.json:2:68"}},
    {R"("precision": {"dtype": "bf16", "recipes": {"wide": {"base": "mxfp8", "compute": "fp32"}},
"rules": [{"match": "*.mlp.down", "recipe": "wide"}]}, "model": {"mlp_bias": true, "qk_norm": false}, "checkpoint": {"export": {"dtype": "bf16"}})",
     {"checkpoint.export.dtype: bf16 does not hold layers.0.mlp.down, which computes in fp32: take auto or fp32"}},
    // Files.
    {R"("checkpoint": {"init_from": "none"})", {"checkpoint.init_from: no such checkpoint or folder of a model", "c.json:2:29"}},
    {R"("checkpoint": {"resume": "none"})", {"checkpoint.resume: no such checkpoint", "c.json:2:26"}},
    {"!{\n\"data\": {\"path\": \"no*.txt\", \"tokenizer\": \"byte\"}}", {"no*.txt\" matches no file", "text.txt", "c.json:2:18"}},
    {"!{\n\"data\": {\"path\": \".\", \"tokenizer\": \"byte\"}}", {"is a folder", "c.json:2:18"}},
    {"!{\n\"data\": {\"train\": [{\"path\": \"gone\"}], \"tokenizer\": \"byte\"}}", {"data.train.0.path: ", "c.json:2:29"}},
    {"!{\n\"data\": {\"path\": \"text.txt\", \"valid\": [{\"path\": \"text.txt\"}], \"tokenizer\": \"byte\"}}",
     {"data.path: excludes data.train and data.valid", "c.json:2:18"}},
    {"!{\n\"data\": {\"path\": \"text.txt\"}}", {"model.vocab_size: must be given", "c.json:1:1"}},
    {"!{}", {"data: must name what to train on", "c.json:1:1"}},
};

std::string listing(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) names.push_back(entry.path().string());
  std::sort(names.begin(), names.end());
  return ::testing::PrintToString(names);
}

class BrokenConfig : public ::testing::TestWithParam<size_t> {};

TEST_P(BrokenConfig, IsRefusedBeforeAnythingIsWritten) {
  const Broken& broken = kBrokenConfigs.at(GetParam());
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(20'000, 'x'));
  const bool whole = broken.sections.starts_with("!");
  write_file(folder / "c.json", whole ? broken.sections.substr(1) : "{" + std::string(kData) + ",\n" + broken.sections + "}");
  const std::string before = listing(folder.path());
  for (const std::vector<std::string>& command : {std::vector<std::string>{"train", "c.json"}, {"config", "check", "c.json"}}) {
    const ProcessResult result = run_mantissa(command, folder.path());
    EXPECT_EQ(result.exit_code, 2) << command.front() << '\n' << broken.sections.substr(0, 200);
    EXPECT_EQ(result.output, "");
    EXPECT_THAT(result.errors, StartsWith("error: "));
    for (const std::string& expected : broken.expected) EXPECT_THAT(result.errors, HasSubstr(expected));
    EXPECT_EQ(listing(folder.path()), before);
  }
}

INSTANTIATE_TEST_SUITE_P(All, BrokenConfig, ::testing::Range<size_t>(0, kBrokenConfigs.size()));

TEST(ConfigErrors, AllComeInOneRun) {
  const TemporaryFolder folder;
  write_file(folder / "c.json",
             "{\"optimizer\": {\"lr\": -1, \"bta1\": 0.5},\n \"training\": {\"steps\": 1.5},\n \"data\": {\"path\": \"no.txt\"}}");
  const ProcessResult result = run_mantissa({"train", "c.json", "--set", "eval.iters=0", "--set", "modle.norm=rms"}, folder.path());
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("7 errors"));
  for (const char* const part : {"c.json:1:22", "c.json:1:26", "c.json:2:24", "no.txt", "(--set eval.iters=0)", "did you mean 'model'?"}) {
    EXPECT_THAT(result.errors, HasSubstr(part));
  }
}

// Codes times scales are exact in bf16, whatever the module computes in.
TEST(ConfigErrors, AModuleOfCodesMayComputeInFp32AndBeExportedInBf16) {
  const TemporaryFolder folder;
  write_file(folder / "text.txt", std::string(20'000, 'x'));
  write_file(folder / "c.json", "{" + std::string(kData) +
                                    R"(, "precision": {"dtype": "bf16", "recipes": {"wide": {"base": "mxfp8", "compute": "fp32"}},
"rules": [{"match": "*.mlp.down", "recipe": "wide"}]}, "checkpoint": {"export": {"dtype": "bf16"}}})");
  const ProcessResult result = run_mantissa({"config", "check", "c.json"}, folder.path());
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

// The most memory that a process of this test has held so far, in bytes.
size_t most_resident() {
  rusage usage{};
  EXPECT_EQ(::getrusage(RUSAGE_CHILDREN, &usage), 0);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

TEST(HugeConfig, TakesMemoryInProportionToItsSizeAndPrintsFiftyErrors) {
  const TemporaryFolder folder;
  const auto many = [](const std::string& entry) { return "[" + repeated(entry + ",", 400'000 / (entry.size() + 1)) + entry + "]"; };
  std::string deep = many("1");
  for (int i = 0; i < 30; ++i) deep = "{\"" + std::string(10'000, 'k') + "\": " + deep + "}";
  for (const std::string& content :
       {deep, R"({"data": {"train": )" + many("{}") + "}}", R"({"data": {"train": )" + many("1") + "}}", R"({"x": )" + many("[]") + "}",
        R"({"eval": {"samples": {"prompts": )" + many("\"a\"") + "}}}", R"({"precision": {"rules": )" + many("{}") + "}}"}) {
    write_file(folder / "c.json", content);
    const ProcessResult result = run_mantissa({"config", "check", "c.json"}, folder.path());
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_LE(std::count(result.errors.begin(), result.errors.end(), '\n'), 52) << content.substr(0, 60);
    EXPECT_LE(most_resident(), 48 * content.size() + (64 << 20)) << content.substr(0, 60);
  }
}

std::filesystem::path source(const std::string& path) { return std::filesystem::path(MANTISSA_SOURCE_DIR) / path; }

std::vector<std::filesystem::path> shipped_configs() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(source("configs"))) {
    if (entry.path().extension() == ".json" && entry.path().filename() != "config.schema.json") files.push_back(entry.path());
  }
  return files;
}

TEST(ShippedConfigs, AreValidButForTheDataTheyName) {
  EXPECT_GE(shipped_configs().size(), 4u);
  for (const auto& file : shipped_configs()) {
    RunConfig config;
    ConfigReport report;
    read_config({.file = file.string()}, fields_of(config), report);
    if (file.stem() == "finetune") config.model.vocab_size = 300;  // its model is that of a folder
    resolve_run_config(config, report, file.string());
    EXPECT_NO_THROW(report.throw_if_failed()) << file;
  }
}

TEST(ShippedConfigs, QuickstartNeedsNothingButTheRepository) {
  const TemporaryFolder folder;
  const ProcessResult result = run_mantissa({"config", "check", source("configs/quickstart.json")}, folder.path());
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("\"tokenizer\": \"byte\",  // "));
}

TEST(Schema, IsTheOneThatWasCommitted) {
  const TemporaryFolder folder;
  const ProcessResult result = run_mantissa({"config", "schema"}, folder.path());
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, read_file(source("configs/config.schema.json")))
      << "generate it again: mantissa config schema > configs/config.schema.json";
}

constexpr const char* kValidate = R"(
import json, sys, jsonschema
schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)
errors = list(jsonschema.Draft202012Validator(schema).iter_errors(json.load(open(sys.argv[2]))))
for error in errors: print(error.json_path, error.message, file=sys.stderr)
sys.exit(1 if errors else 0)
)";

TEST(Schema, AcceptsWhatIsShippedAndRefusesWhatIsBroken) {
  const TemporaryFolder folder;
  if (run_process({"python3", "-c", "import jsonschema"}, folder.path()).exit_code != 0)
    GTEST_SKIP() << "python3-jsonschema is not installed";
  const auto validate = [&](const std::string& content) {
    write_file(folder / "plain.json", nlohmann::json::parse(content, nullptr, true, true).dump());  // without comments
    return run_process({"python3", "-c", kValidate, source("configs/config.schema.json"), folder / "plain.json"}, folder.path());
  };
  for (const auto& file : shipped_configs()) {
    const ProcessResult result = validate(read_file(file));
    EXPECT_EQ(result.exit_code, 0) << file << '\n' << result.errors;
  }
  EXPECT_EQ(validate(effective_config(RunConfig{})).exit_code, 0);
  for (const char* const sections :
       {R"({"optimizer": {"lr": 0}})", R"({"model": {"norm": "rmsnorm"}})", R"({"optimizor": {}})", R"({"training": {"steps": 1.5}})",
        R"({"training": {"seed": -1}})", R"({"eval": {"samples": {"promts": []}}})", R"({"data": {"train": [{"path": 3}]}})"}) {
    EXPECT_EQ(validate(sections).exit_code, 1) << sections;
  }
}

}  // namespace mantissa::config_errors_test
