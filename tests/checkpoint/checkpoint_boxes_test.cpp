// Tensors as boxes in global coordinates: what lets one layout of ranks read what another wrote.
#include <gmock/gmock.h>

#include <limits>
#include <numeric>

#include "checkpoint_testing.h"
#include "mantissa/io/safetensors.h"

namespace mantissa::test::checkpoint_boxes_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// A [4, 6] tensor stored as the two boxes of a split along dim 1 and one below: what another layout would have written.
struct BoxedTensor {
  std::vector<float> global = std::vector<float>(24);
  std::vector<float> stored;
  std::vector<Box> boxes = {{{0, 0}, {3, 2}}, {{0, 2}, {3, 4}}, {{3, 0}, {1, 6}}};

  BoxedTensor() {
    for (size_t i = 0; i < global.size(); ++i) global[i] = static_cast<float>(i);
    for (const Box& box : boxes)
      for (int64_t r = box.start[0]; r < box.start[0] + box.size[0]; ++r)
        for (int64_t c = box.start[1]; c < box.start[1] + box.size[1]; ++c) stored.push_back(static_cast<float>(r * 6 + c));
  }
  CheckpointContent content() const {
    CheckpointContent out{{.step = 1}, {}};
    out.tensors = {{.name = "w", .shape = {4, 6}, .boxes = boxes, .data = saved_tensor({24}, stored)}};
    return out;
  }
};

TEST_F(CheckpointTest, BoxesAreJoinedInGlobalCoordinates) {
  const BoxedTensor tensor;
  CheckpointReader reader(open_directory(folder).save(tensor.content()).path);
  std::vector<float> back(24);
  reader.read("w", std::as_writable_bytes(std::span(back)));
  EXPECT_EQ(back, tensor.global);
}

TEST_F(CheckpointTest, EveryBoxOfATensorCanBeReadAlone) {
  const BoxedTensor tensor;
  CheckpointReader reader(open_directory(folder).save(tensor.content()).path);
  int boxes = 0;
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t c = 0; c < 6; ++c)
      for (int64_t rows = 0; r + rows <= 4; ++rows)
        for (int64_t columns = 0; c + columns <= 6; ++columns, ++boxes) {
          std::vector<float> back(static_cast<size_t>(rows * columns)), expected;
          reader.read("w", {{r, c}, {rows, columns}}, std::as_writable_bytes(std::span(back)));
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) expected.push_back(static_cast<float>((r + i) * 6 + c + j));
          ASSERT_EQ(back, expected) << "box at " << r << ", " << c << " of " << rows << " x " << columns;
        }
  EXPECT_EQ(boxes, 14 * 27);
}

TEST_F(CheckpointTest, AThreeDimensionalTensorIsReadAcrossPieces) {
  std::vector<float> stored;  // [2, 3, 4] as [2, 1, 4] and [2, 2, 4]
  for (const auto& [begin, end] : {std::pair{0, 1}, std::pair{1, 3}})
    for (int a = 0; a < 2; ++a)
      for (int b = begin; b < end; ++b)
        for (int c = 0; c < 4; ++c) stored.push_back(static_cast<float>((a * 3 + b) * 4 + c));
  CheckpointContent content{{.step = 1}, {}};
  content.tensors = {
      {.name = "w", .shape = {2, 3, 4}, .boxes = {{{0, 0, 0}, {2, 1, 4}}, {{0, 1, 0}, {2, 2, 4}}}, .data = saved_tensor({24}, stored)}};
  CheckpointReader reader(open_directory(folder).save(content).path);
  std::vector<float> back(24), part(4);
  reader.read("w", std::as_writable_bytes(std::span(back)));
  for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i], static_cast<float>(i));
  reader.read("w", {{1, 0, 2}, {1, 2, 2}}, std::as_writable_bytes(std::span(part)));
  EXPECT_THAT(part, ElementsAre(14, 15, 18, 19));
}

TEST_F(CheckpointTest, ATensorLargerThanAChunkIsReadInParts) {
  const State state(3, 3'000'000);  // 24 MB: six chunks, and the second tensor begins inside the third
  CheckpointReader reader(open_directory(folder).save(state.content()).path);
  EXPECT_EQ(reader.manifest().shards[0].hashes.size(), 6u);
  EXPECT_TRUE(state.equals(reader));
}

// 40 MB: five chunks of each tensor. A reader keeps eight.
TEST_F(CheckpointTest, AChunkIsReadAgainOnlyAfterEightOthers) {
  constexpr int64_t kOfChunk = 1 << 20;  // elements
  const State state(3, 5 * kOfChunk);
  const std::filesystem::path saved = open_directory(folder).save(state.content()).path;
  CheckpointReader reader(saved);
  const auto read = [&](const char* tensor, int64_t chunk) {
    std::vector<float> row(10);
    const std::span<float> of_box = std::string_view(tensor) == "w" ? std::span(row) : std::span(row).first(1);
    const Box box = of_box.size() == 10 ? Box{{chunk * kOfChunk / 10 + 1, 0}, {1, 10}} : Box{{chunk * kOfChunk}, {1}};
    reader.read(tensor, box, std::as_writable_bytes(of_box));
    return row;
  };
  std::vector<std::vector<float>> before;
  for (int64_t chunk = 0; chunk < 5; ++chunk) before.push_back(read("w.m", chunk));
  for (int64_t chunk = 0; chunk < 3; ++chunk) read("w", chunk);
  const std::filesystem::path shard = saved / "shard-00000.safetensors";
  flip_byte(shard, static_cast<int64_t>(std::filesystem::file_size(shard)) - 5 * kOfChunk * 4);  // the first one of w.m
  for (int64_t chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(read("w.m", chunk), before[static_cast<size_t>(chunk)]);
  for (const int64_t chunk : {3, 4, 0}) read("w", chunk);  // instead of the three above
  for (int64_t chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(read("w.m", chunk), before[static_cast<size_t>(chunk)]);
  for (const int64_t chunk : {1, 2}) read("w", chunk);
  EXPECT_EQ(read("w.m", 1), before[1]);
  for (const int64_t chunk : {3, 4}) read("w", chunk);
  EXPECT_THROW(read("w.m", 0), CheckpointDamage);
}

TEST_F(CheckpointTest, ADamagedChunkIsRefusedEachTimeAndAVerificationReadsAgain) {
  const State state(3);
  const std::filesystem::path saved = open_directory(folder).save(state.content()).path;
  CheckpointReader reader(saved);
  EXPECT_TRUE(state.equals(reader));
  const std::filesystem::path shard = saved / "shard-00000.safetensors";
  flip_byte(shard, static_cast<int64_t>(std::filesystem::file_size(shard)) - 1);
  EXPECT_TRUE(state.equals(reader)) << "what was verified is kept";
  EXPECT_THROW(reader.verify(), CheckpointDamage);
  for (int time = 0; time < 3; ++time) EXPECT_THROW(state.equals(reader), CheckpointDamage);
  flip_byte(shard, static_cast<int64_t>(std::filesystem::file_size(shard)) - 1);
  EXPECT_TRUE(state.equals(reader));
}

TEST_F(CheckpointTest, BoxesThatDoNotTileAreRefusedBeforeAnythingIsWritten) {
  BoxedTensor tensor;
  tensor.boxes[2] = {{2, 0}, {1, 6}};
  CheckpointDirectory directory = open_directory(folder);
  EXPECT_EQ(error_code_of([&] { directory.save(tensor.content()); }), ExitCode::internal);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK"));
}

TEST_F(CheckpointTest, AnUnknownTensorOrAWrongSizeIsAnErrorThatNamesIt) {
  CheckpointReader reader(open_directory(folder).save(State(1).content()).path);
  std::vector<std::byte> out(8);
  EXPECT_EQ(error_code_of([&] { reader.tensor("v"); }), ExitCode::usage);
  EXPECT_EQ(error_code_of([&] { reader.read("w", out); }), ExitCode::internal);
  EXPECT_EQ(error_code_of([&] { reader.read("w", {{99, 9}, {1, 2}}, out); }), ExitCode::internal);
}

// ---- several shards

// What process r of 3 saves of w [5, 2], elements 0 to 9, and of v [3], 20 to 22: rows in turn; the second owns nothing of v.
std::vector<CheckpointTensor> share(int r) {
  const auto numbers = [](int first, int count) {
    std::vector<float> out(static_cast<size_t>(count));
    std::iota(out.begin(), out.end(), static_cast<float>(first));
    return saved_tensor({count}, out);
  };
  const int64_t begin = std::array{0, 2, 3}.at(static_cast<size_t>(r)), end = std::array{2, 3, 5}.at(static_cast<size_t>(r));
  const int rows = static_cast<int>(end - begin);
  std::vector<CheckpointTensor> out = {
      {.name = "w", .shape = {5, 2}, .boxes = {{{begin, 0}, {rows, 2}}}, .data = numbers(static_cast<int>(2 * begin), 2 * rows)}};
  if (r == 0) out.push_back({.name = "v", .shape = {3}, .boxes = {{{0}, {1}}}, .data = numbers(20, 1)});
  if (r == 2) out.push_back({.name = "v", .shape = {3}, .boxes = {{{1}, {2}}}, .data = numbers(21, 2)});
  return out;
}

std::vector<ShardEntry> entries(std::initializer_list<int> ranks) {
  std::vector<ShardEntry> out;
  for (const int r : ranks) out.push_back(describe_shard(share(r), static_cast<int64_t>(out.size()), 1));
  return out;
}

TEST_F(CheckpointTest, ShardsOfSeveralProcessesAreOneCheckpoint) {
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, entries({0, 1, 2})));
  for (const int r : {2, 0, 1}) write_shard(share(r), entries({0, 1, 2})[static_cast<size_t>(r)], save.folder);
  const SavedCheckpoint saved = directory.commit(save);
  EXPECT_THAT(names_in(saved.path),
              UnorderedElementsAre("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors"));
  CheckpointReader reader(saved.path);
  std::vector<float> w(10), v(3);
  reader.read("w", std::as_writable_bytes(std::span(w)));
  reader.read("v", std::as_writable_bytes(std::span(v)));
  EXPECT_THAT(w, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(v, ElementsAre(20, 21, 22));
  EXPECT_TRUE(directory.begin(assemble_manifest({.step = 1}, entries({0, 1, 2}))).folder.empty()) << "it is there";
}

// As any tool of the format reads them.
TEST_F(CheckpointTest, AShardIsASafetensorsFileOfItsPieces) {
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, entries({0, 1, 2})));
  for (const int r : {0, 1, 2}) write_shard(share(r), entries({0, 1, 2})[static_cast<size_t>(r)], save.folder);
  const SafetensorsFile last(directory.commit(save).path / "shard-00002.safetensors");
  ASSERT_EQ(last.entries().size(), 2U);
  const SafetensorsEntry* const v = last.find("v[1:3]");
  ASSERT_NE(v, nullptr);
  EXPECT_EQ(v->dtype, FileDtype::f32);
  EXPECT_THAT(v->shape, ElementsAre(2));
  std::vector<float> values(2);
  last.read(*v, 0, std::as_writable_bytes(std::span(values)));
  EXPECT_THAT(values, ElementsAre(21, 22));
}

// The manifest lists tensors as the first shard has them.
TEST_F(CheckpointTest, AHeaderListsPiecesAsTheyLieInItsShard) {
  std::vector<std::vector<CheckpointTensor>> shares = {share(0), share(1), share(2)};
  std::swap(shares[2][0], shares[2][1]);
  std::vector<ShardEntry> shards;
  for (size_t i = 0; i < 3; ++i) shards.push_back(describe_shard(shares[i], static_cast<int64_t>(i), 1));
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, shards));
  for (size_t i = 0; i < 3; ++i) write_shard(shares[i], shards[i], save.folder);
  const SavedCheckpoint saved = directory.commit(save);
  const SafetensorsFile last(saved.path / "shard-00002.safetensors");
  std::vector<float> values(2);
  last.read(*last.find("v[1:3]"), 0, std::as_writable_bytes(std::span(values)));
  EXPECT_THAT(values, ElementsAre(21, 22));
  EXPECT_NO_THROW(CheckpointReader(saved.path).verify());
}

TEST_F(CheckpointTest, WideElementsComeFirstInAShard) {
  const std::vector<uint8_t> bytes = {1, 2, 3};
  std::vector<CheckpointTensor> tensors = {{.name = "file", .shape = {3}, .boxes = {}, .data = saved_tensor({3}, bytes)}};
  tensors.push_back(share(0)[1]);
  const ShardEntry entry = describe_shard(tensors, 0, 1);
  write_shard(tensors, entry, folder.path());
  const SafetensorsFile file(folder / "shard-00000.safetensors");
  EXPECT_LT(file.find("v[0:1]")->begin, file.find("file")->begin);
  EXPECT_EQ(file.find("v[0:1]")->begin % 4, 0);
}

TEST_F(CheckpointTest, AMissingOrDoubledShareIsRefusedBeforeAnythingIsWritten) {
  for (const auto& ranks : {entries({0, 1}), entries({0, 2}), entries({0, 1, 1, 2})}) {
    EXPECT_EQ(error_code_of([&] { assemble_manifest({.step = 1}, ranks); }), ExitCode::internal);
  }
  std::vector<ShardEntry> odd = entries({0, 1, 2});
  odd[1].tensors[0].shape = {6, 2};
  EXPECT_THAT(error_of([&] { assemble_manifest({.step = 1}, odd); }).what(), HasSubstr("w is fp32 [6, 2] in one shard, fp32 [5, 2]"));
}

TEST_F(CheckpointTest, AnAbandonedSaveLeavesNothing) {
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, entries({0, 1, 2})));
  write_shard(share(0), entries({0, 1, 2})[0], save.folder);
  directory.abandon(save);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK"));
}

TEST_F(CheckpointTest, AShardThatWasNotWrittenIsNotPublished) {
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, entries({0, 1, 2})));
  for (const int r : {0, 2}) write_shard(share(r), entries({0, 1, 2})[static_cast<size_t>(r)], save.folder);
  EXPECT_EQ(error_code_of([&] { directory.commit(save); }), ExitCode::storage);
  EXPECT_FALSE(load_newest(checkpoints(), [](CheckpointReader&) {}).has_value());
}

TEST_F(CheckpointTest, AValueThatIsNotFiniteIsNamedByItsPlaceInTheWholeTensor) {
  const std::vector<float> bad = {1, 2, 3, 4, std::numeric_limits<float>::infinity(), 6};
  const CheckpointTensor tensor{
      .name = "w", .shape = {5, 4}, .boxes = {{{0, 0}, {1, 2}}, {{2, 1}, {2, 2}}}, .data = saved_tensor({6}, bad)};
  EXPECT_STREQ(error_of([&] { describe_shard({tensor}, 3, 7); }).what(), "w: element 13 is NaN or Inf; step 7 is not saved");
}

}  // namespace mantissa::test::checkpoint_boxes_test
