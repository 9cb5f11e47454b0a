// TensorBoard event files and metrics.jsonl.
#include "mantissa/io/event_file.h"

#include <gmock/gmock.h>

#include <array>
#include <limits>
#include <nlohmann/json.hpp>

#include "event_records.h"
#include "files.h"
#include "mantissa/base/log.h"
#include "mantissa/io/jsonl.h"

namespace mantissa::test {
namespace {

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
                         "290000000000002840"                                                       // of squares 12
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

TEST(EventFile, TwoFilesOfOneSecondHaveDifferentNames) {
  const TemporaryFolder folder;
  EXPECT_NE(EventFile(folder.path(), 1.0).path(), EventFile(folder.path(), 1.0).path());
}

TEST(EventFile, AMissingFolderIsAnEnvironmentError) {
  const TemporaryFolder folder;
  try {
    EventFile(folder / "missing", 1.0);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::environment);
  }
}

// ---- metrics.jsonl

TEST(JsonLines, WritesOneObjectALineInTheGivenOrder) {
  const TemporaryFolder folder;
  JsonLines file(folder / "metrics.jsonl");
  file.write({{"type", "step"}, {"step", 1}, {"loss", 2.5}});
  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"type\":\"step\",\"step\":1,\"loss\":2.5}\n");
}

TEST(JsonLines, NanBecomesNullAndBrokenTextIsReplaced) {
  const TemporaryFolder folder;
  JsonLines file(folder / "metrics.jsonl");
  file.write({{"loss", std::numeric_limits<double>::quiet_NaN()}, {"text", "a\xff\nb"}});
  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"loss\":null,\"text\":\"a\xef\xbf\xbd\\nb\"}\n");
}

TEST(JsonLines, AResumedRunAppends) {
  const TemporaryFolder folder;
  JsonLines(folder / "metrics.jsonl").write({{"step", 1}});
  JsonLines(folder / "metrics.jsonl").write({{"step", 2}});
  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(JsonLines, ATornLastLineIsCutOnResume) {
  const TemporaryFolder folder;
  const std::string whole = "{\"step\":1}\n";
  for (const std::string& torn : {std::string("{\"st"), std::string(10000, 'x'), std::string()}) {
    write_file(folder / "metrics.jsonl", whole + torn);
    JsonLines(folder / "metrics.jsonl").write({{"step", 2}});
    EXPECT_EQ(read_file(folder / "metrics.jsonl"), whole + "{\"step\":2}\n");
  }
  write_file(folder / "metrics.jsonl", "torn from the start");
  JsonLines(folder / "metrics.jsonl").write({{"step", 2}});
  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"step\":2}\n");
}

TEST(JsonLines, AFullDiskIsCountedAndNotThrown) {
  JsonLines file("/dev/full");
  for (int step = 0; step < 3; ++step) file.write({{"step", step}});
  EXPECT_EQ(file.failures(), 3);
}

}  // namespace
}  // namespace mantissa::test
