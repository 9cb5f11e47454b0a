// Computes the loss on validation data, and the probability of each token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/batch.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/metrics/events.h"
#include "models/gpt.h"

namespace mantissa {

// Returns how many windows of a set `iters` micro batches have; all without `iters`.
int64_t windows_to_read(const ValidationData& data, int set, int64_t micro_batch_size, std::optional<int64_t> iters);

// Throws Error(usage) if evaluate() would find no target that counts.
void require_targets(const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters);

// Returns how many windows evaluate() reads, of all sets.
int64_t evaluated_windows(const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters);

// Evaluates the first iters * micro_batch_size windows of each set, or all of them; always the same ones. Throws Error(usage) if no target
// counts. `stop` is asked before each round of micro batches, one for each of `ranks`; true, which all ranks must answer alike, ends the
// evaluation. The result is the same for any number of ranks. With a teacher it has the divergence, too: KL(teacher || model) without a
// temperature; the loss keeps its bits.
Evaluation evaluate(Gpt& model, const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters,
                    const std::function<bool()>& stop = {}, const Communicator& ranks = {}, Gpt* teacher = nullptr);

// Returns the batch of one sequence of at least two tokens: all but the last, each with the next one as its target.
Batch batch_of(const std::vector<int32_t>& sequence);

// Returns the natural logarithm of the probability that the model gives to each target, [B * T] in the order of the batch; 0 where there is
// no target. Throws Error(numerical), naming sequence and position, for one that is not finite, and what to_device() throws.
std::vector<float> target_logprobs(Gpt& model, const Batch& batch);

}  // namespace mantissa
