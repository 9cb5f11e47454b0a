// Tokenizers that were trained here, and texts that come in parts.
#include <gmock/gmock.h>

#include <random>
#include <set>

#include "files.h"
#include "testing.h"
#include "text/bpe_trainer.h"
#include "tokenizer_files.h"

namespace mantissa::trained_tokenizer_test {

using test::added_token;
using test::encode;
using test::made;
using test::small_tokenizer;
using ::testing::ElementsAre;

using Ids = std::vector<int32_t>;

// The ids of several texts that a stream gets in parts of a size: a list for each text.
std::vector<Ids> streamed(const BpeTokenizer& tokenizer, const std::vector<std::string>& texts, size_t window) {
  std::vector<Ids> out(1);
  StreamEncoder encoder(tokenizer,
                        {.ids = [&out](std::span<const int32_t> ids) { out.back().insert(out.back().end(), ids.begin(), ids.end()); },
                         .end_of_text = [&out] { out.emplace_back(); }},
                        SpecialTokenText::tokens, window);
  for (const std::string& text : texts) {
    for (size_t at = 0; at < text.size(); at += window) encoder.add(std::string_view(text).substr(at, window), {});
    encoder.end_text({});
  }
  encoder.flush();
  out.pop_back();
  return out;
}

TEST(BpeTokenizer, EachTextOfAStreamBeginsAnew) {
  Json json = small_tokenizer({"_"});
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "first"}, {"split", false}};
  const BpeTokenizer tokenizer = made(json);
  for (const size_t window : {1U, 3U, 100U})
    EXPECT_THAT(streamed(tokenizer, {"he", "ll", ""}, window), ElementsAre(Ids{17, 10}, Ids{17, 11}, Ids{}));
}

// A tokenizer that cuts at each "l", with another member in its file.
struct InParts {
  const char *member, *value, *text;
  bool cuts;  // before the end of the text is known
};

#define SPLIT(pattern, behavior, invert) R"({"type":"Split","pattern":)" pattern R"(,"behavior":")" behavior R"(","invert":)" invert "}"
#define TOKEN(content, flag) R"([{"id":30,"content":")" content R"(",")" flag R"(":true,"special":true}])"
TEST(TextsInParts, HaveTheIdsOfTheWhole) {
  static const InParts kRows[] = {
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "Isolated", "false"), "hello orl", true},
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "Removed", "false"), "hello orl", true},
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "Removed", "true"), "hello orl", true},
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "MergedWithPrevious", "false"), "hello orl", false},
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "MergedWithNext", "false"), "hello orl", false},
      {"pre_tokenizer", SPLIT(R"({"String":"l"})", "Contiguous", "false"), "hello orl", false},
      {"pre_tokenizer", SPLIT(R"({"Regex":"l|(?<=l)o"})", "Isolated", "false"), "lor", false},
      {"pre_tokenizer",
       R"({"type":"Sequence","pretokenizers":[)" SPLIT(R"({"String":"l"})", "Isolated",
                                                       "false") R"(,{"type":"Metaspace","replacement":"_","prepend_scheme":"first"}]})",
       "hlh", false},
      {"normalizer", R"({"type":"Lowercase"})", "HELlo", true},
      {"normalizer", R"({"type":"Prepend","prepend":"_"})", "hlhl", false},
      {"normalizer", R"({"type":"Replace","pattern":{"String":"  "},"content":"_"})", "l  hl", false},
      {"normalizer", R"({"type":"Strip","strip_left":true,"strip_right":true})", "  h l  ", false},
      {"added_tokens", TOKEN("[", "normalized"), "l  [  hl", true},
      {"added_tokens", TOKEN("hel", "single_word"), "hello hel", false},
      {"added_tokens", TOKEN("[", "lstrip"), "l  [  hl", false},
      {"added_tokens", TOKEN("[", "rstrip"), "l  [  hl", false}};
  for (const InParts& row : kRows) {
    Json json = small_tokenizer({" ", "_", "_h"});
    json["model"]["merges"].entries().emplace_back("_ h");
    json["pre_tokenizer"] = parse_json(R"({"type":"Split","pattern":{"String":"l"},"behavior":"Isolated","invert":false})", "p");
    json[row.member] = parse_json(row.value, row.member);
    const BpeTokenizer tokenizer = made(json);
    EXPECT_EQ(tokenizer.works_on_parts(), row.cuts) << row.value;
    const Ids whole = encode(tokenizer, row.text);
    for (const size_t window : {1U, 2U, 3U, 100U}) EXPECT_THAT(streamed(tokenizer, {row.text}, window), ElementsAre(whole)) << row.value;
  }
}
#undef SPLIT
#undef TOKEN

TEST(BpeTokenizer, IdsDoNotDependOnTheThreadsAndTextBetweenMatchesIsKeptInParts) {
  Json json = small_tokenizer();
  json["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "l+"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const BpeTokenizer tokenizer = made(json);
  std::string text;
  for (size_t i = 0; i < 1000; ++i) text += test::repeated("helloworld", 1 + i % 3).substr(i % 7);
  const test::Threads one(1);
  const Ids whole = encode(tokenizer, text);
  EXPECT_EQ(tokenizer.decode(whole), text);
  for (const size_t window : {1U, 2U, 7U, 100U}) EXPECT_THAT(streamed(tokenizer, {text}, window), ElementsAre(whole)) << window;
  const test::Threads three(3);
  EXPECT_EQ(encode(tokenizer, text), whole);
}

// A tokenizer of bytes that was trained on a text, and random texts, whole and in parts of any size.
class TrainedTokenizer : public ::testing::Test {
 protected:
  static std::string trained(int64_t size) {
    BpeTrainer trainer;
    const std::string text = test::repeated("It's the year 2024; we'll say: \"h\xC3\xA9llo\" \xF0\x9F\x98\x80\n\n  and again... \t", 40);
    for (size_t at = 0; at < text.size(); at += 7) trainer.add(std::string_view(text).substr(at, 7), {});
    trainer.end_text({});
    return trainer.train(size);
  }
  std::string random_text() {
    static const std::vector<std::string> kParts = {
        "It's",          " the",  "  ",        "\n",           "\r\n", "2024", "h\xC3\xA9", "\xF0\x9F\x98\x80",
        "<|endoftext|>", "<|end", "e\xCC\x81", "\xE4\xB8\xAD", "!!",   "'LL",  "\xC2\xA0",  "x"};
    std::string out;
    for (size_t i = random_() % 30; i > 0; --i) out += kParts[random_() % kParts.size()];
    return out;
  }
  std::mt19937 random_{7};
};

TEST_F(TrainedTokenizer, BytesComeBack) {
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(trained(290), "t.json");
  EXPECT_EQ(tokenizer.size(), 290);
  EXPECT_EQ(tokenizer.id_of("<|endoftext|>"), 289);
  for (int i = 0; i < 300; ++i) {
    const std::string text = random_text();
    EXPECT_EQ(tokenizer.decode(encode(tokenizer, text, SpecialTokenText::text)), text);
    EXPECT_LT(encode(tokenizer, "It's the year").size(), 13U);
  }
}

TEST_F(TrainedTokenizer, IsTheSameForTheSameText) {
  EXPECT_EQ(trained(280), trained(280));
  EXPECT_EQ(test::error_of([] { trained(256); }).code(), ExitCode::usage);
  EXPECT_LT(BpeTokenizer::from_json(trained(100000), "t.json").size(), 1000) << "no pair occurs twice";
}

// Returns the words that are tokens of a vocabulary that was trained on words, each on a line.
std::vector<std::string> merged_words(const std::vector<std::string>& words, int64_t size) {
  BpeTrainer trainer;
  for (const std::string& word : words) trainer.add(word + "\n", {});
  trainer.end_text({});
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(trainer.train(size), "t.json");
  std::vector<std::string> out;
  for (const std::string& word : std::set(words.begin(), words.end()))
    if (tokenizer.id_of(word)) out.push_back(word);
  return out;
}

TEST_F(TrainedTokenizer, MergesTheMostFrequentPairAndOfEqualOnesThatOfTheLowerIds) {
  EXPECT_THAT(merged_words({"ab", "cd", "ab", "cd"}, 258), ElementsAre("ab"));
  EXPECT_THAT(merged_words({"ab", "cd", "cd", "ab", "cd"}, 258), ElementsAre("cd"));
  // Two of the five pairs "bc" are left where "ab" has been merged.
  EXPECT_THAT(merged_words({"abc", "abc", "abc", "ab", "ab", "ab", "bc", "bc", "de", "de", "de"}, 259), ElementsAre("ab", "de"));
  EXPECT_THAT(merged_words({"ab", "cd", "cd"}, 300), ElementsAre("cd")) << "a pair that occurs once is not merged";
}

TEST_F(TrainedTokenizer, AddedTokensComeLast) {
  BpeTrainer trainer;
  trainer.add("abababab", {});
  trainer.end_text({});
  const std::vector<AddedToken> added = {{.content = "<think>"}, {.content = "<|im_end|>", .special = true}};
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(trainer.train(261, added), "t.json");
  EXPECT_EQ(tokenizer.size(), 261);
  EXPECT_EQ(tokenizer.id_of("<|endoftext|>"), 258);
  EXPECT_EQ(tokenizer.id_of("<think>"), 259);
  EXPECT_EQ(tokenizer.id_of("<|im_end|>"), 260);
  EXPECT_THAT(encode(tokenizer, "abab<|im_end|>ab"), ElementsAre(257, 260, 256)) << "of two merges";
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 258, 259, 260, 256}), "ab<think>ab") << "special tokens are not shown";
  EXPECT_EQ(test::error_of([&] { trainer.train(258, added); }).code(), ExitCode::usage);
  EXPECT_EQ(BpeTokenizer::from_json(trainer.train(259, added), "t.json").size(), 259);
}

// Words that share many pairs, which all have to be merged in each: time grows with their number, not with its power.
TEST_F(TrainedTokenizer, WordsThatSharePairsAreMergedOnceEach) {
  BpeTrainer trainer;
  const std::string letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  trainer.add(letters + " " + letters + " x" + letters, {});
  trainer.end_text({});
  const BpeTokenizer tokenizer = BpeTokenizer::from_json(trainer.train(320), "t.json");
  EXPECT_EQ(encode(tokenizer, letters).size(), 1U);
}

TEST_F(TrainedTokenizer, IdsDoNotDependOnTheParts) {
  Json json = parse_json(trained(290), "t.json");
  for (const char* const normalizer :
       {"null", R"({"type":"NFC"})", R"({"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Lowercase"}]})"}) {
    json["normalizer"] = parse_json(normalizer, "normalizer");
    json["added_tokens"] = Json::Entries{added_token("<|endoftext|>", 289), added_token(" the", 310, false)};
    json["added_tokens"][1]["normalized"] = true;
    const BpeTokenizer tokenizer = made(json);
    ASSERT_TRUE(tokenizer.works_on_parts());
    for (int i = 0; i < 200; ++i) {
      const std::string text = random_text();
      const size_t part = 1 + random_() % 9, window = 1 + random_() % 40;
      Ids ids;
      int ends = 0;
      StreamEncoder encoder(
          tokenizer,
          {.ids = [&](std::span<const int32_t> some) { ids.insert(ids.end(), some.begin(), some.end()); }, .end_of_text = [&] { ++ends; }},
          SpecialTokenText::tokens, window);
      for (int twice = 0; twice < 2; ++twice) {
        for (size_t at = 0; at < text.size(); at += part) encoder.add(std::string_view(text).substr(at, part), {});
        encoder.end_text({});
      }
      encoder.flush();
      Ids expected = encode(tokenizer, text);
      expected.insert(expected.end(), expected.begin(), expected.end());
      EXPECT_EQ(ids, expected) << text;
      EXPECT_EQ(ends, 2);
    }
  }
}

}  // namespace mantissa::trained_tokenizer_test
