#include <gmock/gmock.h>

#include <set>

#include "data/open_data.h"
#include "data/token_writer.h"
#include "files.h"
#include "json/json_fields.h"

namespace mantissa::data_open_test {

using test::error_of;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

class OpenDataTest : public ::testing::Test {
 protected:
  DataConfig text_config(const std::string& content, TokenizerKind tokenizer = TokenizerKind::byte) {
    write_file(folder_ / "a.txt", content);
    DataConfig config;
    config.path = folder_ / "a.txt";
    config.tokenizer = choice_name(tokenizer);
    return config;
  }

  test::TemporaryFolder folder_;
};

TEST_F(OpenDataTest, ShortFormHoldsTheTailOut) {
  std::string content;
  for (int i = 0; i < 105; ++i) content += static_cast<char>(i);
  const DataConfig config = text_config(content);
  Data data = open_data(config, {.seq_len = 4});
  EXPECT_EQ(data.vocab_size, 256);
  EXPECT_EQ(data.train->tokens(), 94);  // floor(105 * 0.9)
  const Batch valid = data.valid.batch(0, 0, 100);
  EXPECT_EQ(valid.target_count, 10);
  EXPECT_EQ(valid.tokens.front(), 94);
  const Batch train = data.train->batch(0, 23);  // floor((94 - 1) / 4)
  std::set<int32_t> seen(train.tokens.begin(), train.tokens.end());
  EXPECT_EQ(seen.size(), 92U);
  EXPECT_EQ(*seen.rbegin(), 91);
  const auto order = [&](uint64_t seed) { return open_data(config, {.seq_len = 4, .seed = seed}).train->batch(0, 23).tokens; };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
  EXPECT_EQ(training_tokens(1115394, 0.1), 1003854) << "of tiny Shakespeare, as nanoGPT has it";
  EXPECT_EQ(training_tokens(10, 0.1), 9);
  EXPECT_EQ(training_tokens(7, 0.0), 7);
}

// A text has 2 MiB and a byte: a reader has three windows.
TEST_F(OpenDataTest, WhatTakesLongTellsThatItGoesOn) {
  int reported = 0;
  const auto calls = [&](const DataConfig& config, bool validation = false) {
    reported = 0;
    const DataOptions options = {.seq_len = 4, .progressed = [&] { ++reported; }};
    const Data data = validation ? open_validation_data(config, options) : open_data(config, options);
    const int opening = reported;
    std::vector<int32_t> ids(5);
    data.files[0].read(0, 5, ids.data());
    EXPECT_EQ(reported, opening) << "reading later is none of it";
    return opening;
  };
  DataConfig characters = text_config(std::string((2 << 20) + 1, 'a'), TokenizerKind::character);
  EXPECT_EQ(calls(characters), 3 + 3 + 3 + 3 + 1) << "is it text, its characters; is it text, its tokens; its fingerprint";
  EXPECT_EQ(calls(characters, true), 3 + 3 + 3 + 3);
  characters.format = DataFormat::text;
  EXPECT_EQ(calls(characters), 3 + 3 + 1);
  DataConfig lines = text_config("{\"text\": \"ab\"}\n\n{\"text\": \"cdefghijklmnopqrstuvwxyz\"}\n");
  lines.format = DataFormat::jsonl;
  EXPECT_EQ(calls(lines), 2 + 1) << "lines and a fingerprint";
  lines.path.reset();
  lines.train = lines.valid = {{.path = folder_ / "a.txt"}};
  EXPECT_EQ(calls(lines), 2 * (2 + 1));
}

TEST_F(OpenDataTest, CharTokenizerReadsTheWholeFileOfTheShortForm) {
  const std::string content = std::string(95, 'a') + "bcde\u00e9";  // the last five only in the validation part
  Data data = open_data(text_config(content, TokenizerKind::character), {.seq_len = 4});
  EXPECT_EQ(data.vocab_size, 6);
  EXPECT_EQ(data.tokenizer->size(), 6);
  EXPECT_EQ(data.train->batch(0, 1).tokens, data.tokenizer->encode("aaaa"));
}

TEST_F(OpenDataTest, CharTokenizerOfListsKnowsTheTrainingFilesOnly) {
  write_file(folder_ / "train.txt", "abcabcabc");
  write_file(folder_ / "valid.txt", "abx");
  DataConfig config;
  config.tokenizer = "char";
  config.train = {{.path = folder_ / "train.txt"}};
  config.valid = {{.path = folder_ / "valid.txt"}};
  const Error error = error_of([&] { open_data(config, {.seq_len = 4}); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("valid.txt: the character U+0078 'x'"));
}

TEST_F(OpenDataTest, NanoGptCharactersComeFromItsMetaFile) {
  write_file(folder_ / "train.bin", std::string("\2\0\1\0\0\0\2\0", 8));
  DataConfig config;
  config.tokenizer = "char";
  config.train = {{.path = folder_ / "train.bin"}};
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 3}); }).what(), HasSubstr("meta.json"));
  write_file(folder_ / "meta.json", R"({"vocab_size": 3, "itos": {"0": "\n", "1": "a", "2": "\u00e9"}, "stoi": {}})");
  Data data = open_data(config, {.seq_len = 3});
  EXPECT_EQ(data.tokenizer->decode(data.train->batch(0, 1).tokens), "\u00e9a\n");
  for (const char* bad :
       {"{}", R"({"itos": {"1": "a"}})", R"({"itos": {"0": "ab"}})", R"({"itos": {"0": ""}})", R"({"itos": {"0": "b", "1": "a"}})"}) {
    write_file(folder_ / "meta.json", bad);
    EXPECT_EQ(error_of([&] { open_data(config, {.seq_len = 3}); }).code(), ExitCode::data) << bad;
  }
}

TEST_F(OpenDataTest, EveryTokenFileMustHaveTheSameCharacters) {
  const auto pair = [&](const std::string& name, std::vector<char32_t> characters) {
    MegatronWriter writer(folder_ / name, {.vocab_size = 2});
    writer.add_document(std::vector<int32_t>{1, 0, 1});
    writer.finish();
    write_file(folder_ / (name + ".tokenizer.json"), Tokenizer::characters(std::move(characters)).to_json());
    return WeightedPath{.path = folder_ / name};
  };
  const WeightedPath one = pair("one", {'x', 'y'}), same = pair("same", {'x', 'y'}), other = pair("other", {'a', 'b'});
  const auto open = [](std::vector<WeightedPath> train, std::vector<WeightedPath> valid) {
    DataConfig config;
    config.tokenizer = "char";
    config.train = std::move(train);
    config.valid = std::move(valid);
    return open_data(config, {.seq_len = 2});
  };
  Data both = open({one, same}, {same});
  EXPECT_EQ(both.tokenizer->decode(both.train->batch(0, 1).tokens), "yx");
  for (const auto& [train, valid] :
       {std::pair{std::vector{one, other}, std::vector{same}}, std::pair{std::vector{one}, std::vector{other}}}) {
    const Error error = error_of([&, &train = train, &valid = valid] { open(train, valid); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(folder_ / "other.tokenizer.json"));
    EXPECT_THAT(error.what(), HasSubstr(folder_ / "one.tokenizer.json"));
  }
  DataConfig alone;
  alone.valid = {other};
  const Error error = error_of([&] { open_validation_data(alone, {.seq_len = 2, .tokenizer = Tokenizer::characters({'x', 'y'})}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("other.tokenizer.json"));
  std::filesystem::remove(folder_ / "same.tokenizer.json");
  EXPECT_EQ(error_of([&] { open({one, same}, {}); }).code(), ExitCode::usage) << "nobody knows its characters";
}

TEST_F(OpenDataTest, ValidationAloneNeedsNoTrainingFilesAndACheckpointsTokenizerTakesThePlaceOfTheConfigs) {
  DataConfig characters = text_config("abababababababababab", TokenizerKind::character);
  EXPECT_EQ(open_data(characters, {.seq_len = 4, .tokenizer = Tokenizer::characters({'a', 'b', 'c'})}).vocab_size, 3);
  write_file(folder_ / "valid.txt", "hello");
  DataConfig config;
  config.tokenizer = "byte";
  config.train = {{.path = folder_ / "gone.txt"}};
  config.valid = {{.path = folder_ / "valid.txt"}};
  const Data data = open_validation_data(config, {.seq_len = 4});
  EXPECT_FALSE(data.train);
  EXPECT_EQ(data.valid.batch(0, 0, 9).target_count, 4);
  EXPECT_EQ(data.valid.name(0), folder_ / "valid.txt");
}

TEST_F(OpenDataTest, MixturesAndValidationSetsKeepTheirOrder) {
  for (const char* name : {"a", "b", "v", "w"}) write_file(folder_ / (std::string(name) + ".txt"), std::string(40, *name));
  DataConfig config;
  config.tokenizer = "byte";
  config.train = {{.path = folder_ / "a.txt", .weight = 3}, {.path = folder_ / "b.txt", .weight = 1}};
  config.valid = {{.path = folder_ / "w.txt"}, {.path = folder_ / "v.txt"}};
  Data data = open_data(config, {.seq_len = 1});
  const Batch batch = data.train->batch(0, 400);
  EXPECT_EQ(std::count(batch.tokens.begin(), batch.tokens.end(), 'a'), 300);
  ASSERT_EQ(data.valid.sets(), 2);
  EXPECT_EQ(data.valid.batch(0, 0, 1).tokens[0], 'w');
  EXPECT_EQ(data.valid.batch(1, 0, 1).tokens[0], 'v');
  EXPECT_EQ(data.fingerprints.train.size(), 2U);
  EXPECT_EQ(data.fingerprints.valid.size(), 2U);
}

TEST_F(OpenDataTest, SizesOfVocabularyAndTokenizerMustAgree) {
  DataConfig config = text_config("some text to read");
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 4, .vocab_size = 255}); }).what(), HasSubstr("255 is less than the 256 ids"));
  EXPECT_EQ(open_data(config, {.seq_len = 4, .vocab_size = 300}).vocab_size, 300);
  config.tokenizer.reset();
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 4}); }).what(), HasSubstr("model.vocab_size"));
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 4, .vocab_size = 300}); }).what(), HasSubstr("data.tokenizer"));
}

using DocumentOption = void (*)(DataConfig&);
constexpr DocumentOption kMask = [](DataConfig& config) { config.mask_eod_loss = true; };
constexpr DocumentOption kReset = [](DataConfig& config) { config.reset_position_ids = true; };
constexpr DocumentOption kSeparate = [](DataConfig& config) { config.document_mask = true; };

TEST_F(OpenDataTest, MaskingWithoutBoundariesIsAUsageError) {
  write_file(folder_ / "n.bin", std::string(40, '\1'));
  for (const DocumentOption set : {kMask, kReset, kSeparate}) {
    DataConfig config;
    config.path = folder_ / "n.bin";
    set(config);
    const Error error = error_of([&] { open_data(config, {.seq_len = 2, .vocab_size = 300}); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr("data.eod_id"));
    config.eod_id = 7;
    EXPECT_TRUE(open_data(config, {.seq_len = 2, .vocab_size = 300}).train);
  }
}

TEST_F(OpenDataTest, DocumentOptionsThatFindOneTextAreWarnings) {
  using ::testing::IsEmpty;
  using ::testing::StartsWith;
  DataConfig config = text_config("some text to read, and a little more of it");
  const auto warnings = [&] { return data_warnings(config, open_data(config, {.seq_len = 4, .vocab_size = 300})); };
  EXPECT_THAT(warnings(), IsEmpty()) << "none is on";
  config.reset_position_ids = config.document_mask = true;
  EXPECT_THAT(warnings(), ElementsAre(StartsWith("data.reset_position_ids has no effect"), StartsWith("data.document_mask has no effect")));
  config.reset_position_ids = false;
  config.eod_id = 256;
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr("no character has the id data.eod_id 256")));
  config.append_eod = true;
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr("data.document_mask"))) << "behind the text";
  config.append_eod = false;
  config.eod_id = ' ';
  EXPECT_THAT(warnings(), IsEmpty()) << "words";
  config.eod_id = 256;
  write_file(folder_ / "more.txt", "another document of this set");
  config.path = folder_ / "*.txt";
  EXPECT_THAT(warnings(), IsEmpty()) << "two";
}

// Documents of one token and an end; the second half is held out.
TEST_F(OpenDataTest, EachDocumentOptionReachesTrainingAndValidation) {
  std::string tokens;
  for (int i = 0; i < 4; ++i) tokens += std::string("\1\0\7\0", 4);
  write_file(folder_ / "n.bin", tokens);
  const auto expect = [&](DocumentOption set, const std::vector<int32_t>& targets, const std::vector<int32_t>& positions,
                          const std::vector<int32_t>& starts) {
    DataConfig given;
    given.path = folder_ / "n.bin";
    given.valid_fraction = 0.5;
    given.eod_id = 7;
    set(given);
    const DataOptions options{.seq_len = 3, .vocab_size = 8};
    Data data = open_data(given, options), valid = open_validation_data(given, options);
    for (const Batch& batch : {data.train->batch(0, 1), data.valid.batch(0, 0, 1), valid.valid.batch(0, 0, 1)}) {
      EXPECT_EQ(batch.targets, targets);
      EXPECT_EQ(batch.positions, positions);
      EXPECT_EQ(batch.segment_starts, starts);
    }
  };
  const std::vector<int32_t> targets{7, 1, 7}, positions{0, 1, 2}, starts{0, 0, 0};
  expect([](DataConfig&) {}, targets, positions, starts);
  expect(kMask, {7, kNoTarget, 7}, positions, starts);
  expect(kReset, targets, {0, 1, 0}, starts);
  expect(kSeparate, targets, positions, {0, 0, 2});
}

TEST_F(OpenDataTest, GlobsAreSortedAndPairsCountOnce) {
  for (const char* name : {"b2.txt", "b10.txt", "a.txt"}) write_file(folder_ / name, name);
  MegatronWriter writer(folder_ / "pair", {.vocab_size = 10});
  writer.add_document(std::vector<int32_t>{1});
  writer.finish();
  EXPECT_THAT(expand_paths(folder_ / "*.txt"), ElementsAre(folder_ / "a.txt", folder_ / "b10.txt", folder_ / "b2.txt"));
  EXPECT_THAT(expand_paths(folder_ / "{b2,a}.txt"), ElementsAre(folder_ / "a.txt", folder_ / "b2.txt"));
  EXPECT_THAT(expand_paths(folder_ / "pair*"), ElementsAre(folder_ / "pair.bin"));
  EXPECT_THAT(expand_paths(folder_ / "pair"), ElementsAre(folder_ / "pair.bin"));
  EXPECT_THAT(expand_paths(folder_ / "*.idx"), ElementsAre(folder_ / "pair.bin"));
  write_file(folder_ / "odd[1].txt", "x");
  EXPECT_THAT(expand_paths(folder_ / "odd[1].txt"), ElementsAre(folder_ / "odd[1].txt"));
}

TEST_F(OpenDataTest, EmptyMatchNamesPatternFolderAFewFilesAndTheKeyToSet) {
  EXPECT_EQ(error_of([&] { expand_paths(folder_ / "none*"); }).code(), ExitCode::usage);
  EXPECT_THAT(error_of([&] { expand_paths(folder_ / "no/such/*.txt"); }).what(), HasSubstr("there is no folder"));
  EXPECT_THAT(error_of([&] { expand_paths(folder_.path()); }).what(), HasSubstr("is a folder"));
  for (int i = 0; i < 8; ++i) write_file(folder_ / (std::to_string(i) + ".txt"), "x");
  EXPECT_THAT(error_of([&] { expand_paths(folder_ / "none*"); }).what(),
              ::testing::AllOf(HasSubstr("none*\" matches no file"), EndsWith("holds 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more")));
  EXPECT_THAT(error_of([&] { expand_paths(folder_ / "none*", "data.path"); }).what(), EndsWith("; name yours with --set data.path=FILE"));
  DataConfig config = text_config("x");
  config.path.reset();
  config.train = {{.path = folder_ / "0.txt"}, {.path = folder_ / "none*"}};
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 4}); }).what(), HasSubstr("--set data.train.1.path=FILE"));
  config.tokenizer = "char";
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }).what(), HasSubstr("--set data.train.1.path=FILE"));
  config.train.pop_back();
  config.valid = {{.path = folder_ / "none*"}};
  EXPECT_THAT(error_of([&] { open_data(config, {.seq_len = 4}); }).what(), HasSubstr("--set data.valid.0.path=FILE"));
}

TEST_F(OpenDataTest, FingerprintsTellChangedDataApart) {
  const DataConfig config = text_config("The quick brown fox jumps over the lazy dog");
  const auto saved = from_json<DataFingerprints>(json_text(open_data(config, {.seq_len = 4}).fingerprints), "checkpoint");
  require_same_data(saved, open_data(config, {.seq_len = 4}).fingerprints);
  for (const char* changed : {"The quick brown fox jumps over the lazy dOg", "The quick brown fox jumps over the lazy dog."}) {
    const Error error = error_of([&] { require_same_data(saved, open_data(text_config(changed), {.seq_len = 4}).fingerprints); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr("a.txt: the training data changed"));
  }
  EXPECT_EQ(error_of([&] { require_same_data(saved, {}); }).code(), ExitCode::data);
  const DataFingerprints moved = {.train = {}, .valid = saved.train};
  EXPECT_THAT(error_of([&] { require_same_data(moved, saved); }).what(),
              HasSubstr("the training data changed since the checkpoint: 0 files"));
  EXPECT_THAT(error_of([&] { require_same_data(moved, {}); }).what(),
              HasSubstr("the validation data changed since the checkpoint: 1 files"));
}

TEST_F(OpenDataTest, SmallFilesAreHashedAndLargeOnesSampledFromEndToEnd) {
  write_file(folder_ / "x", "xxhash");
  EXPECT_EQ(fingerprint(folder_ / "x").hash.value, 3665147885093898016U);  // published: XXH64("xxhash", seed 0)
  // Sparse: 200 MiB without using the disk.
  write_file(folder_ / "big", "start");
  std::filesystem::resize_file(folder_ / "big", 200 << 20);
  const FileFingerprint before = fingerprint(folder_ / "big");
  EXPECT_EQ(before.bytes, 200 << 20);
  for (const int64_t offset : {(200 << 20) - 1, 1000}) {
    std::fstream file(folder_ / "big", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset).put('x').flush();
    EXPECT_NE(fingerprint(folder_ / "big").hash, before.hash);
    file.seekp(offset).put('\0').flush();
    EXPECT_EQ(fingerprint(folder_ / "big").hash, before.hash);
  }
}

}  // namespace mantissa::data_open_test
