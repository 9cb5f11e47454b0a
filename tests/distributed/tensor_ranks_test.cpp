// Runs whose layers are divided among ranks, here threads of one process, start from the weights of a run alone and learn what it learns.
#include <gmock/gmock.h>

#include <cmath>

#include "mantissa/train/precision_setup.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa {
namespace {

using test::TrainedRun;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Layout {
  int data, tensor;
  bool sequence;

  int ranks() const { return data * tensor; }
  std::string name() const { return text("dp", data, "tp", tensor, sequence ? "sp" : ""); }
};

constexpr Layout kLayouts[] = {{1, 2, false}, {1, 2, true}, {1, 4, false}, {1, 4, true}, {2, 2, false}, {2, 2, true}};

struct Case {
  const char* name;
  double loss;    // largest relative difference of the first loss
  double cosine;  // least, of any gradient
  std::vector<std::string> sets;
};

class TensorRanks : public test::TrainingTest, public ::testing::WithParamInterface<Case> {
 protected:
  // 19 tokens a sequence: token shares are ragged.
  std::vector<std::string> sets(const Layout& layout, const std::vector<std::string>& more) const {
    std::vector<std::string> out = {"model.hidden_size=256",
                                    "model.intermediate_size=128",
                                    "model.num_attention_heads=8",
                                    "model.num_key_value_heads=4",
                                    "model.qk_norm=true",
                                    "model.max_position_embeddings=19",
                                    "training.seq_len=19",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=4",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "training.steps=1",
                                    "optimizer.grad_clip=0",
                                    text("parallel.data=", layout.data),
                                    text("parallel.tensor=", layout.tensor),
                                    text("parallel.sequence_parallel=", layout.sequence ? "true" : "false")};
    out.insert(out.end(), GetParam().sets.begin(), GetParam().sets.end());
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  // What rank 0 was told.
  TrainedRun run_on(const Layout& layout, const std::string& name, const std::vector<std::string>& more = {}) const {
    const LoadedConfig loaded = config(name, sets(layout, more));
    if (layout.ranks() == 1) return run(loaded);
    TrainedRun out;
    const auto errors = test::run_ranks(layout.ranks(), [&](const Communicator& world) {
      TrainedRun own = run(loaded, {}, make_mesh(world, layout.tensor));
      if (world.rank() == 0) out = std::move(own);
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << name;
    return out;
  }

  // Norms and biases that are not one and zero.
  std::string trained_weights() const {
    run_on({1, 1, false}, "weights", {"training.steps=8", "optimizer.lr=3e-2"});
    return "checkpoint.init_from=" + checkpoint("weights", 8);
  }

  std::vector<float> tensor(const std::string& name, int64_t step, const std::string& of) const {
    CheckpointReader reader(checkpoint(name, step));
    std::vector<float> out(static_cast<size_t>(whole_box(reader.tensor(of).shape).elements()));
    reader.read(of, std::as_writable_bytes(std::span(out)));
    return out;
  }
  std::vector<std::string> parameters(const std::string& name, int64_t step) const {
    std::vector<std::string> out;
    const CheckpointReader reader(checkpoint(name, step));
    for (const ManifestTensor& tensor : reader.manifest().tensors) {
      if (tensor.name.starts_with("master.")) out.push_back(tensor.name.substr(7));
    }
    return out;
  }
  std::string codes(const std::string& name, int64_t step) const {
    return nlohmann::json::parse(CheckpointReader(checkpoint(name, step)).manifest().plan).at("quantised").dump();
  }
};

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * double{b[i]};
    aa += double{a[i]} * double{a[i]};
    bb += double{b[i]} * double{b[i]};
  }
  return aa == 0.0 && bb == 0.0 ? 1.0 : ab / std::sqrt(aa * bb);
}

TEST_P(TensorRanks, TakeTheFirstStepOfOne) {
  const std::string weights = trained_weights();
  const TrainedRun alone = run_on({1, 1, false}, "alone", {weights});
  for (const Layout& layout : kLayouts) {
    const TrainedRun together = run_on(layout, layout.name(), {weights});
    ASSERT_EQ(together.losses.size(), 1U) << layout.name();
    EXPECT_NEAR(together.losses[0], alone.losses[0], GetParam().loss * alone.losses[0]) << layout.name();
    EXPECT_NEAR(together.norms[0], alone.norms[0], 20 * GetParam().loss * alone.norms[0]) << layout.name();
    for (const std::string& parameter : parameters("alone", 1)) {
      EXPECT_GE(cosine(tensor(layout.name(), 1, "m." + parameter), tensor("alone", 1, "m." + parameter)), GetParam().cosine)
          << layout.name() << ' ' << parameter;
    }
  }
}

// A rate that is 0 in fp32: what is drawn, loaded and saved is the same at every layout.
TEST_P(TensorRanks, StartFromTheSameWeightsAndCodes) {
  const std::vector<std::string> still = {"optimizer.lr=1e-60", "training.steps=3"};
  run_on({1, 1, false}, "alone", still);
  for (const Layout& layout : kLayouts) {
    run_on(layout, layout.name(), still);
    EXPECT_EQ(codes(layout.name(), 3), codes("alone", 3)) << layout.name();
    for (const std::string& parameter : parameters("alone", 3)) {
      EXPECT_EQ(tensor(layout.name(), 3, "master." + parameter), tensor("alone", 3, "master." + parameter))
          << layout.name() << ' ' << parameter;
    }
  }
}

// After some steps the recorded codes are those of the saved masters, and whoever loads them saves the same.
TEST_P(TensorRanks, SaveWhatAnyOtherLayoutLoads) {
  for (const Layout& first : {Layout{1, 2, true}, Layout{2, 2, false}, Layout{1, 4, false}}) {
    const std::string name = "from" + first.name();
    run_on(first, name, {"training.steps=4"});
    CheckpointReader reader(checkpoint(name, 4));
    EXPECT_NO_THROW(verify_codes(reader));
    for (const Layout& second : {Layout{1, 1, false}, Layout{4, 1, false}, Layout{1, 2, false}, Layout{1, 4, true}}) {
      const std::string again = name + "to" + second.name();
      run_on(second, again, {"training.steps=4", "checkpoint.resume=" + checkpoint(name, 4)});
      EXPECT_EQ(codes(again, 4), codes(name, 4)) << again;
      for (const std::string& parameter : parameters(name, 4)) {
        for (const char* prefix : {"master.", "m.", "v."}) {
          EXPECT_EQ(tensor(again, 4, prefix + parameter), tensor(name, 4, prefix + parameter)) << again << ' ' << parameter;
        }
      }
    }
  }
}

// The prompt is one token, and so is every later step: under sequence parallelism all ranks but the last have no row of it.
// In fp32: else the likelier of two near tokens may be the other.
class TensorTexts : public TensorRanks {};

TEST_P(TensorTexts, AreThoseOfOne) {
  const std::vector<std::string> more = {"training.steps=12", "eval.interval=6", "eval.iters=3",
                                         R"(eval.samples={"interval":6,"temperature":0,"max_new_tokens":12,"prompts":["a","abcab"]})"};
  const TrainedRun alone = run_on({1, 1, false}, "alone", more);
  ASSERT_EQ(alone.samples.size(), 4U);
  for (const Layout& layout : kLayouts) {
    const TrainedRun together = run_on(layout, layout.name(), more);
    EXPECT_EQ(together.samples, alone.samples) << layout.name();
    ASSERT_EQ(together.valid_losses.size(), alone.valid_losses.size());
    for (size_t i = 0; i < alone.valid_losses.size(); ++i)
      EXPECT_NEAR(together.valid_losses[i], alone.valid_losses[i], 1e-4) << layout.name();
  }
}

std::vector<Case> cases() {
  const auto recipe = [](const char* name, std::vector<std::string> more = {}) {
    std::vector<std::string> sets = {"precision.dtype=bf16", std::string("precision.recipe=") + name};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  return {{"fp32", 1e-6, 0.99999, {"model.attention_bias=all", "model.mlp_bias=true"}},
          {"gpt2",
           1e-6,
           0.99999,
           {"model.norm=layer", "model.norm_bias=true", "model.position=learned", "model.activation=gelu_tanh", "model.attention_bias=all",
            "model.mlp_bias=true", "model.tie_word_embeddings=true", "training.recompute=full"}},
          {"bf16", 1e-4, 0.999, recipe("high")},
          {"mxfp8", 1e-3, 0.99, recipe("mxfp8")},
          {"mxfp8_gather", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_param_gather=true", "training.recompute=selective"})},
          {"fp8_block", 1e-3, 0.99,
           recipe("fp8_block", {"model.hidden_size=512", "model.intermediate_size=512", "model.num_key_value_heads=8"})},
          {"mxfp4_qat", 1e-3, 0.99, recipe("mxfp4_qat_mxfp8_act")},
          {"mxfp8_output", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_output_proj=true", "model.pad_vocab_to=128"})}};
}

const auto kName = [](const ::testing::TestParamInfo<Case>& c) { return std::string(c.param.name); };
INSTANTIATE_TEST_SUITE_P(, TensorRanks, ::testing::ValuesIn(cases()), kName);
INSTANTIATE_TEST_SUITE_P(, TensorTexts, ::testing::Values(cases()[0], cases()[1]), kName);

// Parts of 16 rows: on one rank they are one run of rows, on two they cannot be hashed.
using FineParts = test::TrainingTest;

TEST_F(FineParts, AreFusedOnOneRankAndRefusedOnTwo) {
  const std::vector<std::string> sets = {
      "precision.dtype=bf16",        "precision.recipe=mxfp4_qat",  "model.hidden_size=128", "model.num_attention_heads=8",
      "model.num_key_value_heads=1", "model.intermediate_size=128", "training.steps=1"};
  run("run", sets);
  CheckpointReader reader(checkpoint("run", 1));
  EXPECT_EQ(verify_codes(reader), 8);
  std::vector<std::string> two = sets;
  two.insert(two.end(), {"parallel.tensor=2", "parallel.data=1", "model.num_key_value_heads=2"});
  const Error error = test::error_of([&] { config("two", two); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("out 32 of part k cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"));
}

using TensorRanksRefused = test::TrainingTest;

TEST_F(TensorRanksRefused, WhereHeadsOrBlocksCannotBeDivided) {
  const auto message = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"parallel.tensor=2", "parallel.data=1"});
    const Error error = test::error_of([&] { config("refused", more); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(message({"model.num_key_value_heads=1"}), HasSubstr("model.num_key_value_heads 1 cannot be divided among 2 ranks"));
  EXPECT_THAT(message({"precision.recipe=mxfp8", "precision.dtype=bf16", "model.hidden_size=64", "model.intermediate_size=96"}),
              HasSubstr("out 96 of part gate cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"));
  EXPECT_THAT(message({"precision.recipe=mxfp8", "precision.dtype=bf16", "precision.fp8_output_proj=true", "model.hidden_size=64",
                       "model.intermediate_size=128", "model.pad_vocab_to=32", "model.vocab_size=20"}),
              HasSubstr("needs a padded vocabulary in multiples of 64, 32 for each rank of parallel.tensor, got 32"));
}

}  // namespace
}  // namespace mantissa
