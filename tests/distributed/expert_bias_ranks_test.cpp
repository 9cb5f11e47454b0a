// Expert biases follow from the choices of all data ranks: their bits are those of one process, at every number of ranks.
#include "training_on_ranks.h"

namespace mantissa::expert_bias_ranks_test {

using test::TrainedRun;

class ExpertBiasOnRanks : public test::TrainingOnRanks {
 protected:
  TrainedRun run_biased(int ranks, const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> sets = {"training.micro_batch_size=1",
                                     "training.grad_accum=null",
                                     "training.global_batch_size=8",
                                     "training.accumulation=tree",
                                     "training.threads=1",
                                     "schedule.type=constant",
                                     "checkpoint.interval=7",
                                     "eval.interval=10",
                                     "model.hidden_size=64",
                                     "model.moe.num_experts=6",
                                     "model.moe.intermediate_size=32",
                                     "model.moe.score=sigmoid",
                                     "model.moe.aux_loss_coef=0",
                                     "model.moe.bias_update_rate=1e-2",
                                     "training.replica_check_interval=5",
                                     "precision.dtype=bf16",
                                     "precision.recipe=mxfp8",
                                     "precision.fp8_param_gather=true"};
    sets.insert(sets.end(), more.begin(), more.end());
    return run_on(ranks, name, sets);
  }
};

TEST_F(ExpertBiasOnRanks, HasTheBitsOfOne) {
  const TrainedRun alone = run_biased(1, "alone");
  const std::vector<float> bias = tensor("alone", 20, "buffer.layers.1.moe.expert_bias");
  EXPECT_NE(bias, std::vector<float>(6, 0.0F));
  for (const auto& [ranks, expert] : {std::pair(2, 1), std::pair(4, 1), std::pair(8, 1), std::pair(2, 2), std::pair(4, 2)}) {
    const std::string name = text("ranks", ranks, "expert", expert);
    expect_same_course(alone, run_biased(ranks, name, {text("parallel.expert=", expert)}));
    expect_same_checkpoints("alone", name, 20);
  }
}

TEST_F(ExpertBiasOnRanks, GoesOnAtAnotherNumberOfRanks) {
  run_biased(1, "alone");
  for (const auto& [before, after] : {std::pair(1, 4), std::pair(4, 2), std::pair(2, 1)}) {
    const std::string name = text("from", before, "to", after);
    run_biased(before, name, {"training.steps=7"});
    run_biased(after, name, {"checkpoint.resume=auto"});
    expect_same_checkpoints("alone", name, 20);
  }
}

}  // namespace mantissa::expert_bias_ranks_test
