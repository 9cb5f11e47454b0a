// Manifests that are damaged, or whole but hostile: right hash, wrong content. Each is refused with CheckpointDamage before a tensor is
// read.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "checkpoint_testing.h"

namespace mantissa::test::checkpoint_hostile_test {

using nlohmann::json;
using ::testing::HasSubstr;

// A manifest file with the right last line.
std::string sealed(const std::string& json_text) {
  const std::string body = json_text + "\n";
  return body + xxh64(body).text() + "\n";
}

// Replaces the value, as JSON, at a JSON pointer ("-" appends to a list); without a value removes the member.
struct Edit {
  const char* at = nullptr;
  const char* value = nullptr;
};
struct Change {
  const char* reason;  // part of the message
  Edit first = {}, second = {};
};

class HostileManifest : public CheckpointTest {
 protected:
  HostileManifest() {
    path_ = open_directory(folder).save(State(7).content()).path / "manifest.json";
    good_ = read_file(path_);
    body_ = json::parse(good_.substr(0, good_.size() - 17));
  }

  // Expects the manifest to be refused by a message that holds `reason`.
  void expect_refused(const std::string& content, const std::string& reason) {
    write_file(path_, content);
    try {
      CheckpointReader reader(path_.parent_path());
      ADD_FAILURE() << "accepted, expected: " << reason;
    } catch (const CheckpointDamage& damage) {
      EXPECT_THAT(damage.what(), HasSubstr(reason));
    }
  }

  // Each change starts from the untouched manifest.
  void expect_all_refused(std::span<const Change> changes) {
    const json untouched = body_;
    for (const Change& change : changes) {
      body_ = untouched;
      for (const Edit& edit : {change.first, change.second})
        if (edit.at != nullptr) apply(edit);
      expect_refused(sealed(body_.dump()), change.reason);
    }
    body_ = untouched;
  }

  void apply(const Edit& edit) {
    const json::json_pointer pointer(edit.at);
    if (edit.value != nullptr)
      body_[pointer] = json::parse(edit.value);
    else
      body_[pointer.parent_pointer()].erase(pointer.back());
  }

  std::filesystem::path path_;
  std::string good_;
  json body_;
};

TEST_F(HostileManifest, TheUntouchedOneIsAccepted) {
  write_file(path_, sealed(body_.dump()));
  CheckpointReader reader(path_.parent_path());
  EXPECT_TRUE(State(7).equals(reader));
}

TEST_F(HostileManifest, EveryDamagedByteTruncationAndExtensionIsFound) {
  EXPECT_EQ(format_manifest(parse_manifest(good_, "manifest")), good_);
  std::vector<std::string> all;
  for (size_t i = 0; i < good_.size(); ++i) {
    all.push_back(good_.substr(0, i));
    for (const int bits : {1 << (i % 8), 0x20}) {  // letters of the hash in upper case are others
      all.push_back(good_);
      all.back()[i] = static_cast<char>(good_[i] ^ bits);
    }
  }
  for (const char* more : {"\n", " ", "{}", "0123456789abcdef\n"}) all.push_back(good_ + more);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(error_code_of([&] { parse_manifest(all[i], "manifest"); }), ExitCode::data) << i;
}

// The grammar itself has tests in tests/json and tests/fuzz.
TEST_F(HostileManifest, TextThatIsNotStrictJsonIsRefused) {
  const std::string body = body_.dump();
  const auto with = [&](const std::string& part) { return sealed("{" + part + "," + body.substr(1)); };
  for (const std::string& none : {sealed(""), sealed(body + "x"), sealed("/* comment */" + body), with(R"("x":NaN)"),
                                  with("\"x\":\"\xff\""), sealed(std::string(1'000'000, '\0'))})
    expect_refused(none, "manifest.json");
  for (const char* const no_object : {"[]", "null"}) expect_refused(sealed(no_object), "must be an object");
  expect_refused(with(R"("\u0073tep":7)"), "duplicate");
  expect_refused(with("\"x\":" + std::string(100'000, '[') + std::string(100'000, ']')), "deep");
}

TEST_F(HostileManifest, WrongFieldsAreRefused) {
  static constexpr Change kChanges[] = {
      {"has an unknown key \"extra\"", {"/extra", "1"}},
      {"has no \"samples\"", {"/samples"}},
      {"has no \"samples\"", {"/samples"}, {"/other", "1"}},
      {"has format version 1, but this program reads version 2; export it with the program that wrote it", {"/format_version", "1"}},
      {"format version 3", {"/format_version", "3"}},
      {"format_version: must be an integer", {"/format_version", "1.0"}},
      {"step: must be 0 or more, got -1", {"/step", "-1"}},
      {"step: must be an integer", {"/step", "1.5"}},
      {"step: must be in [0, 9223372036854775807], got 9223372036854775808", {"/step", "9223372036854775808"}},
      {"fingerprints.build: must be a string", {"/fingerprints/build", "5"}},
      {"fingerprints: has no \"build\"", {"/fingerprints/build"}},
      {"shards: must be a list, got {}", {"/shards", "{}"}},
      {"there is no shard 0", {"/shards", "[]"}},
      {"two shards are called", {"/shards/-", R"({"file": "shard-00000.safetensors", "bytes": 0, "chunk_bytes": 1, "xxh64": []})"}},
      {"tensors: must be a list, got null", {"/tensors", "null"}},
      {"belong to no tensor", {"/tensors", "[]"}},
      {"two tensors are called w", {"/tensors/1/name", "\"w\""}},
      {"name has 0 bytes", {"/tensors/0/name", "\"\""}},
      {"name with control characters", {"/tensors/0/name", R"("w\u001b[2J")"}},
      {"no tensor may be called w[0:1]", {"/tensors/0/name", "\"w[0:1]\""}},
      {"no tensor may be called __metadata__", {"/tensors/0/name", "\"__metadata__\""}},
      {"tensors[0].dtype: must be one of fp32, bf16, fp64, i32, u8, got \"float\"", {"/tensors/0/dtype", "\"float\""}},
  };
  expect_all_refused(kChanges);
  body_["tensors"][0]["name"] = std::string(1025, 'a');
  expect_refused(sealed(body_.dump()), "name has 1025 bytes");
}

TEST_F(HostileManifest, ShardsThatDoNotFitAreRefused) {
  static constexpr Change kChanges[] = {
      {"plain file name", {"/shards/0/file", R"("../shard-00000.safetensors")"}},
      {"plain file name", {"/shards/0/file", R"("/etc/passwd")"}},
      {"plain file name", {"/shards/0/file", R"("")"}},
      {"No such file", {"/shards/0/file", R"("other.bin")"}},
      {"bytes, but the manifest says 40",
       {"/shards/0", R"({"file": "shard-00000.safetensors", "bytes": 0, "chunk_bytes": 1, "xxh64": []})"},
       {"/tensors", "[]"}},
      {"shards[0].bytes: must be in [0, 9223372036854775807], got 18446744073709551615", {"/shards/0/bytes", "18446744073709551615"}},
      {"need 2199023255552 chunk hashes, found 1", {"/shards/0/bytes", "9223372036854775807"}},
      {"chunk_bytes must be 1 to 67108864, got 0", {"/shards/0/chunk_bytes", "0"}},
      {"chunk_bytes must be 1 to 67108864, got 67108865", {"/shards/0/chunk_bytes", "67108865"}},
      {"need 8000 chunk hashes", {"/shards/0/chunk_bytes", "1"}},
      {"found 0", {"/shards/0/xxh64", "[]"}},
      {"shards[0].xxh64[0]: must be 16 hex digits, got \"0123456789ABCDEF\"", {"/shards/0/xxh64/0", R"("0123456789ABCDEF")"}},
      {"shards[0].xxh64[0]: must be 16 hex digits, got 5", {"/shards/0/xxh64/0", "5"}},
      {"shards[0]: must be an object, got 5", {"/shards/0", "5"}},
  };
  expect_all_refused(kChanges);
  body_["shards"][0]["file"] = std::string(300, 'a');
  expect_refused(sealed(body_.dump()), "plain file name");
}

TEST_F(HostileManifest, BoxesOutsideTheirTensorAreRefused) {
  static constexpr Change kChanges[] = {
      {"tensors[0].shape[0]: must be 0 or more, got -100", {"/tensors/0/shape", "[-100, -10]"}},
      {"pieces[0].size[0]: must be 0 or more, got -100", {"/tensors/0/pieces/0/size", "[-100, -10]"}},
      {"start[0]: must be 0 or more, got -1", {"/tensors/0/pieces/0/start", "[-1, 0]"}},
      {"at most 5", {"/tensors/0/shape", "[1, 1, 1, 1, 1, 1000]"}},
      {"another number of dimensions", {"/tensors/0/pieces/0/start", "[0]"}},
      {"is not possible", {"/tensors/0/shape", "[1099511627776, 1099511627776]"}},
      {"too many bytes", {"/tensors/0/shape", "[9223372036854775807]"}},
      {"is not inside", {"/tensors/0/pieces/0/size", "[101, 10]"}},
      {"is not inside", {"/tensors/0/pieces/0/start", "[1, 0]"}},
      {"is not inside", {"/tensors/0/pieces/0/start", "[9223372036854775807, 0]"}},
      {"is not inside", {"/tensors/0/pieces/0/size", "[0, 10]"}},
      {"cover 990 of 1000", {"/tensors/0/pieces/0/size", "[99, 10]"}},
      {"cover 0 of 1000", {"/tensors/0/pieces", "[]"}},
      {"pieces[0]: must be an object, got []", {"/tensors/0/pieces/0", "[]"}},
      {"pieces[0]: has an unknown key \"extra\"", {"/tensors/0/pieces/0/extra", "0"}},
      {"overlap",
       {"/tensors/0/pieces",
        R"([{"shard":0,"start":[0,0],"size":[50,10],"offset":0}, {"shard":0,"start":[49,0],"size":[50,10],"offset":2000}])"}},
      {"overlap",
       {"/tensors/0/pieces",
        R"([{"shard":0,"start":[0,0],"size":[100,5],"offset":0}, {"shard":0,"start":[0,4],"size":[100,5],"offset":2000}])"}},
      {"overlap",
       {"/tensors/0/pieces",
        R"([{"shard":0,"start":[0,0],"size":[50,10],"offset":0}, {"shard":0,"start":[0,0],"size":[50,10],"offset":2000}])"}},
      {"cover 2000 of 1000", {"/tensors/0/pieces/-", R"({"shard": 0, "start": [0, 0], "size": [100, 10], "offset": 0})"}},
      {"belong to two tensors", {"/tensors/1/pieces/0/offset", "0"}},
      {"belong to two tensors", {"/tensors/1/pieces/0/offset", "3996"}},
      {"not inside shard", {"/tensors/1/pieces/0/offset", "4004"}},
      {"not inside shard", {"/tensors/1/pieces/0/offset", "9223372036854775807"}},
      {"there is no shard 1", {"/tensors/0/pieces/0/shard", "1"}},
      {"belong to no tensor", {"/tensors/1/dtype", "\"bf16\""}},
  };
  expect_all_refused(kChanges);
}

TEST_F(HostileManifest, HugeCountsAreRefusedInTimeAndMemoryOfTheText) {
  const auto pieces = [](int count) {
    std::string out = "[";
    for (int i = 0; i < count; ++i) out += text(i ? "," : "", R"({"shard":0,"start":[0,)", i, R"(],"size":[1,1],"offset":0})");
    return out + "]";
  };
  apply({"/tensors/0/pieces", pieces(4097).c_str()});
  expect_refused(sealed(body_.dump()), "at most 4096");
  // The most pieces that are accepted, all beginning at the same first coordinate: the slowest case of the overlap check.
  apply({"/tensors/0/pieces", pieces(4096).c_str()});
  apply({"/tensors/0/shape", "[1,4096]"});
  expect_refused(sealed(body_.dump()), "belong to two tensors");
  std::filesystem::resize_file(path_, static_cast<uintmax_t>(Manifest::kMaxBytes) + 1);  // a hole: no disk space
  EXPECT_THAT(error_of([&] { CheckpointReader reader(path_.parent_path()); }).what(), HasSubstr("at most 100000000 are accepted"));
}

TEST_F(HostileManifest, LinksFoldersAndPipesInTheFilesPlaceAreRefused) {
  const std::filesystem::path shard_path = path_.parent_path() / "shard-00000.safetensors";
  std::filesystem::rename(shard_path, folder / "elsewhere.bin");
  std::filesystem::create_symlink(folder / "elsewhere.bin", shard_path);
  for (const auto& next : std::initializer_list<std::function<void()>>{[&] { std::filesystem::create_directory(shard_path); },
                                                                       [&] { ASSERT_EQ(::mkfifo(shard_path.c_str(), 0600), 0); }, [] {}}) {
    EXPECT_THROW(CheckpointReader reader(path_.parent_path()), CheckpointDamage);
    std::filesystem::remove(shard_path);
    next();
  }
}

TEST_F(HostileManifest, WhatWouldNotBeReadIsNotFormatted) {
  const Manifest good = parse_manifest(good_, "manifest");
  const auto problem = [&](auto&& change) {
    Manifest bad = good;
    change(bad);
    const Error error = error_of([&] { format_manifest(bad); });
    EXPECT_EQ(error.code(), ExitCode::internal);
    return std::string(error.what());
  };
  EXPECT_THAT(problem([](Manifest& bad) { bad.tensors[0].name = "w\xff"; }), HasSubstr("not UTF-8"));
  EXPECT_THAT(problem([](Manifest& bad) { bad.shards[0].file = "w\xff"; }), HasSubstr("plain file name"));
  EXPECT_THAT(problem([](Manifest& bad) { bad.shards[0].bytes += 1; }), HasSubstr("belong to no tensor"));
  EXPECT_THAT(problem([](Manifest& bad) { bad.state = "{"; }), HasSubstr("state"));
}

TEST_F(HostileManifest, ADtypeIsNamedInTheListOfThem) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i32, Dtype::u8})
    EXPECT_THAT(NamedDtype::kTextForm, HasSubstr(dtype_name(dtype)));
}

}  // namespace mantissa::test::checkpoint_hostile_test
