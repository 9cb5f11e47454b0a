#include "ops/permuted_tokens.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/ops/rounding_scope.h"

namespace mantissa {
namespace {

Tensor empty_rows(const Tensor& like, int64_t rows) { return empty(like.device(), like.dtype(), like.shape().with_dim0(rows)); }

// Reorders rows: row r is that of assignment assignments[r]; each row of x has per_row of them.
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

std::vector<int64_t> in_bytes(std::vector<int64_t> rows, int64_t each) {
  for (int64_t& count : rows) count *= each;
  return rows;
}

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
      parts.push_back({.in = in, .in_counts = counts[2 * i], .out = out, .out_counts = counts[2 * i + 1]});
    }
    group.all_to_all(parts, Purpose::activations);
  }

 private:
  std::vector<int64_t> sent_, arriving_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

// Counts of rows, [ranks, experts of each].
struct Counts {
  size_t experts;
  std::vector<int64_t> of;

  std::span<const int64_t> rank(size_t r) const { return std::span(of).subspan(r * experts, experts); }
};

std::vector<int64_t> by_rank(const Counts& counts) {
  std::vector<int64_t> out;
  for (size_t r = 0; r < counts.of.size() / counts.experts; ++r) {
    const auto own = counts.rank(r);
    out.push_back(std::accumulate(own.begin(), own.end(), int64_t{0}));
  }
  return out;
}

// Returns the rows of all groups of the arriving rows.
int64_t group_rows(const Counts& arriving, int64_t multiple) {
  int64_t rows = 0;
  for (const int64_t count : arriving.of) rows += round_up(count, multiple);
  return rows;
}

// Returns where the rows of each expert and rank end.
std::vector<int64_t> ends_of(const Counts& arriving, int64_t multiple) {
  std::vector<int64_t> ends = {0};
  for (size_t e = 0; e < arriving.experts; ++e) {
    for (size_t r = 0; r < arriving.of.size() / arriving.experts; ++r)
      ends.push_back(ends.back() + round_up(arriving.rank(r)[e], multiple));
  }
  return ends;
}

// Returns where the rows of each expert end.
std::shared_ptr<const HostGroups> known_groups(const AllToAllPlan& plan, int64_t usual_rows) {
  HostGroups out{.offsets = {}, .usual_rows = usual_rows};
  for (size_t i = 0; i < plan.ends.size(); i += static_cast<size_t>(plan.group.size())) out.offsets.push_back(plan.ends[i]);
  return std::make_shared<const HostGroups>(std::move(out));
}

int64_t indexable_rows(const Counts& arriving, int64_t multiple) {
  const int64_t rows = group_rows(arriving, multiple);
  require(rows <= INT32_MAX, rows, " rows arrived for experts, too many for indices of 32 bits");
  return rows;
}

Dispatch empty_dispatch(Backend& device, int64_t experts, int64_t arrivals, int64_t rows) {
  Dispatch out;
  out.offsets = empty(device, Dtype::i32, {experts + 1});
  out.rows = empty(device, Dtype::i32, {arrivals});
  out.assignments = empty(device, Dtype::i32, {rows});
  return out;
}

// Lays out what arrives on the device.
Dispatch arranged(Backend& device, const Counts& arriving, int64_t arrivals, ExpertGradients gradients, int64_t multiple) {
  const auto experts = static_cast<int64_t>(arriving.experts), ranks = std::ssize(arriving.of) / experts;
  Dispatch out = empty_dispatch(device, experts, arrivals, indexable_rows(arriving, multiple));
  if (gradients == ExpertGradients::by_source) out.gradient_offsets = empty(device, Dtype::i32, {experts * ranks + 1});
  const std::vector<int32_t> counts(arriving.of.begin(), arriving.of.end());
  device.run(ArrivalTable{.counts = from_host(device, Dtype::i32, {ranks, experts}, counts.data()),
                          .offsets = out.offsets,
                          .rows = out.rows,
                          .assignments = out.assignments,
                          .multiple = multiple,
                          .source_offsets = out.gradient_offsets});
  out.rows = out.rows.view({arrivals, 1});
  return out;
}

std::vector<int64_t> numbers_of(const Tensor& assignments, int64_t first) {
  const std::vector<int32_t> from = to_host<int32_t>(assignments);
  std::vector<int64_t> out(from.begin(), from.end());
  for (int64_t& number : out) number += first;
  return out;
}

// Returns, for each row here, the number that its assignment has at home.
std::vector<int64_t> arrived_numbers(const Dispatch& to, const std::vector<int64_t>& leaving) {
  const AllToAllPlan& plan = *to.all_to_all;
  constexpr auto kEach = static_cast<int64_t>(sizeof(int64_t));
  std::vector<int64_t> arriving(static_cast<size_t>(sum(plan.arrived))), out;
  plan.group.all_to_all(std::as_bytes(std::span(leaving)), in_bytes(plan.sent, kEach), std::as_writable_bytes(std::span(arriving)),
                        in_bytes(plan.arrived, kEach), Purpose::control);
  for (const int32_t row : to_host<int32_t>(to.assignments)) out.push_back(row < 0 ? 0 : arriving[static_cast<size_t>(row)]);
  return out;
}

// Numbers padding, which stands behind rows of its group. Transforms make nonzero numbers of its zeros, so it draws by numbers that no
// assignment has: those below zero, as many for the last row of each group as a group may have padding.
void number_padding(const std::vector<int32_t>& rows, std::vector<int64_t>& numbers) {
  constexpr int64_t kMostPadding = 1024;
  for (size_t i = 1; i < numbers.size(); ++i) {
    if (rows[i] < 0) numbers[i] = (rows[i - 1] < 0 ? numbers[i - 1] : -numbers[i - 1] * kMostPadding) - 1;
  }
}

// Returns where the rows of each matrix end, beginning with 0.
std::vector<int64_t> matrix_ends(const Dispatch& of) {
  if (of.all_to_all) return of.all_to_all->ends;
  const std::vector<int32_t> ends = to_host<int32_t>(of.offsets);
  return {ends.begin(), ends.end()};
}

}  // namespace

Dispatch dispatch_here(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity) {
  Backend& device = experts.device();
  Dispatch out{.offsets = empty(device, Dtype::i32, {num_experts + 1}),
               .rows = empty_like(experts),
               .assignments = empty(device, Dtype::i32, {dispatch_rows(experts.elements(), num_experts, multiple)}),
               .per_row = experts.dim(1)};
  device.run(DispatchTable{.experts = experts,
                           .offsets = out.offsets,
                           .rows = out.rows,
                           .assignments = out.assignments,
                           .multiple = multiple,
                           .capacity = capacity});
  return out;
}

// Exchanges counts first, because they are data. The host reads them once.
Dispatch dispatch_among(const Communicator& ranks, ExpertGradients gradients, const Tensor& experts, int64_t num_experts, int64_t multiple,
                        int64_t capacity) {
  const Dispatch all = dispatch_here(experts, num_experts, 1, capacity);
  const std::vector<int32_t> offsets = to_host<int32_t>(all.offsets);
  const auto size = static_cast<size_t>(ranks.size());
  Counts leaving{.experts = static_cast<size_t>(num_experts) / size, .of = {}}, arriving{.experts = leaving.experts, .of = {}};
  for (size_t e = 0; e + 1 < offsets.size(); ++e) leaving.of.push_back(offsets[e + 1] - offsets[e]);
  arriving.of.resize(leaving.of.size());
  const std::vector<int64_t> bytes(size, static_cast<int64_t>(leaving.experts * sizeof(int64_t)));
  ranks.all_to_all(std::as_bytes(std::span(leaving.of)), bytes, std::as_writable_bytes(std::span(arriving.of)), bytes, Purpose::control);
  AllToAllPlan plan{.group = ranks,
                    .rows = all.rows,
                    .assignments = all.assignments.slice(0, offsets.back()),
                    .sent = by_rank(leaving),
                    .arrived = by_rank(arriving),
                    .ends = ends_of(arriving, multiple)};
  Dispatch out = arranged(experts.device(), arriving, sum(plan.arrived), gradients, multiple);
  out.per_row = all.per_row;
  // With gradients by source, any number of ranks gives the bits of one, which knows no groups. Usual rows assume as many tokens on all
  // ranks as here.
  if (gradients == ExpertGradients::summed) out.host = known_groups(plan, ceil_div(experts.elements() * ranks.size(), num_experts));
  out.all_to_all = std::make_shared<const AllToAllPlan>(std::move(plan));
  return out;
}

void number_rows(Dispatch& to, Rounding rounding) {
  NumberedRows out;
  out.ends = matrix_ends(to);
  if (rounding == Rounding::stochastic) {
    const RoundingPosition* const at = rounding_position();
    std::vector<int64_t> own = numbers_of(to.all_to_all ? to.all_to_all->assignments : to.assignments, at ? at->token * to.per_row : 0);
    out.assignments = to.all_to_all ? arrived_numbers(to, own) : std::move(own);
    number_padding(to_host<int32_t>(to.assignments), out.assignments);
  }
  to.numbered = std::make_shared<const NumberedRows>(std::move(out));
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
