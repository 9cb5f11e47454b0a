// Reads TensorBoard event files back, checking every length and checksum.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "metrics/run_folder.h"

namespace mantissa::test {

inline uint32_t word_at(const std::string& bytes, size_t position) {
  uint32_t value = 0;
  for (size_t i = 4; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes.at(position + i));
  return value;
}

// The data of all records of a file; fails the test where a length or checksum is wrong.
inline std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> out;
  for (size_t at = 0; at < file.size();) {
    const size_t length = word_at(file, at);
    EXPECT_EQ(word_at(file, at + 4), 0u);
    EXPECT_EQ(word_at(file, at + 8), masked_crc32c(file.substr(at, 8)));
    out.push_back(file.substr(at + 12, length));
    EXPECT_EQ(word_at(file, at + 12 + length), masked_crc32c(out.back()));
    at += 16 + length;
  }
  return out;
}

}  // namespace mantissa::test
