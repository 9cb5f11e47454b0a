// Continues a sequence of tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/gpt.h"

namespace mantissa {

inline constexpr int64_t kMostNewTokens = int64_t{1} << 24;  // so many draws each moment has

struct SamplingOptions {
  int64_t max_new_tokens = 64;
  double temperature = 0.8;  // 0: the likeliest token, the lowest id among equals
  int64_t top_k = 50;        // 0: all
  double top_p = 1.0;
  uint64_t seed = 0;
  uint32_t what = 0;    // number of the text: draws of different texts are independent
  uint64_t moment = 0;  // when: the step of the run
};

// Picks a token from logits [n]: of the top_k likeliest the fewest that reach top_p, in proportion to exp(logit / temperature). `uniform`
// in [0, 1) decides. Throws Error(numerical) if a logit is NaN.
int32_t pick_token(std::span<const float> logits, const SamplingOptions& options, double uniform);

// Throws Error(usage) for what cannot be generated: an empty prompt, a token outside the vocabulary, max_new_tokens above kMostNewTokens.
void check_generation(const Gpt& model, const std::vector<std::vector<int32_t>>& prompts, const SamplingOptions& options);

// Returns a warning, which begins with `name`, that a prompt is longer than the model has positions, so that only its end is read; none if
// it is not.
std::optional<std::string> context_warning(const std::string& name, std::span<const int32_t> prompt, int64_t positions);

// Returns the new tokens. Each is passed to on_token as it is found, and false from it ends the generation. When the cache is full, its
// last half is read again and the rest forgotten. Draw i is number (moment << 24) + i of stream `sample`. Throws what check_generation()
// does.
std::vector<int32_t> generate(Gpt& model, const std::vector<int32_t>& prompt, const SamplingOptions& options,
                              const std::function<bool(int32_t)>& on_token = {});

// Continues several prompts, of any lengths, at once. Each gets the tokens that it gets alone, from the same draws. on_token is given the
// number of the prompt, too, and its false ends that one only.
std::vector<std::vector<int32_t>> generate_batch(Gpt& model, const std::vector<std::vector<int32_t>>& prompts,
                                                 const SamplingOptions& options, const std::function<bool(size_t, int32_t)>& on_token = {});

}  // namespace mantissa
