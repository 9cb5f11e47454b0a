// A tokenizer.json that is wrong, in every place. Each is refused with the file's name, or does its work; none takes much memory. Texts
// that break off, or in which any one byte is another, are in tests/fuzz/fuzz_test.cpp.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include "files.h"
#include "text/bpe_tokenizer.h"
#include "tokenizer_files.h"

namespace mantissa::tokenizer_hostile_test {

using test::added_token;
using test::encode;
using test::made;
using test::small_tokenizer;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Json parsed(const char* json) { return parse_json(json, "t.json"); }

// A tokenizer with every part that is supported.
Json whole() {
  Json json = test::small_tokenizer({"<unk>", "<0x41>", "\xE2\x96\x81"});
  json["added_tokens"] = Json::Entries{added_token("<s>", 20), added_token("wor", 15, false)};
  json["normalizer"] = parsed(R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Prepend","prepend":"h"},{"type":"Lowercase"},
    {"type":"Replace","pattern":{"String":" "},"content":"e"},{"type":"Strip","strip_left":true,"strip_right":false}]})");
  json["pre_tokenizer"] = parsed(R"({"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
    {"type":"Punctuation","behavior":"Isolated"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":true},
    {"type":"Split","pattern":{"Regex":"\\p{L}+| "},"behavior":"Isolated","invert":false}]})");
  json["post_processor"] = parsed(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
    {"Sequence":{"id":"A","type_id":0}}],"special_tokens":{"<s>":{"id":"<s>","ids":[20],"tokens":["<s>"]}}})");
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
                                           std::string(20000, '('),
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
    } catch (const Error& error) {  // an error of this text
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

struct RefusedFile {
  const char *patch, *message;  // a merge patch of small_tokenizer()
};

void apply_patch(Json& json, const Json& patch) {
  for (const auto& [name, value] : patch.members()) {
    if (value.is_object() && json.get(name).is_object())
      apply_patch(json[name], value);
    else
      json[name] = value;
  }
}

constexpr RefusedFile kRefused[] = {
    {R"({"model":{"type":"WordPiece"}})", "WordPiece"},
    {R"({"model":{"type":"Unigram"}})", "Unigram"},
    {R"({"model":null})", "model"},
    {R"({"model":{"vocab":[]}})", "model.vocab"},
    {R"({"model":{"vocab":{"zz":0}}})", "id 0"},
    {R"({"model":{"vocab":{"zz":-1}}})", "zz"},
    {R"({"model":{"vocab":{"zz":"1"}}})", "zz"},
    {R"({"model":{"vocab":{"zz":4000000000}}})", "zz"},
    {R"({"model":{"vocab":{"zz":60000000}}})", "60000000"},
    {R"({"model":{"dropout":0.1}})", "dropout"},
    {R"({"model":{"continuing_subword_prefix":"##"}})", "continuing_subword_prefix"},
    {R"({"model":{"end_of_word_suffix":"</w>"}})", "end_of_word_suffix"},
    {R"({"model":{"unk_token":"<x>"}})", "<x>"},
    {R"({"model":{"merges":"h e"}})", "merges"},
    {R"({"model":{"merges":["he"]}})", "entry 0"},
    {R"({"model":{"merges":["h e l"]}})", "entry 0"},
    {R"({"model":{"merges":[["h"]]}})", "entry 0"},
    {R"({"model":{"merges":[7]}})", "entry 0"},
    {R"({"model":{"merges":["h x"]}})", "\"x\""},
    {R"({"model":{"merges":["h l"]}})", "\"hl\""},
    {R"({"normalizer":{"type":"BertNormalizer"}})", "BertNormalizer"},
    {R"({"normalizer":{"type":"Sequence","normalizers":[{"type":"Precompiled"}]}})", "Precompiled"},
    {R"({"normalizer":{}})", "normalizer"},
    {R"({"normalizer":{"type":"Replace","pattern":"x","content":""}})", "pattern"},
    {R"({"pre_tokenizer":{"type":"Split","pattern":{"Regex":"\\b"},"behavior":"Isolated"}})", R"("\b")"},
    {R"({"pre_tokenizer":{"type":"Split","pattern":{"String":"x"},"behavior":"Gone"}})", "Gone"},
    {R"({"pre_tokenizer":{"type":"BertPreTokenizer"}})", "BertPreTokenizer"},
    {R"({"pre_tokenizer":{"type":"Whitespace"}})", "Whitespace"},
    {R"({"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"ByteLevel","add_prefix_space":false},{"type":"Digits"}]}})",
     "after ByteLevel"},
    {R"({"pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}})", "last"},
    {R"({"pre_tokenizer":{"type":"Metaspace","replacement":""}})", "replacement"},
    {R"({"decoder":{"type":"WordPiece"}})", "WordPiece"},
    {R"({"decoder":{"type":"Strip","content":"","start":1,"stop":0}})", "content"},
    {R"({"decoder":{"type":"Strip","content":" ","start":-1,"stop":0}})", "start"},
    {R"({"post_processor":{"type":"Other"}})", "Other"},
    {R"({"post_processor":{"type":"TemplateProcessing","single":[],"special_tokens":{}}})", "single"},
    {R"({"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{}}})",
     "<s>"},
    {R"({"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"Sequence":{"id":"A"}}],"special_tokens":{}}})",
     "once"},
    {R"({"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"Sequence":{"id":"B"}}],"special_tokens":{}}})",
     "post_processor.single[1].Sequence.id: must be A"},
    {R"({"post_processor":{"type":"Sequence","processors":[{"type":"RobertaProcessing","sep":["</s>",2],"cls":["<s>",1]},{"type":"ByteLevel"},
      {"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"["}},{"Sequence":{"id":"A"}}],"special_tokens":{"[":{"ids":[3]}}}]}})",
     "post_processor.processors[2]: a second post-processor"},
    {R"({"post_processor":{"type":"Sequence","processors":[{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},
      {"SpecialToken":{"id":"]"}}],"special_tokens":{"]":{"ids":[3]}}},{"type":"BertProcessing","sep":["</s>",2],"cls":["<s>",1]}]}})",
     "post_processor.processors[1]: a second post-processor"},
    {R"({"version":"2.0"})", "version \"2.0\""},
    {R"({"version":1.0})", "version 1"},
    {R"({"special_tokens_map":{}})", "\"special_tokens_map\""},
    {R"({"decoder":{"type":"Metaspace","replacement":""}})", "decoder.replacement"},
    {R"({"added_tokens":{}})", "added_tokens"},
    {R"({"added_tokens":[{"id":3}]})", "content"},
    {R"({"added_tokens":[{"id":-3,"content":"x"}]})", "id"},
    {R"({"added_tokens":[{"id":30,"content":"x"},{"id":31,"content":"x"}]})", "twice"},
    {R"({"added_tokens":[{"id":30,"content":"x"},{"id":30,"content":"y"}]})", "id 30"},
    {R"({"added_tokens":[{"id":30,"content":"he"}]})", "model.vocab"}};

TEST(RefusedTokenizers, AreNamedByThePartOfTheFile) {
  for (const RefusedFile& row : kRefused) {
    Json json = small_tokenizer();
    apply_patch(json, parse_json(row.patch, "patch"));
    const Error error = test::error_of([&] { made(json); });
    EXPECT_EQ(error.code(), ExitCode::data) << row.patch;
    EXPECT_THAT(error.what(), ::testing::StartsWith("t.json")) << row.patch;
    EXPECT_THAT(error.what(), HasSubstr(row.message)) << row.patch;
  }
}

// Each of these is small and would take gigabytes or the stack.
TEST(BpeTokenizer, HostileFilesTakeNoMemory) {
  Json deep = small_tokenizer(), wide = small_tokenizer(), sparse = small_tokenizer(), grows = small_tokenizer();
  deep["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::Entries(100000, Json{{"type", "Digits"}})}};
  wide["added_tokens"] = Json::Entries{added_token("<a>", int64_t{1} << 26)};
  sparse["model"]["vocab"]["zz"] = int64_t{1} << 26;
  const Json doubled = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  grows["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::Entries(60, doubled)}};
  for (const Json* const file : {&deep, &wide, &sparse}) EXPECT_EQ(test::error_of([&] { made(*file); }).code(), ExitCode::data);
  const BpeTokenizer growing = made(grows);
  EXPECT_EQ(test::error_of([&] { encode(growing, "aaaa"); }).code(), ExitCode::data);
}

TEST(BpeTokenizer, FilesThatAreNoTokenizerAreRefused) {
  for (const char* const file : {"", "[]", "7", "null", "{\"model\":[]}", "{\"model\":{\"merges\":[]}}", "{\"version\":\"1.0\"}", "{"})
    EXPECT_EQ(test::error_of([&] { BpeTokenizer::from_json(file, "t.json"); }).code(), ExitCode::data) << file;
}

}  // namespace mantissa::tokenizer_hostile_test
