// The saves of a run need so much of its disk.
#include <gtest/gtest.h>

#include "exports_of_runs.h"
#include "train/run.h"

namespace mantissa::save_room_test {

struct Course {
  const char* what;
  int64_t steps, interval, latest, every, step, kept;
  int64_t most;
};

TEST(SaveRoom, IsThatOfTheCheckpointsWhichLieSideBySide) {
  const Course courses[] = {{"one at the end", 30, 0, 3, 0, 0, 0, 1},
                            {"as many as there are", 30, 15, 3, 0, 0, 0, 2},
                            {"the last one is not at an interval", 31, 15, 3, 0, 0, 0, 3},
                            {"a new one before the oldest goes", 30, 5, 3, 0, 0, 0, 4},
                            {"the newest two", 30, 5, 2, 0, 0, 0, 3},
                            {"those at 10, 20 and 30 stay", 30, 5, 2, 10, 0, 0, 6},
                            {"no more than there are", 30, 5, 2, 5, 0, 0, 6},
                            {"those at 15 and 30 stay", 30, 5, 2, 3, 0, 0, 5},
                            {"none is a multiple", 30, 5, 2, 1'000'000'000'000, 0, 0, 3},
                            {"the last one alone is a multiple", 32, 5, 2, 16, 0, 0, 4},
                            {"the last one alone of a run that saves at its end", 32, 0, 2, 16, 0, 0, 1},
                            {"two of three are there", 30, 5, 3, 0, 10, 2, 2},
                            {"all three are there", 30, 5, 3, 0, 15, 3, 1},
                            {"more are there than are kept", 30, 5, 3, 0, 25, 9, 1},
                            {"nothing is left to be done", 30, 5, 3, 0, 30, 3, 0}};
  for (const Course& course : courses) {
    RunConfig config;
    config.training.steps = course.steps;
    config.checkpoint.interval = course.interval;
    config.checkpoint.keep_latest = course.latest;
    config.checkpoint.keep_every = course.every;
    EXPECT_EQ(most_new_checkpoints(config, course.step, course.kept), course.most) << course.what;
  }
}

class SavedSize : public test::ExportsOfRuns {};

TEST_F(SavedSize, IsKnownBeforeTheSave) {
  const std::string tokenizer = "data.tokenizer=char";
  for (const auto& [name, more] :
       {std::pair("dense", std::vector{tokenizer, std::string("model.attention_bias=all")}),
        {"experts", {tokenizer, R"(model.moe={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
                                      "score": "sigmoid", "bias_update_rate": 1e-3})"}},
        {"frozen", {tokenizer, R"(optimizer.rules=[{"match": "layers.0.*", "lr_factor": 0}])"}},
        {"muon", {tokenizer, "optimizer.type=muon", "optimizer.moments=bf16"}}}) {
    run_on(test::kAlone, name, more);
    const CheckpointReader reader(checkpoint(name, 2));
    const PrecisionPlan plan = resolve_plan(reader.config());
    EXPECT_EQ(checkpoint_bytes(reader.config(), plan, {}), reader.bytes()) << name;
    EXPECT_EQ(checkpoint_bytes(reader.config(), plan, {{.name = "tokenizer.json", .bytes = "12345"}}), reader.bytes() + 5);
  }
  run_on(test::kAlone, "exported", {"checkpoint.export={}"});
  const RunConfig saved = CheckpointReader(checkpoint("exported", 2)).config();
  const int64_t bytes = export_bytes(saved.model, resolve_plan(saved), {});
  const auto on_disk = static_cast<int64_t>(std::filesystem::file_size(exported("exported", 2) + "/model.safetensors"));
  EXPECT_LT(bytes, on_disk);
  EXPECT_GT(bytes, on_disk - 10'000) << "without the header";
}

}  // namespace mantissa::save_room_test
