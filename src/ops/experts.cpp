#include "ops/experts.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "mantissa/base/integers.h"
#include "ops/linear.h"

namespace mantissa {

Routing route(const Var& logits, const RoutingOptions& options, const Tensor& bias) {
  const Tensor& x = logits.value();
  Backend& device = x.device();
  const int64_t tokens = x.dim(0), assignments = options.rule.top_k;
  Routing out{.weights = {},
              .experts = empty(device, Dtype::i32, {tokens, assignments}),
              .scores = empty_like(x),
              .counts = empty(device, Dtype::i32, {options.sequences, x.dim(1)})};
  const Tensor weights = empty(device, x.dtype(), {tokens, assignments});
  device.run(RouteForward{.logits = x,
                          .experts = out.experts,
                          .weights = weights,
                          .scores = out.scores,
                          .counts = out.counts,
                          .rule = options.rule,
                          .bias = bias});
  out.weights =
      record("route", weights, {logits}, [x, options, experts = out.experts, scores = out.scores, counts = out.counts](const Tensor& dy) {
        const Tensor dx = empty_like(x);
        dy.device().run(RouteBackward{.logits = x,
                                      .scores = scores,
                                      .experts = experts,
                                      .counts = counts,
                                      .dweights = dy,
                                      .dlogits = dx,
                                      .rule = options.rule,
                                      .balance = options.balance,
                                      .sequence_balance = options.sequence_balance,
                                      .z = options.z});
        return std::vector<Tensor>{dx};
      });
  return out;
}

namespace {

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
  const Tensor out = empty(rows.device(), rows.dtype(), rows.shape().with_dim0(places.dim(0)));
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
    const Tensor out = empty(rows.device(), rows.dtype(), rows.shape().with_dim0(sum(arriving_)));
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
    std::deque<std::vector<int64_t>> counts;  // which the parts point to
    std::vector<Communicator::Exchange> parts;
    for (const auto& [in, out] : tensors_) {
      const int64_t bytes = in.shape().with_dim0(1).elements() * dtype_bytes(in.dtype());
      const auto &leaving = counts.emplace_back(in_bytes(sent_, bytes)), &arriving = counts.emplace_back(in_bytes(arriving_, bytes));
      parts.push_back({.in = in, .in_counts = leaving, .out = out, .out_counts = arriving});
    }
    group.all_to_all(parts, Purpose::activations);
  }

 private:
  std::vector<int64_t> sent_, arriving_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

// Plans the dispatch of these assignments to experts of this rank, of which the host knows nothing.
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

// Plans it among ranks. Exchanges counts first, because they are data. The host reads them once.
Dispatch dispatch_among(const Communicator& ranks, ExpertGradients gradients, const Tensor& experts, int64_t num_experts, int64_t multiple,
                        int64_t capacity) {
  Backend& device = experts.device();
  const Dispatch all = dispatch_here(experts, num_experts, 1, capacity);
  const std::vector<int32_t> offsets = to_host<int32_t>(all.offsets);
  const int64_t own_experts = num_experts / ranks.size();
  const auto size = static_cast<size_t>(ranks.size()), each = static_cast<size_t>(own_experts);
  std::vector<int64_t> leaving, arriving(offsets.size() - 1);  // counts of rows, [ranks, experts of each]
  for (size_t e = 0; e + 1 < offsets.size(); ++e) leaving.push_back(offsets[e + 1] - offsets[e]);
  const std::vector<int64_t> bytes(size, own_experts * static_cast<int64_t>(sizeof(int64_t)));
  ranks.all_to_all(std::as_bytes(std::span(leaving)), bytes, std::as_writable_bytes(std::span(arriving)), bytes, Purpose::control);
  const auto by_rank = [&](std::span<const int64_t> counts) {
    std::vector<int64_t> out;
    for (; !counts.empty(); counts = counts.subspan(each))
      out.push_back(std::accumulate(counts.begin(), counts.begin() + own_experts, int64_t{0}));
    return out;
  };
  AllToAllPlan plan{.group = ranks,
                    .rows = all.rows,
                    .assignments = all.assignments.slice(0, offsets.back()),
                    .sent = by_rank(leaving),
                    .arrived = by_rank(arriving),
                    .ends = {0}};
  for (size_t e = 0; e < each; ++e) {
    for (size_t r = 0; r < size; ++r) plan.ends.push_back(plan.ends.back() + round_up(arriving[r * each + e], multiple));
  }
  const int64_t rows = plan.ends.back(), arrivals = sum(plan.arrived);
  require(rows <= INT32_MAX, rows, " rows arrived for experts, too many for indices of 32 bits");
  Dispatch out{.offsets = empty(device, Dtype::i32, {own_experts + 1}),
               .rows = empty(device, Dtype::i32, {arrivals}),
               .assignments = empty(device, Dtype::i32, {rows}),
               .per_row = all.per_row};
  if (gradients == ExpertGradients::by_source) out.gradient_offsets = empty(device, Dtype::i32, {own_experts * ranks.size() + 1});
  const std::vector<int32_t> counts(arriving.begin(), arriving.end());
  device.run(ArrivalTable{.counts = from_host(device, Dtype::i32, {ranks.size(), own_experts}, counts.data()),
                          .offsets = out.offsets,
                          .rows = out.rows,
                          .assignments = out.assignments,
                          .multiple = multiple,
                          .source_offsets = out.gradient_offsets});
  out.rows = out.rows.view({arrivals, 1});
  // With gradients by source, any number of ranks gives the bits of one, which knows no groups. Usual rows assume as many tokens on all
  // ranks as here.
  if (gradients == ExpertGradients::summed) {
    HostGroups groups{.offsets = {}, .usual_rows = ceil_div(experts.elements() * ranks.size(), num_experts)};
    for (size_t i = 0; i < plan.ends.size(); i += size) groups.offsets.push_back(plan.ends[i]);
    out.host = std::make_shared<const HostGroups>(std::move(groups));
  }
  out.all_to_all = std::make_shared<const AllToAllPlan>(std::move(plan));
  return out;
}

}  // namespace

// Where groups usually have this many rows, the library of a GPU multiplies one group after the other (gemm_path.h). The host must then
// know where they end: it reads that once a dispatch, unless the library reads it itself.
Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity, const Communicator& ranks,
                  ExpertGradients gradients) {
  if (ranks.size() > 1) return dispatch_among(ranks, gradients, experts, num_experts, multiple, capacity);
  Dispatch out = dispatch_here(experts, num_experts, multiple, capacity);
  const int64_t usual_rows = ceil_div(experts.elements(), num_experts);
  const GemmDevice device = experts.device().gemm_device();
  const bool at_once = multiplies_groups(device), for_library = at_once || (device.library > 0 && usual_rows >= kRowsForLibrary);
  if (!for_library || gradients != ExpertGradients::summed) return out;
  const std::vector<int32_t> ends = at_once ? std::vector<int32_t>() : to_host<int32_t>(out.offsets);
  out.host = std::make_shared<const HostGroups>(HostGroups{.offsets = {ends.begin(), ends.end()}, .usual_rows = usual_rows});
  return out;
}

void number_rows(Dispatch& to, Rounding rounding) {
  const AllToAllPlan* const plan = to.all_to_all.get();
  NumberedRows out;
  if (plan) {
    out.ends = plan->ends;
  } else {
    const std::vector<int32_t> ends = to_host<int32_t>(to.offsets);
    out.ends.assign(ends.begin(), ends.end());
  }
  if (rounding == Rounding::stochastic) {
    const RoundingPosition* const at = rounding_position();
    const std::vector<int32_t> own = to_host<int32_t>(plan ? plan->assignments : to.assignments), rows = to_host<int32_t>(to.assignments);
    std::vector<int64_t>& numbers = out.assignments;
    for (const int32_t assignment : own) numbers.push_back(assignment + (at ? at->token * to.per_row : 0));
    if (plan) {  // the number that the assignment of each row has at home
      constexpr auto kEach = static_cast<int64_t>(sizeof(int64_t));
      const std::vector<int64_t> leaving = std::exchange(numbers, {});
      std::vector<int64_t> arriving(static_cast<size_t>(sum(plan->arrived)));
      plan->group.all_to_all(std::as_bytes(std::span(leaving)), in_bytes(plan->sent, kEach), std::as_writable_bytes(std::span(arriving)),
                             in_bytes(plan->arrived, kEach), Purpose::control);
      for (const int32_t row : rows) numbers.push_back(row < 0 ? 0 : arriving[static_cast<size_t>(row)]);
    }
    // Padding stands behind rows of its group. Transforms make nonzero numbers of its zeros, so it draws by numbers that no assignment has:
    // those below zero, as many for the last row of each group as a group may have padding.
    constexpr int64_t kMostPadding = 1024;
    for (size_t i = 1; i < numbers.size(); ++i) {
      if (rows[i] < 0) numbers[i] = (rows[i - 1] < 0 ? numbers[i - 1] : -numbers[i - 1] * kMostPadding) - 1;
    }
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

namespace {

// Returns the rows of each expert's weight.
int64_t out_of(const LinearWeight& weight, const Dispatch& to) { return weight.shape()[0] / (to.offsets.dim(0) - 1); }

// Adds the bias of each row's expert, which may have another compute type, to unrounded sums [R, C].
Tensor with_bias(const Tensor& sums, const Var& bias, const Dispatch& at, const Tensor& row_weights, Dtype dtype) {
  const Dtype added = bias.value().dtype() == dtype ? dtype : sums.dtype();
  const Tensor out = sums.dtype() == added ? sums : empty(sums.device(), added, sums.shape());
  const Tensor addend = converted(bias.value(), added);
  sums.device().run(AddGroupedBias{.x = sums, .bias = addend, .out = out, .offsets = at.offsets, .row_weights = row_weights});
  return converted(out, dtype);
}

void bias_gradient(Leaf& bias, const Tensor& dy, const Dispatch& at, const Tensor& row_weights) {
  const auto [dbias, accumulate] = bias.target();
  const Tensor& offsets = at.gradient_offsets.defined() ? at.gradient_offsets : at.offsets;
  dy.device().run(GroupedBiasGradient{.dy = dy, .dbias = dbias, .offsets = offsets, .accumulate = accumulate, .row_weights = row_weights});
}

}  // namespace

Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Var& bias, const Dispatch& to,
                      const LinearOperands& operands, const DispatchedOptions& options, const TensorParallel& tp) {
  const LinearGemms gemms(gate_up, operands, to);
  const Tensor& value = x.value();
  const bool biased = bias.value().defined(), recorded = recording({x, weights, gate_up.var(), bias});
  const bool keeps = recorded && gate_up.leaf != nullptr;  // wgrad reads the input
  const bool codes_move = options.as_codes && operands.moves_input_codes(keeps);
  const PermutedTokens moved =
      to_experts(to, codes_move ? Value(gemms.codes_of_tokens(OperandRole::input, value)) : Value(value), weights.value());
  const LinearInput input =
      codes_move ? LinearInput{.codes = std::get<QuantizedTensor>(moved.rows)} : gemms.input(std::get<Tensor>(moved.rows), keeps);
  const Tensor row_weights = moved.weights;
  to.weights->values = row_weights;
  Tensor up = empty(value.device(), biased ? stats_dtype(value.dtype()) : value.dtype(), {to.assignments.dim(0), out_of(gate_up, to)});
  gemms.fprop(input, {}, up);
  if (biased) up = with_bias(up, bias, to, {}, value.dtype());
  const auto activation = [up, row_weights, limit = options.limit] {
    const Tensor out = empty(up.device(), up.dtype(), {up.dim(0), up.dim(1) / 2});
    up.device().run(SwiGluForward{.x = up, .out = out, .row_weights = row_weights, .limit = limit});
    return out;
  };
  if (!recorded) return Var(activation());
  const Var out = record("dispatched_swiglu", activation(), {x, weights, gate_up.var(), bias},
                         [gemms, up, row_weights, to, tp, limit = options.limit, kept = keeps ? gemms.kept(input) : LinearInput(),
                          columns = value.dim(1), bias_leaf = bias.leaf()](const Tensor& dy) {
                           const Tensor dup = empty_like(up), drow_weights = empty_like(row_weights);
                           dy.device().run(SwiGluBackward{
                               .x = up, .dy = dy, .dx = dup, .row_weights = row_weights, .drow_weights = drow_weights, .limit = limit});
                           const bool partial = shared(tp, Split::column_parallel);
                           const Tensor dx = empty(dy.device(), partial ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
                           gemms.backward(kept, dup, dx);
                           if (bias_leaf) bias_gradient(*bias_leaf, dup, to, {});
                           if (partial) tp.group.sum(drow_weights, Purpose::activations);
                           const Tensor of_bias = std::exchange(to.weights->more_gradient, {});
                           if (of_bias.defined()) dy.device().run(Add{.a = drow_weights, .b = of_bias, .out = drow_weights});
                           const TokenRows back = to_tokens(to, partial ? summed(tp, dx, {}, dy.dtype()) : dx, drow_weights);
                           return std::vector<Tensor>{back.sums, back.weights, {}, {}};
                         });
  return options.keep == Keep::value ? out : rebuilt_on_demand(out, activation);
}

Var combined_linear(const Var& x, const LinearWeight& down, const Var& bias, const Dispatch& from, const LinearOperands& operands,
                    const TensorParallel& tp) {
  const LinearGemms gemms(down, operands, from);
  const Tensor& value = x.value();
  const Dtype dtype = value.dtype();
  const bool biased = bias.value().defined(), partial = shared(tp, Split::row_parallel), recorded = recording({x, down.var(), bias});
  const bool keeps = recorded && down.leaf != nullptr;
  const LinearInput input = gemms.input(value, keeps);
  require(!biased || from.weights->values.defined(), "combined_linear: a bias needs the weights that dispatched_swiglu leaves");
  Tensor rows = empty(value.device(), partial || biased ? stats_dtype(dtype) : dtype, {value.dim(0), out_of(down, from)});
  gemms.fprop(input, {}, rows);
  if (partial) rows = summed(tp, rows, {}, biased ? rows.dtype() : dtype);  // whole on each of the tensor ranks
  if (biased) rows = with_bias(rows, bias, from, from.weights->values, dtype);
  const Tensor y = to_tokens(from, rows).sums;
  if (!recorded) return Var(y);
  return record(
      "combined_linear", y, {x, down.var(), bias},
      [gemms, from, codes_move = operands.takes_gradient_codes(), saved = keeps ? SavedInput(x, input, gemms, false) : SavedInput(),
       columns = value.dim(1), bias_value = bias.value(), bias_leaf = bias.leaf()](const Tensor& dy) {
        const Tensor dx = empty(dy.device(), dy.dtype(), {from.assignments.dim(0), columns});
        const LinearInput kept = saved.get(gemms);
        const Value moving = codes_move ? Value(gemms.codes_of_tokens(OperandRole::output_grad, dy)) : Value(dy);
        const Value arrived = to_experts(from, moving).rows;
        if (bias_value.defined()) {  // gradients of the bias and, as far as they multiply it, of the weights of the rows
          const auto* const codes = std::get_if<QuantizedTensor>(&arrived);
          const Tensor& weights = from.weights->values;
          const Tensor moved = codes ? decoded(*codes, dy.dtype()) : std::get<Tensor>(arrived), dot = empty_like(weights);
          const Dtype read = bias_value.dtype() == dy.dtype() ? dy.dtype() : dot.dtype();
          dy.device().run(
              GroupedBiasDot{.dy = converted(moved, read), .bias = converted(bias_value, read), .out = dot, .offsets = from.offsets});
          from.weights->more_gradient = dot;
          if (bias_leaf) bias_gradient(*bias_leaf, moved, from, weights);
        }
        gemms.backward(kept, arrived, dx);
        return std::vector<Tensor>{dx, {}, {}};
      });
}

}  // namespace mantissa
