// Safetensors files and indexes that are damaged or forged: each is refused with a reason, in bounded memory, and nothing is written.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <set>

#include "safetensors_files.h"

namespace mantissa::test::safetensors_hostile_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

// What is made below by hand and by loops is more than 500 files: each is refused with its path, the byte and a reason.
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

TEST_F(HostileSafetensors, EveryTruncationAndEveryByteTooMany) {
  const std::string good = safetensors_bytes_of(
      "{" + tensor_text("a", "F32", "[2,3]", "[0,24]") + "," + tensor_text("b", "I64", "[1]", "[24,32]") + "}", std::string(32, 'x'));
  write_file(path_, good);
  EXPECT_EQ(SafetensorsFile(path_).entries().size(), 2u);
  for (size_t size = 0; size < good.size(); ++size) expect_refused(good.substr(0, size), "");
  for (const size_t more : {size_t{1}, size_t{2}, size_t{8}, size_t{4096}})
    expect_refused(good + std::string(more, ' '), "the tensors end here");
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

// A flipped bit gives another file or none; what is accepted has its tensors side by side within the file.
TEST_F(HostileSafetensors, EveryFlippedBitOfAHeader) {
  const std::string good = safetensors_bytes_of(
      "{" + tensor_text("a", "F32", "[2,3]", "[0,24]") + "," + tensor_text("b", "I8", "[8]", "[24,32]") + "}", std::string(32, 'x'));
  int refused = 0;
  for (size_t bit = 0; bit < 8 * (good.size() - 32); ++bit) {
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    write_file(path_, bytes);
    try {
      const SafetensorsFile file(path_);
      int64_t sum = 0;
      for (const SafetensorsEntry& entry : file.entries()) {
        EXPECT_EQ(entry.bytes(), safetensors_bytes(entry));
        EXPECT_GE(entry.begin, static_cast<int64_t>(good.size()) - 32);
        EXPECT_LE(entry.end, static_cast<int64_t>(good.size()));
        sum += entry.bytes();
      }
      EXPECT_EQ(sum, 32);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

TEST_F(HostileSafetensors, SizesThatCannotBe) {
  for (int i = 0; i < kFileDtypes; ++i) {
    const std::string dtype = file_dtype_name(static_cast<FileDtype>(i));
    const auto refused = [&](const char* shape, const char* offsets, const char* reason) {
      expect_header_refused(tensor_text("a", dtype, shape, offsets), 16, reason);
    };
    refused("[9223372036854775807,2]", "[0,16]", "more elements than can be counted");
    refused("[4294967296,4294967296]", "[0,0]", "more elements than can be counted");
    refused("[0,9223372036854775807,9223372036854775807]", "[0,0]", "more elements than can be counted");
    refused("[18446744073709551615]", "[0,16]", "beyond any file");
    refused("[-1]", "[0,16]", "whole numbers of 0 or more");
    refused("[1000]", "[0,16]", "hold 16");
    refused("[1,1,1,1,1,1,1,1,1]", "[0,16]", "more than 8 numbers");
  }
  for (const char* dtype : {"F4", "F6_E2M3", "F6_E3M2"})
    expect_header_refused(tensor_text("a", dtype, "[3]", "[0,2]"), 2, "no whole number of bytes");
}

TEST_F(HostileSafetensors, OffsetsThatDoNotTileTheFile) {
  const auto tensors = [](std::initializer_list<const char*> offsets) {
    std::string members;
    for (const char* text_of : offsets) {
      int begin = 0, end = 0;
      std::sscanf(text_of, "[%d,%d]", &begin, &end);
      members += (members.empty() ? "" : ",") + tensor_text(text("t", members.size()), "U8", text('[', end - begin, ']'), text_of);
    }
    return members;
  };
  expect_header_refused(tensors({"[0,4]", "[4,8]"}), 9, "the tensors end here");
  expect_header_refused(tensors({"[0,4]", "[4,8]"}), 7, "end beyond the file");
  expect_header_refused(tensors({"[1,4]"}), 4, "bytes of no tensor before");
  expect_header_refused(tensors({"[0,4]", "[5,8]"}), 8, "bytes of no tensor before");
  expect_header_refused(tensors({"[0,4]", "[3,8]"}), 8, "bytes of another tensor in");
  expect_header_refused(tensors({"[0,8]", "[0,8]"}), 8, "bytes of another tensor in");
  expect_header_refused(tensors({"[0,8]", "[2,4]"}), 8, "bytes of another tensor in");
  expect_header_refused(tensors({"[0,4]", "[2,2]", "[4,8]"}), 8, "bytes of another tensor in");
  expect_header_refused(tensors({}), 1, "the tensors end here");
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
  for (const char* header : {"{}}", "{\"a\"}", "{a:1}", "{,}", "{} {}", "{\"a\":1 \"b\":2}", "{/**/}", "{\"a\":NaN}", "{\"a\":1e400}",
                             "{\"a\\u12\":{}}", "{'a':{}}"})
    expect_refused(safetensors_bytes_of(header), header[1] == '"' && header[5] == '1' ? "" : "the header is no JSON");
  for (const size_t at : {size_t{1}, size_t{2}, size_t{4}})
    expect_refused(safetensors_bytes_of(std::string("{ }  }").replace(at, 1, 1, '\0')), "the header is no JSON: a zero byte");
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
  expect_header_refused(a + "," + a, 0, "duplicate key \"a\"");
  expect_header_refused(a + "," + tensor_text("\\u0061", "U8", "[0]", "[0,0]"), 0, "duplicate key \"a\"");
  expect_header_refused(R"("a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]})", 0, "duplicate key \"dtype\"");
  expect_header_refused(R"("a":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]})", 0, "duplicate key \"shape\"");
  expect_header_refused(R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"data_offsets":[0,0]})", 0, "duplicate key \"data_offsets\"");
  expect_header_refused(R"("__metadata__":{},"__metadata__":{})", 0, "duplicate key \"__metadata__\"");
  expect_header_refused(R"("__metadata__":{"x":"1","x":"1"})", 0, "duplicate key \"x\"");
}

TEST_F(HostileSafetensors, NamesAndTextsThatAreNoUtf8OrControlATerminal) {
  for (const char* bytes :
       {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80", "\xf8\x88\x80\x80\x80", "\n", "\x01"}) {
    expect_header_refused(tensor_text(bytes, "U8", "[0]", "[0,0]"), 0, "no JSON");
    expect_header_refused(text("\"__metadata__\":{\"", bytes, "\":\"\"}"), 0, "no JSON");
    expect_header_refused(text("\"__metadata__\":{\"\":\"", bytes, "\"}"), 0, "no JSON");
  }
  for (const char* name : {"\\u0000", "a\\u0000b", "\\n", "\\u001b[2J", "\\u007f", "\\u0085"})
    expect_header_refused(tensor_text(name, "U8", "[0]", "[0,0]"), 0, "control characters");
  expect_header_refused(tensor_text("", "U8", "[0]", "[0,0]"), 0, "must not be empty");
  expect_header_refused(tensor_text(std::string(1025, 'n'), "U8", "[0]", "[0,0]"), 0, "a name of 1025 bytes");
  expect_header_refused(tensor_text("\\ud800", "U8", "[0]", "[0,0]"), 0, "no JSON");
}

TEST_F(HostileSafetensors, DepthIsRefusedWhereItBegins) {
  for (const char* open : {"[", "{\"a\":"}) {
    const std::string deep = repeated(open, 100'000);
    expect_header_refused("\"a\":" + deep, 0, "byte");
    expect_header_refused("\"a\":{\"shape\":" + deep, 0, "byte");
    expect_header_refused("\"__metadata__\":{\"a\":" + deep, 0, "nested more than 32 levels deep");
  }
}

// The least text that a tensor takes, a million and one times; all on the same byte.
TEST_F(HostileSafetensors, CrowdsOfTensorsTakeBoundedMemory) {
  std::string crowd;
  const std::string tensor = tensor_text("", "U8", "[]", "[0,1]");  // its first quotation mark is the name's
  for (int i = 0; i <= 1'000'000; ++i) crowd.append(i > 0 ? ",\"" : "\"").append(std::to_string(i)).append(tensor, 1);
  expect_header_refused(crowd, 1, "more than 1000000 tensors");
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LE(usage.ru_maxrss, (48 * static_cast<int64_t>(crowd.size()) + (256 << 20)) / 1024);
  crowd.resize(crowd.find(",\"100000\""));
  expect_header_refused(crowd, 1, "bytes of another tensor in");
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
  // Of the two tensors; `file_of_b` is JSON.
  static std::string index_with(const std::string& file_of_b, const std::string& more = "") {
    return text(R"({"weight_map":{"a":"model-00001-of-00002.safetensors","b":)", file_of_b, more, "}}");
  }
};

TEST_F(HostileIndex, NamesThatAreNoFilesBesideIt) {
  write_file(folder_ / "outside", "x");
  for (const char* file :
       {"\"../outside\"", "\"/etc/passwd\"", "\"..\"", "\".\"", "\"\"", "\"a/b\"", "\"./model-00002-of-00002.safetensors\"", "\".hidden\"",
        "\"a\\u0000b\"", "\"a\\\\b\"", "\"a b\"", "\"a\\n\"", "\"caf\u00e9\"", "\"-\u2044-\"", "1", "null", "[]", "{}", "true"})
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
  EXPECT_EQ(SafetensorsFolder(folder_.path()).entries().size(), 2u);
  expect_refused(index_with("\"model-00001-of-00002.safetensors\""),
                 "weight_map has a tensor \"b\", which model-00001-of-00002.safetensors has not");
  expect_refused(index_with(second, ",\"c\":" + second), "weight_map has a tensor \"c\"");
  expect_refused(index_with(second, ",\"d\":\"other.safetensors\""), "tensor \"c\" is not in the weight_map");
  expect_refused(R"({"weight_map":{"b":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}})",
                 "says the weight_map");
  fs::copy(folder_ / "other.safetensors", folder_ / "twin.safetensors");
  expect_refused(index_with(second, R"(,"c":"other.safetensors","d":"twin.safetensors")"), "belongs into other.safetensors");
}

TEST_F(HostileIndex, TextsThatAreNone) {
  for (const char* index :
       {"", "{", "[]", "1", "null", "{}", R"({"weight_map":[]})", R"({"weight_map":null})", R"({"weight_map":{"a":"b",}})",
        R"({"weight_map":{}} x)", "\xef\xbb\xbf{}", R"({"weight_map":{},"weight_map":{}})", R"({"weight_map":{"a":"b","a":"b"}})",
        R"({"metadata":{"total_size":NaN},"weight_map":{}})", "{\"\xff\":1}", "// x\n{}"})
    expect_refused(index, "");
  expect_refused("{\"weight_map\":" + repeated("[", 100'000), "nested more than 32 levels deep");
  EXPECT_THAT(error_with(index_with("\"a\",}")).what(), HasSubstr(".index.json:1:"));
}

TEST_F(HostileIndex, AFolderIsOneModel) {
  TemporaryFolder empty;
  EXPECT_EQ(error_of([&] { SafetensorsFolder read(empty.path()); }).code(), ExitCode::usage);
  EXPECT_EQ(error_of([&] { SafetensorsFolder read(empty / "none"); }).code(), ExitCode::usage);
  fs::copy(folder_ / "other.safetensors", folder_ / "model.safetensors");
  const Error error = error_of([&] { SafetensorsFolder read(folder_.path()); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("has both"));
}

TEST_F(HostileIndex, ReadingWritesNothing) {
  const auto listing = [&] {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path()))
      names.insert(text(entry.path().string(), fs::file_size(entry)));
    return names;
  };
  const auto before = listing();
  SafetensorsFolder read(folder_.path());
  EXPECT_EQ(listing(), before);
}

}  // namespace mantissa::test::safetensors_hostile_test
