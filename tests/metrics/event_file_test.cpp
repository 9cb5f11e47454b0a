// TensorBoard event files and metrics.jsonl.
#include <gmock/gmock.h>

#include <array>
#include <limits>
#include <nlohmann/json.hpp>

#include "event_records.h"
#include "files.h"
#include "mantissa/base/log.h"
#include "metrics/run_folder.h"

namespace mantissa::test::event_file_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string bytes_of_hex(const std::string& digits) {
  std::string out;
  for (size_t i = 0; i < digits.size(); i += 2) out += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return out;
}

TEST(Crc32c, HasThePublishedValues) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720 B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(EventFile, VersionRecordHasTheReferenceBytes) {
  const std::string data = version_event(1.0);
  EXPECT_EQ(data, bytes_of_hex("09000000000000f03f1a0d627261696e2e4576656e743a32"));
  const std::string record = event_record(data);
  ASSERT_EQ(record.size(), 24u + 16);
  EXPECT_EQ(word_at(record, 8), 0x224b7fa3u);
  EXPECT_EQ(word_at(record, 36), 0x7a57bf86u);
}

TEST(EventFile, ScalarRecordHasTheReferenceBytes) {
  const TaggedValue loss{.tag = "loss", .value = 2.5f};
  const std::string data = scalar_event(7, 2.0, {&loss, 1});
  EXPECT_EQ(data, bytes_of_hex("09000000000000004010072a0d0a0b0a046c6f73731500002040"));
  const std::string record = event_record(data);
  ASSERT_EQ(record.size(), 26u + 16);
  EXPECT_EQ(word_at(record, 8), 0x2dd89b12u);
  EXPECT_EQ(word_at(record, 38), 0x60ecdfc2u);
}

TEST(EventFile, HistogramRecordHasABucketForEachNumberAfterAnEmptyOne) {
  EXPECT_EQ(histogram_event(7, 2.0, "s", {{-2, 3}, {0, 1}}),
            bytes_of_hex("09000000000000004010072a780a760a01732a71"
                         "0900000000000000c0"                                                       // least -2
                         "110000000000000000"                                                       // greatest 0
                         "190000000000001040"                                                       // number 4
                         "2100000000000018c0"                                                       // sum -6
                         "290000000000002840"                                                       // sum of squares 12
                         "322000000000000004c0000000000000f8bf000000000000e0bf000000000000e03f"     // ends -2.5, -1.5, -0.5, 0.5
                         "3a20000000000000000000000000000008400000000000000000000000000000f03f"));  // counts 0, 3, 0, 1
}

TEST(EventFile, StepsAboveOneByteAreVarints) { EXPECT_EQ(scalar_event(300, 0.0, {}).substr(9), bytes_of_hex("10ac022a00")); }

TEST(EventFile, RecordsFollowTheVersionAndAreThereAtOnce) {
  const TemporaryFolder folder;
  EventFile file(folder.path(), 1700000000.5);
  EXPECT_EQ(file.path().filename().string().rfind("events.out.tfevents.1700000000.", 0), 0u) << file.path();
  const std::array<TaggedValue, 2> scalars = {TaggedValue{"train/loss", 1.5f},
                                              TaggedValue{"train/lr", std::numeric_limits<float>::quiet_NaN()}};
  for (int64_t step = 1; step <= 200; ++step) file.write(step, 1700000001.0, scalars);
  const auto records = records_of(read_file(file.path()));
  ASSERT_EQ(records.size(), 201u);
  EXPECT_EQ(records[0], version_event(1700000000.5));
  EXPECT_EQ(records[200], scalar_event(200, 1700000001.0, scalars));
  EXPECT_EQ(file.failures(), 0);
}

TEST(EventFile, TwoFilesOfOneSecondHaveDifferentNamesAndAMissingFolderIsAnEnvironmentError) {
  const TemporaryFolder folder;
  EXPECT_NE(EventFile(folder.path(), 1.0).path(), EventFile(folder.path(), 1.0).path());
  EXPECT_EQ(error_of([&] { EventFile(folder / "missing", 1.0); }).code(), ExitCode::environment);
}

// ---- metrics.jsonl

// The bytes that are written for an event, as the only line of metrics.jsonl or as an event file.
std::string written(const auto& event, bool lines = true) {
  const TemporaryFolder folder;
  Metrics({.run_name = {}, .dir = folder.path().string(), .jsonl = lines, .tensorboard = !lines}).write(event);
  std::string out;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) out += read_file(entry.path());
  return out;
}

std::vector<std::string> keys_of(const std::string& content) {
  std::vector<std::string> keys;
  const auto line = nlohmann::ordered_json::parse(content);
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  return keys;
}

TEST(MetricsLines, HaveTheirKeysInOrder) {
  const std::string step = written(StepEvent{.mfu = {}, .precision = PrecisionSummary{.fp32_gemms = 3}});
  EXPECT_THAT(keys_of(step), ElementsAre("type", "step", "loss", "lr", "grad_norm", "tokens", "dt_ms", "tok_s", "mfu", "mfu_meas",
                                         "mem_gib", "eta_s", "skipped", "time", "q_sqnr_db", "fp32_gemms"));
  EXPECT_THAT(step, EndsWith(",\"q_sqnr_db\":null,\"fp32_gemms\":3}\n"));
  EXPECT_THAT(written(StepEvent{.mfu = {}, .memory_gib = 4.5, .gpu_memory_gib = 34.5}),
              AllOf(HasSubstr("\"mem_gib\":4.5,"), EndsWith(",\"gpu_mem_gib\":34.5}\n")));
  EXPECT_THAT(written(StepEvent{.mfu = {}, .padding = 0.25}), EndsWith(",\"padding\":0.25}\n"));
  const std::string failed = written(SaveEvent{.step = 7, .problem = "no space"});
  EXPECT_THAT(keys_of(failed), ElementsAre("type", "step", "path", "seconds", "time", "problem"));
  EXPECT_THAT(failed, StartsWith("{\"type\":\"checkpoint\",\"step\":7,\"path\":\"\",\"seconds\":0.0,\"time\":"));
  EXPECT_THAT(written(ExportEvent{{.step = 7, .path = "e"}}),
              StartsWith("{\"type\":\"export\",\"step\":7,\"path\":\"e\",\"seconds\":0.0,\"time\":"));
  const PrecisionEvent scales{.step = 1, .module = "m", .role = "input", .amax = 0.5, .scales = {{126, 1}, {9, 2}, {255, 3}}};
  EXPECT_THAT(written(scales),
              StartsWith("{\"type\":\"precision\",\"step\":1,\"module\":\"m\",\"role\":\"input\",\"sqnr_db\":null,\"clipped\":0.0,"
                         "\"flushed\":0.0,\"amax\":0.5,\"scales\":{\"9\":2,\"126\":1,\"255\":3},\"time\":"))
      << "in the order of their codes";
  EXPECT_THAT(written(EvaluationEvent{.result = {.loss = std::numeric_limits<double>::quiet_NaN()}}), HasSubstr("\"loss\":null,"));
  EXPECT_THAT(written(StepEvent{.loss = {}, .mfu = {}}), HasSubstr("\"loss\":null,"));
  EXPECT_THAT(written(SampleEvent{.step = 1, .prompt = "", .text = "a\xff\nb"}), HasSubstr("\"text\":\"a\xef\xbf\xbd\\nb\","));
}

TEST(MetricsLines, TensorBoardHasTheShareOfPaddingWhereThereIsSome) {
  EXPECT_THAT(written(StepEvent{.mfu = {}, .padding = 0.25}, false), HasSubstr("data/padding"));
  EXPECT_THAT(written(StepEvent{.mfu = {}}, false), ::testing::Not(HasSubstr("data/padding")));
}

TEST(MetricsLines, TensorBoardHasNoLossOfAStepWithoutTargets) {
  EXPECT_THAT(written(StepEvent{.mfu = {}}, false), AllOf(HasSubstr("train/loss"), HasSubstr("train/grad_norm")));
  EXPECT_THAT(written(StepEvent{.loss = {}, .mfu = {}}, false),
              AllOf(::testing::Not(HasSubstr("train/loss")), HasSubstr("train/grad_norm")));
}

TEST(MetricsLines, TensorBoardHasThePeakMemoryOfAGpuAndItsUtilization) {
  EXPECT_THAT(written(StepEvent{.mfu = 0.5, .gpu_memory_gib = 34.5}, false),
              AllOf(HasSubstr("perf/mfu"), HasSubstr("mem/peak_gib"), HasSubstr("mem/gpu_peak_gib")));
  EXPECT_THAT(written(StepEvent{.mfu = {}}, false), AllOf(HasSubstr("mem/peak_gib"), ::testing::Not(HasSubstr("mem/gpu_peak_gib"))));
}

TEST(MetricsLines, AResumedRunAppendsAndATornLastLineIsCut) {
  const TemporaryFolder folder;
  const auto started_after = [&](const std::string& before) {
    write_file(folder / "metrics.jsonl", before);
    Metrics({.run_name = {}, .dir = folder.path().string(), .tensorboard = false}).write(StartEvent{});
    return read_file(folder / "metrics.jsonl");
  };
  const std::string whole = "{\"step\":1}\n", start = "{\"type\":\"start\",";
  for (const std::string& torn : {std::string("{\"st"), std::string(10000, 'x'), std::string()})
    EXPECT_THAT(started_after(whole + torn), StartsWith(whole + start));
  EXPECT_THAT(started_after("torn from the start"), StartsWith(start));
}

}  // namespace mantissa::test::event_file_test
