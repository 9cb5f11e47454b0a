// A tokenizer.json that is wrong, in every place. Each is refused with the file's name, or does its work; none takes much memory.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include "files.h"
#include "mantissa/text/bpe_tokenizer.h"
#include "tokenizer_files.h"

namespace mantissa::tokenizer_hostile_test {

using test::added_token;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Json parsed(const char* json) { return parse_json(json, "t.json"); }

// Has every part that is supported.
Json whole() {
  Json json = test::small_tokenizer({"<unk>", "<0x41>", "\xE2\x96\x81"});
  json["added_tokens"] = Json::Entries{added_token("<s>", 30), added_token("wor", 15, false)};
  json["normalizer"] = parsed(R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Prepend","prepend":"h"},{"type":"Lowercase"},
    {"type":"Replace","pattern":{"String":" "},"content":"e"},{"type":"Strip","strip_left":true,"strip_right":false}]})");
  json["pre_tokenizer"] = parsed(R"({"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
    {"type":"Punctuation","behavior":"Isolated"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":true},
    {"type":"Split","pattern":{"Regex":"\\p{L}+| "},"behavior":"Isolated","invert":false}]})");
  json["post_processor"] = parsed(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
    {"Sequence":{"id":"A","type_id":0}}],"special_tokens":{"<s>":{"id":"<s>","ids":[30],"tokens":["<s>"]}}})");
  json["decoder"] =
      parsed(R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},
    {"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]})");
  json["model"]["unk_token"] = "<unk>";
  json["model"]["byte_fallback"] = json["model"]["fuse_unk"] = json["model"]["ignore_merges"] = true;
  return json;
}

const std::vector<Json>& wrong_values() {
  static const std::vector<Json> kWrong = {nullptr,
                                           true,
                                           -1,
                                           7,
                                           int64_t{1} << 40,
                                           1e300,
                                           "",
                                           "x",
                                           "\\w(?<",
                                           std::string(100000, '('),
                                           Json::Entries(),
                                           Json::Members(),
                                           Json::Entries(1000, Json{{"type", "Sequence"}}),
                                           {{"type", "Sequence"}},
                                           {{"type", "BPE"}},
                                           {{"Regex", "(a+)+$"}}};
  return kWrong;
}

// Puts each wrong value in each place of `at`, which is a part of `file`, and each time asks for a tokenizer of that.
class Spoiler {
 public:
  void spoil(Json& at) {
    for (const Json& wrong : wrong_values()) try_with(at, wrong);
    if (at.is_object()) {
      for (auto& [name, member] : at.members()) spoil(member);
      for (const auto& [name, member] : Json::Members(at.members())) {
        at.members().erase(name);
        try_file(name + " is gone");
        at.members()[name] = member;
      }
    } else if (at.is_list()) {
      for (Json& entry : at.entries()) spoil(entry);
    }
  }
  void try_text(const std::string& text, const std::string& what) {
    ++tried_;
    try {
      use(BpeTokenizer::from_json(text, "t.json"), what);
    } catch (const Error& error) {
      ++refused_;
      EXPECT_EQ(error.code(), ExitCode::data) << what << ": " << error.what();
      EXPECT_THAT(error.what(), StartsWith("t.json")) << what;
      EXPECT_LT(std::string(error.what()).size(), 1000U) << what << ' ' << shortened(error.what(), 300);
    }
  }
  Json file = whole();
  int tried_ = 0, refused_ = 0;

 private:
  static void use(const BpeTokenizer& tokenizer, const std::string& what) {
    try {
      for (const int32_t id : tokenizer.encode("<s> hello wor 12!", {}, SpecialTokenText::tokens)) {
        EXPECT_GE(id, 0) << what;
        EXPECT_LT(id, tokenizer.size()) << what;
      }
    } catch (const Error& error) {  // of this text
      EXPECT_THAT(error.what(), AnyOf(HasSubstr("normalizer"), HasSubstr("cannot be"))) << what;
    }
  }
  void try_with(Json& at, const Json& wrong) {
    const Json right = std::exchange(at, wrong);
    try_file(wrong.shown());
    at = right;
  }
  void try_file(const std::string& what) { try_text(file.dump(), what); }
};

int64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

TEST(HostileTokenizers, AWrongValueInAnyPlaceIsRefusedOrWorks) {
  Spoiler spoiler;
  spoiler.try_text(spoiler.file.dump(), "as it is");
  ASSERT_EQ(spoiler.refused_, 0);
  spoiler.spoil(spoiler.file);
  EXPECT_GT(spoiler.refused_, 1000);
  EXPECT_LT(spoiler.refused_, spoiler.tried_) << "what is not used may be anything";
  EXPECT_LT(peak_memory(), int64_t{1} << 30) << "of all tests of this process";
}

TEST(HostileTokenizers, NamesInMessagesAreShort) {
  Spoiler spoiler;
  const std::string name(100000, 'n');
  spoiler.file["added_tokens"] = Json::Entries{added_token(name, 30), added_token(name, 31)};
  spoiler.try_text(spoiler.file.dump(), "twice");
  spoiler.file["added_tokens"] = Json::Entries{added_token(name, 1 << 24)};
  spoiler.try_text(spoiler.file.dump(), "a large id");
  spoiler.file["model"]["vocab"][name] = 29;
  spoiler.file["added_tokens"] = Json::Entries{added_token(name, 31)};
  spoiler.try_text(spoiler.file.dump(), "two ids");
  EXPECT_EQ(spoiler.refused_, 3);
}

TEST(HostileTokenizers, ATextThatBreaksOffIsRefused) {
  Spoiler spoiler;
  const std::string text = spoiler.file.dump();
  for (size_t size = 0; size < text.size(); size += 7) spoiler.try_text(text.substr(0, size), "of " + std::to_string(size) + " bytes");
  EXPECT_EQ(spoiler.refused_, spoiler.tried_);
  for (size_t at = 0; at < text.size(); at += 11) {
    std::string damaged = text;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x80);
    spoiler.try_text(damaged, "byte " + std::to_string(at));
  }
}

}  // namespace mantissa::tokenizer_hostile_test
