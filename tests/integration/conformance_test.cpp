// `mantissa conformance` as a user runs it.
#include <gmock/gmock.h>

#include "process.h"

namespace mantissa::conformance_test {

using ::testing::EndsWith;
using ::testing::HasSubstr;

class Conformance : public ::testing::Test {
 protected:
  Conformance() { std::filesystem::copy(std::string(MANTISSA_SOURCE_DIR) + "/tests/golden", folder_.path()); }
  test::ProcessResult run(const std::string& device = "cpu") {
    return test::run_mantissa({"conformance", ".", "--device", device}, folder_.path());
  }
  void replace(const std::string& name, const std::string& from, const std::string& to) {
    std::string content = test::read_file(folder_ / name);
    const size_t at = content.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    test::write_file(folder_ / name, content.replace(at, from.size(), to));
  }

  test::TemporaryFolder folder_;
};

TEST_F(Conformance, PassesOnBothDevicesWithOneLineForEachFile) {
  for (const char* const device : {"cpu", "cpu_reference"}) {
    const auto result = run(device);
    EXPECT_EQ(result.exit_code, 0) << result.output << result.errors;
    const auto lines = std::count(result.output.begin(), result.output.end(), '\n');
    EXPECT_THAT(result.output, EndsWith(text("\n", lines - 1, " files: ", lines - 1, " passed, 0 failed\n")));
    EXPECT_THAT(result.output, HasSubstr("pass  e2m1_flashinfer_special_row.mxg\n"));
    EXPECT_THAT(result.output, HasSubstr("pass  worked_examples.json\n"));
  }
}

TEST_F(Conformance, ADamagedFileFailsAloneWithExitCodeOne) {
  std::string bytes = test::read_file(folder_ / "e4m3_rceil_ties_row.mxg");
  bytes.back() = static_cast<char>(~bytes.back());
  test::write_file(folder_ / "e4m3_rceil_ties_row.mxg", bytes);
  const auto result = run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("FAIL  e4m3_rceil_ties_row.mxg  payload: crc32 is "));
  EXPECT_THAT(result.output, HasSubstr(" passed, 1 failed\n"));
}

TEST_F(Conformance, AWrongWorkedExampleIsNamed) {
  replace("worked_examples.json", "0xb8", "0xb9");
  const auto result = run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      HasSubstr("FAIL  worked_examples.json  codes: [0, 2] is 0xb8, expected 0xb9; 1 of 32 differs (above the largest element: floor"));
}

TEST_F(Conformance, TheManifestMustAgree) {
  replace("manifest.json", "\"mode\": \"rceil\"", "\"mode\": \"floor\"");
  std::filesystem::remove(folder_ / "gemm_e4m3_e4m3.mxm");
  std::filesystem::copy_file(folder_ / "e5m2_rceil_ties_row.mxg", folder_ / "e5m2_rceil_more_row.mxg");
  const auto result = run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("FAIL  e4m3_rceil_ties_row.mxg  manifest: mode is \"floor\", the header says \"rceil\"\n"));
  EXPECT_THAT(result.output, HasSubstr("FAIL  gemm_e4m3_e4m3.mxm  manifest: the file is absent\n"));
  EXPECT_THAT(result.output, HasSubstr("FAIL  e5m2_rceil_more_row.mxg  manifest: the file is not listed\n"));
  EXPECT_THAT(result.output, HasSubstr(", 3 failed\n"));
}

TEST_F(Conformance, WithoutAManifestTheFilesSpeakForThemselves) {
  std::filesystem::remove(folder_ / "manifest.json");
  std::filesystem::rename(folder_ / "e5m2_rceil_ties_row.mxg", folder_ / "e4m3_rceil_same_row.mxg");
  const auto result = run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("FAIL  e4m3_rceil_same_row.mxg  header: the format is e5m2, the name says 'e4m3'\n"));
  EXPECT_THAT(result.output, HasSubstr(", 1 failed\n"));
}

TEST_F(Conformance, AFolderWithoutGoldenFilesIsAUsageErrorAndABrokenManifestADataError) {
  const test::TemporaryFolder empty;
  EXPECT_EQ(test::run_mantissa({"conformance", "."}, empty.path()).exit_code, 2);
  EXPECT_EQ(test::run_mantissa({"conformance", "absent"}, empty.path()).exit_code, 2);
  EXPECT_EQ(test::run_mantissa({"conformance", ".", "--device", "gpu"}, folder_.path()).exit_code, 2);
  test::write_file(folder_ / "manifest.json", "{\"files\": [{}]}");
  const auto result = run();
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.errors, HasSubstr("manifest.json: files[0]: has no \"file\""));
}

}  // namespace mantissa::conformance_test
