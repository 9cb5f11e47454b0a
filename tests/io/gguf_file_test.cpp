// GGUF files: what they hold is read as it was written; those that are forged are refused with a reason, in bounded memory.
#include "io/gguf_file.h"

#include <gmock/gmock.h>

#include <limits>

#include "gguf_inputs.h"
#include "io/ggml_blocks.h"

namespace mantissa::test::gguf_file_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kF32 = 0, kQ80 = 8;

GgufHeader header_of(const std::string& bytes) { return {bytes, std::ssize(bytes), "FILE"}; }
std::string refusal(const std::string& bytes, ExitCode code = ExitCode::data) {
  const Error error = error_of([&] { header_of(bytes); });
  EXPECT_EQ(error.code(), code) << error.what();
  EXPECT_LE(std::string_view(error.what()).size(), 600U);
  return error.what();
}

const std::string kTwoRows(32, 'x');
GgufParts small() {
  return {.keys = {gguf_text("general.architecture", "llama")}, .infos = {gguf_info("a", {4, 2}, kF32, 0)}, .data = kTwoRows};
}
GgufParts with_infos(std::vector<std::string> infos, size_t bytes) { return {.infos = std::move(infos), .data = std::string(bytes, 'x')}; }

TEST(GgufFile, KeysAndTensorsAreThoseOfTheFile) {
  GgufParts parts = small();
  parts.keys = {gguf_key("a.u8", GgufType::u8, le(uint8_t{200})),
                gguf_key("a.i8", GgufType::i8, le(int8_t{-3})),
                gguf_key("a.u16", GgufType::u16, le(uint16_t{60'000})),
                gguf_key("a.i16", GgufType::i16, le(int16_t{-300})),
                gguf_u32("a.u32", 4'000'000'000),
                gguf_key("a.i32", GgufType::i32, le(int32_t{-70'000})),
                gguf_key("a.u64", GgufType::u64, le(uint64_t{1} << 62)),
                gguf_key("a.i64", GgufType::i64, le(int64_t{-1} << 40)),
                gguf_f32("a.f32", 1e-5F),
                gguf_key("a.f64", GgufType::f64, le(0.1)),
                gguf_bool("a.bool", true),
                gguf_text("a.text", "grün"),
                gguf_texts("a.texts", {"x", "", "yz"}),
                gguf_i32s("a.list", {3, -1})};
  parts.infos.push_back(gguf_info("b", {32}, kQ80, 32));
  parts.data += std::string(34, 'y');
  const GgufHeader header = header_of(gguf_bytes(parts));
  EXPECT_EQ(header.version(), 3U);
  EXPECT_EQ(header.integer("a.u8"), 200);
  EXPECT_EQ(header.integer("a.i8"), -3);
  EXPECT_EQ(header.integer("a.u16"), 60'000);
  EXPECT_EQ(header.integer("a.i16"), -300);
  EXPECT_EQ(header.integer("a.u32"), 4'000'000'000);
  EXPECT_EQ(header.integer("a.i32"), -70'000);
  EXPECT_EQ(header.integer("a.u64"), int64_t{1} << 62);
  EXPECT_EQ(header.integer("a.i64"), int64_t{-1} << 40);
  EXPECT_EQ(header.number("a.f32"), 1e-5) << "the decimal that was meant";
  EXPECT_EQ(header.number("a.f64"), 0.1);
  EXPECT_EQ(header.number("a.i8"), -3.0);
  EXPECT_EQ(header.boolean("a.bool"), true);
  EXPECT_EQ(header.string("a.text"), "grün");
  EXPECT_THAT(header.strings("a.texts").value(), ElementsAre("x", "", "yz"));
  EXPECT_THAT(header.integers("a.list").value(), ElementsAre(3, -1));
  EXPECT_EQ(header.integer("none"), std::nullopt);
  EXPECT_EQ(header.keys().size(), parts.keys.size());
  ASSERT_EQ(header.tensors().size(), 2U);
  EXPECT_THAT(header.tensors()[0].shape, ElementsAre(2, 4)) << "the outermost first";
  EXPECT_EQ(header.tensors()[1].type, GgmlType::q8_0);
  EXPECT_EQ(header.tensors()[1].bytes, 34);
  EXPECT_EQ(header.tensors()[1].begin, header.tensors()[0].begin + 32);
}

TEST(GgufFile, AFileIsReadInPieces) {
  const TemporaryFolder folder;
  GgufParts parts = small();
  parts.keys.push_back(gguf_texts("long", std::vector<std::string>(200'000, "0123456789")));  // more than the first piece
  write_file(folder / "a.gguf", gguf_bytes(parts));
  const GgufFile file(folder / "a.gguf");
  EXPECT_EQ(file.header().strings("long").value().back(), "0123456789");
  std::string bytes(5, '\0');
  file.read(file.header().tensors()[0], 27, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, "xxxxx");
  EXPECT_EQ(error_of([&] { file.read(file.header().tensors()[0], 28, std::as_writable_bytes(std::span(bytes))); }).code(),
            ExitCode::internal);
  EXPECT_TRUE(is_gguf_file(folder / "a.gguf"));
  write_file(folder / "magic", "GGUFx");
  write_file(folder / "text", "text");
  EXPECT_TRUE(is_gguf_file(folder / "magic"));
  EXPECT_FALSE(is_gguf_file(folder / "text"));
  EXPECT_FALSE(is_gguf_file(folder.path()));
  EXPECT_FALSE(is_gguf_file(folder / "nothing.gguf"));
  EXPECT_EQ(error_of([&] { GgufFile none(folder / "nothing.gguf"); }).code(), ExitCode::usage);
}

TEST(GgufFile, AlignmentIsThatOfItsKey) {
  GgufParts parts = small();
  parts.keys.push_back(gguf_u32("general.alignment", 128));
  parts.alignment = 128;
  parts.infos.push_back(gguf_info("b", {1}, kF32, 128));
  parts.data.resize(128 + 4);
  const GgufHeader header = header_of(gguf_bytes(parts));
  EXPECT_EQ(header.alignment(), 128);
  EXPECT_EQ(header.tensors()[1].begin % 128, 0);
  parts.data.resize(256);
  EXPECT_NO_THROW(header_of(gguf_bytes(parts))) << "with the last padding";
  parts.data.resize(257);
  EXPECT_THAT(refusal(gguf_bytes(parts)), HasSubstr("the tensors end here, the file has"));
  parts = small();
  for (const uint32_t alignment : {0U, 3U, 48U}) {
    parts.keys = {gguf_u32("general.alignment", alignment)};
    EXPECT_THAT(refusal(gguf_bytes(parts)), HasSubstr(text("general.alignment must be a power of two, got ", alignment)));
  }
  parts.keys = {gguf_key("general.alignment", GgufType::u64, le(uint64_t{32}))};
  EXPECT_THAT(refusal(gguf_bytes(parts)), HasSubstr("general.alignment must be a u32, got u64"));
}

TEST(GgufFile, FilesThatAreNone) {
  for (const char* bytes : {"", "G", "GGU", "ggufxxxxxxxxxxxxxxxxxxxxxxxx", "{\"a\":1}"})
    EXPECT_THAT(refusal(bytes), HasSubstr("FILE: byte 0: is no GGUF file"));
  GgufParts parts = small();
  for (const uint32_t version : {0U, 1U, 4U, 0x03000000U}) {
    parts.version = version;
    EXPECT_THAT(refusal(gguf_bytes(parts)),
                HasSubstr(version == 0x03000000U || version == 0 ? "byte order of big-endian" : "of GGUF; mantissa reads 2 and 3"));
  }
  parts.version = 2;
  EXPECT_NO_THROW(header_of(gguf_bytes(parts)));
  const std::string whole = gguf_bytes(small());
  for (size_t size = 4; size < whole.size(); ++size) refusal(whole.substr(0, size));
}

// Counts and sizes that no file of this size can have are refused before anything of their size is made.
TEST(GgufFile, CountsBeyondTheFile) {
  constexpr uint64_t kMany = uint64_t{1} << 60;
  GgufParts parts = small();
  for (const uint64_t count : {kMany, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1000}}) {
    parts.tensor_count = count;
    EXPECT_THAT(refusal(gguf_bytes(parts)), AllOf(HasSubstr("byte 8: "), HasSubstr(text(count, " tensors in a file of")),
                                                  HasSubstr(" bytes, which is truncated or damaged")));
    parts.tensor_count.reset();
    parts.key_count = count;
    EXPECT_THAT(refusal(gguf_bytes(parts)), AllOf(HasSubstr("byte 16: "), HasSubstr(text(count, " key-values in a file of"))));
    parts.key_count.reset();
    GgufParts list = small();
    list.keys = {gguf_key("k", GgufType::array, le(uint32_t{8}) + le(count))};
    EXPECT_THAT(refusal(gguf_bytes(list)), HasSubstr(text("key \"k\": ", count, " elements")));
    list.keys = {gguf_key("k", GgufType::array, le(uint32_t{10}) + le(count))};
    EXPECT_THAT(refusal(gguf_bytes(list)), HasSubstr(text("key \"k\": ", count, " elements")));
    list.keys = {gguf_key("k", GgufType::string, le(count))};
    EXPECT_THAT(refusal(gguf_bytes(list)), HasSubstr(text("key \"k\": a string of ", count, " bytes")));
    list.keys = {le(count)};
    EXPECT_THAT(refusal(gguf_bytes(list)), HasSubstr(count == 1000 ? "1000 bytes are to follow" : "the name of a key has"));
    list.keys.clear();
    list.infos = {le(count) + "name"};
    EXPECT_THAT(refusal(gguf_bytes(list)), HasSubstr(count == 1000 ? "1000 bytes are to follow" : "the name of a tensor has"));
  }
  // A sparse file may be as large, and is not read.
  parts.keys = {gguf_key("k", GgufType::array, le(uint32_t{0}) + le(uint64_t{1} << 28))};
  EXPECT_THAT(error_of([&] { GgufHeader header(gguf_bytes(parts), int64_t{1} << 30, "FILE"); }).what(),
              HasSubstr("key \"k\": the keys and tensor infos have more than 134217728 bytes"));
}

TEST(GgufFile, KeysThatAreNone) {
  const auto refused = [](const std::string& key) {
    GgufParts parts = small();
    parts.keys = {key};
    return refusal(gguf_bytes(parts));
  };
  EXPECT_THAT(refused(gguf_string("k") + le(uint32_t{13}) + le(uint64_t{0})), HasSubstr("key \"k\": there is no type 13 of values"));
  EXPECT_THAT(refused(gguf_key("k", GgufType::array, le(uint32_t{9}) + le(uint64_t{1}))), HasSubstr("an array of arrays"));
  EXPECT_THAT(refused(gguf_key("k", GgufType::boolean, "\2")), HasSubstr("a bool that is neither 0 nor 1"));
  EXPECT_THAT(refused(gguf_key("k", GgufType::array, le(uint32_t{7}) + le(uint64_t{3}) + std::string("\0\1\3", 3))),
              HasSubstr("neither 0 nor 1"));
  EXPECT_THAT(refused(gguf_u32("", 1)), HasSubstr("the name of a key has 0 bytes"));
  EXPECT_THAT(refused(gguf_u32("a\nb", 1)), HasSubstr("no UTF-8 without control characters"));
  EXPECT_THAT(refused(gguf_u32("\xff", 1)), HasSubstr("no UTF-8"));
  GgufParts parts = small();
  parts.keys = {gguf_u32("twice", 1), gguf_u32("once", 2), gguf_u32("twice", 1)};
  EXPECT_THAT(refusal(gguf_bytes(parts)), HasSubstr("the key \"twice\" is there twice"));
}

TEST(GgufFile, ValuesOfAnotherTypeAreRefusedByTheirKey) {
  GgufParts parts = small();
  parts.keys = {gguf_u32("n", 1), gguf_text("t", "\xff"), gguf_texts("l", {"\xff"}), gguf_f32("f", std::numeric_limits<float>::infinity()),
                gguf_key("u", GgufType::u64, le(~uint64_t{0}))};
  const GgufHeader header = header_of(gguf_bytes(parts));
  const auto wrong = [](const auto& get) {
    const Error error = error_of(get);
    EXPECT_EQ(error.code(), ExitCode::data);
    return std::string(error.what());
  };
  EXPECT_EQ(wrong([&] { header.string("n"); }), "FILE: key \"n\": must be a string, got u32");
  EXPECT_EQ(wrong([&] { header.integer("t"); }), "FILE: key \"t\": must be an integer, got string");
  EXPECT_EQ(wrong([&] { header.string("t"); }), "FILE: key \"t\": is no UTF-8");
  EXPECT_EQ(wrong([&] { header.strings("l"); }), "FILE: key \"l\": entry 0 is no UTF-8");
  EXPECT_EQ(wrong([&] { header.strings("n"); }), "FILE: key \"n\": must be an array of strings, got u32 of u32");
  EXPECT_EQ(wrong([&] { header.integers("l"); }), "FILE: key \"l\": must be an array of integers, got array of string");
  EXPECT_EQ(wrong([&] { header.number("f"); }), "FILE: key \"f\": is inf");
  EXPECT_EQ(wrong([&] { header.number("l"); }), "FILE: key \"l\": must be a number, got array");
  EXPECT_EQ(wrong([&] { header.boolean("n"); }), "FILE: key \"n\": must be a bool, got u32");
  EXPECT_EQ(wrong([&] { header.integer("u"); }), "FILE: key \"u\": is an integer beyond 2^63");
}

TEST(GgufFile, TensorsThatCannotBe) {
  const auto refused = [](const std::vector<std::string>& infos, size_t bytes, ExitCode code = ExitCode::data) {
    return refusal(gguf_bytes(with_infos(infos, bytes)), code);
  };
  constexpr uint64_t kLarge = uint64_t{1} << 32;
  EXPECT_THAT(refused({gguf_info("a", {1, 1, 1, 1, 1}, kF32, 0)}, 32), HasSubstr("tensor \"a\": 5 dimensions, at most 4"));
  EXPECT_THAT(refused({gguf_info("a", {0}, kF32, 0)}, 32), HasSubstr("tensor \"a\": a dimension of 0"));
  EXPECT_THAT(refused({gguf_info("a", {~uint64_t{0}}, kF32, 0)}, 32), HasSubstr("a dimension of 18446744073709551615"));
  EXPECT_THAT(refused({gguf_info("a", {kLarge, kLarge}, kF32, 0)}, 32), HasSubstr("more elements than can be counted"));
  EXPECT_THAT(refused({gguf_info("a", {uint64_t{1} << 62}, kF32, 0)}, 32), HasSubstr("elements of F32 in a file of"));
  EXPECT_THAT(refused({gguf_info("a", {33}, kQ80, 0)}, 64), HasSubstr("rows of 33 elements are no whole blocks of Q8_0, which have 32"));
  EXPECT_THAT(refused({gguf_info("a", {1}, 4, 0)}, 32), HasSubstr("tensor \"a\": there is no type 4 of tensors"));
  EXPECT_THAT(refused({gguf_info("a", {1}, 1000, 0)}, 32), HasSubstr("there is no type 1000"));
  EXPECT_THAT(refused({gguf_info("a", {256}, 10, 0)}, 96, ExitCode::usage),
              HasSubstr("FILE: tensor \"a\": is Q2_K; mantissa reads F32, F16"));
  EXPECT_THAT(refused({gguf_info("a", {9}, kF32, 0)}, 32), HasSubstr("beyond the file"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, 32)}, 64), HasSubstr("begin at 32, and those of the tensors before it end at 0"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, ~uint64_t{31})}, 64), HasSubstr("those of the tensors before it end at 0"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, 4)}, 64), HasSubstr("begin at 4, no multiple of the alignment 32"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, 0), gguf_info("b", {8}, kF32, 0)}, 64),
              HasSubstr("tensor \"b\": its data begin at 0, and"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, 0), gguf_info("b", {8}, kF32, 64)}, 96),
              HasSubstr("tensor \"b\": its data begin at 64, and"));
  EXPECT_THAT(refused({gguf_info("a", {8}, kF32, 0), gguf_info("a", {8}, kF32, 32)}, 64), HasSubstr("the tensor \"a\" is there twice"));
  EXPECT_THAT(refused({gguf_info("", {8}, kF32, 0)}, 32), HasSubstr("the name of a tensor has 0 bytes"));
  EXPECT_THAT(refused({gguf_info(std::string(1025, 'a'), {8}, kF32, 0)}, 32), HasSubstr("1 to 1024 are accepted"));
  EXPECT_THAT(refused({gguf_info("a\x1b[2J", {8}, kF32, 0)}, 32), HasSubstr("no UTF-8 without control characters"));
}

TEST(GgufFile, TypesHaveTheNamesAndSizesOfGgml) {
  EXPECT_EQ(readable_ggml_types(), "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4");
  EXPECT_STREQ(ggml_type_name(39), "MXFP4");
  EXPECT_STREQ(ggml_type_name(16), "IQ2_XXS");
  EXPECT_EQ(ggml_type_name(4), nullptr);
  EXPECT_EQ(ggml_type_info(GgmlType::q6_k).bytes, 210);
  EXPECT_EQ(mantissa::gguf_key(gguf::kBlockCount, "qwen3moe"), "qwen3moe.block_count");
  EXPECT_EQ(mantissa::gguf_key(gguf::kName, "llama"), "general.name");
}

}  // namespace mantissa::test::gguf_file_test
