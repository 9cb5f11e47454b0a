#include "train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "mantissa/backend/functions.h"
#include "mantissa/base/rng.h"

namespace mantissa {
namespace {

// Returns how many tokens are read again of a text that the cache cannot hold.
int64_t kept_tokens(int64_t capacity) { return std::max<int64_t>(1, capacity / 2); }

// One text as it grows.
struct Sequence {
  std::vector<int32_t> tokens, pending;  // all; those that the cache does not hold yet
  std::vector<KeyValueCache> cache;
  bool ended = false;

  // Keeps the newest tokens that fit with room to go on, where the pending ones do not fit.
  void make_room(int64_t capacity) {
    if (cache[0].length + std::ssize(pending) <= capacity) return;
    for (KeyValueCache& layer : cache) layer.length = 0;
    pending.assign(tokens.end() - std::min(kept_tokens(capacity), std::ssize(tokens)), tokens.end());
  }
};

// Returns the logits of the next token of each. Those that lack one token are computed together, others one by one: what a prompt has
// alone are then the bits that it has here.
std::vector<std::vector<float>> next_logits(Gpt& model, const std::vector<Sequence*>& sequences) {
  std::vector<std::vector<float>> out(sequences.size());
  std::vector<int32_t> tokens;
  std::vector<std::vector<KeyValueCache>*> caches;
  std::vector<size_t> places;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    if (sequence.pending.size() > 1) {
      out[i] = to_host<float>(model.next_logits(sequence.pending, sequence.cache));
      continue;
    }
    tokens.push_back(sequence.pending[0]);
    caches.push_back(&sequence.cache);
    places.push_back(i);
  }
  if (tokens.empty()) return out;
  const std::vector<float> logits = to_host<float>(model.next_logits(tokens, caches));
  const auto width = std::ssize(logits) / std::ssize(places);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i) * width;
    out[places[i]].assign(row, row + width);
  }
  return out;
}

}  // namespace

void check_generation(const Gpt& model, const std::vector<std::vector<int32_t>>& prompts, const SamplingOptions& options) {
  const int64_t vocab = *model.config().vocab_size;
  require(options.max_new_tokens <= kMostNewTokens, ExitCode::usage, "generation: max_new_tokens must be at most ", kMostNewTokens,
          ", got ", options.max_new_tokens);
  for (const std::vector<int32_t>& prompt : prompts) {
    require(!prompt.empty(), ExitCode::usage, "generation: the prompt is empty; it needs at least one token");
    for (const int32_t id : prompt)
      require(id >= 0 && id < vocab, ExitCode::usage, "generation: token ", id, " of the prompt is outside the vocabulary of ", vocab);
  }
}

std::optional<std::string> context_warning(const std::string& name, std::span<const int32_t> prompt, int64_t positions) {
  if (std::ssize(prompt) <= positions) return std::nullopt;
  return text(name, ": the prompt has ", count_text(prompt.size(), "token"), ", but the model has ", positions,
              " positions: only the last ", kept_tokens(positions), " are read");
}

int32_t pick_token(std::span<const float> logits, const SamplingOptions& options, double uniform) {
  for (size_t i = 0; i < logits.size(); ++i)
    require(!std::isnan(logits[i]), ExitCode::numerical, "generation: logit ", i, " is not a number");
  const bool greedy = options.temperature <= 0.0;
  std::vector<int32_t> ids(logits.size());  // the likeliest first, equals by id
  std::iota(ids.begin(), ids.end(), 0);
  const int64_t top = greedy ? 1 : options.top_k, count = top > 0 ? std::min(top, std::ssize(ids)) : std::ssize(ids);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  if (greedy) return ids[0];
  struct Candidate {
    int32_t id;
    double weight;
  };
  std::vector<Candidate> candidates;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = ids[static_cast<size_t>(i)];
    candidates.push_back({id, static_cast<double>(logits[static_cast<size_t>(id)])});
  }
  const double largest = candidates[0].weight;
  double total = 0.0;
  for (Candidate& candidate : candidates) total += candidate.weight = std::exp((candidate.weight - largest) / options.temperature);
  double reached = 0.0;
  size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || reached < options.top_p * total)) reached += candidates[kept++].weight;
  double left = uniform * reached;
  for (size_t i = 0; i < kept; ++i) {  // the token whose weight, after those before it, reaches beyond `left`
    left -= candidates[i].weight;
    if (left < 0.0) return candidates[i].id;
  }
  return candidates[kept - 1].id;
}

std::vector<std::vector<int32_t>> generate_batch(Gpt& model, const std::vector<std::vector<int32_t>>& prompts,
                                                 const SamplingOptions& options, const std::function<bool(size_t, int32_t)>& on_token) {
  check_generation(model, prompts, options);
  const int64_t capacity = model.config().max_position_embeddings, vocab = *model.config().vocab_size;
  const RngKey key{.seed = options.seed, .stream = RngStream::sample};
  std::vector<Sequence> all;
  for (const std::vector<int32_t>& prompt : prompts)
    all.push_back({.tokens = prompt, .pending = prompt, .cache = model.new_cache(std::ssize(prompt) + options.max_new_tokens)});
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    std::vector<Sequence*> growing;
    for (Sequence& sequence : all)
      if (!sequence.ended) growing.push_back(&sequence), sequence.make_room(capacity);
    if (growing.empty()) break;
    const auto words = random_words(key, options.what, (options.moment << 24) + static_cast<uint64_t>(i));
    const double draw = static_cast<double>((uint64_t{words[0]} << 21) ^ (words[1] >> 11)) * 0x1p-53;  // uniform, of 53 bits
    const std::vector<std::vector<float>> logits = next_logits(model, growing);
    for (size_t j = 0; j < growing.size(); ++j) {
      Sequence& sequence = *growing[j];
      const int32_t id = pick_token({logits[j].data(), static_cast<size_t>(vocab)}, options, draw);
      sequence.tokens.push_back(id);
      sequence.pending.assign(1, id);
      sequence.ended = on_token && !on_token(static_cast<size_t>(&sequence - all.data()), id);
    }
  }
  std::vector<std::vector<int32_t>> out;
  for (size_t i = 0; i < all.size(); ++i) out.emplace_back(all[i].tokens.begin() + std::ssize(prompts[i]), all[i].tokens.end());
  return out;
}

std::vector<int32_t> generate(Gpt& model, const std::vector<int32_t>& prompt, const SamplingOptions& options,
                              const std::function<bool(int32_t)>& on_token) {
  const auto one = [&](size_t, int32_t id) { return !on_token || on_token(id); };
  return generate_batch(model, {prompt}, options, one).front();
}

}  // namespace mantissa
