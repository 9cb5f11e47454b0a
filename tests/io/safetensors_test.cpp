// Safetensors files: those that are written are read again. Files that others may have damaged or forged are in
// safetensors_hostile_test.cpp.
#include "io/safetensors.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "safetensors_files.h"

namespace mantissa::test::safetensors_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST_F(Safetensors, DtypesAreCalledAsTheFormatSays) {
  const char* const names[] = {"BOOL",    "F4",          "F6_E2M3",     "F6_E3M2", "U8",  "I8",  "F8_E5M2", "F8_E4M3",
                               "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",     "U16", "F16", "BF16",    "I32",
                               "U32",     "F32",         "C64",         "F64",     "I64", "U64"};
  ASSERT_EQ(std::size(names), kFileDtypes);
  for (int i = 0; i < kFileDtypes; ++i) {
    EXPECT_STREQ(file_dtype_name(static_cast<FileDtype>(i)), names[i]);
    EXPECT_EQ(parse_file_dtype(names[i]), static_cast<FileDtype>(i));
  }
  EXPECT_EQ(parse_file_dtype("F8"), std::nullopt);
}

TEST_F(Safetensors, AllDtypesAreReadAsTheyWereWritten) {
  const std::vector<SafetensorsTensor> tensors = one_of_each_dtype();
  write_model(folder(), tensors);
  SafetensorsFolder read(folder());
  EXPECT_EQ(read.entries().size(), tensors.size());
  for (const SafetensorsTensor& tensor : tensors) expect_content(read, tensor);
  EXPECT_EQ(read.find("of.F4")->bytes(), 12);
  EXPECT_EQ(read.find("of.F6_E2M3")->bytes(), 18);
  EXPECT_EQ(read.find("of.BF16")->bytes(), 48);
  EXPECT_EQ(read.find("of."), nullptr);
}

TEST_F(Safetensors, ScalarsAndEmptyTensorsAreLegalAndSoIsAModelWithoutTensors) {
  const std::vector<SafetensorsTensor> tensors = {{"scalar", FileDtype::f32, {}},
                                                  {"empty", FileDtype::f32, {0}},
                                                  {"flat", FileDtype::i64, {4, 0, 3}},
                                                  {"z", FileDtype::u8, {0, 1LL << 59}}};
  write_model(folder(), tensors);
  SafetensorsFolder read(folder());
  for (const SafetensorsTensor& tensor : tensors) expect_content(read, tensor);
  EXPECT_EQ(read.find("scalar")->bytes(), 4);
  const TemporaryFolder none;
  write_model(none.path(), {});
  EXPECT_TRUE(SafetensorsFolder(none.path()).entries().empty());
}

TEST_F(Safetensors, TheFileIsWhatTheFormatSaysToTheByte) {
  const SafetensorsLayout layout({{"b", FileDtype::u8, {2}}, {"c", FileDtype::f32, {1}}, {"a", FileDtype::u8, {1}}}, {{"by", "me\n"}});
  ASSERT_EQ(layout.tensors().size(), 3u);
  EXPECT_EQ(layout.tensors()[0].name + layout.tensors()[1].name + layout.tensors()[2].name, "cab");
  layout.create(folder());
  SafetensorsWriter writer(folder(), layout, 0, 3);
  writer.write(std::as_bytes(std::span("1234", 4)));
  writer.write(std::as_bytes(std::span("5", 1)));
  writer.write(std::as_bytes(std::span("67", 2)));
  writer.finish();
  EXPECT_EQ(SafetensorsFile(folder_ / "model.safetensors").metadata(), (SafetensorsMetadata{{"format", "pt"}, {"by", "me\n"}}));
  std::string header = R"({"__metadata__":{"format":"pt","by":"me\n"},"c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_file(folder_ / "model.safetensors"), safetensors_bytes_of(header, "1234567"));
}

TEST_F(Safetensors, TheFormatOfTheMetadataIsPtUnlessItIsNamed) {
  const SafetensorsMetadata named = {{"by", "me"}, {"format", "mlx"}};
  test::write_model(folder(), {{"a", FileDtype::u32, {2}}}, named);
  EXPECT_EQ(SafetensorsFolder(folder()).metadata(), named);
}

TEST_F(Safetensors, ChunksOfAnySizeKeepTheirPlace) {
  const SafetensorsTensor tensor{"a", FileDtype::u8, {5 << 20}};
  const std::vector<std::byte> content = content_of(tensor);
  const SafetensorsLayout layout({tensor});
  layout.create(folder());
  SafetensorsWriter writer(folder(), layout, 0, 1);
  size_t at = 0;
  for (const int chunk : {100, 2 << 20, 1 << 19, 1 << 19, 1, 1 << 20}) {
    writer.write(std::span(content).subspan(at, static_cast<size_t>(chunk)));
    at += static_cast<size_t>(chunk);
  }
  writer.write(std::span(content).subspan(at));
  writer.finish();
  SafetensorsFolder read(folder());
  expect_content(read, tensor);
}

TEST_F(Safetensors, LargeModelsAreCutIntoShards) {
  const std::vector<SafetensorsTensor> tensors = one_of_each_dtype();
  write_model(folder(), tensors, {}, 200);
  const std::vector<std::string> names = names_in(folder());
  const size_t shards = names.size() - 1;
  EXPECT_GT(shards, 3u);
  EXPECT_EQ(names.front(), text("model-00001-of-0000", shards, ".safetensors"));
  EXPECT_EQ(names.back(), "model.safetensors.index.json");
  SafetensorsFolder read(folder());
  int64_t total = 0;
  std::vector<int64_t> in_file(read.files().size());
  for (const SafetensorsTensor& tensor : tensors) {
    expect_content(read, tensor);
    total += safetensors_bytes(tensor);
    in_file.at(static_cast<size_t>(read.find(tensor.name)->file)) += safetensors_bytes(tensor);
  }
  EXPECT_LE(*std::max_element(in_file.begin(), in_file.end()), 200);
  const auto index = nlohmann::json::parse(read_file(folder_ / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(index["weight_map"].size(), tensors.size());
}

// The files that it names are as they were.
TEST_F(Safetensors, AnIndexThatIsReplacedAloneIsSeen) {
  write_model(folder(), {{"a", FileDtype::u8, {10}}, {"b", FileDtype::u8, {10}}}, {}, 10);
  SafetensorsFolder read(folder());
  EXPECT_NO_THROW(read.require_unchanged());
  const std::string index = folder_ / "model.safetensors.index.json", content = read_file(index);
  std::filesystem::remove(index);
  write_file(index, content);
  const Error error = error_of([&] { read.require_unchanged(); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), ::testing::StartsWith(index + ": was changed or replaced"));
}

TEST_F(Safetensors, ATensorAboveTheLimitHasAShardOfItsOwn) {
  write_model(folder(), {{"a", FileDtype::u8, {10}}, {"b", FileDtype::u8, {300}}, {"c", FileDtype::u8, {10}}, {"d", FileDtype::u8, {90}}},
              {}, 100);
  SafetensorsFolder read(folder());
  std::string files;
  for (const SafetensorsEntry& entry : read.entries()) files += text(entry.name, entry.file, ' ');
  EXPECT_EQ(files, "a0 b1 c2 d2 ");
  std::filesystem::create_directory(folder() + "/first");
  write_model(folder() + "/first", {{"a", FileDtype::u8, {300}}}, {}, 100);
  EXPECT_TRUE(std::filesystem::exists(folder() + "/first/model.safetensors"));  // no empty shard before it
}

TEST_F(Safetensors, ChunksAreReadFromAnyPosition) {
  const SafetensorsTensor tensor{"a", FileDtype::f32, {50}};
  write_model(folder(), {tensor, {"b", FileDtype::u8, {3}}});
  const std::vector<std::byte> content = content_of(tensor);
  const SafetensorsFile file(folder_ / "model.safetensors");
  std::vector<std::byte> chunk(30);
  file.read(*file.find("a"), 101, chunk);
  EXPECT_TRUE(std::equal(chunk.begin(), chunk.end(), content.begin() + 101));
  file.read(*file.find("a"), 200, {});
  for (const int64_t offset : {int64_t{-1}, int64_t{171}, int64_t{1} << 62})
    EXPECT_EQ(error_of([&] { file.read(*file.find("a"), offset, chunk); }).code(), ExitCode::internal);
}

TEST_F(Safetensors, LinksOfTheUserAreFollowed) {
  fs::create_directories(folder_ / "blobs");
  fs::create_directories(folder_ / "snapshot");
  write_model(folder_ / "blobs", one_of_each_dtype(), {}, 200);
  for (const std::string& name : names_in(folder_ / "blobs")) fs::create_symlink("../blobs/" + name, folder_ / "snapshot/" + name);
  SafetensorsFolder read(folder_ / "snapshot");
  for (const SafetensorsTensor& tensor : one_of_each_dtype()) expect_content(read, tensor);
  fs::create_directory_symlink("snapshot", folder_ / "main");
  EXPECT_EQ(SafetensorsFolder(folder_ / "main").entries().size(), static_cast<size_t>(kFileDtypes));
}

TEST_F(Safetensors, AFileThatShrinksAfterItWasOpenedIsAnError) {
  write_model(folder(), one_of_each_dtype(), {}, 200);
  SafetensorsFolder read(folder());
  const SafetensorsEntry& entry = *read.find("of.BOOL");
  fs::resize_file(read.files()[static_cast<size_t>(entry.file)], 300);
  std::vector<std::byte> out(static_cast<size_t>(entry.bytes()));
  const Error error = error_of([&] { read.read(entry, 0, out); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("was changed or replaced while the model was read"));
}

// Each writer has consecutive tensors, whatever files they are in; some may have none.
TEST_F(Safetensors, AnyNumberOfWritersMakesTheSameFiles) {
  std::vector<SafetensorsTensor> tensors = one_of_each_dtype();
  tensors.push_back({"empty", FileDtype::f32, {0, 3}});
  tensors.push_back({"large", FileDtype::f32, {1000}});
  const auto files = [&](int parts) {
    const std::string here = folder_ / text("by ", parts);
    fs::create_directory(here);
    write_model(here, tensors, {}, 300, 7, parts);
    std::string all;
    for (const std::string& name : names_in(here)) all += name + "\n" + read_file(here + "/" + name);
    return all;
  };
  const std::string one = files(1);
  for (const int parts : {2, 3, 7, 40}) EXPECT_TRUE(files(parts) == one) << parts;
}

TEST_F(Safetensors, PartsOfALayoutAreNearlyEqual) {
  std::vector<SafetensorsTensor> tensors;
  for (int i = 0; i < 1000; ++i) tensors.push_back({text("t", i), FileDtype::u8, {1 + i % 17}});
  const SafetensorsLayout layout(tensors);
  for (const int parts : {1, 2, 3, 8, 61}) {
    EXPECT_EQ(layout.first_of(0, parts), 0U);
    EXPECT_EQ(layout.first_of(parts, parts), 1000U);
    for (int part = 0; part < parts; ++part) {
      const size_t first = layout.first_of(part, parts), last = layout.first_of(part + 1, parts);
      ASSERT_LT(first, last);
      EXPECT_NEAR(static_cast<double>(layout.place(last - 1).end - layout.place(first).begin), static_cast<double>(layout.bytes()) / parts,
                  34);
    }
  }
}

TEST_F(Safetensors, TheWrongNumberOfBytesIsABrokenContract) {
  const std::vector<std::byte> bytes(9);
  const SafetensorsLayout layout({{"a", FileDtype::u8, {8}}, {"b", FileDtype::u8, {1}}});
  layout.create(folder());
  SafetensorsWriter writer(folder(), layout, 0, 2);
  EXPECT_EQ(error_of([&] { writer.write(bytes); }).code(), ExitCode::internal);
  EXPECT_EQ(error_of([&] { writer.finish(); }).code(), ExitCode::internal);
  writer.write(std::span(bytes).first(8));
  EXPECT_THAT(error_of([&] { writer.finish(); }).what(), HasSubstr("b: 1 bytes are missing"));
  writer.write(std::span(bytes).first(1));
  EXPECT_EQ(error_of([&] { writer.write(bytes); }).code(), ExitCode::internal);
  writer.finish();
  EXPECT_EQ(SafetensorsFolder(folder()).entries().size(), 2u);
}

TEST_F(Safetensors, WhatNoReaderTakesIsNotWritten) {
  const auto refused = [&](const std::vector<SafetensorsTensor>& tensors) {
    const Error error = error_of([&] { SafetensorsLayout(tensors, {}); });
    EXPECT_EQ(error.code(), ExitCode::internal) << error.what();
  };
  refused({{"a", FileDtype::u8, {1}}, {"a", FileDtype::f32, {1}}});
  refused({{"", FileDtype::u8, {1}}});
  refused({{"a\nb", FileDtype::u8, {1}}});
  refused({{"a\xff", FileDtype::u8, {1}}});
  refused({{std::string(1025, 'a'), FileDtype::u8, {1}}});
  refused({{"__metadata__", FileDtype::u8, {1}}});
  refused({{"a", FileDtype::f4, {3}}});
  refused({{"a", FileDtype::f32, {-1}}});
  refused({{"a", FileDtype::f32, {1LL << 62}}});
  refused({{"a", FileDtype::f32, {1, 1, 1, 1, 1, 1, 1, 1, 1}}});
  EXPECT_TRUE(names_in(folder()).empty());
}

TEST_F(Safetensors, ADiskThatIsTooSmallIsFoundBeforeAnythingIsWritten) {
  const Error error = error_of([&] { SafetensorsLayout({{"a", FileDtype::u8, {1LL << 55}}}).create(folder()); });
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_TRUE(names_in(folder()).empty());
}

TEST_F(Safetensors, AnyOrderOfKeysIsRead) {
  write_file(folder_ / "model.safetensors", safetensors_bytes_of(R"({ "b" : {"data_offsets":[0,1],"shape":[],"dtype":"U8"} ,
  "a":{"shape":[2,1],"data_offsets":[1,5],"dtype":"F16"},"__metadata__":{}}   )",
                                                                 "12345"));
  SafetensorsFolder read(folder());
  EXPECT_EQ(read.find("a")->shape, (std::vector<int64_t>{2, 1}));
  std::string bytes(4, ' ');
  read.read(*read.find("a"), 0, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, "2345");
}

}  // namespace mantissa::test::safetensors_test
