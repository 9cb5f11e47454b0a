// Effects of each part of a tokenizer.json on ids and texts. Expected ids and texts are those of the package tokenizers.
#include "text/bpe_tokenizer.h"

#include <gmock/gmock.h>

#include <random>

#include "files.h"
#include "mantissa/base/text.h"
#include "text/characters.h"
#include "tokenizer_files.h"

namespace mantissa::bpe_tokenizer_test {

using test::added_token;
using test::encode;
using test::made;
using test::small_tokenizer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ids = std::vector<int32_t>;

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

TEST(BpeTokenizer, PartsThatSayNothingChangeNothing) {
  for (const char* const part : {"version", "truncation", "padding", "added_tokens", "normalizer", "post_processor"}) {
    Json json = small_tokenizer();
    json.members().erase(part);
    EXPECT_EQ(encode(BpeTokenizer::from_json(json.dump(), "t.json"), "hel"), Ids({10, 6})) << "without " << part;
  }
  Json json = small_tokenizer();
  json["version"] = nullptr;
  json["model"]["dropout"] = 0.0;
  EXPECT_THAT(encode(made(json), "hel"), ElementsAre(10, 6));
}

// "ab" is no pair any more where "bc" has been merged, and the pair of "a" and "bc" comes after that of "r" and "a". More symbols than are
// merged without a heap, at every length around that.
TEST(BpeTokenizer, APairThatAMergeChangedWaitsForItsTurn) {
  Json json = small_tokenizer({"bc", "ab", "ra", "abc"});
  json["model"]["merges"] = Json::Entries{"b c", "a b", "r a", "a bc"};
  const BpeTokenizer tokenizer = made(json);
  for (size_t words = 1; words < 40; ++words) {
    const Ids ids = encode(tokenizer, test::repeated("rabc", words));
    ASSERT_EQ(ids.size(), 2 * words);
    for (size_t i = 0; i < words; ++i) EXPECT_THAT(std::span(ids).subspan(2 * i, 2), ElementsAre(19, 17));
  }
}

// Byte pair encoding as it is defined: the pair of the lowest rank is merged, the leftmost first, until none is left.
struct RandomMerges {
  explicit RandomMerges(std::mt19937& random) {
    while (names.size() < 40) {
      const size_t short_ones = std::min<size_t>(names.size(), 14);
      const auto left = static_cast<int32_t>(random() % short_ones), right = static_cast<int32_t>(random() % short_ones);
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
  EXPECT_EQ(made(json).decode(Ids{5, 18, 19, 0}), "h\u00e9a");
  EXPECT_EQ(made(json).decode(Ids{18, 0, 19, 18}), "\uFFFDa\uFFFD\uFFFD");
}

// Tokenizers keeps an unknown token back until a character has a token of its own.
TEST(BpeTokenizer, AnUnknownTokenStandsBehindTheBytesThatFollowIt) {
  Json json = small_tokenizer({"<unk>", "<0xC3>", "<0xA9>"});
  json["model"]["unk_token"] = "<unk>";
  json["model"]["byte_fallback"] = true;
  EXPECT_THAT(encode(made(json), "xh"), ElementsAre(17, 5));
  EXPECT_THAT(encode(made(json), "x\u00e9h"), ElementsAre(18, 19, 17, 5));
  EXPECT_THAT(encode(made(json), "x\u00e9y"), ElementsAre(18, 19, 17, 17));
  EXPECT_THAT(encode(made(json), "xy\u00e9"), ElementsAre(17, 18, 19, 17));
  json["model"]["fuse_unk"] = true;
  EXPECT_THAT(encode(made(json), "x\u00e9yh"), ElementsAre(18, 19, 17, 5)) << "one for both";
  EXPECT_THAT(encode(made(json), "xhy"), ElementsAre(17, 5, 17));
}

// U+0120 is the letter of a space, U+010A that of a line end; C4, A0 and 8A are the bytes of these letters.
TEST(BpeTokenizer, ALetterOfAByteWithoutATokenIsWhatACharacterWouldBe) {
  Json json = small_tokenizer({"<unk>", "<0xC4>", "<0xA0>"});
  json["pre_tokenizer"] = parse_json(R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":false})", "p");
  EXPECT_THAT(encode(made(json), "a h"), ElementsAre(0, 5)) << "left out";
  json["model"]["unk_token"] = "<unk>";
  EXPECT_THAT(encode(made(json), "a h"), ElementsAre(0, 17, 5));
  json["model"]["byte_fallback"] = true;
  EXPECT_THAT(encode(made(json), "a h"), ElementsAre(0, 18, 19, 5));
  EXPECT_THAT(encode(made(json), "a\n h"), ElementsAre(0, 18, 19, 17, 5)) << "U+010A has a byte without a token";
}

TEST(BpeTokenizer, APieceThatALongOneBeginsWithIsMergedAlone) {
  Json json = small_tokenizer();
  json["pre_tokenizer"] = parse_json(R"({"type":"Split","pattern":{"String":"d"},"behavior":"Removed","invert":false})", "pretokenizer");
  const BpeTokenizer tokenizer = made(json);
  const std::string text = test::repeated("hello", 20);
  for (size_t length = 1; length < text.size(); ++length) {
    const std::string beginning = text.substr(0, length);
    Ids expected = encode(tokenizer, text);
    std::ranges::copy(encode(tokenizer, beginning), std::back_inserter(expected));
    ASSERT_EQ(encode(tokenizer, text + 'd' + beginning), expected) << length;
  }
}

TEST(BpeTokenizer, IgnoreMergesTakesAWholePieceFirstAndMergesMayBePairs) {
  Json json = small_tokenizer({"hellor"});  // no merge makes this
  EXPECT_THAT(pieces(json, "hellor"), ElementsAre("hello", "r"));
  json["model"]["ignore_merges"] = true;
  EXPECT_THAT(pieces(json, "hellor"), ElementsAre("hellor"));
  json["model"]["merges"] = Json::Entries{Json::Entries{"h", "e"}, Json::Entries{"l", "l"}};
  EXPECT_THAT(pieces(json, "hello"), ElementsAre("hello"));
  json["model"]["ignore_merges"] = false;
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
  EXPECT_THAT(encode(tokenizer, "a ]\n\u3000a"), ElementsAre(0, 21, 0));
  EXPECT_THAT(encode(tokenizer, "a] [a"), ElementsAre(0, 21, 20, 0)) << "white space that both could take";
  EXPECT_THAT(encode(tokenizer, "hel hello hel, _hel"), ElementsAre(22, 13, 22, 10, 6));
}

// A token takes along the white space on its own side, and on no other.
TEST(BpeTokenizer, WhiteSpaceGoesWithATokenOnTheSideThatItStrips) {
  Json json = small_tokenizer({" "});
  json["added_tokens"] = Json::Entries{added_token("[", 20), added_token("]", 21)};
  json["added_tokens"][0]["lstrip"] = true;
  json["added_tokens"][1]["rstrip"] = true;
  const BpeTokenizer tokenizer = made(json);
  EXPECT_THAT(encode(tokenizer, "a [ a"), ElementsAre(0, 20, 17, 0));
  EXPECT_THAT(encode(tokenizer, "a ] a"), ElementsAre(0, 17, 21, 0));
  EXPECT_THAT(encode(tokenizer, "a   [  a  ]   a"), ElementsAre(0, 20, 17, 17, 0, 17, 17, 21, 0)) << "all of it";
}

// The package goes on searching behind the token itself, and the text goes on behind what it finds.
TEST(BpeTokenizer, ATokenOfWhiteSpaceIsFoundInWhiteSpaceThatAnotherTakesAlong) {
  Json json = small_tokenizer({" "});
  json["added_tokens"] = Json::Entries{added_token("]", 20), added_token("\n\n", 21, false)};
  json["added_tokens"][0]["rstrip"] = true;
  for (const bool normalized : {false, true}) {
    for (Json& token : json["added_tokens"].entries()) token["normalized"] = normalized;
    const BpeTokenizer tokenizer = made(json);
    EXPECT_THAT(encode(tokenizer, "a]\n\nb"), ElementsAre(0, 20, 21, 1));
    EXPECT_THAT(encode(tokenizer, "a]\n\n"), ElementsAre(0, 20, 21)) << "at the end of a text";
    EXPECT_THAT(encode(tokenizer, "a] \n\n \n\nb"), ElementsAre(0, 20, 21, 17, 21, 1));
    EXPECT_THAT(encode(tokenizer, "a] \n\n  b"), ElementsAre(0, 20, 21, 17, 17, 1)) << "the rest is text again";
    EXPECT_THAT(encode(tokenizer, "a]  b"), ElementsAre(0, 20, 1));
  }
}

// The end of a run of white space is looked for once, not from each token in it: that took hours.
TEST(BpeTokenizer, ManyTokensInOneRunOfWhiteSpaceAreFoundInLinearTime) {
  constexpr size_t kCount = 500000;
  Json json = small_tokenizer();
  json["added_tokens"] = Json::Entries{added_token(" ", 20), added_token("\t", 21)};
  json["added_tokens"][0]["rstrip"] = true;
  const BpeTokenizer tokenizer = made(json);
  EXPECT_EQ(encode(tokenizer, test::repeated(" ", kCount)), Ids(kCount, 20));
  const Ids ids = encode(tokenizer, "a" + test::repeated(" \t", kCount) + " b");
  ASSERT_EQ(ids.size(), 2 * kCount + 3);
  EXPECT_EQ(std::ranges::count(ids, 20), int64_t{kCount} + 1);
  EXPECT_EQ(std::ranges::count(ids, 21), int64_t{kCount});
}

// Another id than the package gives would be that of another token where a model is served.
TEST(BpeTokenizer, AddedTokensAreNumberedOnAsThePackageNumbersThem) {
  const auto tokenizer = [](Json::Entries tokens, std::optional<int64_t> above = {}) {
    Json json = small_tokenizer();
    if (above) json["model"]["vocab"].add("zz", *above);
    json["added_tokens"] = std::move(tokens);
    return BpeTokenizer::from_json(json.dump(), "t.json");
  };
  EXPECT_EQ(tokenizer({added_token("<a>", 17), added_token("he", 10), added_token("<b>", 18)}).id_of("<b>"), 18);
  EXPECT_EQ(tokenizer({added_token("<a>", 18)}, 40).id_of("<a>"), 18) << "the vocabulary may leave ids out";
  EXPECT_EQ(tokenizer({added_token("zz", 40), added_token("<a>", 41)}, 40).id_of("<a>"), 41);
  const std::pair<Json::Entries, const char*> refused[] = {
      {{added_token("<x>", 300)},
       "\"<x>\" has the id 300, but the package tokenizers numbers added tokens without gaps, and the next id is 17"},
      {{added_token("<a>", 17), added_token("<x>", 19)}, "the next id is 18"},
      {{added_token("<x>", 18), added_token("<a>", 17)}, "the next id is 17"},
      {{added_token("<x>", 16)}, "the next id is 17"}};
  for (const auto& [tokens, says] : refused) {
    const Error error = test::error_of([&, &given = tokens] { tokenizer(given); });
    EXPECT_EQ(error.code(), ExitCode::data) << says;
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::StartsWith("t.json"), HasSubstr(says)));
  }
}

TEST(BpeTokenizer, NoTokenBeginsInsideOneThatMayNotStandThere) {
  Json json = small_tokenizer();
  json["added_tokens"] = Json::Entries{added_token("hel", 20), added_token("el", 21, false)};
  json["added_tokens"][0]["single_word"] = true;
  EXPECT_THAT(encode(made(json), "hello el"), ElementsAre(13, 21)) << "beside a letter";
  json["added_tokens"][0]["single_word"] = false;
  EXPECT_THAT(encode(made(json), "hello el", SpecialTokenText::text), ElementsAre(13, 21)) << "a text like any other";
  EXPECT_THAT(encode(made(json), "helel", SpecialTokenText::text), ElementsAre(10, 6, 21)) << "one that begins right behind it is found";
}

TEST(BpeTokenizer, NormalizedTokensAreFoundInNormalizedText) {
  Json json = small_tokenizer();
  json["normalizer"] = {{"type", "Lowercase"}};
  json["added_tokens"] = Json::Entries(1, added_token("HE", 20));
  json["added_tokens"][0]["normalized"] = true;
  EXPECT_THAT(encode(made(json), "hE He a"), ElementsAre(20, 20, 0));
  json["added_tokens"][0]["normalized"] = false;
  EXPECT_THAT(encode(made(json), "hE HE"), ElementsAre(10, 20));
}

struct Normalized {
  const char *normalizer, *text;
  std::vector<std::string> expected;
};

TEST(NormalizedTexts, AreWhatTheModelSees) {
  static const Normalized kRows[] = {
      {R"({"type":"NFC"})", "e\u0301A\uFF21", {"\xC3\xA9", "A"}},
      {R"({"type":"NFKC"})", "e\u0301A\uFF21", {"\xC3\xA9", "A", "A"}},
      {R"({"type":"Lowercase"})", "HELLO\xC4\xB0", {"hello", "i", "\xCC\x87"}},
      {R"({"type":"Prepend","prepend":"▁"})", "a", {"\xE2\x96\x81", "a"}},
      {R"({"type":"Replace","pattern":{"String":"."},"content":"ll"})", "he.o", {"hello"}},
      {R"({"type":"Replace","pattern":{"Regex":"\\s+"},"content":"▁"})", "a \n b", {"a", "\xE2\x96\x81", "b"}},
      {R"({"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"x"},"content":""},
                                   {"type":"Prepend","prepend":"▁"}]})",
       "x",
       {}},
      {R"({"type":"Strip","strip_left":true,"strip_right":false})", " A ", {"A", " "}},
      {R"({"type":"Strip","strip_left":true,"strip_right":false})", "  ", {}},
      {R"({"type":"Strip","strip_left":false,"strip_right":true})", "  ", {}},
      {R"({"type":"Strip","strip_left":false,"strip_right":false})", "  ", {" ", " "}},
      {R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":" "},
                                   {"type":"Replace","pattern":{"String":" "},"content":"▁"}]})",
       "a a",
       {"\xE2\x96\x81", "a", "\xE2\x96\x81", "a"}}};
  for (const Normalized& row : kRows) {
    Json json = small_tokenizer({"\xE2\x96\x81", "\xC3\xA9", "A", "i", "\xCC\x87", " "});
    json["normalizer"] = parse_json(row.normalizer, "normalizer");
    EXPECT_EQ(pieces(json, row.text), row.expected) << row.normalizer;
  }
}

struct InForm {
  const char *text, *composed, *compatible;
};

TEST(NormalForms, AreThoseOfTheTable) {
  static const InForm kRows[] = {
      {"", "", ""},
      {"abc\n", "abc\n", "abc\n"},
      {"e\u0301x\u00e9", "\u00e9x\u00e9", "\u00e9x\u00e9"},
      {"\u0301e", "\u0301e", "\u0301e"},                    // a mark that nothing stands before
      {"a\u0307\u0323", "\u1ea1\u0307", "\u1ea1\u0307"},    // the marks are ordered first
      {"\u1ea1\u0302", "\u1ead", "\u1ead"},                 // so is the mark that a composite was made of
      {"a\u0315\u0300", "\u00e0\u0315", "\u00e0\u0315"},    // composed past a mark of another class
      {"a\u0301\u0301", "\u00e1\u0301", "\u00e1\u0301"},    // but not past one of its own
      {"a\u0305\u0301", "a\u0305\u0301", "a\u0305\u0301"},  // nor past another of its own
      {"a\u034f\u0301", "a\u034f\u0301", "a\u034f\u0301"},  // nor past one of none
      {"\u212b\u2126", "\u00c5\u03a9", "\u00c5\u03a9"},     // singletons
      {"\u0344", "\u0308\u0301", "\u0308\u0301"},           // marks that are not composed again
      {"\u0915\u093c", "\u0915\u093c", "\u0915\u093c"},     // excluded from composition
      {"\u0958", "\u0915\u093c", "\u0915\u093c"},
      {"\u1100\u1161\u11a8x", "\uac01x", "\uac01x"},  // Hangul
      {"\u1100\u1175", "\uae30", "\uae30"},
      {"\u1112\u1175\u11c2", "\ud7a3", "\ud7a3"},  // the last one
      {"\uac00\u11a8", "\uac01", "\uac01"},
      {"\uac01\u11a8", "\uac01\u11a8", "\uac01\u11a8"},
      {"\uac00\u11a7", "\uac00\u11a7", "\uac00\u11a7"},  // the last one is no trailing jamo
      {"\u09c7\u09be", "\u09cb", "\u09cb"},              // a second character that is no mark of a class
      {"\ufb01\u2460\uff76\uff9e", "\ufb01\u2460\uff76\uff9e", "fi1\u30ac"},
      {"\u1e9b\u0323", "\u1e9b\u0323", "\u1e69"},
      {"\u1e9b", "\u1e9b", "\u1e61"},  // composed, of a character that has a compatible one
      {"\u0fb2\u0f81", "\u0fb2\u0f71\u0f80", "\u0fb2\u0f71\u0f80"},
      // Tables of tokenizers lack what came after Unicode 9: composites, compatible characters, the order of marks.
      {"\U000105D2\u0307\u32ff", "\U000105D2\u0307\u32ff", "\U000105D2\u0307\u32ff"},
      {"a\U00010D69\u0327", "a\U00010D69\u0327", "a\U00010D69\u0327"},
      {"a\U0001E130\u0327", "a\U0001E130\u0327", "a\U0001E130\u0327"},
      {"a\u1dfb\u0327", "a\u0327\u1dfb", "a\u0327\u1dfb"}};
  for (const InForm& row : kRows) {
    EXPECT_EQ(in_normal_form(row.text, NormalForm::composed), row.composed) << row.text;
    EXPECT_EQ(in_normal_form(row.text, NormalForm::compatible), row.compatible) << row.text;
    EXPECT_EQ(in_normal_form(std::string("x ") + row.text + " y\u00e9", NormalForm::composed),
              std::string("x ") + row.composed + " y\u00e9");
  }
}

// Any text normalized once more is equal, and so are its parts that begin with a character of ASCII.
TEST(NormalForms, AreTheSameInPartsAndOnceMore) {
  std::mt19937 random(7);
  constexpr std::array<char32_t, 20> kSome = {'a',    'e',    ' ',    0x300,  0x301,  0x323,  0x315,  0x34F, 0x1100, 0x1161,
                                              0x11A8, 0xAC00, 0xAC01, 0x1EA1, 0x1E9B, 0xFB01, 0x0958, 0x9C7, 0x9BE,  0x9CB};
  for (int i = 0; i < 20000; ++i) {
    std::string text, other = "b";
    for (size_t length = random() % 8; length-- > 0;) append_utf8(kSome[random() % kSome.size()], text);
    for (size_t length = random() % 4; length-- > 0;) append_utf8(kSome[random() % kSome.size()], other);
    for (const NormalForm form : {NormalForm::composed, NormalForm::compatible}) {
      const std::string once = in_normal_form(text, form);
      ASSERT_EQ(in_normal_form(once, form), once) << text;
      ASSERT_EQ(in_normal_form(text + other, form), once + in_normal_form(other, form)) << text << other;
    }
  }
}

// Letters, digits and signs that Unicode 16 added, and the small letter of one.
TEST(BpeTokenizer, PropertiesOfCharactersAreThoseOfTheTable) {
  Json json = small_tokenizer({"\U00010D70", "\U00010D41", "\u1b7f", "1", "1\U00010D41", "h\u1b7f", "\u2e42", "h\u2e42"});
  json["model"]["merges"] = Json::Entries{Json::Entries{"1", "\U00010D41"}, Json::Entries{"h", "\u1b7f"}, Json::Entries{"h", "\u2e42"}};
  const auto ids = [&json](const char* part, const char* content, const std::string& text) {
    Json with = json;
    with[part] = parse_json(content, "part");
    return encode(made(with), text);
  };
  EXPECT_THAT(ids("normalizer", R"({"type":"Lowercase"})", "\U00010D50H"), ElementsAre(17, 5));
  EXPECT_THAT(ids("pre_tokenizer", R"({"type":"Digits","individual_digits":false})", "1\U00010D41"), ElementsAre(21));
  EXPECT_THAT(ids("pre_tokenizer", R"({"type":"Punctuation"})", "h\u1b7f"), ElementsAre(22))
      << "of which tokenizers' Punctuation does not know";
  EXPECT_THAT(ids("pre_tokenizer", R"({"type":"Punctuation"})", "h\u2e42"), ElementsAre(5, 23)) << "of Unicode 8";
  json["added_tokens"] = Json::Entries{added_token("or", 14, false)};
  json["added_tokens"][0]["single_word"] = true;
  EXPECT_THAT(ids("pre_tokenizer", R"({"type":"Split","pattern":{"String":"r"},"behavior":"Isolated"})", "\U00010D70or or"),
              ElementsAre(17, 7, 8, 14))
      << "beside a letter it is no word of its own";
}

// DeepSeek's expression: U+1FA77, of Unicode 15, is a symbol, which takes the space before it along.
TEST(BpeTokenizer, ASymbolOfUnicode15TakesItsSpaceAlong) {
  Json json = small_tokenizer({"\U0001FA77", " ", " \U0001FA77"});
  json["model"]["merges"].entries().push_back(Json::Entries{" ", "\U0001FA77"});
  json["pre_tokenizer"] = {
      {"type", "Split"},
      {"behavior", "Isolated"},
      {"pattern", {{"Regex", R"([^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}}};
  EXPECT_THAT(pieces(json, "hello \U0001FA77"), ElementsAre("hello", " \U0001FA77"));
}

struct Cut {
  const char *pretokenizer, *text;
  std::vector<std::string> expected;
};

// Pieces show by merges that do not cross them: "ll" and "hell" are tokens.
#define SPLIT(behavior, invert) R"({"type":"Split","pattern":{"String":"l"},"behavior":")" behavior R"(","invert":)" invert "}"
TEST(CutTexts, AreEncodedPieceByPiece) {
  static const Cut kRows[] = {
      {SPLIT("Isolated", "false"), "hello", {"he", "l", "l", "o"}},
      {SPLIT("Removed", "false"), "hello", {"he", "o"}},
      {SPLIT("Removed", "true"), "hello", {"l", "l"}},
      {SPLIT("Contiguous", "false"), "hello", {"he", "ll", "o"}},
      {SPLIT("MergedWithPrevious", "false"), "hellor", {"he", "l", "l", "or"}},
      {SPLIT("MergedWithNext", "false"), "olld", {"o", "l", "ld"}},
      {R"({"type":"Digits","individual_digits":false})", "l1111", {"l", "11", "11"}},
      {R"({"type":"Digits","individual_digits":false})", "l\xC2\xBD", {"l", "\xC2\xBD"}},
      {R"({"type":"Digits","individual_digits":true})", "l11", {"l", "1", "1"}},
      {R"({"type":"Punctuation","behavior":"Contiguous"})", "he..", {"he", ".."}},
      {R"({"type":"Punctuation"})", "he..", {"he", ".", "."}},
      {R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})", "he h", {"\xE2\x96\x81", "he", "\xE2\x96\x81h"}},
      {R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", "he h", {"he", "\xE2\x96\x81h"}},
      {R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})", " h", {"\xE2\x96\x81h"}},
      {R"({"type":"Metaspace","replacement":"▁","add_prefix_space":true})", "h", {"\xE2\x96\x81h"}},
      {R"({"type":"Metaspace","replacement":"▁","add_prefix_space":false})", "h", {"h"}},
      {R"({"type":"ByteLevel","add_prefix_space":true,"use_regex":false})", "h", {"\xC4\xA0h"}},
      {R"({"type":"ByteLevel","add_prefix_space":true,"use_regex":false})", " h", {"\xC4\xA0h"}},
      {R"({"type":"Sequence","pretokenizers":[{"type":"Digits"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"}]})",
       "1h",
       {"\xE2\x96\x81", "1", "h"}},
      {R"({"type":"Sequence","pretokenizers":[{"type":"Digits"},{"type":"Punctuation"}]})", "l11..", {"l", "11", ".", "."}}};
  for (const Cut& row : kRows) {
    Json json = small_tokenizer(
        {"\xE2\x96\x81", "\xE2\x96\x81h", "1", "11", ".", "..", " ", "l1", "\xC2\xBD", "l\xC2\xBD", "\xC4\xA0", "\xC4\xA0h"});
    json["model"]["merges"].entries().insert(json["model"]["merges"].entries().end(), {"▁ h", "1 1", ". .", "l 1", "l ½", "Ġ h"});
    json["pre_tokenizer"] = parse_json(row.pretokenizer, "pretokenizer");
    EXPECT_EQ(pieces(json, row.text), row.expected) << row.pretokenizer;
  }
}
#undef SPLIT

TEST(BpeTokenizer, MetaspaceOfFirstIsAtTheBeginningOfTheText) {
  Json json = small_tokenizer({"\xE2\x96\x81", "\xE2\x96\x81h"});
  json["model"]["merges"].entries().emplace_back("▁ h");
  json["added_tokens"] = Json::Entries{added_token("<a>", 30)};
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}};
  EXPECT_THAT(encode(made(json), "h<a>h"), ElementsAre(18, 30, 5));
  EXPECT_THAT(encode(made(json), "<a>h h"), ElementsAre(30, 5, 18));
  json["added_tokens"][0]["normalized"] = true;
  EXPECT_THAT(encode(made(json), "h<a>h"), ElementsAre(18, 30, 5));
  EXPECT_THAT(encode(made(json), "<a>h h"), ElementsAre(30, 5, 18));
}

struct FirstPiece {
  const char *normalizer, *before, *text;  // before: the pretokenizer that stands before Metaspace
  std::vector<std::string> expected;
};

// The first character is that of the text as it came: nothing that was stripped, replaced by nothing or cut off, and nothing put before it.
TEST(MetaspaceOfFirst, IsWhereTheFirstCharacterOfTheTextIs) {
  static const FirstPiece kRows[] = {
      {"null", "", "h", {"▁h"}},
      {"null", "", " h", {"▁h"}},
      {R"({"type":"Strip","strip_left":true,"strip_right":true})", "", " h ", {"h"}},
      {R"({"type":"Strip","strip_left":true,"strip_right":true})", "", "h ", {"▁h"}},
      {R"({"type":"Strip","strip_left":false,"strip_right":true})", "", "\th", {"▁", "\t", "h"}},
      {R"({"type":"Replace","pattern":{"String":"x"},"content":""})", "", "xh", {"h"}},
      {R"({"type":"Replace","pattern":{"String":"x"},"content":""})", "", "hx", {"▁h"}},
      {R"({"type":"Replace","pattern":{"String":"x"},"content":"h"})", "", "xa", {"▁h", "a"}},
      {R"({"type":"Replace","pattern":{"String":"xa"},"content":"h"})", "", "xa", {"h"}},
      {R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"a"},{"type":"Strip","strip_left":true,"strip_right":true}]})",
       "",
       " h",
       {"▁", "a", "▁h"}},
      {R"({"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"x"},{"type":"Replace","pattern":{"String":"x"},"content":""}]})",
       "",
       "h",
       {"▁h"}},
      {R"({"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Replace","pattern":{"String":"f"},"content":""}]})",
       "",
       "\ufb01h",
       {"▁", "i", "h"}},
      {R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]})", "", "E\u0301h", {"▁", "\u00e9", "h"}},
      {"null", R"({"type":"Split","pattern":{"String":"x"},"behavior":"Removed"})", "xh", {"h"}},
      {"null", R"({"type":"Split","pattern":{"String":"x"},"behavior":"Removed"})", "hxh", {"▁h", "h"}},
      {"null", R"({"type":"Punctuation","behavior":"Removed"})", ".h", {"h"}},
      {"null", R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", "h h", {"▁h", "▁h"}},
      {"null", R"({"type":"Split","pattern":{"String":"x"},"behavior":"MergedWithNext"})", "hxh", {"▁h", "x", "h"}}};
  for (const FirstPiece& row : kRows) {
    Json json = small_tokenizer({"▁", "▁h", "\t", "i", "\u00e9", "x"});
    json["model"]["merges"].entries().emplace_back("▁ h");
    json["normalizer"] = parse_json(row.normalizer, "normalizer");
    const std::string metaspace = R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"first"})";
    const std::string both = text(R"({"type":"Sequence","pretokenizers":[)", row.before, *row.before != '\0' ? "," : "", metaspace, "]}");
    json["pre_tokenizer"] = parse_json(both, "pretokenizer");
    EXPECT_EQ(pieces(json, row.text), row.expected) << row.normalizer << row.before << ' ' << row.text;
  }
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
  json["post_processor"] = parse_json(R"({"type":"Sequence","processors":[{"type":"RobertaProcessing","sep":["</s>",2],"cls":["<s>",1]},
    {"type":"TemplateProcessing","single":[{"Sequence":{"id":"A"}}],"special_tokens":{}}]})",
                                      "p");
  EXPECT_THAT(made(json).before_text(), ElementsAre(1)) << "the other adds none";
  EXPECT_THAT(made(json).after_text(), ElementsAre(2));
}

struct Decoded {
  const char* decoder;
  Ids ids;
  const char* expected;
};

TEST(DecodedTexts, AreThoseOfTheDecoder) {
  static const Decoded kRows[] = {
      {"null", {0, 1}, "a b"},
      {R"({"type":"Fuse"})", {0, 1}, "ab"},
      {R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})", {17, 17, 18}, "a a  "},
      {R"({"type":"Metaspace","replacement":"▁"})", {18, 17}, " a"},
      {R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never"})", {17}, " a"},
      {R"({"type":"Replace","pattern":{"String":"▁"},"content":"_"})", {17, 18}, "_a__"},
      {R"({"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":"a","start":2,"stop":1}]})", {0, 0, 0, 1, 0, 0}, "aba"},
      {R"({"type":"ByteFallback"})", {22, 23}, "\xCF\xBF"},
      {R"({"type":"ByteLevel"})",
       {20, 19, 21, 0},
       " h\xE2\x82\x9Ch"
       "a"},
      {R"({"type":"ByteLevel"})",
       {19, 0, 19},
       "\xEF\xBF\xBD"
       "a\xEF\xBF\xBD"}};
  for (const Decoded& row : kRows) {
    Json json = small_tokenizer({"▁a", "▁▁", "\xC3\xA2\xC4\xA4", "Ġh", "\xC4\xBEh", "<0xcF>", "<0xBf>"});  // from 17
    json["decoder"] = parse_json(row.decoder, "decoder");
    EXPECT_EQ(made(json).decode(row.ids), row.expected) << row.decoder;
  }
}

TEST(LossyUtf8, ReplacesTheLongestBeginningsOfCharacters) {
  EXPECT_EQ(lossy_utf8("a\xE0\x80\x80z"), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz");
  EXPECT_EQ(lossy_utf8("\xF0\x9F\x98z\xF0\x9F\x98\x80"), "\xEF\xBF\xBDz\xF0\x9F\x98\x80");
  for (const char* const none : {"\xED\xA0\x80\xC3", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80"})
    EXPECT_EQ(lossy_utf8(none), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  for (const char* const least_or_most : {"\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) EXPECT_EQ(lossy_utf8(least_or_most), least_or_most);
}

TEST(BpeTokenizer, NamesTheByteThatIsNoUtf8) {
  const BpeTokenizer tokenizer = made(small_tokenizer());
  const Error error = test::error_of(
      [&] { tokenizer.encode("he\xFF", {.name = "f.txt", .code = ExitCode::data, .offset = 100}, SpecialTokenText::tokens); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("f.txt: not UTF-8 at byte 102"));
  EXPECT_EQ(test::error_of([&] { encode(tokenizer, "he\xC3"); }).code(), ExitCode::usage);
}

}  // namespace mantissa::bpe_tokenizer_test
