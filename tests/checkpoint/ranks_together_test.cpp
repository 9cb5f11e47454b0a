// Ranks that save one checkpoint together, or look for one and take the same; here threads of one process.
#include <gmock/gmock.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint_testing.h"
#include "comm/mesh.h"
#include "thread_ranks.h"

namespace mantissa::test::ranks_together_test {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using SaveTogether = CheckpointTest;

// Saves a tensor of each rank, of three parts of 4 MiB or less. Returns how often each rank reported progress.
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

// Makes opening and reading fail on rank 1, in a given way, a given number of times.
class FailsOnOne : public RanksTogether {
 public:
  FailsOnOne(const Communicator& world, std::function<void()> failure, int times)
      : RanksTogether(world), rank_(world.rank()), failure_(std::move(failure)), times_(times) {}
  void read(const std::function<void()>& body) const override {
    RanksTogether::read([&] {
      if (rank_ == 1 && times_-- > 0) failure_();
      body();
    });
  }

 private:
  int rank_;
  std::function<void()> failure_;
  mutable int times_;
};

class SearchTogetherTest : public CheckpointTest {
 protected:
  SearchTogetherTest() {
    CheckpointDirectory directory = open_directory(folder);
    for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  }

  // The step that each of three ranks takes, where opening fails on one.
  std::vector<int64_t> taken(const std::function<void()>& failure, int times) const {
    std::vector<int64_t> steps(3, -1);
    const auto errors = run_ranks(3, [&](const Communicator& world) {
      const FailsOnOne together(world, failure, times);
      const auto loaded = load_newest(
          checkpoints(), [&](CheckpointReader& reader) { agree_on_reading(world, [&] { reader.verify(); }); }, together);
      steps[static_cast<size_t>(world.rank())] = loaded ? loaded->step : 0;
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    return steps;
  }
};

TEST_F(SearchTogetherTest, WhatOneCannotOpenAllPassOver) {
  EXPECT_THAT(taken([] {}, 0), Each(2));
  // `latest` names step 2, which is tried in that version and in any.
  EXPECT_THAT(taken([] { throw CheckpointDamage("torn"); }, 1), Each(1)) << "a damaged folder is not tried a second time";
}

TEST_F(SearchTogetherTest, WhatOneFailsToReadAllTryAgain) {
  EXPECT_THAT(taken([] { throw CheckpointUnread("EIO"); }, 1), Each(2));
  EXPECT_THAT(log(), HasSubstr("trying once more"));
  EXPECT_THAT(taken([] { throw CheckpointUnread("EIO"); }, 2), Each(1));
}

TEST_F(SearchTogetherTest, RankZeroChoosesTheCandidates) {
  const auto errors = run_ranks(3, [&](const Communicator& world) {
    const std::vector<CheckpointCandidate> first = {{.path = "a/step-00000002", .step = 2, .hash = "00ff"},
                                                    {.path = "a/latest", .problem = "a/latest: is torn: \n\""}};
    const std::vector<CheckpointCandidate> own = world.rank() == 0 ? first : std::vector<CheckpointCandidate>{{.path = "other"}};
    const std::vector<CheckpointCandidate> chosen = RanksTogether(world).first_of(own);
    ASSERT_EQ(chosen.size(), 2U);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(chosen[i].path, first[i].path);
      EXPECT_EQ(chosen[i].step, first[i].step);
      EXPECT_EQ(chosen[i].hash, first[i].hash);
      EXPECT_EQ(chosen[i].problem, first[i].problem);
    }
    EXPECT_THAT(RanksTogether(world).first_of(world.rank() == 0 ? std::vector<CheckpointCandidate>() : first), IsEmpty());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_F(SearchTogetherTest, AVersionThatOneSeesOtherwiseIsPassedOver) {
  const auto errors = run_ranks(3, [&](const Communicator& world) {
    const RanksTogether together(world);
    together.require_same("manifest", "same");
    try {
      together.require_same("manifest", world.rank() == 2 ? "b" : "a");
      ADD_FAILURE() << "nothing thrown";
    } catch (const CheckpointDamage& damage) {
      EXPECT_STREQ(damage.what(), "rank 2 does not see the same manifest as rank 0");
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(StringsOfRanks, ReachTheFirstAndComeFromIt) {
  const auto errors = run_ranks(4, [](const Communicator& world) {
    const std::string own(static_cast<size_t>(3 * world.rank()), static_cast<char>('a' + world.rank()));
    const std::vector<std::string> expected = {"", "bbb", "cccccc", "ddddddddd"};
    EXPECT_EQ(all_gather_strings(world, own), expected);
    EXPECT_EQ(gather_strings(world, own), world.rank() == 0 ? expected : std::vector<std::string>{own});
    EXPECT_EQ(broadcast_string(world, world.rank() == 0 ? "from 0" : "else"), "from 0");
    EXPECT_EQ(broadcast_string(world, world.rank() == 0 ? "" : "else"), "");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

}  // namespace mantissa::test::ranks_together_test
