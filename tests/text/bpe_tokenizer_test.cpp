// What each part of a tokenizer.json does to ids and texts. Expected ids and texts are those of the package tokenizers.
#include "mantissa/text/bpe_tokenizer.h"

#include <gmock/gmock.h>

#include <random>

#include "files.h"
#include "mantissa/text/bpe_trainer.h"
#include "tokenizer_files.h"

namespace mantissa::bpe_tokenizer_test {

using test::added_token;
using test::small_tokenizer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ids = std::vector<int32_t>;

BpeTokenizer made(const Json& json) { return BpeTokenizer::from_json(json.dump(), "t.json"); }

Ids encode(const BpeTokenizer& tokenizer, std::string_view text, SpecialTokenText special = SpecialTokenText::tokens) {
  return tokenizer.encode(text, {}, special);
}

std::vector<std::string> pieces(const Json& json, std::string_view text) {
  const BpeTokenizer tokenizer = made(json);
  std::vector<std::string> out;
  for (const int32_t id : encode(tokenizer, text)) out.push_back(tokenizer.decode({&id, 1}));
  return out;
}

TEST(BpeTokenizer, MergesByRankAndThenFromTheLeft) {
  EXPECT_THAT(pieces(small_tokenizer(), "helloworld"), ElementsAre("hello", "wor", "ld"));
  EXPECT_THAT(pieces(small_tokenizer(), "lllll"), ElementsAre("ll", "ll", "l"));
  EXPECT_THAT(pieces(small_tokenizer(), "hel"), ElementsAre("he", "l"));
}

// More symbols than are merged without a heap, at every length around that.
TEST(BpeTokenizer, LongPiecesAreMergedAlike) {
  const BpeTokenizer tokenizer = made(small_tokenizer());
  for (size_t words = 1; words < 40; ++words) {
    const Ids ids = encode(tokenizer, test::repeated("helloworld", words) + "lll");
    ASSERT_EQ(ids.size(), 3 * words + 2);
    for (size_t i = 0; i < words; ++i) EXPECT_THAT(std::span(ids).subspan(3 * i, 3), ElementsAre(13, 15, 16));
  }
}

// Byte pair encoding as it is defined: the pair of the lowest rank is merged, the leftmost first, until none is left.
struct RandomMerges {
  explicit RandomMerges(std::mt19937& random) {
    while (names.size() < 40) {
      const auto left = static_cast<int32_t>(random() % names.size()), right = static_cast<int32_t>(random() % names.size());
      const std::string name = names[static_cast<size_t>(left)] + names[static_cast<size_t>(right)];
      if (std::ranges::find(names, name) != names.end()) continue;
      pairs.emplace_back(left, right);
      names.push_back(name);
    }
  }
  Ids encode(Ids ids) const {
    for (size_t rank = 0; rank < pairs.size();) {
      size_t at = 0;
      while (at + 1 < ids.size() && std::pair(ids[at], ids[at + 1]) != pairs[rank]) ++at;
      if (at + 1 >= ids.size()) {
        ++rank;
        continue;
      }
      ids[at] = static_cast<int32_t>(4 + rank);
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
      rank = 0;
    }
    return ids;
  }
  Json file() const {
    Json json = small_tokenizer(), vocab = Json::Members(), merges = Json::Entries();
    for (size_t id = 0; id < names.size(); ++id) vocab.add(names[id], id);
    for (const auto& [left, right] : pairs)
      merges.entries().emplace_back(names[static_cast<size_t>(left)] + ' ' + names[static_cast<size_t>(right)]);
    json["model"]["vocab"] = vocab;
    json["model"]["merges"] = merges;
    return json;
  }

  std::vector<std::string> names = {"a", "b", "c", "d"};
  std::vector<std::pair<int32_t, int32_t>> pairs;
};

TEST(BpeTokenizer, RandomMergesAreThoseOfTheDefinition) {
  std::mt19937 random(3);
  for (int vocabulary = 0; vocabulary < 20; ++vocabulary) {
    const RandomMerges merges(random);
    const BpeTokenizer tokenizer = made(merges.file());
    for (const size_t length : {2U, 5U, 15U, 40U, 100U, 300U}) {
      Ids letters;
      std::string text;
      while (letters.size() < length) {
        letters.push_back(static_cast<int32_t>(random() % 4));
        text += merges.names[static_cast<size_t>(letters.back())];
      }
      ASSERT_EQ(encode(tokenizer, text), merges.encode(letters)) << text << ' ' << merges.file().dump();
    }
  }
}

TEST(BpeTokenizer, ACharacterWithoutATokenIsLeftOutUnlessThereIsAnUnknownOne) {
  Json json = small_tokenizer({"<unk>"});
  EXPECT_THAT(pieces(json, "hxyeo"), ElementsAre("he", "o"));  // the merge does not see what was left out
  json["model"]["unk_token"] = "<unk>";
  EXPECT_THAT(pieces(json, "hxyeo"), ElementsAre("h", "<unk>", "<unk>", "e", "o"));
  json["model"]["fuse_unk"] = true;
  EXPECT_THAT(pieces(json, "hxyeoz"), ElementsAre("h", "<unk>", "e", "o", "<unk>"));
}

TEST(BpeTokenizer, BytesStandForACharacterIfAllAreThere) {
  Json json = small_tokenizer({"<unk>", "<0xC3>", "<0xA9>"});
  json["model"]["unk_token"] = "<unk>";
  json["model"]["byte_fallback"] = true;
  EXPECT_THAT(encode(made(json), "h\xC3\xA9"), ElementsAre(5, 18, 19));
  EXPECT_THAT(encode(made(json), "h\xC3\xA8"), ElementsAre(5, 17)) << "of which one byte has no token";
  json["decoder"] = {{"type", "Sequence"}, {"decoders", Json::Entries{{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}};
  EXPECT_EQ(made(json).decode(Ids{5, 18, 19, 0}),
            "h\xC3\xA9"
            "a");
  EXPECT_EQ(made(json).decode(Ids{18, 0, 19, 18}),
            "\xEF\xBF\xBD"
            "a\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(BpeTokenizer, IgnoreMergesTakesAWholePieceFirst) {
  Json json = small_tokenizer({"hellor"});  // which no merge makes
  EXPECT_THAT(pieces(json, "hellor"), ElementsAre("hello", "r"));
  json["model"]["ignore_merges"] = true;
  EXPECT_THAT(pieces(json, "hellor"), ElementsAre("hellor"));
}

TEST(BpeTokenizer, MergesMayBePairs) {
  Json json = small_tokenizer();
  json["model"]["merges"] = Json::Entries{Json::Entries{"h", "e"}, Json::Entries{"l", "l"}};
  EXPECT_THAT(pieces(json, "hello"), ElementsAre("he", "ll", "o"));
}

TEST(BpeTokenizer, AddedTokensComeBeforeAllElse) {
  Json json = small_tokenizer();
  json["added_tokens"] = Json::Entries{added_token("<a>", 20), added_token("<a><b>", 21), added_token("lo", 22, false)};
  const BpeTokenizer tokenizer = made(json);
  EXPECT_THAT(encode(tokenizer, "he<a><b><a>llo"), ElementsAre(10, 21, 20, 6, 22)) << "the longest of those that begin there";
  EXPECT_THAT(encode(tokenizer, "a<a>", SpecialTokenText::text), ElementsAre(0, 0)) << "'<' and '>' have no token";
  EXPECT_THAT(encode(tokenizer, "lo", SpecialTokenText::text), ElementsAre(22)) << "which is not special";
  EXPECT_EQ(tokenizer.decode(Ids{10, 21, 22, 99, -1}), "helo") << "without special tokens, and what is none";
  EXPECT_EQ(tokenizer.size(), 23);
  EXPECT_EQ(tokenizer.id_of("<a>"), 20);
  EXPECT_EQ(tokenizer.id_of("hello"), 13);
  EXPECT_EQ(tokenizer.id_of("hallo"), std::nullopt);
}

TEST(BpeTokenizer, AddedTokensLookAtWhatIsBesideThem) {
  Json strips = small_tokenizer();
  strips["added_tokens"] = Json::Entries{added_token("[", 20), added_token("]", 21), added_token("hel", 22)};
  strips["added_tokens"][0]["lstrip"] = true;
  strips["added_tokens"][1]["rstrip"] = true;
  strips["added_tokens"][2]["single_word"] = true;
  const BpeTokenizer tokenizer = made(strips);
  EXPECT_FALSE(tokenizer.works_on_parts());
  EXPECT_THAT(encode(tokenizer, "a \t[ a"), ElementsAre(0, 20, 0));
  EXPECT_THAT(encode(tokenizer,
                     "a ]\n\xE3\x80\x80"
                     "a"),
              ElementsAre(0, 21, 0));
  EXPECT_THAT(encode(tokenizer, "a] [a"), ElementsAre(0, 21, 20, 0)) << "white space that both could take";
  EXPECT_THAT(encode(tokenizer, "hel hello hel, _hel"), ElementsAre(22, 13, 22, 10, 6));
}

// What a stream makes of several texts in parts of a size: a list of ids for each.
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

TEST(BpeTokenizer, TextBetweenMatchesIsKeptInParts) {
  Json json = small_tokenizer();
  json["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "l+"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const BpeTokenizer tokenizer = made(json);
  const std::string text = test::repeated("helloworld", 5);
  const Ids whole = encode(tokenizer, text);
  EXPECT_EQ(tokenizer.decode(whole), text);
  for (const size_t window : {1U, 2U, 7U, 100U}) EXPECT_THAT(streamed(tokenizer, {text}, window), ElementsAre(whole)) << window;
}

TEST(BpeTokenizer, NormalizedTokensAreFoundInNormalizedText) {
  Json json = small_tokenizer();
  json["normalizer"] = {{"type", "Lowercase"}};
  json["added_tokens"] = Json::Entries{added_token("HE", 20), added_token("HE", 21)};
  json["added_tokens"].entries().pop_back();
  json["added_tokens"][0]["normalized"] = true;
  EXPECT_THAT(encode(made(json), "hE He a"), ElementsAre(20, 20, 0));
  json["added_tokens"][0]["normalized"] = false;
  EXPECT_THAT(encode(made(json), "hE HE"), ElementsAre(10, 20));
}

struct Normalized {
  const char *name, *normalizer, *text;
  std::vector<std::string> expected;
};

class NormalizedTexts : public ::testing::TestWithParam<Normalized> {};

TEST_P(NormalizedTexts, AreWhatTheModelSees) {
  Json json = small_tokenizer({"\xE2\x96\x81", "\xC3\xA9", "A", "i", "\xCC\x87"});
  json["normalizer"] = parse_json(GetParam().normalizer, "normalizer");
  EXPECT_EQ(pieces(json, GetParam().text), GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(
    , NormalizedTexts,
    ::testing::Values(Normalized{"nfc",
                                 R"({"type":"NFC"})",
                                 "e\xCC\x81"
                                 "A\xEF\xBC\xA1",
                                 {"\xC3\xA9", "A"}},
                      Normalized{"nfkc",
                                 R"({"type":"NFKC"})",
                                 "e\xCC\x81"
                                 "A\xEF\xBC\xA1",
                                 {"\xC3\xA9", "A", "A"}},
                      Normalized{"lowercase", R"({"type":"Lowercase"})", "HELLO\xC4\xB0", {"hello", "i", "\xCC\x87"}},
                      Normalized{"prepend", R"({"type":"Prepend","prepend":"▁"})", "a", {"\xE2\x96\x81", "a"}},
                      Normalized{"replace", R"({"type":"Replace","pattern":{"String":"."},"content":"ll"})", "he.o", {"hello"}},
                      Normalized{
                          "regex", R"({"type":"Replace","pattern":{"Regex":"\\s+"},"content":"▁"})", "a \n b", {"a", "\xE2\x96\x81", "b"}},
                      Normalized{"strip", R"({"type":"Strip","strip_left":true,"strip_right":false})", " A", {"A"}},
                      Normalized{"sequence",
                                 R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":" "},
                                   {"type":"Replace","pattern":{"String":" "},"content":"▁"}]})",
                                 "a a",
                                 {"\xE2\x96\x81", "a", "\xE2\x96\x81", "a"}}),
    [](const auto& one) { return std::string(one.param.name); });

struct Cut {
  const char *name, *pretokenizer, *text;
  std::vector<std::string> expected;
};

class CutTexts : public ::testing::TestWithParam<Cut> {};

// Pieces show by merges that do not cross them: "ll" and "hell" are tokens.
TEST_P(CutTexts, AreEncodedPieceByPiece) {
  Json json = small_tokenizer({"\xE2\x96\x81", "\xE2\x96\x81h", "1", "11", ".", "..", " ", "l1"});
  json["model"]["merges"].entries().insert(json["model"]["merges"].entries().end(), {"▁ h", "1 1", ". .", "l 1"});
  json["pre_tokenizer"] = parse_json(GetParam().pretokenizer, "pretokenizer");
  EXPECT_EQ(pieces(json, GetParam().text), GetParam().expected);
}

#define SPLIT(behavior, invert) R"({"type":"Split","pattern":{"String":"l"},"behavior":")" behavior R"(","invert":)" invert "}"
INSTANTIATE_TEST_SUITE_P(
    , CutTexts,
    ::testing::Values(
        Cut{"isolated", SPLIT("Isolated", "false"), "hello", {"he", "l", "l", "o"}},
        Cut{"removed", SPLIT("Removed", "false"), "hello", {"he", "o"}}, Cut{"kept", SPLIT("Removed", "true"), "hello", {"l", "l"}},
        Cut{"contiguous", SPLIT("Contiguous", "false"), "hello", {"he", "ll", "o"}},
        Cut{"previous", SPLIT("MergedWithPrevious", "false"), "hellor", {"he", "l", "l", "or"}},
        Cut{"next", SPLIT("MergedWithNext", "false"), "olld", {"o", "l", "ld"}},
        Cut{"digits", R"({"type":"Digits","individual_digits":false})", "l1111", {"l", "11", "11"}},
        Cut{"each_digit", R"({"type":"Digits","individual_digits":true})", "l11", {"l", "1", "1"}},
        Cut{"punctuation", R"({"type":"Punctuation","behavior":"Contiguous"})", "he..", {"he", ".."}},
        Cut{"each_punctuation", R"({"type":"Punctuation"})", "he..", {"he", ".", "."}},
        Cut{"metaspace",
            R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})",
            "he h",
            {"\xE2\x96\x81", "he", "\xE2\x96\x81h"}},
        Cut{"metaspace_never", R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", "he h", {"he", "\xE2\x96\x81h"}},
        Cut{"metaspace_legacy", R"({"type":"Metaspace","replacement":"▁","add_prefix_space":true})", "h", {"\xE2\x96\x81h"}},
        Cut{"sequence",
            R"({"type":"Sequence","pretokenizers":[{"type":"Digits"},{"type":"Punctuation"}]})",
            "l11..",
            {"l", "11", ".", "."}}),
    [](const auto& one) { return std::string(one.param.name); });
#undef SPLIT

TEST(BpeTokenizer, MetaspaceOfFirstIsAtTheBeginningOfTheText) {
  Json json = small_tokenizer({"\xE2\x96\x81", "\xE2\x96\x81h"});
  json["model"]["merges"].entries().emplace_back("▁ h");
  json["added_tokens"] = Json::Entries{added_token("<a>", 30)};
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}};
  EXPECT_THAT(encode(made(json), "h<a>h"), ElementsAre(18, 30, 5));
  EXPECT_THAT(encode(made(json), "<a>h h"), ElementsAre(30, 5, 18));
}

TEST(BpeTokenizer, PostProcessorsPutTokensAroundATextOnly) {
  Json json = small_tokenizer();
  json["post_processor"] = parse_json(R"({"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing",
    "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],
    "special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]},"</s>":{"id":"</s>","ids":[2,3],"tokens":["</s>"]}}}]})",
                                      "p");
  const BpeTokenizer both = made(json);
  EXPECT_THAT(both.before_text(), ElementsAre(1));
  EXPECT_THAT(both.after_text(), ElementsAre(2, 3));
  EXPECT_THAT(encode(both, "a"), ElementsAre(0));
  json["post_processor"] = parse_json(R"({"type":"RobertaProcessing","sep":["</s>",2],"cls":["<s>",40]})", "p");
  EXPECT_THAT(made(json).before_text(), ElementsAre(40));
  EXPECT_THAT(made(json).after_text(), ElementsAre(2));
  EXPECT_EQ(made(json).size(), 41) << "which the model must have, too";
}

struct Decoded {
  const char *name, *decoder;
  Ids ids;
  const char* expected;
};

class DecodedTexts : public ::testing::TestWithParam<Decoded> {};

TEST_P(DecodedTexts, AreThoseOfTheDecoder) {
  Json json =
      small_tokenizer({"\xE2\x96\x81"
                       "a",
                       "\xE2\x96\x81\xE2\x96\x81", "\xC3\xA2\xC4\xA4",
                       "\xC4\xA0"
                       "h",
                       "\xC4\xBE"
                       "h"});  // from 17
  json["decoder"] = parse_json(GetParam().decoder, "decoder");
  EXPECT_EQ(made(json).decode(GetParam().ids), GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(
    , DecodedTexts,
    ::testing::Values(Decoded{"none", "null", {0, 1}, "a b"}, Decoded{"fuse", R"({"type":"Fuse"})", {0, 1}, "ab"},
                      Decoded{"metaspace", R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})", {17, 17, 18}, "a a  "},
                      Decoded{"metaspace_first", R"({"type":"Metaspace","replacement":"▁"})", {18, 17}, " a"},
                      Decoded{"metaspace_never", R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", {17}, " a"},
                      Decoded{"replace", R"({"type":"Replace","pattern":{"String":"▁"},"content":"_"})", {17, 18}, "_a__"},
                      Decoded{"strip",
                              R"({"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":"a","start":2,"stop":1}]})",
                              {0, 0, 0, 1, 0, 0},
                              "aba"},
                      Decoded{"bytes",
                              R"({"type":"ByteLevel"})",
                              {20, 19, 21, 0},
                              " h\xE2\x82\x9Ch"
                              "a"},
                      Decoded{"torn_bytes",
                              R"({"type":"ByteLevel"})",
                              {19, 0, 19},
                              "\xEF\xBF\xBD"
                              "a\xEF\xBF\xBD"}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(LossyUtf8, ReplacesTheLongestBeginningsOfCharacters) {
  EXPECT_EQ(lossy_utf8("a\xE0\x80\x80z"), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz");
  EXPECT_EQ(lossy_utf8("\xF0\x9F\x98z\xF0\x9F\x98\x80"), "\xEF\xBF\xBDz\xF0\x9F\x98\x80");
  EXPECT_EQ(lossy_utf8("\xED\xA0\x80\xC3"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(BpeTokenizer, NamesTheByteThatIsNoUtf8) {
  const BpeTokenizer tokenizer = made(small_tokenizer());
  const Error error = test::error_of(
      [&] { tokenizer.encode("he\xFF", {.name = "f.txt", .code = ExitCode::data, .offset = 100}, SpecialTokenText::tokens); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("f.txt: not UTF-8 at byte 102"));
  EXPECT_EQ(test::error_of([&] { encode(tokenizer, "he\xC3"); }).code(), ExitCode::usage);
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
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 259, 260, 256}), "ab<think>ab") << "special tokens are not shown";
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

struct RefusedFile {
  const char *name, *patch, *message;  // a merge patch of small_tokenizer()
};

class RefusedTokenizers : public ::testing::TestWithParam<RefusedFile> {};

void apply_patch(Json& json, const Json& patch) {
  for (const auto& [name, value] : patch.members()) {
    if (value.is_object() && json.get(name).is_object())
      apply_patch(json[name], value);
    else
      json[name] = value;
  }
}

TEST_P(RefusedTokenizers, AreNamedByThePartOfTheFile) {
  Json json = small_tokenizer();
  apply_patch(json, parse_json(GetParam().patch, "patch"));
  const Error error = test::error_of([&] { made(json); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), ::testing::StartsWith("t.json"));
  EXPECT_THAT(error.what(), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    , RefusedTokenizers,
    ::testing::Values(
        RefusedFile{"wordpiece", R"({"model":{"type":"WordPiece"}})", "WordPiece"},
        RefusedFile{"unigram", R"({"model":{"type":"Unigram"}})", "Unigram"}, RefusedFile{"model_missing", R"({"model":null})", "model"},
        RefusedFile{"vocab_list", R"({"model":{"vocab":[]}})", "model.vocab"},
        RefusedFile{"id_twice", R"({"model":{"vocab":{"zz":0}}})", "id 0"},
        RefusedFile{"id_negative", R"({"model":{"vocab":{"zz":-1}}})", "zz"},
        RefusedFile{"id_text", R"({"model":{"vocab":{"zz":"1"}}})", "zz"},
        RefusedFile{"id_huge", R"({"model":{"vocab":{"zz":4000000000}}})", "zz"},
        RefusedFile{"id_sparse", R"({"model":{"vocab":{"zz":60000000}}})", "60000000"},
        RefusedFile{"dropout", R"({"model":{"dropout":0.1}})", "dropout"},
        RefusedFile{"prefix", R"({"model":{"continuing_subword_prefix":"##"}})", "continuing_subword_prefix"},
        RefusedFile{"suffix", R"({"model":{"end_of_word_suffix":"</w>"}})", "end_of_word_suffix"},
        RefusedFile{"unknown", R"({"model":{"unk_token":"<x>"}})", "<x>"},
        RefusedFile{"merges_text", R"({"model":{"merges":"h e"}})", "merges"},
        RefusedFile{"merge_of_one", R"({"model":{"merges":["he"]}})", "entry 0"},
        RefusedFile{"merge_of_three", R"({"model":{"merges":["h e l"]}})", "entry 0"},
        RefusedFile{"merge_list", R"({"model":{"merges":[["h"]]}})", "entry 0"},
        RefusedFile{"merge_number", R"({"model":{"merges":[7]}})", "entry 0"},
        RefusedFile{"merge_unknown", R"({"model":{"merges":["h x"]}})", "\"x\""},
        RefusedFile{"merge_made_unknown", R"({"model":{"merges":["h l"]}})", "\"hl\""},
        RefusedFile{"bert_normalizer", R"({"normalizer":{"type":"BertNormalizer"}})", "BertNormalizer"},
        RefusedFile{"precompiled", R"({"normalizer":{"type":"Sequence","normalizers":[{"type":"Precompiled"}]}})", "Precompiled"},
        RefusedFile{"nameless", R"({"normalizer":{}})", "normalizer"},
        RefusedFile{"pattern", R"({"normalizer":{"type":"Replace","pattern":"x","content":""}})", "pattern"},
        RefusedFile{"expression", R"({"pre_tokenizer":{"type":"Split","pattern":{"Regex":"\\w+"},"behavior":"Isolated"}})", R"("\w")"},
        RefusedFile{"behavior", R"({"pre_tokenizer":{"type":"Split","pattern":{"String":"x"},"behavior":"Gone"}})", "Gone"},
        RefusedFile{"bert", R"({"pre_tokenizer":{"type":"BertPreTokenizer"}})", "BertPreTokenizer"},
        RefusedFile{"white", R"({"pre_tokenizer":{"type":"Whitespace"}})", "Whitespace"},
        RefusedFile{
            "after_bytes",
            R"({"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"ByteLevel","add_prefix_space":false},{"type":"Digits"}]}})",
            "after ByteLevel"},
        RefusedFile{"scheme", R"({"pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}})", "last"},
        RefusedFile{"replacement", R"({"pre_tokenizer":{"type":"Metaspace","replacement":""}})", "replacement"},
        RefusedFile{"decoder", R"({"decoder":{"type":"WordPiece"}})", "WordPiece"},
        RefusedFile{"strip", R"({"decoder":{"type":"Strip","content":"","start":1,"stop":0}})", "content"},
        RefusedFile{"strip_count", R"({"decoder":{"type":"Strip","content":" ","start":-1,"stop":0}})", "start"},
        RefusedFile{"post", R"({"post_processor":{"type":"Other"}})", "Other"},
        RefusedFile{"template_without_text", R"({"post_processor":{"type":"TemplateProcessing","single":[],"special_tokens":{}}})",
                    "single"},
        RefusedFile{
            "template_unknown",
            R"({"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{}}})",
            "<s>"},
        RefusedFile{
            "template_twice",
            R"({"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}},{"Sequence":{"id":"A"}}],"special_tokens":{}}})",
            "once"},
        RefusedFile{"added_object", R"({"added_tokens":{}})", "added_tokens"},
        RefusedFile{"added_nameless", R"({"added_tokens":[{"id":3}]})", "content"},
        RefusedFile{"added_id", R"({"added_tokens":[{"id":-3,"content":"x"}]})", "id"},
        RefusedFile{"added_twice", R"({"added_tokens":[{"id":30,"content":"x"},{"id":31,"content":"x"}]})", "twice"},
        RefusedFile{"added_id_twice", R"({"added_tokens":[{"id":30,"content":"x"},{"id":30,"content":"y"}]})", "id 30"},
        RefusedFile{"added_other_id", R"({"added_tokens":[{"id":30,"content":"he"}]})", "model.vocab"}),
    [](const auto& one) { return std::string(one.param.name); });

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

}  // namespace mantissa::bpe_tokenizer_test
