// Losses of a saved model in other formats, and how far its predictions are from those in high precision.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data/batch.h"
#include "models/gpt.h"

namespace mantissa {

// Means over the targets that count. kl is KL(p || q) in nats, sum p (log p - log q) over the vocabulary, with p of the model in high
// precision and q of the other; equal_greedy is the share of targets before which both find the same token the likeliest.
struct RecipeLoss {
  double loss = 0.0;
  int64_t targets = 0;
  double kl = 0.0, equal_greedy = 1.0;
};

// Returns KL(p || q), and whether the largest of both is the same (the first of several), for logits of one token. Sums are fp64.
struct TokenDifference {
  double kl = 0.0;
  bool equal_greedy = true;
};
TokenDifference token_difference(std::span<const float> p, std::span<const float> q);

// Evaluates a model in high precision and keeps what its output projection reads for every token, [tokens, hidden] in the type of
// computation. Then compares other models with it, one at a time, in parts of logits. Losses have the bits of evaluate().
class RecipeLosses {
 public:
  // The model in high precision and the data must outlive this. `progressed` is called before each micro batch. A part has that many logits
  // at most, but at least 64 rows.
  RecipeLosses(Gpt& high, const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters,
               std::function<void()> progressed, int64_t logits_of_part = int64_t{1} << 24);
  const RecipeLoss& high() const { return loss_; }
  RecipeLoss of(Gpt& model) const;

 private:
  RecipeLoss evaluated(Gpt& model, std::vector<Tensor>* kept) const;

  Gpt& high_;
  const ValidationData& data_;
  int64_t micro_batch_size_;
  std::optional<int64_t> iters_;
  std::function<void()> progressed_;
  int64_t logits_of_part_;
  std::vector<Tensor> hidden_states_;  // by micro batch; undefined: it has no target
  RecipeLoss loss_;
};

// Returns a model under a plan with the weights of another one, which keeps all of its own in high precision, on the device of that one;
// null if the plan computes in fp32 what the other has in bf16 alone.
std::unique_ptr<Gpt> with_plan(Gpt& from, const PrecisionPlan& plan);

}  // namespace mantissa
