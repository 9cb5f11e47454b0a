// Tensors as boxes in global coordinates: what lets one layout of ranks read what another wrote.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"

namespace mantissa::test {
namespace {

using ::testing::ElementsAre;

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

}  // namespace
}  // namespace mantissa::test
