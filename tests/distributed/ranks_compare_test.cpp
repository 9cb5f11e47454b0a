// Comparisons of ranks, here threads of one process, at the start of a run and while it goes on.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::ranks_compare_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class RanksCompare : public test::TrainingTest {
 protected:
  static std::vector<std::string> three_ranks(const std::vector<std::string>& more) {
    std::vector<std::string> out = {"training.micro_batch_size=1", "training.grad_accum=1", "training.threads=1", "parallel.data=3"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

// Rank 2 has another folder, like a rank whose host has a folder of its own under this name.
TEST_F(RanksCompare, RefuseAFolderThatNotAllSee) {
  const auto on_ranks = [&](const std::vector<std::string>& more) {
    return test::run_ranks(3, [&](const Communicator& world) {
      std::vector<std::string> sets = three_ranks(more);
      if (world.rank() == 2) sets.push_back("checkpoint.dir=" + (folder_ / "elsewhere"));
      run(config("shared", sets), {}, world);
    });
  };
  const auto refused = AllOf(StartsWith("3: checkpoint.dir: rank 2 does not see in "), HasSubstr("the folder is not shared between hosts"));
  EXPECT_THAT(on_ranks({}), Each(refused));
  EXPECT_THAT(on_ranks({"checkpoint.resume=auto"}), Each(refused));
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("shared") + "/checkpoints")) {
    EXPECT_EQ(entry.path().filename(), "LOCK");
  }
  for (const std::string file : {"config.json", "run.json", "metrics.jsonl"})
    EXPECT_FALSE(std::filesystem::exists(run_folder("shared") + "/" + file)) << file;
}

TEST_F(RanksCompare, LookForAFileThatTheyDeleteWithThoseOfKilledRuns) {
  const std::string folder = folder_ / "of_a_run";
  std::filesystem::create_directory(folder);
  test::write_file(folder + "/.tmp-nonce-1234", "");
  test::write_file(folder + "/run.json", "{}");
  const auto failures = test::run_ranks(
      2, [&](const Communicator& world) { EXPECT_TRUE(is_shared_folder(world, world.rank() == 0, folder, "logging.dir")); });
  EXPECT_THAT(failures, Each(IsEmpty()));
  for (const auto& entry : std::filesystem::directory_iterator(folder)) EXPECT_EQ(entry.path().filename(), "run.json");
}

TEST_F(RanksCompare, NameTheRankWhosePlanOrDataAreOthers) {
  test::write_file(folder_ / "other.txt", test::second_order_text(10000));
  const auto with_odd = [&](int mismatch, const std::string& set) {
    return test::run_ranks(3, [&](const Communicator& world) {
      run(config("odd", three_ranks(world.rank() == mismatch ? std::vector{set} : std::vector<std::string>{})), {}, world);
    });
  };
  const std::string start = "2: the ranks were started with different inputs: ";
  EXPECT_THAT(with_odd(0, "precision.dtype=bf16"), Each(StartsWith(start + "the precision plan of rank 0 is ")));
  EXPECT_THAT(with_odd(2, "data.path=" + (folder_ / "other.txt")), Each(StartsWith(start + "the data of rank 2 is ")));
  EXPECT_FALSE(std::filesystem::exists(run_folder("odd")));
}

TEST_F(RanksCompare, RefuseAnotherBatchThatOnlyTheirNumberMakes) {
  const auto run_on = [&](int ranks, std::vector<std::string> more) {
    more.insert(more.begin(),
                {"training.micro_batch_size=2", "training.threads=1", "checkpoint.interval=10", text("parallel.data=", ranks)});
    const LoadedConfig loaded = config("batch", more);
    return test::run_ranks(ranks, [&](const Communicator& world) { run(loaded, {}, world); });
  };
  ASSERT_THAT(run_on(2, {"training.grad_accum=2", "training.steps=10"}), Each(IsEmpty()));
  const std::vector<std::string> more = {"training.steps=12", "checkpoint.resume=auto"};
  const auto with = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  EXPECT_THAT(run_on(4, with({"training.grad_accum=2"})),
              Each(AllOf(StartsWith("2: "),
                         HasSubstr("was trained with a global batch of 8 on 2 data ranks, but on 4 data ranks it would be 16; set "
                                   "training.global_batch_size to 8 and training.grad_accum to null"))));
  EXPECT_THAT(run_on(4, with({"training.grad_accum=2", "training.global_batch_size=16", "training.steps=11"})), Each(IsEmpty()))
      << "asked for";
  EXPECT_THAT(run_on(4, with({"training.grad_accum=null", "training.global_batch_size=8"})), Each(IsEmpty()));
}

// One that leaves with an error ends the waits of the others: nobody may still be in the collective before.
TEST_F(RanksCompare, RefuseAlikeHoweverSlowOneIs) {
  const std::vector<std::string> four = {"training.micro_batch_size=1", "training.threads=1", "checkpoint.interval=10",
                                         "training.steps=10"};
  const auto errors_of = [&](int slow, const std::vector<std::string>& more) {
    std::vector<std::string> sets = four;
    sets.insert(sets.end(), {"parallel.data=4", "training.grad_accum=2"});
    sets.insert(sets.end(), more.begin(), more.end());
    const LoadedConfig loaded = config("slow", sets);
    return test::run_ranks(4, [&](const Communicator& world) { run(loaded, {}, world); },
                           {.rank = slow, .sleep = std::chrono::milliseconds(10)});
  };
  run("slow", four);
  std::filesystem::create_directory(folder_ / "empty");
  test::write_file(folder_ / "short.txt", "abc");
  const std::string resume = "checkpoint.resume=", init_from = "checkpoint.init_from=", same_batch = "training.global_batch_size=8";
  const std::string other_model = "model.intermediate_size=32", other_run = "logging.run_name=other";
  const std::vector<std::vector<std::string>> refused = {{resume + "auto"},  // a global batch of 2
                                                         {resume + "auto", same_batch, "training.steps=5"},
                                                         {resume + "auto", same_batch, other_model},
                                                         {resume + "auto", same_batch, "data.valid_fraction=0.2"},
                                                         {resume + (folder_ / "empty"), other_run},
                                                         {init_from + (folder_ / "empty"), other_run},
                                                         {init_from + run_folder("slow"), other_model, other_run},
                                                         {"data.path=" + (folder_ / "short.txt")},
                                                         {R"(eval.samples={"prompts":["Z"],"interval":1})", other_run}};
  for (size_t i = 0; i < refused.size(); ++i)
    EXPECT_THAT(errors_of(i % 2 == 0 ? 0 : 3, refused[i]), Each(StartsWith("2: "))) << ::testing::PrintToString(refused[i]);
  test::flip_byte(checkpoint("slow", 10) + "/manifest.json", 100);
  EXPECT_THAT(errors_of(3, {resume + "auto", same_batch}), Each(StartsWith("4: ")));
}

TEST_F(RanksCompare, CompareTheirWeightsAsOftenAsAsked) {
  const auto control_bytes = [&](const std::string& name, int64_t interval) {  // names travel: of one length
    std::atomic<int64_t> bytes{0};
    const LoadedConfig loaded = config(name, three_ranks({text("training.replica_check_interval=", interval)}));
    const auto errors = test::run_ranks(3, [&](const Communicator& world) {
      run(loaded, {}, world);
      if (world.rank() == 0) bytes = world.traffic().control;
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    return bytes.load();
  };
  const int64_t never = control_bytes("never", 0), twice = control_bytes("twice", 10), always = control_bytes("every", 1);
  EXPECT_GT(twice, never);
  EXPECT_EQ(always - never, 10 * (twice - never)) << "of 20 steps";
}

}  // namespace mantissa::ranks_compare_test
