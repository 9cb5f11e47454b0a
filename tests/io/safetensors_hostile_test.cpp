// Safetensors files and indexes that are forged: each is refused with a reason, in bounded memory, and nothing is written. Files that break
// off, or in which any one byte is another, are in tests/fuzz/fuzz_test.cpp.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "safetensors_files.h"

namespace mantissa::test::safetensors_hostile_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Each file is refused with its path, the byte and a reason.
class HostileSafetensors : public Safetensors {
 protected:
  std::string path_ = folder_ / "model.safetensors";

  void expect_refused(const std::string& bytes, const std::string& reason) {
    write_file(path_, bytes);
    const Error error = error_of([&] { SafetensorsFile file(path_); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), AllOf(::testing::StartsWith(path_ + ": byte "), HasSubstr(reason)));
    EXPECT_LE(std::string_view(error.what()).size(), 600u);
  }
  // A file that holds these members, and as many bytes behind the header.
  void expect_header_refused(const std::string& members, size_t bytes, const std::string& reason) {
    expect_refused(safetensors_bytes_of("{" + members + "}", std::string(bytes, 'x')), reason);
  }
};

TEST_F(HostileSafetensors, LengthsBeyondTheFile) {
  for (size_t size = 0; size < 8; ++size) expect_refused(std::string(size, '\x01'), "ends within the length");
  const uint64_t one = 1;
  for (const uint64_t length : {one << 63, ~uint64_t{0}, ~uint64_t{0} - 7, one << 62, one << 32, uint64_t{100'000'001}})
    expect_refused(safetensors_bytes_of("{}", "", length), "at most 100000000 are accepted");
  for (const uint64_t length : {uint64_t{3}, uint64_t{10}, uint64_t{100'000'000}})
    expect_refused(safetensors_bytes_of("{}", "", length), text("a header of ", length, " bytes in a file of 10"));
  expect_refused(safetensors_bytes_of(""), "must begin with {");
}

// An error about a tensor is at its name, one about a value at this value.
TEST_F(HostileSafetensors, TheByteIsThatOfWhatIsWrong) {
  const auto refused_at = [&](const std::string& members, const std::string& wrong, const std::string& reason) {
    const std::string bytes = safetensors_bytes_of("{" + members + "}", "xxxx");
    expect_refused(bytes, text("byte ", bytes.find(wrong), ": "));
    expect_refused(bytes, reason);
  };
  const std::string good = tensor_text("good", "U8", "[4]", "[0,4]") + ",";
  for (const char* const offsets : {"[4,0]", "[0,5]", "[0,3]", "[0]"})
    refused_at(good + tensor_text("bad", "U8", "[4]", offsets), "\"bad\"", "tensor \"bad\": ");
  refused_at(good + tensor_text("bad", "U9", "[4]", "[0,4]"), "\"U9\"", "there is no dtype \"U9\"");
  refused_at(good + tensor_text("bad", "U8", "[-4]", "[0,4]"), "-4", "shape must hold whole numbers");
  refused_at(good + R"("bad":{"dtype":"U8","shape":[4],"extra":1})", "\"extra\"", "unknown key");
}

TEST_F(HostileSafetensors, SizesThatCannotBe) {
  for (const char* const dtype : {"F4", "F6_E2M3", "U8", "BF16", "C64"}) {
    const auto refused = [&](const char* shape, const char* offsets, const char* reason) {
      expect_header_refused(tensor_text("a", dtype, shape, offsets), 16, reason);
    };
    refused("[9223372036854775807,2]", "[0,16]", "more elements than can be counted");
    refused("[4294967296,4294967296]", "[0,0]", "more elements than can be counted");
    refused("[0,9223372036854775807,9223372036854775807]", "[0,0]", "more elements than can be counted");
    refused("[18446744073709551615]", "[0,16]", "larger than any file");
    refused("[-1]", "[0,16]", "whole numbers of 0 or more");
    refused("[1000]", "[0,16]", "hold 16");
    refused("[1,1,1,1,1,1,1,1,1]", "[0,16]", "more than 8 numbers");
  }
  for (const char* dtype : {"F4", "F6_E2M3", "F6_E3M2"})
    expect_header_refused(tensor_text("a", dtype, "[3]", "[0,2]"), 2, "not a whole number of bytes");
}

TEST_F(HostileSafetensors, OffsetsThatDoNotTileTheFile) {
  const auto expect_tensors_refused = [&](const std::vector<std::pair<int, int>>& offsets, size_t bytes, const std::string& reason) {
    std::string members;
    for (const auto& [begin, end] : offsets)
      members += (members.empty() ? "" : ",") +
                 tensor_text(text("t", members.size()), "U8", text('[', end - begin, ']'), text('[', begin, ',', end, ']'));
    expect_header_refused(members, bytes, reason);
  };
  for (const size_t more : {1U, 2U, 4096U}) expect_tensors_refused({{0, 4}, {4, 8}}, 8 + more, "the tensors end here");
  expect_tensors_refused({}, 1, "the tensors end here");
  expect_tensors_refused({{0, 4}, {4, 8}}, 7, "end beyond the file");
  expect_tensors_refused({{1, 4}}, 4, "no tensor has the bytes before");
  expect_tensors_refused({{0, 4}, {5, 8}}, 8, "no tensor has the bytes before");
  for (const auto& offsets :
       std::vector<std::vector<std::pair<int, int>>>{{{0, 4}, {3, 8}}, {{0, 8}, {0, 8}}, {{0, 8}, {2, 4}}, {{0, 4}, {2, 2}, {4, 8}}})
    expect_tensors_refused(offsets, 8, "another tensor has bytes of");
  for (const char* offsets : {"[4,0]", "[9223372036854775807,0]"})
    expect_header_refused(tensor_text("a", "U8", "[4]", offsets), 4, "end before they begin");
  for (const char* offsets : {"[0,5]", "[4,8]", "[0,9223372036854775807]", "[9223372036854775807,9223372036854775807]"})
    expect_header_refused(tensor_text("a", "U8", "[4]", offsets), 4, "end beyond the file");
  for (const char* offsets : {"[0,-4]", "[-4,0]", "[0,4.0]", "[0,1e1]", "[0,null]", "[0,\"4\"]", "[[0],4]", "[0,{}]", "[true,4]"})
    expect_header_refused(tensor_text("a", "U8", "[4]", offsets), 4, "data_offsets must hold whole numbers");
  for (const char* offsets : {"[]", "[0]"}) expect_header_refused(tensor_text("a", "U8", "[4]", offsets), 4, "must have two data_offsets");
  expect_header_refused(tensor_text("a", "U8", "[4]", "[0,4,4]"), 4, "more than 2 numbers");
  for (const char* offsets : {"4", "null", "{}", "\"0,4\"", "true"})
    expect_header_refused(tensor_text("a", "U8", "[4]", offsets), 4, "data_offsets must be a list");
}

TEST_F(HostileSafetensors, HeadersThatAreNone) {
  for (const char* header : {"[]", "0", "null", " {}", "\xef\xbb\xbf{}", "\"{}\"", "{}\n", "{}\t ", "{}x", "{", "{}{}]"})
    expect_refused(safetensors_bytes_of(header), "the header must");
  for (const char* header : {"{}}", "{a:1}", "{} {}", "{/**/}", "{\"a\":1e400}"})
    expect_refused(safetensors_bytes_of(header), "the header is not JSON");
  expect_refused(safetensors_bytes_of(std::string("{ \0  }", 6)), "the header is not JSON: a zero byte");
  for (const char* value : {"1", "-1", "1.5", "null", "true", "[]", "\"\""}) {
    expect_header_refused(text("\"a\":", value), 0, "\"a\" must be an object");
    expect_header_refused(text("\"__metadata__\":", value), 0, "\"__metadata__\" must be an object");
    if (*value != '"') expect_header_refused(text("\"__metadata__\":{\"k\":", value, "}"), 0, "metadata \"k\" must be text");
    if (*value != '"') expect_header_refused(text("\"a\":{\"dtype\":", value, "}"), 0, "tensor \"a\": dtype must be the name of a type");
    if (*value != '[') expect_header_refused(text(R"("a":{"dtype":"U8","shape":)", value, "}"), 0, "tensor \"a\": shape must be a list");
  }
  for (const char* dtype : {"", "f32", "F31", "F32 ", "float32", "F8", "BF16\\u0000", "U128"})
    expect_header_refused(tensor_text("a", dtype, "[]", "[0,4]"), 4, "there is no dtype");
  for (const char* member : {"\"strides\":[1]", "\"\":1", "\"Dtype\":\"U8\""})
    expect_header_refused(text("\"a\":{", member, "}"), 0, "unknown key");
  expect_header_refused(R"("a":{"shape":[],"data_offsets":[0,1]})", 1, "has no dtype");
  expect_header_refused(R"("a":{"dtype":"U8","data_offsets":[0,1]})", 1, "has no shape");
  expect_header_refused(R"("a":{"dtype":"U8","shape":[]})", 1, "has no data_offsets");
  expect_header_refused(R"("a":{})", 0, "has no dtype");
}

TEST_F(HostileSafetensors, KeysThatAreThereTwice) {
  const std::string a = tensor_text("a", "U8", "[0]", "[0,0]");
  expect_header_refused(a + "," + tensor_text("\\u0061", "U8", "[0]", "[0,0]"), 0, "duplicate key \"a\"");
  expect_header_refused(R"("a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]})", 0, "duplicate key \"dtype\"");
  expect_header_refused(R"("__metadata__":{},"__metadata__":{})", 0, "duplicate key \"__metadata__\"");
  expect_header_refused(R"("__metadata__":{"x":"1","x":"1"})", 0, "duplicate key \"x\"");
}

TEST_F(HostileSafetensors, NamesAndTextsThatAreNoUtf8OrControlATerminal) {
  for (const char* bytes : {"\xff", "\xc0\x80", "\xe2\x82", "\n"}) {
    expect_header_refused(tensor_text(bytes, "U8", "[0]", "[0,0]"), 0, "not JSON");
    expect_header_refused(text("\"__metadata__\":{\"", bytes, "\":\"\"}"), 0, "not JSON");
    expect_header_refused(text("\"__metadata__\":{\"\":\"", bytes, "\"}"), 0, "not JSON");
  }
  for (const char* name : {"\\u0000", "a\\u0000b", "\\n", "\\u001b[2J", "\\u007f", "\\u0085"})
    expect_header_refused(tensor_text(name, "U8", "[0]", "[0,0]"), 0, "control characters");
  expect_header_refused(tensor_text("", "U8", "[0]", "[0,0]"), 0, "must not be empty");
  expect_header_refused(tensor_text(std::string(1025, 'n'), "U8", "[0]", "[0,0]"), 0, "a name of 1025 bytes");
  expect_header_refused(tensor_text("\\ud800", "U8", "[0]", "[0,0]"), 0, "not JSON");
}

TEST_F(HostileSafetensors, DepthIsRefusedWhereItBegins) {
  for (const char* open : {"[", "{\"a\":"}) {
    const std::string deep = repeated(open, 100'000);
    expect_header_refused("\"a\":" + deep, 0, "byte");
    expect_header_refused("\"a\":{\"shape\":" + deep, 0, "byte");
    expect_header_refused("\"__metadata__\":{\"a\":" + deep, 0, "nested more than 32 levels deep");
  }
}

// The least text that a member takes, a million and one times, which are counted before all else; and that of a tensor, all on the same
// byte.
TEST_F(HostileSafetensors, CrowdsOfTensorsTakeBoundedMemory) {
  const auto crowd = [](int members, const std::string& member) {
    std::string out;
    for (int i = 0; i < members; ++i) out.append(i > 0 ? ",\"" : "\"").append(std::to_string(i)).append(member);
    return out;
  };
  const std::string members = crowd(1'000'001, "\":0"), tensor = tensor_text("", "U8", "[]", "[0,1]").substr(1);
  expect_header_refused(members, 1, "more than 1000000 tensors");
  expect_header_refused(crowd(100'000, tensor), 1, "another tensor has bytes of");
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LE(usage.ru_maxrss, (48 * static_cast<int64_t>(members.size()) + (256 << 20)) / 1024);
}

class HostileIndex : public Safetensors {
 protected:
  HostileIndex() {
    write_model(folder_.path(), {{"a", FileDtype::u8, {2}}, {"b", FileDtype::u8, {2}}}, {}, 2);
    write_file(folder_ / "other.safetensors", safetensors_bytes_of("{" + tensor_text("c", "U8", "[1]", "[0,1]") + "}", "x"));
  }
  Error error_with(const std::string& index) {
    write_file(folder_ / "model.safetensors.index.json", index);
    return error_of([&] { SafetensorsFolder read(folder_.path()); });
  }
  void expect_refused(const std::string& index, const std::string& reason) {
    const Error error = error_with(index);
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), AllOf(::testing::StartsWith(folder_.path().string()), HasSubstr(reason)));
  }
  // An index of the two tensors; `file_of_b` is JSON.
  static std::string index_with(const std::string& file_of_b, const std::string& more = "") {
    return text(R"({"weight_map":{"a":"model-00001-of-00002.safetensors","b":)", file_of_b, more, "}}");
  }
};

TEST_F(HostileIndex, NamesThatAreNoFilesBesideIt) {
  write_file(folder_ / "outside", "x");
  for (const char* file : {R"("../outside")", R"("/etc/passwd")", R"("..")", R"("")", R"("a/b")", R"(".hidden")", R"("a\u0000b")",
                           R"("a\\b")", R"("a b")", R"("a\n")", R"("café")", "1", "null", "{}"})
    expect_refused(index_with(file), "must be in a file beside the index");
  expect_refused(index_with('"' + std::string(256, 'a') + '"'), "must be in a file beside the index");
  expect_refused(index_with("\"missing.safetensors\""), "names the file missing.safetensors, which is not beside it");
}

TEST_F(HostileIndex, FilesThatAreNone) {
  fs::create_symlink("nowhere", folder_ / "dangling");
  fs::create_symlink("loop", folder_ / "loop");
  fs::create_directory(folder_ / "directory");
  fs::create_symlink("/dev/zero", folder_ / "device");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  write_file(folder_ / "empty", "");
  for (const char* name : {"dangling", "loop", "directory", "device", "pipe", "empty"}) {
    const Error error = error_with(index_with(text('"', name, '"')));
    EXPECT_THAT(error.code(), ::testing::AnyOf(ExitCode::data, ExitCode::usage)) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(name));
  }
}

TEST_F(HostileIndex, TensorsThatAreElsewhere) {
  const std::string second = "\"model-00002-of-00002.safetensors\"";
  expect_refused(index_with("\"model-00001-of-00002.safetensors\""),
                 "weight_map has a tensor \"b\", which model-00001-of-00002.safetensors lacks");
  expect_refused(index_with(second, ",\"c\":" + second), "weight_map has a tensor \"c\"");
  expect_refused(index_with(second, ",\"d\":\"other.safetensors\""), "tensor \"c\" is not in the weight_map");
  expect_refused(R"({"weight_map":{"b":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}})",
                 " by the weight_map of ");
  fs::copy(folder_ / "other.safetensors", folder_ / "twin.safetensors");
  expect_refused(index_with(second, R"(,"c":"other.safetensors","d":"twin.safetensors")"), "should be in other.safetensors");
}

TEST_F(HostileIndex, TextsThatAreNone) {
  for (const char* index :
       {"", "[]", "null", "{}", R"({"weight_map":[]})", R"({"weight_map":{}} x)", R"({"weight_map":{"a":"b","a":"b"}})"})
    expect_refused(index, "");
  expect_refused("{\"weight_map\":" + repeated("[", 100'000), "nested more than 32 levels deep");
  EXPECT_THAT(error_with(index_with("\"a\",}")).what(), HasSubstr(".index.json:1:"));
}

TEST_F(HostileIndex, AFolderIsOneModelAndReadingWritesNothing) {
  const std::vector<std::string> before = names_in(folder());
  EXPECT_EQ(SafetensorsFolder(folder_.path()).entries().size(), 2u);
  EXPECT_EQ(names_in(folder()), before);
  TemporaryFolder empty;
  for (const std::string& none : {empty.path().string(), empty / "none"})
    EXPECT_EQ(error_of([&] { SafetensorsFolder read(none); }).code(), ExitCode::usage);
  fs::copy(folder_ / "other.safetensors", folder_ / "model.safetensors");
  const Error error = error_of([&] { SafetensorsFolder read(folder_.path()); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("has both"));
}

}  // namespace mantissa::test::safetensors_hostile_test
