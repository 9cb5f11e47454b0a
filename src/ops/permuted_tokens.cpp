#include "ops/permuted_tokens.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

Tensor empty_rows(const Tensor& like, int64_t rows) { return empty(like.device(), like.dtype(), like.shape().with_dim0(rows)); }

// Row r is that of assignment assignments[r]; each row of x has per_row of them.
Value permuted(const Value& x, const Tensor& assignments, int64_t per_row) {
  const Shape shape{assignments.dim(0), shape_of(x)[1]};
  const auto moved = [&](const Value& out) {
    assignments.device().run(Permute{.x = x, .out = out, .assignments = assignments, .per_row = per_row});
    return out;
  };
  if (const auto* codes = std::get_if<QuantizedTensor>(&x)) return moved(empty_quantized(assignments.device(), shape, codes->how));
  return moved(empty(assignments.device(), std::get<Tensor>(x).dtype(), shape));
}

Tensor permuted_numbers(const Tensor& numbers, const Tensor& assignments) {
  const Value column = numbers.view({numbers.elements(), 1});
  return std::get<Tensor>(permuted(column, assignments, 1)).view({assignments.dim(0)});
}

Tensor unpermuted(const Tensor& rows, const Tensor& places) {
  const Tensor out = empty_rows(rows, places.dim(0));
  rows.device().run(Unpermute{.x = rows, .rows = places, .out = out});
  return out;
}

int64_t sum(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Moves rows of several tensors between ranks in one exchange.
class RowExchange {
 public:
  RowExchange(const std::vector<int64_t>& sent, const std::vector<int64_t>& arriving) : sent_(sent), arriving_(arriving) {}

  Tensor add(const Tensor& rows) {
    const Tensor out = empty_rows(rows, sum(arriving_));
    tensors_.emplace_back(rows, out);
    return out;
  }
  QuantizedTensor add(const QuantizedTensor& rows) {
    return {.codes = add(rows.codes), .scales = add(rows.scales), .shape = rows.shape.with_dim0(sum(arriving_)), .how = rows.how};
  }
  Value add(const Value& rows) {
    return std::visit([this](const auto& of) { return Value(add(of)); }, rows);
  }

  void run(const Communicator& group) const {
    std::vector<std::vector<int64_t>> counts;
    for (const auto& [in, out] : tensors_) {
      const int64_t bytes = in.shape().with_dim0(1).elements() * dtype_bytes(in.dtype());
      counts.push_back(in_bytes(sent_, bytes));
      counts.push_back(in_bytes(arriving_, bytes));
    }
    std::vector<Communicator::Exchange> parts;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [in, out] = tensors_[i];
      parts.push_back({.in = host_memory(in), .in_counts = counts[2 * i], .out = host_memory(out), .out_counts = counts[2 * i + 1]});
    }
    group.all_to_all(parts, Purpose::activations);
  }

 private:
  static std::vector<int64_t> in_bytes(std::vector<int64_t> rows, int64_t each) {
    for (int64_t& count : rows) count *= each;
    return rows;
  }

  std::vector<int64_t> sent_, arriving_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

// counts[r][x] is the number of rows that rank r has for expert x of this rank. Computes their positions in the groups.
class Groups {
 public:
  Groups(const std::vector<std::vector<int64_t>>& counts, int64_t multiple) {
    const size_t ranks = counts.size(), experts = counts.front().size();
    std::vector<std::vector<int64_t>> first(ranks, std::vector<int64_t>(experts));  // as they arrive
    int64_t arrived = 0;
    for (size_t r = 0; r < ranks; ++r) {
      for (size_t x = 0; x < experts; ++x) first[r][x] = std::exchange(arrived, arrived + counts[r][x]);
    }
    rows_.resize(static_cast<size_t>(arrived));
    for (size_t x = 0; x < experts; ++x) {
      by_expert_.push_back(size());
      for (size_t r = 0; r < ranks; ++r) {
        by_source_.push_back(size());
        for (int64_t i = 0; i < counts[r][x]; ++i) add(first[r][x] + i);
        assignments_.resize(static_cast<size_t>(round_up(int64_t{size()}, multiple)), -1);
      }
    }
    by_expert_.push_back(size());
    by_source_.push_back(size());
    require(assignments_.size() <= INT32_MAX, assignments_.size(), " rows arrived for experts, too many for indices of 32 bits");
  }

  Dispatch on(Backend& device, ExpertGradients gradients) const {
    const auto vector = [&](const std::vector<int32_t>& values) {
      return from_host(device, Dtype::i32, {static_cast<int64_t>(values.size())}, values.data());
    };
    return {.offsets = vector(by_expert_),
            .rows = vector(rows_).view({static_cast<int64_t>(rows_.size()), 1}),
            .assignments = vector(assignments_),
            .gradient_offsets = gradients == ExpertGradients::by_source ? vector(by_source_) : Tensor()};
  }

 private:
  int32_t size() const { return static_cast<int32_t>(assignments_.size()); }
  void add(int64_t arrived) {
    rows_[static_cast<size_t>(arrived)] = size();
    assignments_.push_back(static_cast<int32_t>(arrived));
  }

  std::vector<int32_t> rows_, assignments_, by_expert_, by_source_;
};

}  // namespace

// Counts are data, so they are exchanged first. The host reads them once.
Dispatch dispatch_among(const Communicator& ranks, ExpertGradients gradients, const Tensor& experts, int64_t num_experts, int64_t multiple,
                        int64_t capacity) {
  const Dispatch all = dispatch(experts, num_experts, 1, capacity);
  const std::vector<int32_t> offsets = to_host<int32_t>(all.offsets);
  const auto size = static_cast<size_t>(ranks.size());
  const size_t each = static_cast<size_t>(num_experts) / size;
  std::vector<int64_t> own, theirs(size * each);
  for (size_t e = 0; e + 1 < offsets.size(); ++e) own.push_back(offsets[e + 1] - offsets[e]);
  const std::vector<int64_t> bytes(size, static_cast<int64_t>(each * sizeof(int64_t)));
  ranks.all_to_all(std::as_bytes(std::span(own)), bytes, std::as_writable_bytes(std::span(theirs)), bytes, Purpose::control);
  AllToAllPlan plan{.group = ranks, .rows = all.rows, .assignments = all.assignments.slice(0, offsets.back()), .sent = {}, .arrived = {}};
  std::vector<std::vector<int64_t>> counts;
  for (size_t r = 0; r < size; ++r) {
    const auto share = [&](const std::vector<int64_t>& of) {
      const auto begin = of.begin() + static_cast<int64_t>(r * each);
      return std::vector<int64_t>(begin, begin + static_cast<int64_t>(each));
    };
    counts.push_back(share(theirs));
    plan.sent.push_back(sum(share(own)));
    plan.arrived.push_back(sum(counts.back()));
  }
  Dispatch out = Groups(counts, multiple).on(experts.device(), gradients);
  out.per_row = all.per_row;
  out.all_to_all = std::make_shared<const AllToAllPlan>(std::move(plan));
  return out;
}

PermutedTokens to_experts(const Dispatch& to, const Value& tokens, const Tensor& weights) {
  const auto moved = [&](const Tensor& assignments) {
    return PermutedTokens{.rows = permuted(tokens, assignments, to.per_row),
                          .weights = weights.defined() ? permuted_numbers(weights, assignments) : Tensor()};
  };
  if (!to.all_to_all) return moved(to.assignments);
  const PermutedTokens leaving = moved(to.all_to_all->assignments);
  RowExchange exchange(to.all_to_all->sent, to.all_to_all->arrived);
  const Value rows = exchange.add(leaving.rows);
  const Tensor numbers = weights.defined() ? exchange.add(leaving.weights) : Tensor();
  exchange.run(to.all_to_all->group);
  return {.rows = permuted(rows, to.assignments, 1), .weights = weights.defined() ? permuted_numbers(numbers, to.assignments) : Tensor()};
}

TokenRows to_tokens(const Dispatch& from, const Tensor& rows, const Tensor& weights) {
  if (!from.all_to_all) {
    const Tensor sums = unpermuted(rows, from.rows);
    if (!weights.defined()) return {.sums = sums};
    return {.sums = sums, .weights = permuted_numbers(weights, from.rows.view({from.rows.elements()})).view(from.rows.shape())};
  }
  const Tensor places = from.rows.view({from.rows.elements()});
  RowExchange exchange(from.all_to_all->arrived, from.all_to_all->sent);
  const Tensor home = exchange.add(std::get<Tensor>(permuted(rows, places, 1)));
  const Tensor numbers = weights.defined() ? exchange.add(permuted_numbers(weights, places)) : Tensor();
  exchange.run(from.all_to_all->group);
  const Tensor& own = from.all_to_all->rows;
  const Tensor by_assignment = weights.defined() ? permuted_numbers(numbers, own.view({own.elements()})).view(own.shape()) : Tensor();
  return {.sums = unpermuted(home, own), .weights = by_assignment};
}

}  // namespace mantissa
