// The loss on validation data.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/data/batch.h"
#include "mantissa/models/gpt.h"

namespace mantissa {

struct SetLoss {
  std::string name;
  double loss = 0.0;  // mean over its targets, in nats
  int64_t targets = 0;

  void fields(auto& v) {
    v("name", name);
    v("loss", loss);
    v("targets", targets);
  }
};

struct Evaluation {
  double loss = 0.0;  // mean over the targets of all sets
  int64_t targets = 0;
  std::vector<SetLoss> sets = {};
  bool stopped = false;  // by the caller, before the end: nothing else is set
};

// Throws Error(usage) if evaluate() would find no target that counts.
void require_targets(const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters);

// The first iters * micro_batch_size windows of each set, or all of them; always the same ones. Throws Error(usage) if no target counts.
// `stop` is asked before each round of micro batches, one for each of `ranks`; true, which all ranks must answer alike, ends the
// evaluation. The result is the same for any number of ranks.
Evaluation evaluate(Gpt& model, const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters,
                    const std::function<bool()>& stop = {}, const Communicator& ranks = {});

}  // namespace mantissa
