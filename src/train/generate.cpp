#include "mantissa/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "mantissa/backend/functions.h"
#include "mantissa/base/rng.h"

namespace mantissa {
namespace {

struct Candidate {
  int32_t id;
  double weight;
};

// Orders the likeliest first, equals by id.
std::vector<Candidate> likeliest(std::span<const float> logits, int64_t top_k) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t kept = top_k > 0 ? std::min(top_k, count) : count;
  std::partial_sort(ids.begin(), ids.begin() + kept, ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::vector<Candidate> candidates(static_cast<size_t>(kept));
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i] = {ids[i], static_cast<double>(logits[static_cast<size_t>(ids[i])])};
  return candidates;
}

// 53 bits.
double uniform(RngKey key, uint32_t what, uint64_t index) {
  const auto words = random_words(key, what, index);
  return static_cast<double>((uint64_t{words[0]} << 21) ^ (words[1] >> 11)) * 0x1p-53;
}

// Keeps the newest tokens that fit with room to go on.
void restart(std::vector<KeyValueCache>& cache, std::vector<int32_t>& pending, const std::vector<int32_t>& sequence, int64_t capacity) {
  for (KeyValueCache& layer : cache) layer.length = 0;
  const int64_t kept = std::min(std::max<int64_t>(1, capacity / 2), static_cast<int64_t>(sequence.size()));
  pending.assign(sequence.end() - kept, sequence.end());
}

}  // namespace

int32_t pick_token(std::span<const float> logits, const SamplingOptions& options, double uniform) {
  for (size_t i = 0; i < logits.size(); ++i)
    require(!std::isnan(logits[i]), ExitCode::numerical, "generation: logit ", i, " is not a number");
  const bool greedy = options.temperature <= 0.0;
  std::vector<Candidate> candidates = likeliest(logits, greedy ? 1 : options.top_k);
  if (greedy) return candidates[0].id;
  const double largest = candidates[0].weight;
  double total = 0.0;
  for (Candidate& candidate : candidates) total += candidate.weight = std::exp((candidate.weight - largest) / options.temperature);
  double reached = 0.0;
  size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || reached < options.top_p * total)) reached += candidates[kept++].weight;
  double left = uniform * reached;
  for (size_t i = 0; i < kept; ++i) {
    left -= candidates[i].weight;
    if (left < 0.0) return candidates[i].id;
  }
  return candidates[kept - 1].id;
}

std::vector<int32_t> generate(Gpt& model, const std::vector<int32_t>& prompt, const SamplingOptions& options,
                              const std::function<bool(int32_t)>& on_token) {
  require(!prompt.empty(), ExitCode::usage, "generation: the prompt is empty; it needs at least one token");
  require(options.max_new_tokens <= kMostNewTokens, ExitCode::usage, "generation: at most ", kMostNewTokens, " new tokens, got ",
          options.max_new_tokens);
  const int64_t capacity = model.config().max_position_embeddings, vocab = *model.config().vocab_size;
  for (const int32_t id : prompt) {
    require(id >= 0 && id < vocab, ExitCode::usage, "generation: token ", id, " of the prompt is outside the vocabulary of ", vocab);
  }
  const RngKey key{.seed = options.seed, .stream = RngStream::sample};
  std::vector<KeyValueCache> cache = model.new_cache(static_cast<int64_t>(prompt.size()) + options.max_new_tokens);
  std::vector<int32_t> sequence = prompt, pending = prompt;
  if (static_cast<int64_t>(pending.size()) > capacity) restart(cache, pending, sequence, capacity);
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    if (cache[0].length + static_cast<int64_t>(pending.size()) > capacity) restart(cache, pending, sequence, capacity);
    const std::vector<float> logits = to_host<float>(model.next_logits(pending, cache));
    const double draw = uniform(key, options.what, (options.moment << 24) + static_cast<uint64_t>(i));
    const int32_t id = pick_token({logits.data(), static_cast<size_t>(vocab)}, options, draw);
    sequence.push_back(id);
    pending.assign(1, id);
    if (on_token && !on_token(id)) break;
  }
  return {sequence.begin() + static_cast<int64_t>(prompt.size()), sequence.end()};
}

}  // namespace mantissa
