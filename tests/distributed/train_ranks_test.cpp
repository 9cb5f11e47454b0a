// A run on several ranks, here threads of one process, resumes on another number, stops as one and is of the size that
// its configuration asks for.
#include "checkpoint_shards.h"
#include "checkpoint_testing.h"
#include "data/token_writer.h"
#include "mantissa/train/load_config.h"
#include "metrics/run_metrics.h"
#include "training_on_ranks.h"

namespace mantissa::train_ranks_test {

using test::TrainedRun;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Case {
  const char* name;
  std::pair<int, int> here, there;  // numbers of ranks, before and after a stop
  std::vector<std::string> sets;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class TrainRanks : public test::TrainingOnRanks, public ::testing::WithParamInterface<Case> {
 protected:
  TrainedRun run_case(int ranks, const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> out = {"training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=8",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "checkpoint.interval=6",
                                    "eval.interval=10",
                                    "training.steps=12"};
    out.insert(out.end(), GetParam().sets.begin(), GetParam().sets.end());
    out.insert(out.end(), more.begin(), more.end());
    return run_on(ranks, name, out);
  }
};

TEST_P(TrainRanks, ResumeOnAnyOtherNumber) {
  run_case(1, "alone");
  for (const auto& [first, second] : {GetParam().here, GetParam().there}) {
    const std::string name = text("from", first, "to", second);
    run_case(first, name);
    std::filesystem::remove_all(checkpoint(name, 12));
    run_case(second, name, {"checkpoint.resume=auto"});
    expect_same_checkpoints("alone", name, 12);
  }
}

INSTANTIATE_TEST_SUITE_P(, TrainRanks,
                         ::testing::Values(Case{"fp32", {4, 2}, {8, 1}, {}},
                                           Case{"masked_targets", {2, 8}, {1, 4}, {"data.eod_id=3", "data.mask_eod_loss=true"}},
                                           Case{"mxfp8_gather_tied",
                                                {8, 1},
                                                {2, 8},
                                                {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
                                                 "model.tie_word_embeddings=true", "model.intermediate_size=64"}},
                                           Case{"qat_recompute",
                                                {1, 4},
                                                {4, 2},
                                                {"precision.dtype=bf16", "precision.recipe=mxfp4_qat_mxfp8_act", "training.recompute=full",
                                                 "model.intermediate_size=64"}}),
                         [](const auto& c) { return std::string(c.param.name); });

class RanksTogether : public test::TrainingTest {
 protected:
  // A run of two data ranks with so many micro batches; errors() returns what body throws on each of them.
  LoadedConfig two_ranks(const std::string& name, int micro_batches, std::vector<std::string> more) const {
    more.insert(more.begin(), {"parallel.data=2", text("training.micro_batch_size=", micro_batches),
                               text("training.grad_accum=", micro_batches), "training.global_batch_size=null", "training.threads=1"});
    return config(name, more);
  }
  static std::vector<std::string> errors(const std::function<void(const Communicator&)>& body) { return test::run_ranks(2, body); }
};

TEST_F(RanksTogether, MeasureThePrecisionOfTheWholeBatchAndOfEveryPart) {
  const auto precision = [&](int ranks) {
    const std::string name = text("ranks", ranks);
    const LoadedConfig loaded =
        config(name, {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.report_interval=2", "training.steps=2",
                      "training.micro_batch_size=1", "training.grad_accum=null", "training.global_batch_size=8",
                      "training.accumulation=tree", "training.threads=1", "model.intermediate_size=64", text("parallel.data=", ranks)});
    if (ranks == 1) {
      run(loaded);
    } else {
      EXPECT_THAT(test::run_ranks(ranks, [&](const Communicator& world) { run(loaded, {}, world); }), Each(IsEmpty()));
    }
    return read_run_metrics(run_folder(name)).precision;
  };
  const std::vector<PrecisionEvent> alone = precision(1), together = precision(4);
  ASSERT_EQ(alone.size(), 24U) << "three roles of eight linears";
  ASSERT_EQ(together.size(), alone.size());
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(together[i].module, alone[i].module);
    EXPECT_EQ(together[i].role, alone[i].role);
    EXPECT_NEAR(*together[i].sqnr_db, *alone[i].sqnr_db, 1e-9) << alone[i].module;
    EXPECT_EQ(together[i].amax, alone[i].amax);
    EXPECT_EQ(together[i].scales, alone[i].scales);
    EXPECT_NEAR(together[i].flushed, alone[i].flushed, 1e-12);
  }
}

TEST_F(RanksTogether, TellWhatTheyGoOnWith) {
  const LoadedConfig loaded = two_ranks("run", 1, {"training.steps=2"});
  const auto found = errors([&](const Communicator& world) {
    std::vector<std::string> reported;
    TrainEvents events;
    events.set_phase = [&reported](int64_t step, const char* section) { reported.push_back(text(step, " ", section)); };
    train(loaded, {"test"}, events, world);
    EXPECT_THAT(reported, ::testing::IsSupersetOf({"0 start", "0 start", "0 step", "1 step", "2 save"})) << "data are read in parts";
    EXPECT_GT(std::ranges::count(reported, "2 save"), 4 + 2 * 8) << "each phase, and each tensor twice";
    EXPECT_EQ(reported.front(), "0 start");
    EXPECT_EQ(reported.back(), "2 save");
  });
  EXPECT_THAT(found, Each(IsEmpty()));
}

// A signal comes once, to any rank and at any time.
TEST_F(RanksTogether, StopAtTheSameStepWhereverOneOfThemIsAsked) {
  const LoadedConfig loaded = two_ranks("asked", 2,
                                        {"eval.interval=3", "eval.iters=4", "checkpoint.resume=auto",
                                         "eval.samples={\"interval\":4,\"max_new_tokens\":5,\"prompts\":[\"ab\"]}"});
  for (const auto& [asked_in, end] : {std::pair("0 start", "0 75"), {"3 evaluation", "3 75"}, {"4 samples", "4 75"}, {"5 step", "6 75"}}) {
    std::vector<std::string> ends(2);
    const auto found = errors([&](const Communicator& world) {
      std::string section;
      bool asked = false;
      TrainEvents events;
      events.set_phase = [&](int64_t step, const char* name) { section = text(step, ' ', name); };
      events.request = [&] {
        if (asked || world.rank() == 0 || section != asked_in) return Request::none;
        asked = true;
        return Request::save_and_stop;
      };
      const TrainSummary summary = train(loaded, {"test"}, events, world);
      ends[static_cast<size_t>(world.rank())] = text(summary.steps, ' ', static_cast<int>(summary.exit));
    });
    EXPECT_THAT(found, Each(IsEmpty()));
    EXPECT_THAT(ends, Each(end)) << asked_in;
  }
}

// The bias corrections of Adam go on from there.
TEST_F(RanksTogether, GoOnWithTheNumberOfUpdatesNotOfSteps) {
  const auto on_ranks = [&](const std::string& name, const std::string& more) {
    const LoadedConfig loaded = two_ranks(
        name, 2,
        {"training.steps=4", "training.nonfinite_limit=9", "optimizer.lr=1e38", "schedule.type=constant", "schedule.warmup_steps=0", more});
    EXPECT_THAT(errors([&](const Communicator& world) { run(loaded, {}, world); }), Each(IsEmpty()));
    return nlohmann::json::parse(CheckpointReader(checkpoint(name, 4)).manifest().state);
  };
  const nlohmann::json saved = on_ranks("saved", "checkpoint.resume=never");
  EXPECT_GT(saved.at("skipped_steps"), 0);
  EXPECT_EQ(saved.at("updates").get<int64_t>() + saved.at("skipped_steps").get<int64_t>(), 4);
  EXPECT_EQ(on_ranks("again", "checkpoint.resume=" + checkpoint("saved", 4)), saved);
}

// A chunk that only one rank reads, after all weights.
TEST_F(RanksTogether, PassOverACheckpointWhereTheMomentsOfOneAreDamaged) {
  const auto on_ranks = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), {"training.steps=2", "checkpoint.interval=1", "model.vocab_size=132000", "model.num_layers=1",
                             "model.tie_word_embeddings=true", "eval.iters=1"});
    const LoadedConfig loaded = two_ranks("large", 1, sets);
    return errors([&](const Communicator& world) { run(loaded, {}, world); });
  };
  ASSERT_THAT(on_ranks({}), Each(IsEmpty()));
  const std::string newest = checkpoint("large", 2);
  const std::vector<Piece> pieces = CheckpointReader(newest).tensor("v.embed.weight").pieces;
  const auto piece = std::ranges::find(pieces, 1, &Piece::shard);
  ASSERT_NE(piece, pieces.end());
  const int64_t bytes = piece->box.elements() * 4;
  ASSERT_GE(bytes, 8 << 20) << "so that the chunk in its middle has nothing else";
  const std::string shard = newest + "/shard-00001.safetensors";
  test::flip_byte(shard, test::header_bytes(shard) + piece->offset + bytes / 2);
  EXPECT_THAT(on_ranks({"checkpoint.resume=" + newest, "logging.run_name=other"}), Each(::testing::StartsWith("4: ")));
  EXPECT_THAT(on_ranks({"checkpoint.resume=auto"}), Each(IsEmpty()));
  EXPECT_NO_THROW(CheckpointReader(newest).verify()) << "made again from the one before";
}

// The sixth window of 16 tokens, which the second rank reads.
TEST_F(RanksTogether, EndAlikeWhereTheDataOfOneIsDamaged) {
  const auto shard = [&](const std::string& name, int32_t late_id) {
    LlmcWriter writer(folder_ / name, {.vocab_size = 1000});
    std::vector<int32_t> ids(200, 'a');
    ids[85] = late_id;
    writer.add_document(ids);
    writer.finish();
    return R"([{"path": ")" + folder_ / name + R"("}])";
  };
  const LoadedConfig loaded = two_ranks("run", 1,
                                        {"data.path=null", "data.tokenizer=byte", "data.train=" + shard("good.bin", 'b'),
                                         "data.valid=" + shard("bad.bin", 300), "training.steps=2", "eval.iters=null"});
  for (const std::string& error : errors([&](const Communicator& world) { run(loaded, {}, world); }))
    EXPECT_THAT(error, ::testing::AllOf(::testing::StartsWith("4: "), HasSubstr("bad.bin")));
  EXPECT_TRUE(std::filesystem::exists(checkpoint("run", 2))) << "the steps that were done are not lost";
}

TEST_F(RanksTogether, RefuseAJobOfAnotherSizeThanTheConfigAsksFor) {
  const nlohmann::json json = {{"parallel", {{"data", 4}}}};
  const Error error = test::error_of(
      [&] { load_run_config({.file = "run.json", .text = json.dump(), .set_files = {}, .sets = {}}, Inputs::unchecked, 1); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("parallel.data: data 4 * tensor 1 needs 4 ranks, but this is one process alone: start it with "
                                      "mantissa launch --nproc-per-node 4"));
}

}  // namespace mantissa::train_ranks_test
