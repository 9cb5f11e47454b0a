// The golden vectors of this project, the kernels against them, and planted faults.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "files.h"
#include "golden_vectors.h"
#include "tools/conformance/golden_check.h"

namespace mantissa::golden_files_test {

using namespace tools;

const std::string kFolder = std::string(MANTISSA_SOURCE_DIR) + "/tests/golden/";
constexpr size_t kHeader = 64;

bool is_vector(const std::string& name) { return name.ends_with(".mxg") || name.ends_with(".mxm"); }

// Begin of each section of the payload in the file, in order, with the file's end last.
struct Section {
  std::string name;
  size_t begin, end;
};

std::vector<Section> sections(const GoldenQuantization& file) {
  std::vector<Section> out;
  size_t at = kHeader;
  const auto add = [&](const char* name, size_t bytes) { out.push_back({name, at, at + bytes}), at += bytes; };
  add("input", file.input.size());
  add("scales", file.scales.size());
  add("codes", file.codes.size());
  add("dequantized", 4 * file.dequantized.size());
  add("swizzled", file.swizzled.size());
  return out;
}

std::string with_flipped_bit(std::string bytes, size_t at, int bit) {
  bytes[at] = static_cast<char>(bytes[at] ^ static_cast<char>(1 << bit));
  return bytes;
}

std::string mended(std::string bytes) {
  const uint32_t crc = reflected_crc<kZlibPolynomial>(std::string_view(bytes).substr(kHeader));
  std::memcpy(bytes.data() + 48, &crc, 4);
  return bytes;
}

// The error of a file: the message of parsing it, or the first difference.
std::string problem(const std::string& name, const std::string& bytes, Backend& device) {
  try {
    return conformance_difference(parse_golden_file(name, bytes), device);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    return error.what();
  }
}

class GoldenFiles : public ::testing::Test {
 protected:
  std::string content(const std::string& name) { return test::read_file(kFolder + name); }
  GoldenQuantization quantization(const std::string& name) { return std::get<GoldenQuantization>(parse_golden_file(name, content(name))); }

  std::unique_ptr<Backend> fast_ = make_backend("cpu"), reference_ = make_backend("cpu_reference");
};

TEST_F(GoldenFiles, AreWhatTheSlowReferenceMakes) {
  std::set<std::string> present, made;
  for (const auto& [name, bytes] : test::golden_files()) {
    made.insert(name);
    EXPECT_TRUE(std::filesystem::exists(kFolder + name) && content(name) == bytes) << name << ": run make_golden_vectors tests/golden";
  }
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    if (entry.is_regular_file()) present.insert(entry.path().filename().string());
  }
  EXPECT_EQ(present, made);
}

TEST_F(GoldenFiles, AreReproducedByEveryBackend) {
  for (const auto& [name, bytes] : test::golden_files()) {
    for (Backend* const device : {fast_.get(), reference_.get()}) {
      if (!is_vector(name)) continue;
      EXPECT_EQ(problem(name, bytes, *device), "") << name << " on " << device->name();
    }
  }
  for (Backend* const device : {fast_.get(), reference_.get()}) {
    EXPECT_EQ(worked_examples_difference(content("worked_examples.json"), "worked_examples.json", *device), "");
  }
}

TEST_F(GoldenFiles, AnyFlippedByteIsFound) {
  for (const char* const name : {"e2m1_flashinfer_special_row.mxg", "e4m3_rceil_wide_f32_col.mxg", "e5m2_floor_wide_tile.mxg",
                                 "swizzle_96x34_col.mxg", "gemm_e5m2_e4m3.mxm"}) {
    const std::string bytes = content(name);
    for (size_t at = 0; at < bytes.size(); ++at) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(~flipped[at]);
      const std::string found = problem(name, flipped, *reference_);
      ASSERT_TRUE(found.starts_with(at < kHeader ? "" : "payload: crc32")) << name << " at " << at << ": " << found;
      ASSERT_FALSE(found.empty()) << name << " at " << at;
    }
  }
}

TEST_F(GoldenFiles, EveryFlippedBitOfTheHeaderIsFound) {
  for (const auto& [name, bytes] : test::golden_files()) {
    if (!is_vector(name)) continue;
    for (size_t bit = 0; bit < 8 * kHeader; ++bit) {
      EXPECT_NE(problem(name, with_flipped_bit(bytes, bit / 8, static_cast<int>(bit % 8)), *reference_), "") << name << " bit " << bit;
    }
  }
}

TEST_F(GoldenFiles, AFlippedBitUnderAMendedCrcIsFoundInItsSection) {
  for (const char* const name : {"e2m1_flashinfer_special_row.mxg", "e4m3_rceil_special_row.mxg", "e5m2_floor_ties_row.mxg",
                                 "e2m1_floor_wide_tile.mxg", "e4m3_rceil_wide_f32_col.mxg", "swizzle_96x34_col.mxg"}) {
    const std::string bytes = content(name);
    const GoldenQuantization file = quantization(name);
    for (const Section& section : sections(file)) {
      if (section.name == "input") continue;
      for (size_t at = section.begin; at < section.end; ++at) {
        const size_t value = (at - section.begin) / 4;
        if (section.name == "dequantized" && (file.dequantized[value] & 0x7F800000U) == 0x7F800000U) continue;  // any NaN will do
        for (int bit = 0; bit < 8; ++bit) {
          const std::string found = problem(name, mended(with_flipped_bit(bytes, at, bit)), *reference_);
          ASSERT_TRUE(found.starts_with(section.name + ": [")) << name << " at " << at << " bit " << bit << ": '" << found << "'";
        }
      }
    }
  }
}

TEST_F(GoldenFiles, AFlippedBitOfAnOperandChangesTheGemm) {
  const std::string name = "gemm_e4m3_e4m3.mxm", bytes = content(name);
  const auto file = std::get<GoldenGemm>(parse_golden_file(name, bytes));
  const size_t end = kHeader + file.a_scales.size() + file.a_codes.size() + file.b_scales.size() + file.b_codes.size();
  for (size_t at = kHeader; at < end; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      const std::string flipped = with_flipped_bit(bytes, at, bit);
      if (((bytes[at] | flipped[at]) & 0x7F) == 0) continue;  // the sign of a zero
      ASSERT_TRUE(problem(name, mended(flipped), *reference_).starts_with("GEMM: ")) << at << " bit " << bit;
    }
  }
  for (size_t at = end + 6; at < bytes.size(); at += 8) {  // exponents and leading bits of D and S
    EXPECT_TRUE(problem(name, mended(with_flipped_bit(bytes, at, 3)), *reference_).starts_with("GEMM: ")) << at;
  }
}

TEST_F(GoldenFiles, AGemmMayBeOffByMoreTheDeeperItIs) {
  for (const int64_t k : {32, 4096}) EXPECT_DOUBLE_EQ(gemm_tolerance(k), 1e-6);
  EXPECT_DOUBLE_EQ(gemm_tolerance(8192), 2e-6);
  EXPECT_DOUBLE_EQ(gemm_tolerance(32768), 8e-6);
}

TEST_F(GoldenFiles, ADifferenceNamesItsFirstIndexAndBothValues) {
  const std::string name = "e4m3_rceil_special_row.mxg", bytes = content(name);
  const Section codes = sections(quantization(name))[2];
  std::string flipped = with_flipped_bit(bytes, codes.begin + 9 * 32 + 1, 0);
  flipped = with_flipped_bit(flipped, codes.begin + 11 * 32, 0);
  EXPECT_EQ(problem(name, mended(flipped), *fast_), "codes: [9, 1] is 0x76, expected 0x77; 2 of 512 differ");
}

TEST_F(GoldenFiles, TheHeaderMustAgreeWithTheName) {
  const auto found = [&](const std::string& name, const std::string& as) { return problem(as, content(name), *reference_); };
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "e5m2_rceil_special_row.mxg"), "header: the format is e4m3, the name says 'e5m2'");
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "e4m3_floor_special_row.mxg"), "header: the rule is rceil, the name says 'floor'");
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "e4m3_rceil_special_col.mxg"), "header: blocks are 'row', the name says 'col'");
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "e4m3_rceil_special_f32_row.mxg"), "header: the input is bf16, the name says fp32");
  EXPECT_EQ(found("e4m3_rceil_wide_f32_col.mxg", "e4m3_rceil_wide_col.mxg"), "header: the input is fp32, the name says bf16");
  EXPECT_EQ(found("swizzle_96x34_col.mxg", "swizzle_34x96_col.mxg"), "header: the matrix is 96x34, the name says 34x96");
  EXPECT_EQ(found("gemm_e5m2_e4m3.mxm", "gemm_e4m3_e5m2.mxm"), "header: the formats call for the name gemm_e5m2_e4m3.mxm");
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "a.mxg").substr(0, 5), "name:");
  EXPECT_EQ(found("e4m3_rceil_special_row.mxg", "_.mxg").substr(0, 5), "name:");
}

TEST_F(GoldenFiles, WhatIsCutOffOrAppendedIsFound) {
  for (const char* const name : {"e2m1_rceil_ties_row.mxg", "gemm_e4m3_e4m3.mxm"}) {
    const std::string bytes = content(name);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const std::string cut = bytes.substr(0, size);
      const std::string found = problem(name, size > kHeader ? mended(cut) : cut, *reference_);
      ASSERT_TRUE(found.starts_with(size < kHeader ? "header: " : "payload: ")) << name << " cut to " << size << ": " << found;
    }
    EXPECT_EQ(problem(name, mended(bytes + '\0'), *reference_), "payload: 1 bytes are left over");
  }
}

TEST(Crc32, IsThatOfZlib) { EXPECT_EQ(reflected_crc<kZlibPolynomial>("123456789"), 0xCBF43926U); }

}  // namespace mantissa::golden_files_test
