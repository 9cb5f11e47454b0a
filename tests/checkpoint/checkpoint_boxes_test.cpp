// Tensors as boxes in global coordinates, by which one layout of ranks reads what another wrote.
#include <gmock/gmock.h>

#include <bit>
#include <limits>
#include <numeric>
#include <random>

#include "checkpoint_testing.h"
#include "io/safetensors.h"
#include "mantissa/formats/block_scale.h"

namespace mantissa::test::checkpoint_boxes_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// A tensor of up to three dimensions, stored as boxes that tile it, as any layout of ranks could have written. Elements count from 0.
struct BoxedTensor {
  explicit BoxedTensor(std::mt19937& random) : random_(random) {
    for (size_t rank = 1 + random() % 3; rank > 0; --rank) shape.push_back(1 + static_cast<int64_t>(random() % 6));
    split(whole_box(shape));
    for (const Box& box : boxes) std::ranges::copy(elements(box), std::back_inserter(stored));
  }
  // Reads a box of the whole tensor.
  std::vector<float> elements(const Box& box) const {
    std::vector<float> out = {0};
    for (size_t d = 0; d < shape.size(); ++d) {
      std::vector<float> next;
      for (const float before : out)
        for (int64_t i = 0; i < box.size[d]; ++i)
          next.push_back(before * static_cast<float>(shape[d]) + static_cast<float>(box.start[d] + i));
      out = next;
    }
    return out;
  }
  Box random_box() const {
    Box box;
    for (const int64_t size : shape) {
      box.start.push_back(static_cast<int64_t>(random_() % static_cast<size_t>(size)));
      box.size.push_back(static_cast<int64_t>(random_() % static_cast<size_t>(size - box.start.back() + 1)));
    }
    return box;
  }
  CheckpointContent content(int64_t step) const {
    const Shape global = shape.size() == 1   ? Shape{shape[0]}
                         : shape.size() == 2 ? Shape{shape[0], shape[1]}
                                             : Shape{shape[0], shape[1], shape[2]};
    CheckpointContent out{{.step = step}, {}};
    out.tensors = {{.name = "w", .shape = global, .boxes = boxes, .data = saved_tensor({std::ssize(stored)}, stored)}};
    return out;
  }

  std::vector<int64_t> shape;
  std::vector<Box> boxes;
  std::vector<float> stored;

 private:
  void split(const Box& box) {
    const size_t d = random_() % shape.size();
    if (box.size[d] < 2 || random_() % 16 == 0) return boxes.push_back(box);
    Box first = box, second = box;
    first.size[d] = 1 + static_cast<int64_t>(random_() % static_cast<size_t>(box.size[d] - 1));
    second.start[d] += first.size[d];
    second.size[d] -= first.size[d];
    split(second);
    split(first);
  }
  std::mt19937& random_;
};

TEST_F(CheckpointTest, AnyBoxOfATensorOfAnyBoxesIsRead) {
  std::mt19937 random(5);
  CheckpointDirectory directory = open_directory(folder);
  size_t most = 0;
  for (int64_t step = 1; step <= 20; ++step) {
    const BoxedTensor tensor(random);
    CheckpointReader reader(directory.save(tensor.content(step)).path);
    most = std::max(most, tensor.boxes.size());
    for (int i = 0; i < 40; ++i) {
      const Box box = i == 0 ? whole_box(tensor.shape) : tensor.random_box();
      const std::vector<float> expected = tensor.elements(box);
      std::vector<float> back(expected.size());
      reader.read("w", box, std::as_writable_bytes(std::span(back)));
      ASSERT_EQ(back, expected) << joined(tensor.shape) << ": " << joined(box.start) << " and " << joined(box.size);
    }
  }
  EXPECT_GT(most, 8U);
}

// State of 40 MB: five chunks of each tensor. A reader keeps eight.
TEST_F(CheckpointTest, AChunkIsReadAgainOnlyAfterEightOthers) {
  constexpr int64_t kOfChunk = 1 << 20;  // elements
  const State state(3, 5 * kOfChunk);
  const std::filesystem::path saved = open_directory(folder).save(state.content()).path;
  CheckpointReader whole(saved), reader(saved);
  EXPECT_EQ(whole.manifest().shards[0].hashes.size(), 10u);
  EXPECT_TRUE(state.equals(whole)) << "chunk by chunk";
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

TEST_F(CheckpointTest, BoxesThatDoNotTileAnUnknownTensorAndAWrongSizeAreErrors) {
  CheckpointContent content{{.step = 1}, {}};
  content.tensors = {{.name = "w", .shape = {4}, .boxes = {{{0}, {2}}, {{1}, {2}}}, .data = saved_tensor({4}, std::vector<float>(4))}};
  CheckpointDirectory directory = open_directory(folder);
  EXPECT_EQ(error_code_of([&] { directory.save(content); }), ExitCode::internal);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK")) << "nothing was written";
  CheckpointReader reader(directory.save(State(1).content()).path);
  std::vector<std::byte> out(8);
  EXPECT_EQ(error_code_of([&] { reader.tensor("v"); }), ExitCode::usage);
  EXPECT_EQ(error_code_of([&] { reader.read("w", out); }), ExitCode::internal);
  EXPECT_EQ(error_code_of([&] { reader.read("w", {{99, 9}, {1, 2}}, out); }), ExitCode::internal);
}

// ---- several shards

// The share that process r of 3 saves of w [5, 2], elements 0 to 9, and of v [3], 20 to 22: rows in turn; the second owns nothing of v.
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

// Each shard is a file of safetensors that any tool of the format reads; the manifest lists tensors as the first one has them.
TEST_F(CheckpointTest, ShardsOfSeveralProcessesAreOneCheckpoint) {
  std::vector<std::vector<CheckpointTensor>> shares = {share(0), share(1), share(2)};
  std::swap(shares[2][0], shares[2][1]);
  std::vector<ShardEntry> shards;
  for (size_t i = 0; i < 3; ++i) shards.push_back(describe_shard(shares[i], static_cast<int64_t>(i), 1));
  CheckpointDirectory directory = open_directory(folder);
  const CheckpointDirectory::Save save = directory.begin(assemble_manifest({.step = 1}, shards));
  for (const size_t i : {2U, 0U, 1U}) write_shard(shares[i], shards[i], save.folder);
  const SavedCheckpoint saved = directory.commit(save);
  EXPECT_THAT(names_in(saved.path),
              UnorderedElementsAre("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors"));
  CheckpointReader reader(saved.path);
  std::vector<float> w(10), v(3), of_last(2);
  reader.read("w", std::as_writable_bytes(std::span(w)));
  reader.read("v", std::as_writable_bytes(std::span(v)));
  EXPECT_THAT(w, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(v, ElementsAre(20, 21, 22));
  EXPECT_TRUE(directory.begin(assemble_manifest({.step = 1}, shards)).folder.empty()) << "it is there";
  const SafetensorsFile last(saved.path / "shard-00002.safetensors");
  ASSERT_EQ(last.entries().size(), 2U);
  const SafetensorsEntry* const piece = last.find("v[1:3]");
  ASSERT_NE(piece, nullptr);
  EXPECT_EQ(piece->dtype, FileDtype::f32);
  EXPECT_THAT(piece->shape, ElementsAre(2));
  last.read(*piece, 0, std::as_writable_bytes(std::span(of_last)));
  EXPECT_THAT(of_last, ElementsAre(21, 22));
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

TEST_F(CheckpointTest, ASaveThatIsAbandonedOrLacksAShardLeavesNoCheckpoint) {
  CheckpointDirectory directory = open_directory(folder);
  const Manifest manifest = assemble_manifest({.step = 1}, entries({0, 1, 2}));
  const CheckpointDirectory::Save abandoned = directory.begin(manifest);
  write_shard(share(0), entries({0, 1, 2})[0], abandoned.folder);
  directory.abandon(abandoned);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK"));
  const CheckpointDirectory::Save save = directory.begin(manifest);
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

constexpr int64_t kRows = 300, kColumns = 256;  // more rows than one thread decodes at a time

// A parameter "w" of random codes with random scales, of which every one occurs.
class RandomCodes : public TensorReader {
 public:
  explicit RandomCodes(Quantization how) : form_{.codes = how, .columns = kColumns} {
    std::mt19937 random(3);
    codes_.resize(static_cast<size_t>(kRows * code_bytes(form_)));
    scales_.resize(static_cast<size_t>((kRows + how.block_rows - 1) / how.block_rows * scale_bytes(form_)));
    for (std::vector<std::byte>* const bytes : {&codes_, &scales_})
      for (std::byte& byte : *bytes) byte = static_cast<std::byte>(random() & 0xFF);
  }

  std::string where() const override { return "here"; }
  bool has(const std::string&) const override { return true; }
  WeightForm form(const std::string&) const override { return form_; }
  void read(const std::string&, const Box&, std::span<std::byte>) override { FAIL() << "codes are not read as values"; }
  void read_codes(const std::string&, int64_t begin, int64_t end, std::span<std::byte> codes, std::span<std::byte> scales) override {
    const int64_t height = form_.codes.block_rows, first = begin / height, last = (end + height - 1) / height;
    EXPECT_EQ(begin % height, 0);
    std::copy_n(codes_.begin() + begin * code_bytes(form_), (end - begin) * code_bytes(form_), codes.begin());
    std::copy_n(scales_.begin() + first * scale_bytes(form_), (last - first) * scale_bytes(form_), scales.begin());
  }

  // Returns the bits of an element, by the definition of the format.
  uint32_t element(int64_t row, int64_t column) const {
    const Quantization& how = form_.codes;
    const auto scale =
        std::to_integer<uint8_t>(scales_[static_cast<size_t>(row / how.block_rows * scale_bytes(form_) + column / how.block_cols)]);
    if (how.format == Format::e4m3)
      return decode_in_block<E4M3>(std::to_integer<uint8_t>(codes_[static_cast<size_t>(row * kColumns + column)]), scale, how.rule);
    const auto pair = std::to_integer<unsigned>(codes_[static_cast<size_t>((row * kColumns + column) / 2)]);
    return decode_in_block<E2M1>(static_cast<uint8_t>(column % 2 == 0 ? pair & 0xFU : pair >> 4U), scale, how.rule);
  }

 private:
  WeightForm form_;
  std::vector<std::byte> codes_, scales_;
};

class DecodedCodes : public ::testing::TestWithParam<Quantization> {};

TEST_P(DecodedCodes, AreThoseOfTheFormatInEveryBox) {
  RandomCodes weights(GetParam());
  const Box whole{.start = {0, 0}, .size = {kRows, kColumns}}, part{.start = {100, 0}, .size = {70, kColumns}};
  const Box inside{.start = {129, 37}, .size = {99, 130}}, narrow{.start = {31, 63}, .size = {2, 3}};
  for (const Box& box : {whole, part, inside, narrow}) {
    std::vector<float> values(static_cast<size_t>(box.elements()));
    weights.read_fp32("w", box, values);
    size_t different = 0;
    for (int64_t i = 0; i < box.elements(); ++i)
      different += std::bit_cast<uint32_t>(values[static_cast<size_t>(i)]) !=
                   weights.element(box.start[0] + i / box.size[1], box.start[1] + i % box.size[1]);
    EXPECT_EQ(different, 0U) << "box at " << box.start[0] << ", " << box.start[1];
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, DecodedCodes,
                         ::testing::Values(packed_form(Format::e2m1), packed_form(Format::e4m3),
                                           Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128},
                                           Quantization{.format = Format::e2m1, .block_cols = 32, .rule = ScaleRule::flashinfer}));

}  // namespace mantissa::test::checkpoint_boxes_test
