// Manifests that are damaged, or whole but hostile: right hash, wrong content. Each is refused with CheckpointDamage before a tensor is
// read.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "checkpoint_testing.h"
#include "mantissa/io/hash.h"

namespace mantissa::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// A manifest file with the right last line.
std::string sealed(const std::string& json_text) {
  const std::string body = json_text + "\n";
  return body + hex64(xxh64(body)) + "\n";
}

class HostileManifest : public CheckpointTest {
 protected:
  HostileManifest() {
    path_ = open_directory(folder).save(State(7).content()).path / "manifest.json";
    good_ = file_content(path_);
    body_ = json::parse(good_.substr(0, good_.size() - 17));
  }

  // Expects the manifest to be refused by a message that holds `reason`.
  void expect_refused(const std::string& content, const std::string& reason) {
    write_content(path_, content);
    try {
      CheckpointReader reader(path_.parent_path());
      ADD_FAILURE() << "accepted, expected: " << reason;
    } catch (const CheckpointDamage& damage) {
      EXPECT_THAT(damage.what(), HasSubstr(reason));
    }
  }

  // Reason and change; each change starts from the untouched manifest.
  void expect_all_refused(const std::vector<std::pair<const char*, std::function<void()>>>& changes) {
    const json untouched = body_;
    for (const auto& [reason, change] : changes) {
      body_ = untouched;
      change();
      expect_refused(sealed(body_.dump()), reason);
    }
  }

  json& tensor(size_t i) { return body_["tensors"][i]; }
  json& piece(size_t i) { return body_["tensors"][i]["pieces"][0]; }
  json& shard() { return body_["shards"][0]; }

  std::filesystem::path path_;
  std::string good_;
  json body_;
};

TEST_F(HostileManifest, TheUntouchedOneIsAccepted) {
  write_content(path_, sealed(body_.dump()));
  CheckpointReader reader(path_.parent_path());
  EXPECT_TRUE(State(7).equals(reader));
}

TEST_F(HostileManifest, EveryFlippedBitIsFound) {
  ASSERT_NO_THROW(parse_manifest(good_, "manifest"));
  for (size_t i = 0; i < good_.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good_;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      ASSERT_EQ(error_code_of([&] { parse_manifest(bad, "manifest"); }), ExitCode::data) << "byte " << i << ", bit " << bit;
    }
  }
}

TEST_F(HostileManifest, EveryTruncationAndExtensionIsFound) {
  for (size_t size = 0; size < good_.size(); ++size)
    ASSERT_EQ(error_code_of([&] { parse_manifest(good_.substr(0, size), "manifest"); }), ExitCode::data) << size;
  for (const char* more : {"\n", " ", "{}", "0123456789abcdef\n"})
    EXPECT_EQ(error_code_of([&] { parse_manifest(good_ + more, "manifest"); }), ExitCode::data);
}

TEST_F(HostileManifest, TextThatIsNotStrictJsonIsRefused) {
  const std::string body = body_.dump();
  const auto with = [&](const std::string& part) { return sealed("{" + part + "," + body.substr(1)); };
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  expect_refused(sealed(""), "");
  expect_refused(sealed("[]"), "must be an object");
  expect_refused(sealed("null"), "must be an object");
  expect_refused(sealed(body + "x"), "manifest.json");
  expect_refused(sealed(body + body), "manifest.json");
  expect_refused(sealed("\xef\xbb\xbf" + body), "byte order mark");
  expect_refused(sealed("/* comment */" + body), "manifest.json");
  expect_refused(with(R"("step":7)"), "duplicate");
  expect_refused(with(R"("\u0073tep":7)"), "duplicate");
  expect_refused(with("\"x\":" + deep), "deep");
  expect_refused(with(R"("x":NaN)"), "manifest.json");
  expect_refused(with(R"("x":1e400)"), "manifest.json");
  expect_refused(with("\"x\":\"\xff\""), "manifest.json");
  expect_refused(with(R"("x":"\ud800")"), "manifest.json");
  expect_refused(with(R"("x":1,)"), "manifest.json");
  expect_refused(sealed(std::string(1'000'000, '\0')), "manifest.json");
}

TEST_F(HostileManifest, WrongFieldsAreRefused) {
  expect_all_refused({
      {"has 12 keys instead of 11", [&] { body_["extra"] = 1; }},
      {"samples",
       [&] {
         body_.erase("samples");
         body_["other"] = 1;
       }},
      {"format version 2", [&] { body_["format_version"] = 2; }},
      {"format_version: must be an integer", [&] { body_["format_version"] = 1.0; }},
      {"step: must be an integer", [&] { body_["step"] = -1; }},
      {"step: must be an integer", [&] { body_["step"] = 1.5; }},
      {"step: must be an integer", [&] { body_["step"] = "7"; }},
      {"step: 9223372036854775808 is too large", [&] { body_["step"] = uint64_t{1} << 63; }},
      {"fingerprints.build: must be a string", [&] { body_["fingerprints"]["build"] = 5; }},
      {"fingerprints: has 2 keys", [&] { body_["fingerprints"].erase("build"); }},
      {"shards: must be an array", [&] { body_["shards"] = json::object(); }},
      {"there is no shard 0", [&] { body_["shards"] = json::array(); }},
      {"two shards are called", [&] { body_["shards"].push_back(shard()); }},
      {"tensors: must be an array", [&] { body_["tensors"] = nullptr; }},
      {"belong to no tensor", [&] { body_["tensors"] = json::array(); }},
      {"two tensors are called w", [&] { tensor(1)["name"] = "w"; }},
      {"name has 0 bytes", [&] { tensor(0)["name"] = ""; }},
      {"name with control characters", [&] { tensor(0)["name"] = "w\x1b[2J"; }},
      {"name with control characters", [&] { tensor(0)["name"] = std::string("w\0", 2); }},
      {"name has 1025 bytes", [&] { tensor(0)["name"] = std::string(1025, 'a'); }},
      {"unknown dtype \"float\"", [&] { tensor(0)["dtype"] = "float"; }},
      {"unknown dtype", [&] { tensor(0)["dtype"] = ""; }},
  });
}

TEST_F(HostileManifest, ShardsThatDoNotFitAreRefused) {
  expect_all_refused({
      {"plain file name", [&] { shard()["file"] = "../shard-00000.bin"; }},
      {"plain file name", [&] { shard()["file"] = "/etc/passwd"; }},
      {"plain file name", [&] { shard()["file"] = ".."; }},
      {"plain file name", [&] { shard()["file"] = ""; }},
      {"plain file name", [&] { shard()["file"] = "a/b"; }},
      {"plain file name", [&] { shard()["file"] = std::string("shard\0.bin", 10); }},
      {"plain file name", [&] { shard()["file"] = std::string(300, 'a'); }},
      {"No such file", [&] { shard()["file"] = "other.bin"; }},
      {"has 8000 bytes, the manifest says 7996",
       [&] {
         shard()["bytes"] = 7996;
         piece(1)["size"] = {999};
         tensor(1)["shape"] = {999};
       }},
      {"bytes: 18446744073709551615 is too large", [&] { shard()["bytes"] = UINT64_MAX; }},
      {"need 2199023255552 chunk hashes, found 1", [&] { shard()["bytes"] = INT64_MAX; }},
      {"chunks of 0 bytes", [&] { shard()["chunk_bytes"] = 0; }},
      {"chunks of 67108865 bytes", [&] { shard()["chunk_bytes"] = 67108865; }},
      {"need 8000 chunk hashes", [&] { shard()["chunk_bytes"] = 1; }},
      {"found 0", [&] { shard()["xxh64"] = json::array(); }},
      {"16 hex digits", [&] { shard()["xxh64"][0] = "0123456789ABCDEF"; }},
      {"16 hex digits", [&] { shard()["xxh64"][0] = 5; }},
      {"must be an object", [&] { shard() = 5; }},
  });
}

TEST_F(HostileManifest, BoxesOutsideTheirTensorAreRefused) {
  expect_all_refused({
      {"shape: must be an integer",
       [&] {
         tensor(0)["shape"] = {-100, -10};
       }},
      {"pieces[0].size: must be an integer",
       [&] {
         piece(0)["size"] = {-100, -10};
       }},
      {"start: must be an integer",
       [&] {
         piece(0)["start"] = {-1, 0};
       }},
      {"at most 5", [&] { tensor(0)["shape"] = {1, 1, 1, 1, 1, 1000}; }},
      {"another rank", [&] { piece(0)["start"] = {0}; }},
      {"another rank",
       [&] {
         piece(0)["size"] = {1000};
         piece(0)["start"] = {0};
       }},
      {"is not possible",
       [&] {
         tensor(0)["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
       }},
      {"too many bytes", [&] { tensor(0)["shape"] = {INT64_MAX}; }},
      {"is not inside",
       [&] {
         piece(0)["size"] = {101, 10};
       }},
      {"is not inside",
       [&] {
         piece(0)["start"] = {1, 0};
       }},
      {"is not inside",
       [&] {
         piece(0)["start"] = {INT64_MAX, 0};
       }},
      {"is not inside",
       [&] {
         piece(0)["size"] = {0, 10};
       }},
      {"cover 990 of 1000",
       [&] {
         piece(0)["size"] = {99, 10};
       }},
      {"cover 0 of 1000", [&] { tensor(0)["pieces"] = json::array(); }},
  });
}

TEST_F(HostileManifest, BoxesThatOverlapOrLeaveBytesOverAreRefused) {
  const auto add_piece = [&](size_t i, json start, json size, int64_t offset) {
    tensor(i)["pieces"].push_back({{"shard", 0}, {"start", std::move(start)}, {"size", std::move(size)}, {"offset", offset}});
  };
  expect_all_refused({
      {"overlap",
       [&] {
         piece(0)["size"] = {50, 10};
         add_piece(0, {49, 0}, {50, 10}, 2000);
       }},
      {"overlap",
       [&] {
         piece(0)["size"] = {100, 5};
         add_piece(0, {0, 4}, {100, 5}, 2000);
       }},
      {"overlap",
       [&] {
         piece(0)["size"] = {50, 10};
         add_piece(0, {0, 0}, {50, 10}, 2000);
       }},
      {"cover 2000 of 1000",
       [&] {
         add_piece(0, {0, 0}, {100, 10}, 0);
       }},
      {"belong to two tensors", [&] { piece(1)["offset"] = 0; }},
      {"belong to two tensors", [&] { piece(1)["offset"] = 3996; }},
      {"not inside shard", [&] { piece(1)["offset"] = 4004; }},
      {"not inside shard", [&] { piece(1)["offset"] = INT64_MAX; }},
      {"there is no shard 1", [&] { piece(0)["shard"] = 1; }},
      {"belong to no tensor", [&] { tensor(1)["dtype"] = "bf16"; }},
      {"must be an object", [&] { piece(0) = json::array(); }},
      {"has 5 keys", [&] { piece(0)["extra"] = 0; }},
  });
}

TEST_F(HostileManifest, HugeCountsAreRefusedInTimeAndMemoryOfTheText) {
  json pieces = json::array();
  for (int i = 0; i <= 16384; ++i) pieces.push_back(json::array());
  tensor(0)["pieces"] = pieces;
  expect_refused(sealed(body_.dump()), "at most 16384");

  // The most pieces that are accepted, all beginning at the same first coordinate: the slowest case of the overlap check.
  pieces = json::array();
  for (int i = 0; i < 16384; ++i) pieces.push_back({{"shard", 0}, {"start", {0, i}}, {"size", {1, 1}}, {"offset", 0}});
  tensor(0)["pieces"] = pieces;
  tensor(0)["shape"] = {1, 16384};
  expect_refused(sealed(body_.dump()), "belong to two tensors");
}

TEST_F(HostileManifest, AManifestOverTheCapIsNotEvenRead) {
  std::filesystem::resize_file(path_, static_cast<uintmax_t>(Manifest::kMaxBytes) + 1);  // a hole: no disk space
  try {
    CheckpointReader reader(path_.parent_path());
    ADD_FAILURE();
  } catch (const CheckpointDamage& damage) {
    EXPECT_THAT(damage.what(), HasSubstr("at most 100000000 are accepted"));
  }
}

TEST_F(HostileManifest, LinksFoldersAndPipesInTheFilesPlaceAreRefused) {
  const std::filesystem::path shard_path = path_.parent_path() / "shard-00000.bin";
  std::filesystem::rename(shard_path, folder / "elsewhere.bin");
  std::filesystem::create_symlink(folder / "elsewhere.bin", shard_path);
  EXPECT_THROW(CheckpointReader reader(path_.parent_path()), CheckpointDamage);
  std::filesystem::remove(shard_path);
  std::filesystem::create_directory(shard_path);
  EXPECT_THROW(CheckpointReader reader(path_.parent_path()), CheckpointDamage);
  std::filesystem::remove(shard_path);
  ASSERT_EQ(::mkfifo(shard_path.c_str(), 0600), 0);
  EXPECT_THROW(CheckpointReader reader(path_.parent_path()), CheckpointDamage);
}

TEST_F(HostileManifest, FormattedTextParsesToTheSameManifest) {
  const Manifest manifest = parse_manifest(good_, "manifest");
  EXPECT_EQ(format_manifest(manifest), good_);
}

}  // namespace
}  // namespace mantissa::test
