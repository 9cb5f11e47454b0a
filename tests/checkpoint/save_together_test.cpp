// Ranks that save one checkpoint together, here threads of one process.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "mantissa/checkpoint/ranks_together.h"
#include "thread_ranks.h"

namespace mantissa::test::save_together_test {

using ::testing::Each;
using ::testing::IsEmpty;

using SaveTogether = CheckpointTest;

// Each rank saves a tensor of its own, of three parts of 4 MiB or less. How often each reported progress.
std::vector<int> progress_of(int ranks, const TemporaryFolder& folder) {
  std::vector<int> reported(static_cast<size_t>(ranks));
  EXPECT_THAT(
      run_ranks(ranks,
                [&](const Communicator& world) {
                  std::optional<CheckpointDirectory> directory;
                  if (world.rank() == 0) directory.emplace(open_directory(folder));
                  CheckpointContent content = State(1).content();
                  const int64_t elements = 2 * kCheckpointChunkBytes / 4 + 1;
                  const std::vector<float> values(static_cast<size_t>(elements));
                  content.tensors = {
                      {.name = text("w", world.rank()), .shape = {elements}, .boxes = {}, .data = saved_tensor({elements}, values)}};
                  int& own = reported[static_cast<size_t>(world.rank())];
                  save_together(world, directory, content, [&own] { ++own; });
                }),
      Each(IsEmpty()));
  return reported;
}

TEST_F(SaveTogether, EachPhaseAndPartOfASaveIsProgress) {
  EXPECT_THAT(progress_of(2, folder), Each(4 + 3 + 3)) << "phases, hashed, written";
  EXPECT_TRUE(std::filesystem::exists(checkpoints() / "step-00000001" / "shard-00001.safetensors"));
}

TEST_F(SaveTogether, ASaveOfOneRankIsOnePhase) { EXPECT_THAT(progress_of(1, folder), Each(1)); }

}  // namespace mantissa::test::save_together_test
