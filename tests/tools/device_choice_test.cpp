// A checkpoint has no device: one that was saved on some device is evaluated, continued, exported and verified on any other, and trained on
// there.
#include <gmock/gmock.h>

#include "async_device.h"
#include "backend/gpus.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint_shards.h"
#include "exports.h"
#include "hf/export_weights.h"
#include "process.h"
#include "shared_run.h"
#include "tool_commands.h"
#include "train/evaluate.h"

namespace mantissa::device_choice_test {

using nlohmann::json;
using test::AsyncDevice;
using test::ClosedDevice;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Words = std::vector<std::string>;

class DeviceChoices : public test::ExportTest {
 protected:
  // fp32, of which the CPU backends give sums of other bits, as they add in another order.
  static Words sets(Words more) {
    Words out = test::kShape;
    out.insert(out.end(), {"precision.dtype=fp32", "precision.recipe=mxfp8", "data.tokenizer=byte"});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  // Three steps by the plain kernels of the CPU.
  static void SetUpTestSuite() { shared_ = std::make_unique<test::SharedRun>(sets({"training.device=cpu_reference"})); }
  static void TearDownTestSuite() { shared_.reset(); }
  DeviceChoices() { shared_->copy_to(run_folder("run")); }

  // Makes the checkpoint say that it was saved on a device which this build lacks.
  static void say_cuda(const std::string& saved) {
    test::change_manifest(saved, [](Manifest& manifest) {
      json config = json::parse(manifest.config);
      config.at("training").at("device") = "cuda";
      manifest.config = config.dump();
    });
  }

  // Returns the output of a command that succeeds.
  static std::string output(const Words& words, const Words& more = {}) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    const test::CommandResult result = test::command_result(all);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return result.output;
  }

  // The log-probabilities that eval writes with these options.
  std::vector<float> logprobs(const Words& options) const {
    output({"eval", saved_, "--prompt-ids", "97,98,99,100,104,97,98", "--logprobs", "out.jsonl"}, options);
    const json line = json::parse(test::read_file(path("out.jsonl")));
    std::vector<float> out;
    for (const json& value : line.at("logprobs"))
      if (!value.is_null()) out.push_back(value.get<float>());
    return out;
  }
  std::vector<float> logprobs_on(std::unique_ptr<Backend> device) const {
    const LoadedModel loaded = load_model(saved_, std::move(device));
    return target_logprobs(*loaded.model, batch_of({97, 98, 99, 100, 104, 97, 98}));
  }

  // All files of an export that a device makes.
  std::map<std::string, std::string> files_by(std::unique_ptr<Backend> device, const std::string& from, const ExportOptions& options) {
    const std::string out = text("export", ++runs_);
    export_model(from, path(out), options, std::move(device));
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(path(out))) files[entry.path().filename()] = test::read_file(entry.path());
    return files;
  }

  static inline std::unique_ptr<test::SharedRun> shared_;
  const std::string saved_ = checkpoint("run", 3);
  test::WorkingFolder here_{folder_.path()};
};

TEST_F(DeviceChoices, EvalHasTheBitsOfTheDeviceThatItIsGiven) {
  const std::vector<float> plain = logprobs_on(make_backend("cpu_reference")), fast = logprobs_on(make_backend("cpu"));
  ASSERT_EQ(plain.size(), 6U);
  ASSERT_NE(plain, fast);
  for (const bool cuda : {false, true}) {
    if (cuda) say_cuda(saved_);
    EXPECT_EQ(logprobs({}), fast) << "not those of the device that trained";
    EXPECT_EQ(logprobs({"--device", "cpu_reference"}), plain);
  }
  EXPECT_EQ(logprobs_on(std::make_unique<ClosedDevice>()), fast);
  EXPECT_EQ(logprobs_on(std::make_unique<AsyncDevice>()), fast);
}

TEST_F(DeviceChoices, GenerateContinuesOnAnyDevice) {
  const Words words = {"generate", saved_, "--prompt-ids", "97,98", "--temperature", "0", "--max-new-tokens", "5"};
  const std::string before = output(words);
  say_cuda(saved_);
  EXPECT_EQ(output(words), before);
  EXPECT_EQ(output(words, {"--device", "cpu_reference"}).substr(0, 6), "97 98 ");
}

TEST_F(DeviceChoices, ExportWritesTheSameBytesOnAnyDevice) {
  say_cuda(saved_);
  for (const ExportWeights weights : {ExportWeights::dequantized, ExportWeights::packed}) {
    const ExportOptions options{.weights = weights};
    const auto expected = files_by(make_backend("cpu"), saved_, options);
    EXPECT_EQ(files_by(make_backend("cpu_reference"), saved_, options), expected);
    EXPECT_EQ(files_by(std::make_unique<ClosedDevice>(), saved_, options), expected);
    EXPECT_EQ(files_by(std::make_unique<AsyncDevice>(), saved_, options), expected);
  }
  const std::string packed = path("export6");
  const auto again = files_by(make_backend("cpu"), packed, {.weights = ExportWeights::packed});
  EXPECT_EQ(files_by(std::make_unique<ClosedDevice>(), packed, {.weights = ExportWeights::packed}), again) << "codes as they are";
  for (const char* const device : {"auto", "cpu_reference"}) {
    const std::string out = std::string("out-") + device;
    output({"export", saved_, "--output", out, "--device", device});
    EXPECT_EQ(test::read_file(path(out) + "/model.safetensors"), test::read_file(path("export1/model.safetensors"))) << device;
    EXPECT_THAT(output({"verify", out, "--against", saved_, "--device", device}), HasSubstr("0 values differ"));
  }
}

TEST_F(DeviceChoices, AnExportIsMadeAndLoadedOnTheDeviceThatIsGiven) {
  auto closed = std::make_unique<ClosedDevice>();
  const ClosedDevice& device = *closed;
  ModelExport model(saved_, {}, std::move(closed));
  std::filesystem::create_directory(path("out"));
  model.begin(path("out"));
  model.write(path("out"), 0, 1);
  EXPECT_GT(device.uploads(), 0);
  EXPECT_GT(device.waits(Lane::compute), 0);
  export_to(saved_, "folder");
  EXPECT_EQ(load_model(path("folder"), make_backend("cpu_reference")).device->name(), std::string("cpu_reference"));
}

// A chunk of a large matrix may begin and end inside a block.
TEST_F(DeviceChoices, RowsInsideBlocksAreThoseOfTheWholeOnAnyDevice) {
  const std::string weight = "layers.0.mlp.down.weight";
  constexpr int64_t kRows = 64, kColumns = 96, kBegin = 5, kEnd = 49;
  test::set_element(saved_, "master." + weight, 40 * kColumns, 3.0F);  // so that its block has another scale
  CheckpointReader reader(saved_);
  CheckpointWeights masters(reader);
  const SavedModel model = saved_model(reader);
  std::vector<std::unique_ptr<Backend>> devices;
  devices.push_back(make_backend("cpu"));
  devices.push_back(std::make_unique<ClosedDevice>());
  devices.push_back(std::make_unique<AsyncDevice>());
  for (auto& device : devices) {
    ForwardWeights weights(masters, model.plan, std::move(device));
    std::vector<float> whole(kRows * kColumns), part((kEnd - kBegin) * kColumns);
    weights.read(weight, 0, kRows, whole);
    weights.read(weight, kBegin, kEnd, part);
    EXPECT_EQ(part, std::vector<float>(whole.begin() + kBegin * kColumns, whole.begin() + kEnd * kColumns));
    const std::vector<std::byte> codes = weights.codes(weight, 0, kRows), scales = weights.scales(weight, 0, kRows);
    const auto rows_of = [](const std::vector<std::byte>& all, int64_t width) {
      return std::vector<std::byte>(all.begin() + kBegin * width, all.begin() + kEnd * width);
    };
    EXPECT_EQ(weights.codes(weight, kBegin, kEnd), rows_of(codes, kColumns));
    EXPECT_EQ(weights.scales(weight, kBegin, kEnd), rows_of(scales, kColumns / 32));
  }
}

TEST_F(DeviceChoices, VerifyMakesCodesOnAnyDevice) {
  say_cuda(saved_);
  const std::string intact = output({"verify", saved_});
  EXPECT_THAT(intact, HasSubstr("the codes of 8 weights follow from their masters"));
  EXPECT_EQ(output({"verify", saved_, "--device", "cpu_reference"}), intact);
  CheckpointReader reader(saved_);
  ClosedDevice closed;
  EXPECT_EQ(verify_codes(reader, closed), 8);
  EXPECT_GT(closed.waits(Lane::compute), 0);
  AsyncDevice async;
  EXPECT_EQ(verify_codes(reader, async), 8);
}

TEST_F(DeviceChoices, ARunStartsFromWeightsOfAnotherDevice) {
  const auto losses = [&](const std::string& name, const std::string& device) {
    return run(name, sets({"checkpoint.init_from=" + saved_, "training.device=" + device})).losses;
  };
  const std::vector<double> fast = losses("fast", "auto"), plain = losses("plain", "cpu_reference");
  EXPECT_NE(fast, plain);
  say_cuda(saved_);
  EXPECT_EQ(losses("fast again", "auto"), fast);
  EXPECT_EQ(losses("plain again", "cpu_reference"), plain);
}

TEST_F(DeviceChoices, ARunGoesOnAndOnAnotherDeviceWhichItSays) {
  run("start", sets({}));
  const std::string start = checkpoint("start", 3);
  const auto losses = [&](const std::string& name, const std::string& device) {
    open_log({.console = false, .file = path("log-" + name)});
    const Words more = {"training.steps=6", "checkpoint.resume=" + start, "training.device=" + device};
    const std::vector<double> out = run(name, sets(more)).losses;
    close_log();
    return out;
  };
  const std::vector<double> fast = losses("fast", "auto"), plain = losses("plain", "cpu_reference");
  ASSERT_EQ(fast.size(), 3U);
  EXPECT_NE(fast, plain);
  EXPECT_THAT(test::read_file(path("log-fast")), Not(HasSubstr("training.device")));
  EXPECT_THAT(test::read_file(path("log-plain")), HasSubstr("training.device: auto in the checkpoint, cpu_reference here"));
  say_cuda(start);
  EXPECT_EQ(losses("fast again", "auto"), fast);
  EXPECT_THAT(test::read_file(path("log-fast again")), HasSubstr("training.device: cuda in the checkpoint, auto here"));
}

// The message of a build without CUDA, or of one on a host without a GPU.
auto says_why_there_is_no_gpu(const std::string& before) {
  return AnyOf(HasSubstr(before + "this build has no backend cuda, because"),
               HasSubstr(before + "no GPU can be used: " + find_gpus().text));
}

TEST_F(DeviceChoices, ADeviceThatIsNotThereIsNamedBeforeAnythingIsWritten) {
  if (find_gpus().usable) GTEST_SKIP() << "this host has it";
  for (Words words : {Words{"eval", saved_, "--prompt-ids", "97,98", "--logprobs", "out.jsonl"},
                      {"generate", saved_},
                      {"export", saved_, "--output", "out"},
                      {"verify", saved_},
                      {"conformance", MANTISSA_SOURCE_DIR "/tests/golden"}}) {
    SCOPED_TRACE(words[0]);
    words.insert(words.end(), {"--device", "cuda"});
    const auto absent = test::command_result(words);
    EXPECT_EQ(absent.exit_code, 3);
    EXPECT_THAT(absent.error, AllOf(says_why_there_is_no_gpu("--device: "), HasSubstr("; --device cpu computes without one")));
    EXPECT_EQ(absent.output, "");
    words.back() = "gpu";
    const auto unknown = test::run_mantissa(words, ".");
    EXPECT_EQ(unknown.exit_code, 2);
    EXPECT_THAT(unknown.errors, AllOf(HasSubstr("--device"), HasSubstr("cpu_reference")));
  }
  for (const char* const name : {"out", "out.jsonl"}) EXPECT_FALSE(std::filesystem::exists(name)) << name;
}

// A run says so before it makes a folder.
TEST_F(DeviceChoices, ARunNeedsTheDeviceThatItNames) {
  if (find_gpus().usable) GTEST_SKIP() << "this host has it";
  const Error error = test::error_of([&] { run("other", sets({"training.device=cuda"})); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(), AllOf(says_why_there_is_no_gpu(""), HasSubstr("; training.device=cpu computes without one")));
  EXPECT_FALSE(std::filesystem::exists(run_folder("other")));
}

}  // namespace mantissa::device_choice_test
