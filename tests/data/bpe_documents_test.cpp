// A tokenizer.json as the tokenizer of a run: documents, prompts, texts as they grow, and the end token.
#include <gmock/gmock.h>

#include <algorithm>

#include "data/documents.h"
#include "data/open_data.h"
#include "data/token_writer.h"
#include "data/tokenizer.h"
#include "files.h"
#include "mantissa/base/text.h"
#include "text/bpe_trainer.h"
#include "tokenizer_files.h"

namespace mantissa::bpe_documents_test {

using test::added_token;
using test::error_of;
using test::small_tokenizer;
using test::without_gaps;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ids = std::vector<int32_t>;

// "hello" is 13, "wor" 15, "ld" 16; 30 begins a text and 31 ends it.
Json with_ends() {
  Json json = small_tokenizer();
  json["added_tokens"] = Json::Entries{added_token("<s>", 30), added_token("</s>", 31)};
  json["post_processor"] = parse_json(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
    {"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],
    "special_tokens":{"<s>":{"ids":[30]},"</s>":{"ids":[31]}}})",
                                      "p");
  return json;
}

class BpeDocumentsTest : public ::testing::Test {
 protected:
  std::string tokenizer_path(const Json& json) const {
    write_file(folder_ / "tokenizer.json", without_gaps(json).dump());
    return folder_ / "tokenizer.json";
  }
  Tokenizer tokenizer(const Json& json) const { return Tokenizer::from_path(tokenizer_path(json)); }
  DataConfig config(const std::string& name, const std::string& content) const {
    write_file(folder_ / name, content);
    DataConfig config;
    config.train = {{.path = folder_ / name}};
    config.tokenizer = tokenizer_path(with_ends());
    return config;
  }
  static Ids all_tokens(const Data& data) {
    Ids ids(static_cast<size_t>(data.files.at(0).tokens()));
    data.files.at(0).read(0, std::ssize(ids), ids.data());
    return ids;
  }

  test::TemporaryFolder folder_;
};

TEST_F(BpeDocumentsTest, EachHasWhatTheModelExpectsAroundIt) {
  const Data lines = open_data(config("a.jsonl", "{\"text\":\"helloworld\"}\n\n{\"text\":\"\"}\n{\"text\":\"<s>ld\"}\n"), {.seq_len = 2});
  EXPECT_THAT(all_tokens(lines), ElementsAre(30, 13, 15, 16, 31, 30, 30, 16, 31));
  EXPECT_EQ(lines.vocab_size, 32);
  const Data whole = open_data(config("a.txt", "helloworld"), {.seq_len = 2});
  EXPECT_THAT(all_tokens(whole), ElementsAre(30, 13, 15, 16, 31));
  const Tokenizer own = tokenizer(with_ends());
  EXPECT_THAT(own.encode_prompt("hello", {}), ElementsAre(30, 13)) << "which goes on";
  EXPECT_THAT(own.encode("hello"), ElementsAre(13));
}

TEST_F(BpeDocumentsTest, TheEndTokenIsThatOfTheFileBesideIt) {
  DataConfig appends = config("a.jsonl", "{\"text\":\"hello\"}\n");
  appends.append_eod = true;
  EXPECT_EQ(error_of([&] { open_data(appends, {.seq_len = 2}); }).code(), ExitCode::usage) << "no file says which it is";
  for (const char* const token : {R"("</s>")", R"({"content":"</s>","lstrip":false})"}) {
    write_file(folder_ / "tokenizer_config.json", std::string("{\"eos_token\":") + token + "}");
    EXPECT_THAT(all_tokens(open_data(appends, {.seq_len = 2})), ElementsAre(30, 13, 31)) << "once";
  }
  write_file(folder_ / "tokenizer_config.json", R"({"eos_token":"<none>"})");
  EXPECT_EQ(tokenizer(with_ends()).end_token(), std::nullopt);
  std::filesystem::remove(folder_ / "tokenizer_config.json");
  Json gpt2 = small_tokenizer();
  gpt2["added_tokens"] = Json::Entries{added_token("<|endoftext|>", 40)};
  EXPECT_EQ(tokenizer(gpt2).end_token(), 40);
}

TEST_F(BpeDocumentsTest, EndWithTheEndTokenOnceWhoeverPutsItThere) {
  Json json = small_tokenizer();
  json["added_tokens"] = Json::Entries{added_token("<|endoftext|>", 17), added_token("<s>", 18)};
  const auto tokens = [&](const std::string& name, const std::string& content, int64_t seq_len = 1) {
    DataConfig appends = config(name, content);
    appends.tokenizer = tokenizer_path(json);
    appends.append_eod = true;
    return all_tokens(open_data(appends, {.seq_len = seq_len}));
  };
  const std::string lines = "{\"text\":\"hello<|endoftext|>\"}\n{\"text\":\"\"}\n{\"text\":\"ld\"}\n";
  EXPECT_THAT(tokens("a.jsonl", lines), ElementsAre(13, 17, 16, 17)) << "and an empty text is no document";
  EXPECT_THAT(tokens("a.txt", "hello<|endoftext|>"), ElementsAre(13, 17));
  EXPECT_THAT(tokens("a.txt", "<|endoftext|>hello"), ElementsAre(17, 13, 17));
  EXPECT_THAT(tokens("a.jsonl", "{\"prompt\":\"hello\",\"completion\":\"ld<|endoftext|>\"}\n", 3), ElementsAre(13, 16, 17));
  json["post_processor"] = parse_json(R"({"type":"RobertaProcessing","sep":["<|endoftext|>",17],"cls":["<s>",18]})", "p");
  EXPECT_THAT(tokens("a.jsonl", "{\"text\":\"hello\"}\n{\"text\":\"ld\"}\n"), ElementsAre(18, 13, 17, 18, 16, 17));
  EXPECT_THAT(tokens("a.jsonl", "{\"prompt\":\"hello\",\"completion\":\"ld\"}\n", 4), ElementsAre(18, 13, 16, 17));
}

TEST_F(BpeDocumentsTest, AreWarnedOfWhereTheySpellWhatTheTokenizerPutsAroundThem) {
  const auto warnings = [this](const std::string& content) {
    const DataConfig given = config("a.jsonl", content);
    return data_warnings(given, open_data(given, {.seq_len = 6}));
  };
  const auto line = [](const std::string& text) { return "{\"text\":\"" + text + "\"}\n"; };
  const std::string begins = "the begin token, which the tokenizer puts before each text, is also written out in ",
                    ends = "the end token, which the tokenizer puts after each text, is also written out in ";
  EXPECT_THAT(warnings(line("hello<s>") + line("he</s>ll") + line("")), IsEmpty()) << "elsewhere";
  EXPECT_THAT(warnings(line("<s>hello") + line("ld") + line("<s>")),
              ElementsAre(HasSubstr("a.jsonl: " + begins + "2 texts, so it appears")));
  EXPECT_THAT(warnings(line("hello</s>") + line("ld")), ElementsAre(HasSubstr(ends + "1 text, so it appears")));
  EXPECT_THAT(warnings(R"({"prompt":"<s>hello","completion":"ld</s>"})"), ElementsAre(HasSubstr(begins + "1"), HasSubstr(ends + "1")));
  const Tokenizer own = tokenizer(with_ends());
  EXPECT_TRUE(own.begins_twice(own.encode_prompt("<s>hello", {})));
  EXPECT_FALSE(own.begins_twice(own.encode_prompt("hello<s>", {})));
  EXPECT_FALSE(own.begins_twice(own.encode_prompt("", {})));
  EXPECT_FALSE(tokenizer(small_tokenizer()).begins_twice(Ids{13})) << "which puts nothing there";
  const Ids many(8, own.encode_prompt("", {})[0]);
  EXPECT_FALSE(own.begins_twice(std::span(many).first(0))) << "what lies behind is not looked at";
  EXPECT_FALSE(own.begins_twice(std::span(many).first(1)));
  EXPECT_TRUE(own.begins_twice(many));
}

// encode_prompt() is what generate has.
TEST_F(BpeDocumentsTest, APromptIsTrainedAsItIsAsked) {
  const std::string prompt = "</s>hello<s>ld</s>";
  const Ids trained = all_tokens(open_data(config("a.jsonl", "{\"prompt\":\"" + prompt + "\",\"completion\":\"wor\"}"), {.seq_len = 8}));
  const Ids asked = tokenizer(with_ends()).encode_prompt(prompt, {});
  EXPECT_THAT(asked, ElementsAre(30, 31, 13, 30, 16, 31));
  EXPECT_TRUE(begins_with(trained, asked)) << ::testing::PrintToString(trained);
  EXPECT_TRUE(ends_with(trained, Ids{15, 31})) << ::testing::PrintToString(trained);
}

TEST_F(BpeDocumentsTest, APathIsAFileOrAFolder) {
  const std::string described = tokenizer(with_ends()).to_json();
  EXPECT_THAT(described, HasSubstr("\"bpe\""));
  EXPECT_EQ(error_of([&] { Tokenizer::from_json(described, "m"); }).code(), ExitCode::data) << "the file is elsewhere";
  tokenizer_path(small_tokenizer());
  EXPECT_EQ(Tokenizer::from_path(folder_.path()).size(), 17);
  EXPECT_NE(Tokenizer::from_path(folder_.path()).to_json(), described) << "by the hash of its file";
  EXPECT_EQ(error_of([&] { Tokenizer::from_path(folder_ / "none"); }).code(), ExitCode::usage);
  write_file(folder_ / "tokenizer.json", R"({"model":{"type":"Unigram"}})");
  const Error error = error_of([&] { Tokenizer::from_path(folder_.path()); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr(folder_ / "tokenizer.json"));
  EXPECT_THAT(error.what(), HasSubstr("Unigram"));
}

TEST_F(BpeDocumentsTest, LinesAreKnownByTheirKeysWhateverTheFileIsCalled) {
  const std::string line = "{\"prompt\":\"hello\",\"completion\":\"ld\"}\n";
  EXPECT_EQ(all_tokens(open_data(config("a.json", "\n " + line), {.seq_len = 4})).size(), 4U);
  for (const size_t blanks : {63U, 64U, 65U, 5000U})
    EXPECT_EQ(recognize_format(InputFile((write_file(folder_ / "b", std::string(blanks, '\n') + line), folder_ / "b"))), DataFormat::jsonl);
}

TEST_F(BpeDocumentsTest, ATokenizerIsTrainedOnTheTextsOfExamples) {
  const auto texts = [this](const std::string& content) {
    write_file(folder_ / "t.jsonl", content);
    std::vector<std::string> out;
    for_each_text(InputFile(folder_ / "t.jsonl"), [&out](const std::string& text, const TextOrigin&) { out.push_back(text); });
    return out;
  };
  EXPECT_THAT(texts("{\"text\":\"a\",\"other\":\"b\"}\n{\"prompt\":\"c\",\"completion\":\"d\"}\n"
                    R"({"messages":[{"role":"user","content":"e"},{"role":"assistant","content":"f","thinking":"g","tool_calls":null}]})"),
              ElementsAre("a", "c", "d", "e", "f", "g"));
  EXPECT_EQ(error_of([&] { texts(R"({"tokens":[1],"mask":[1]})"); }).code(), ExitCode::usage);
  for (const char* const bad : {R"({"messages":[{"content":3}]})", R"({"messages":3})", R"({"messages":[3]})", R"({"content":"a"})", "3",
                                R"({"text":"a","messages":[]})", R"({"text":3})", R"({"completion":"a"})"}) {
    const Error error = error_of([&] { texts(std::string(bad) + "\n"); });
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), HasSubstr("t.jsonl, line 1")) << bad;
  }
}

TEST_F(BpeDocumentsTest, ModelsEndWhereTheDataTaughtThemTo) {
  DataConfig config;
  EXPECT_THAT(learned_end_tokens(config, std::nullopt), IsEmpty());
  config.eod_id = 7;
  EXPECT_THAT(learned_end_tokens(config, Tokenizer::bytes()), IsEmpty()) << "which nothing appended";
  config.append_eod = true;
  Json json = with_ends();
  json["added_tokens"].entries().push_back(added_token("<|eot_id|>", 33));
  write_file(folder_ / "tokenizer_config.json", R"({"eos_token":"</s>","model_max_length":1000000000000000019884624838656})");
  EXPECT_THAT(learned_end_tokens(config, tokenizer(json)), ElementsAre(7, 31));
  config.eod_id = 31;
  EXPECT_THAT(learned_end_tokens(config, tokenizer(json)), ElementsAre(31)) << "which is both";
  config.append_eod = false;
  config.chat_template = ChatTemplate::llama3;
  EXPECT_THAT(learned_end_tokens(config, tokenizer(json)), ElementsAre(33, 31));
  write_file(folder_ / "tokenizer_config.json", "{");
  EXPECT_EQ(error_of([&] { tokenizer(json); }).code(), ExitCode::data);
}

// Messages are of users; who writes a prompt and its completion knows the tokens.
TEST_F(BpeDocumentsTest, MessagesTakeTokensOfUsersForText) {
  Json json = with_ends();
  json["added_tokens"].entries().insert(json["added_tokens"].entries().end(),
                                        {added_token("<|im_start|>", 32), added_token("<|im_end|>", 33)});
  DataConfig chat = config("a.jsonl", R"({"messages":[{"role":"user","content":"ld</s>"},{"role":"assistant","content":"hello<s>"}]})");
  chat.tokenizer = tokenizer_path(json);
  chat.chat_template = ChatTemplate::chatml;
  const Ids ids = all_tokens(open_data(chat, {.seq_len = 20}));
  EXPECT_EQ(ids.front(), 32) << "the template alone says what begins";
  EXPECT_EQ(std::ranges::count(ids, 30) + std::ranges::count(ids, 31), 0) << "'<', '/', 's' and '>' have no token";
  EXPECT_EQ(std::ranges::count(ids, 33), 2);
  EXPECT_EQ(std::ranges::count(ids, 13), 1) << ::testing::PrintToString(ids);
}

TEST_F(BpeDocumentsTest, AChatTemplateThatNothingUsesIsAnError) {
  const std::string lines = "{\"prompt\":\"hello\",\"completion\":\"ld\"}\n", tokens = R"({"tokens":[1,2,3],"mask":[0,1,1]})";
  const auto with_template = [this](const std::string& name, const std::string& content) {
    DataConfig given = config(name, content);
    given.chat_template = ChatTemplate::chatml;
    return given;
  };
  for (const auto& [name, content, format] : {std::tuple("a.jsonl", lines, "jsonl"), {"a.txt", "hello world", "text"}}) {
    const DataConfig given = with_template(name, content);
    const Error error = error_of([&] { open_data(given, {.seq_len = 2}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << name;
    EXPECT_THAT(error.what(), HasSubstr("data.chat_template: chatml renders \"messages\", which no file has: ")) << name;
    EXPECT_THAT(error.what(), HasSubstr(std::string(name) + " is " + format)) << name;
  }
  EXPECT_TRUE(open_data(with_template("a.jsonl", tokens), {.seq_len = 3}).train) << "which it may have rendered";
  const DataConfig shard = with_template("a.bin", "");
  LlmcWriter writer(folder_ / "a.bin", {.vocab_size = 32, .eod_id = 31});
  writer.add_document(Ids{1, 2, 3, 4, 5});
  writer.finish();
  EXPECT_TRUE(open_data(shard, {.seq_len = 2}).train) << "and so of any file of ids";
  DataConfig raw = with_template("b.bin", std::string("\1\0\2\0\3\0\4\0", 8));
  raw.format = DataFormat::nanogpt;
  EXPECT_TRUE(open_data(raw, {.seq_len = 2}).train);
  ConfigReport report;
  raw.validate(report);
  EXPECT_TRUE(report.ok());
  DataConfig valid = with_template("a.jsonl", lines);
  valid.valid = valid.train;
  const Data data = open_validation_data(valid, {.seq_len = 4});
  EXPECT_EQ(data.valid.sets(), 1) << "of a run that has used it";
  EXPECT_FALSE(has_conversations(data));
}

TEST_F(BpeDocumentsTest, AWholeCharacterIsPrintedAtOnce) {
  BpeTrainer trainer;
  const std::string text = "caf\xC3\xA9 \xF0\x9F\x98\x80!";
  trainer.add("abc", {});
  trainer.end_text({});
  write_file(folder_ / "tokenizer.json", trainer.train(257));
  const Tokenizer bytes = Tokenizer::from_path(folder_.path());
  const Ids ids = bytes.encode(text);
  ASSERT_EQ(ids.size(), text.size());
  TokenStream stream(bytes, bytes.encode("x"));
  std::vector<std::string> parts;
  for (const int32_t id : ids)
    if (std::string part = stream.add(id); !part.empty()) parts.push_back(std::move(part));
  EXPECT_THAT(parts, ElementsAre("c", "a", "f", "\xC3\xA9", " ", "\xF0\x9F\x98\x80", "!"));
  EXPECT_EQ(stream.add(ids[3]), "");
  EXPECT_EQ(stream.rest(), "\xEF\xBF\xBD") << "what did not become whole";
}

// Decoding takes a run of tokens that name bytes as a whole: where one of its characters is cut off, each byte is U+FFFD.
TEST_F(BpeDocumentsTest, AStreamOfByteTokensIsWhatDecodingGivesAndUtf8) {
  Json json = small_tokenizer({"<0x0A>", "<0xE3>", "<0x81>", "<0x82>"});
  json["added_tokens"] = Json::Entries{added_token("</s>", 21)};  // which texts do not show
  json["decoder"] = parse_json(R"({"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"}]})", "d");
  const Tokenizer own = tokenizer(json);
  const auto shown = [&own](const Ids& prompt, const Ids& ids) {
    TokenStream stream(own, prompt);
    std::string text;
    for (size_t i = 0; i <= ids.size(); ++i) {
      const std::string part = i < ids.size() ? stream.add(ids[i]) : stream.rest();
      EXPECT_TRUE(is_utf8(part)) << ::testing::PrintToString(ids);
      text += part;
    }
    return text;
  };
  constexpr std::array<int32_t, 6> kTokens = {0, 17, 18, 19, 20, 21};
  for (size_t number = 0; number < 7776; ++number) {  // all of five tokens
    Ids ids;
    for (size_t i = 0, rest = number; i < 5; ++i, rest /= 6) ids.push_back(kTokens[rest % 6]);
    ASSERT_EQ("a" + shown({0}, ids), own.decode(Ids{0, ids[0], ids[1], ids[2], ids[3], ids[4]})) << ::testing::PrintToString(ids);
  }
  EXPECT_EQ(shown({0, 17}, {18, 0}), "\uFFFDa") << "behind a line end that has been shown";
  TokenStream lines(own, {0});
  EXPECT_EQ(lines.add(17), "");
  EXPECT_EQ(lines.add(0), "\na") << "as soon as the run has ended";
}

// A token that takes away from what has been shown shows nothing.
TEST_F(BpeDocumentsTest, AStreamShowsNothingOfATokenThatMakesTheTextShorter) {
  Json json = small_tokenizer();
  json["decoder"] =
      parse_json(R"({"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Replace","pattern":{"String":"bc"},"content":""}]})", "d");
  const Tokenizer own = tokenizer(json);
  TokenStream stream(own, {0});
  EXPECT_EQ(stream.add(1), "b");
  EXPECT_EQ(stream.add(2), "") << "\"abc\" is \"a\"";
  EXPECT_EQ(stream.rest(), "");
}

// Its decoder strips the space that a text begins with, which is not there in the middle of one.
TEST_F(BpeDocumentsTest, AStreamKeepsSpacesBetweenTokensAndBytesAsTheyAre) {
  Json json = small_tokenizer({"\xE2\x96\x81hello", "\xE2\x96\x81wor"});
  json["decoder"] = parse_json(R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"Fuse"},
    {"type":"Strip","content":" ","start":1,"stop":0}]})",
                               "d");
  const Tokenizer own = tokenizer(json), bytes = Tokenizer::bytes();
  TokenStream stream(own, {17}), of_bytes(bytes, {'a'});
  std::string shown;
  for (const int32_t id : {18, 16, 17}) shown += stream.add(id);
  EXPECT_EQ(shown + '|' + stream.rest(), " world hello|");
  EXPECT_EQ(of_bytes.add(0xC3), "\xC3");
}

}  // namespace mantissa::bpe_documents_test
