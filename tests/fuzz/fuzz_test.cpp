// The fuzz targets without a fuzzer: over their corpus, where good-* are inputs that are accepted, bad-* refused and found-* what a fuzzer
// found, over each beginning of the good ones and each of their bytes with a bit flipped, and over changes that are the same in every run.
// The fuzzers look at more changes of the same kinds.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "files.h"
#include "fuzz/json_changes.h"
#include "fuzz/targets.h"
#include "mantissa/base/rng.h"

namespace mantissa::fuzz {

void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }

}  // namespace mantissa::fuzz

namespace mantissa::test::fuzz_test {

using fuzz::kTargets;
using fuzz::Named;

std::map<std::string, std::string> corpus_of(const Named& target) {
  std::map<std::string, std::string> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(MANTISSA_SOURCE_DIR "/tests/fuzz/corpus/") + target.name))
    corpus[entry.path().filename().string()] = read_file(entry.path().string());
  return corpus;
}

class FuzzTarget : public ::testing::TestWithParam<Named> {};

TEST_P(FuzzTarget, KeepsItsPromisesOverItsCorpus) {
  int good = 0, bad = 0;
  for (const auto& [name, input] : corpus_of(GetParam())) {
    bool accepted = false;
    ASSERT_NO_THROW(accepted = GetParam().target(input)) << name;
    good += name.starts_with("good-") ? 1 : 0;
    bad += name.starts_with("bad-") ? 1 : 0;
    EXPECT_TRUE(accepted || !name.starts_with("good-")) << name;
    EXPECT_FALSE(accepted && name.starts_with("bad-")) << name;
  }
  EXPECT_GE(good, 2);
  EXPECT_GE(bad, 2);
}

bool may_end_anywhere(const std::string& target) { return target == "examples" || target == "chat_template"; }

// The length of an input whose shorter beginnings are no inputs of the target: up to the bracket that closes JSON, or all that a header
// counts. 0: a beginning may be one.
size_t indivisible_bytes(const std::string& target, const std::string& name, const std::string& input) {
  if (may_end_anywhere(target)) return 0;
  if (target == "safetensors_file" || target == "gguf_file" || target == "mlx_folder" || target == "store_frames" || name == "good-llmc" ||
      name == "good-llmq" || name == "good-megatron")
    return input.size();
  const size_t last = input.find_last_not_of(" \n");
  return target != "token_file" && (input[last] == '}' || input[last] == ']') ? last + 1 : 0;
}

TEST_P(FuzzTarget, RefusesEachBeginningOfGoodInputsAndBearsAnyDamagedByte) {
  int beginnings = 0;
  for (const auto& [name, input] : corpus_of(GetParam())) {
    if (!name.starts_with("good-")) continue;
    const size_t whole = indivisible_bytes(GetParam().name, name, input);
    for (size_t size = 1; size < whole; ++size, ++beginnings)
      ASSERT_FALSE(GetParam().target(input.substr(0, size))) << name << ": " << size << " bytes";
    std::string damaged = input;
    for (size_t i = 0; i < input.size(); ++i) {
      const int bits = 1 << (i % 8);
      damaged[i] = static_cast<char>(input[i] ^ bits);
      ASSERT_NO_THROW(GetParam().target(damaged)) << name << ": byte " << i << ", bits " << bits;
      damaged[i] = input[i];
    }
  }
  EXPECT_TRUE(beginnings > 15 || may_end_anywhere(GetParam().name));
}

// Bits flipped, bytes set, stretches cut out, doubled and taken from another input.
class Changes {
 public:
  explicit Changes(uint64_t number) : number_(number) {}

  std::string of(std::string input, const std::string& other) {
    for (uint32_t i = 0, count = 1 + below(4); i < count && !input.empty(); ++i) change(input, other);
    return input;
  }

 private:
  uint32_t below(size_t count) {
    return random_words({.seed = 11, .stream = RngStream::test}, draw_++, number_)[0] % static_cast<uint32_t>(count);
  }

  void change(std::string& input, const std::string& other) {
    using namespace std::string_view_literals;
    static constexpr std::string_view telling = "\0\xff\x7f\"{}[],:0-9\\ /*\r\n"sv;
    const size_t at = below(input.size()), length = 1 + below(std::min<size_t>(64, input.size() - at));
    switch (below(6)) {
      case 0: input[at] = static_cast<char>(input[at] ^ 1 << below(8)); break;
      case 1: input[at] = telling[below(telling.size())]; break;
      case 2: input.erase(at, length); break;
      case 3: input.insert(at, input.substr(at, length)); break;
      case 4: input.resize(at); break;
      default: input.insert(at, other.substr(std::min(other.size(), at), length));
    }
  }

  uint64_t number_;
  uint32_t draw_ = 0;
};

TEST_P(FuzzTarget, KeepsItsPromisesOverChangesOfItsCorpus) {
  const auto corpus = corpus_of(GetParam());
  uint64_t number = 0;
  for (const auto& [name, input] : corpus) {
    for (const auto& [unused, other] : corpus) {
      for (int i = 0; i < 20; ++i) {
        const std::string changed = Changes(++number).of(input, other);
        ASSERT_NO_THROW(GetParam().target(changed)) << name << ": " << ::testing::PrintToString(changed);
      }
    }
  }
}

// They come past the first brackets: most of what was accepted still is JSON, and some of it is accepted.
TEST_P(FuzzTarget, KeepsItsPromisesOverChangesOfTheStructureOfJson) {
  int changes = 0, accepted = 0;
  uint64_t number = 0;
  for (const auto& [name, input] : corpus_of(GetParam())) {
    if (!name.starts_with("good-")) continue;
    for (int i = 0; i < 200; ++i) {
      ++number;
      uint32_t draws = 0;
      const auto draw = [&](size_t below) { return random_words({.seed = 12, .stream = RngStream::test}, draws++, number)[0] % below; };
      const auto changed = fuzz::with_changed_json(input, draw);
      if (!changed) continue;
      ++changes;
      ASSERT_NO_THROW(accepted += GetParam().target(*changed) ? 1 : 0) << name << ": " << ::testing::PrintToString(*changed);
    }
  }
  const std::set<std::string> without_json = {"chat_template", "gguf_file", "store_frames"};
  EXPECT_EQ(changes > 0 && accepted > 0 && accepted < changes, !without_json.contains(GetParam().name)) << accepted << " of " << changes;
}

// A length before the text follows it, and so does what comes behind.
TEST(JsonChanges, KeepWhatIsAroundTheText) {
  const std::string input = std::string("\x07\0\0\0\0\0\0\0", 8) + R"({"a":1})" + "tail";
  const auto changed = fuzz::with_changed_json(input, [](size_t below) { return below - 1; });
  ASSERT_TRUE(changed.has_value());
  EXPECT_TRUE(changed->ends_with("}tail"));
  EXPECT_NE(changed, input);
  EXPECT_EQ(static_cast<size_t>((*changed)[0]), changed->size() - 12);
  EXPECT_FALSE(fuzz::with_changed_json("no brackets", [](size_t) { return size_t{0}; }));
  EXPECT_FALSE(fuzz::with_changed_json("{\"a\": ", [](size_t) { return size_t{0}; }));
}

INSTANTIATE_TEST_SUITE_P(All, FuzzTarget, ::testing::ValuesIn(kTargets), [](const auto& target) { return std::string(target.param.name); });

// Without this a target that promises nothing would pass.
TEST(FuzzTargets, ABrokenPromiseIsThrown) {
  EXPECT_THROW(fuzz::promise(false, "x"), std::logic_error);
  EXPECT_THROW(fuzz::accepted([] { fail(ExitCode::internal, "a reason that is long"); }), std::logic_error);
  EXPECT_THROW(fuzz::accepted([] { fail(ExitCode::data, "short"); }), std::logic_error);
  EXPECT_FALSE(fuzz::accepted([] { fail(ExitCode::data, "a reason that is long"); }));
}

}  // namespace mantissa::test::fuzz_test
