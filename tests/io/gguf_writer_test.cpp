// The keys and tensor infos of GGUF files, byte by byte, and read again.
#include <gmock/gmock.h>

#include "files.h"
#include "io/gguf_file.h"
#include "testing.h"

namespace mantissa::gguf_writer_test {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::string little(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string string(const std::string& text) { return little(uint64_t{text.size()}) + text; }

TEST(GgufWriter, TheFrontIsWhatTheFormatSaysToTheByte) {
  GgufKeys keys;
  keys.add_u32("a", 7);
  keys.add_bools("b", {true, false});
  const GgufLayout layout = gguf_layout(keys, {{.name = "m", .type = GgmlType::mxfp4, .shape = {3, 64}}, {.name = "v", .shape = {2}}});
  std::string expected = "GGUF" + little(uint32_t{3}) + little(uint64_t{2}) + little(uint64_t{2});
  expected += string("a") + little(uint32_t{4}) + little(uint32_t{7});
  expected += string("b") + little(uint32_t{9}) + little(uint32_t{7}) + little(uint64_t{2}) + std::string("\1\0", 2);
  expected += string("m") + little(uint32_t{2}) + little(uint64_t{64}) + little(uint64_t{3}) + little(uint32_t{39}) + little(uint64_t{0});
  expected +=
      string("v") + little(uint32_t{1}) + little(uint64_t{2}) + little(uint32_t{0}) + little(uint64_t{128});  // 102 bytes and padding
  expected.resize((expected.size() + 31) / 32 * 32, '\0');
  EXPECT_EQ(layout.front, expected);
  EXPECT_EQ(layout.tensors[0].bytes, 3 * 2 * 17);
  EXPECT_EQ(layout.tensors[1].begin, std::ssize(expected) + 128);
  EXPECT_EQ(layout.bytes, std::ssize(expected) + 160);
}

TEST(GgufWriter, EveryKeyIsReadAsItWasAdded) {
  GgufKeys keys;
  keys.add_u32("u", 4294967295);
  keys.add_f32("f", 1e-5);
  keys.add_bool("yes", true);
  keys.add_bool("no", false);
  keys.add_string("s", "a\nb");
  keys.add_strings("strings", {"", "\xC3\xA9", "c"});
  keys.add_i32s("ints", {-1, 5});
  const GgufLayout layout = gguf_layout(keys, {});
  const GgufHeader header(layout.front, layout.bytes, "test");
  EXPECT_EQ(header.integer("u"), 4294967295);
  EXPECT_EQ(header.number("f"), 1e-5);
  EXPECT_EQ(header.boolean("yes"), true);
  EXPECT_EQ(header.boolean("no"), false);
  EXPECT_EQ(header.string("s"), "a\nb");
  EXPECT_THAT(header.strings("strings").value(), ElementsAre("", "\xC3\xA9", "c"));
  EXPECT_THAT(header.integers("ints").value(), ElementsAre(-1, 5));
}

TEST(GgufWriter, AKeyStandsOnceAndRowsAreWholeBlocks) {
  GgufKeys keys;
  keys.add_u32("a", 1);
  EXPECT_THAT(error_of([&] { keys.add_bool("a", true); }).what(), HasSubstr("a is there twice"));
  EXPECT_THAT(error_of([&] { keys.add_u32("b", -1); }).what(), HasSubstr("b: -1 does not fit"));
  EXPECT_THAT(error_of([&] {
                gguf_layout(keys, {{.name = "m", .type = GgmlType::mxfp4, .shape = {3, 48}}});
              }).what(),
              HasSubstr("m: rows of 48 elements in blocks of 32"));
}

}  // namespace mantissa::gguf_writer_test
