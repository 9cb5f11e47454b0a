#include "ops/experts.h"

#include <algorithm>
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

// Dispatches tokens. Where groups usually have this many rows, the library of a GPU multiplies one group after the other (gemm_path.h). The
// host must then know where they end: it reads that once a dispatch.
Dispatch dispatch(const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity, const Communicator& ranks,
                  ExpertGradients gradients) {
  if (ranks.size() > 1) return dispatch_among(ranks, gradients, experts, num_experts, multiple, capacity);
  Dispatch out = dispatch_here(experts, num_experts, multiple, capacity);
  const int64_t usual_rows = ceil_div(experts.elements(), num_experts);
  const bool for_library = experts.device().gemm_device().library > 0 && usual_rows >= kRowsForLibrary;
  if (!for_library || gradients != ExpertGradients::summed) return out;
  const std::vector<int32_t> ends = to_host<int32_t>(out.offsets);
  out.host = std::make_shared<const HostGroups>(HostGroups{.offsets = {ends.begin(), ends.end()}, .usual_rows = usual_rows});
  return out;
}

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

namespace {

// Returns x [N, in] as it is dispatched: as codes where no expert reads values.
Value tokens_of(const LinearGemms& gemms, const Tensor& x, const Recipe& recipe, bool as_codes, bool recorded) {
  return as_codes && dispatches_codes(recipe, recorded) ? Value(gemms.codes_of_tokens(OperandRole::input, x)) : Value(x);
}

LinearInput input_of(const LinearGemms& gemms, const Value& rows, bool recorded) {
  if (const auto* codes = std::get_if<QuantizedTensor>(&rows)) return {.codes = *codes};
  return gemms.input(std::get<Tensor>(rows), recorded);
}

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

// Returns the rows of dy as they arrived, as values.
Tensor values_of(const Value& dy, Dtype dtype) {
  if (const auto* values = std::get_if<Tensor>(&dy)) return *values;
  return decoded(std::get<QuantizedTensor>(dy), dtype);
}

// Computes the gradients of down's bias and, as far as they multiply that bias, of the weights of the rows.
struct DownBias {
  Tensor value{};  // undefined: there is none
  Leaf* leaf = nullptr;

  void backward(const Value& rows, Dtype dtype, const Dispatch& from) const {
    if (!value.defined()) return;
    const Tensor dy = values_of(rows, dtype), gemm = empty_like(from.weights->values);
    const Dtype read = value.dtype() == dtype ? dtype : gemm.dtype();
    dy.device().run(GroupedBiasDot{.dy = converted(dy, read), .bias = converted(value, read), .out = gemm, .offsets = from.offsets});
    from.weights->more_gradient = gemm;
    if (leaf) bias_gradient(*leaf, dy, from, from.weights->values);
  }
};

// Computes gate and up of x, before the activation.
Tensor first_gemm(const LinearGemms& gemms, const LinearInput& x, const Var& bias, const Dispatch& to, Shape shape, Dtype dtype) {
  const bool biased = bias.value().defined();
  const Tensor sums = empty(to.assignments.device(), biased ? stats_dtype(dtype) : dtype, shape);
  gemms.fprop(x, {}, sums);
  return biased ? with_bias(sums, bias, to, {}, dtype) : sums;
}

// Computes the rows of all experts, whole on each of the tensor ranks.
Tensor second_gemm(const LinearGemms& gemms, const LinearInput& x, const Var& bias, const Dispatch& from, Shape shape, Dtype dtype,
                   const TensorParallel& tp) {
  const bool biased = bias.value().defined(), partial = shared(tp, Split::row_parallel);
  const Tensor rows = empty(from.assignments.device(), partial || biased ? stats_dtype(dtype) : dtype, shape);
  gemms.fprop(x, {}, rows);
  const Tensor whole = partial ? summed(tp, rows, {}, biased ? rows.dtype() : dtype) : rows;
  return biased ? with_bias(whole, bias, from, from.weights->values, dtype) : whole;
}

}  // namespace

Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Var& bias, const Dispatch& to,
                      const Recipe& recipe, const DispatchedOptions& options, const TensorParallel& tp) {
  const LinearGemms gemms(gate_up, recipe, to);
  const Tensor& value = x.value();
  const bool recorded = recording({x, weights, gate_up.var(), bias});
  const PermutedTokens moved = to_experts(to, tokens_of(gemms, value, recipe, options.as_codes, recorded), weights.value());
  const LinearInput input = input_of(gemms, moved.rows, recorded);
  const Tensor row_weights = moved.weights;
  to.weights->values = row_weights;
  const Tensor up = first_gemm(gemms, input, bias, to, {to.assignments.dim(0), out_of(gate_up, to)}, value.dtype());
  const auto activation = [up, row_weights, limit = options.limit] {
    const Tensor out = empty(up.device(), up.dtype(), {up.dim(0), up.dim(1) / 2});
    up.device().run(SwiGluForward{.x = up, .out = out, .row_weights = row_weights, .limit = limit});
    return out;
  };
  if (!recorded) return Var(activation());
  const Var out = record("dispatched_swiglu", activation(), {x, weights, gate_up.var(), bias},
                         [gemms, up, row_weights, to, tp, limit = options.limit, kept = gemms.kept(input), columns = value.dim(1),
                          bias_leaf = bias.leaf()](const Tensor& dy) {
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

Var combined_linear(const Var& x, const LinearWeight& down, const Var& bias, const Dispatch& from, const Recipe& recipe,
                    const TensorParallel& tp) {
  const LinearGemms gemms(down, recipe, from);
  const Tensor& value = x.value();
  const bool biased = bias.value().defined(), recorded = recording({x, down.var(), bias});
  const LinearInput input = gemms.input(value, recorded);
  require(!biased || from.weights->values.defined(), "combined_linear: a bias needs the weights that dispatched_swiglu leaves");
  const Tensor rows = second_gemm(gemms, input, bias, from, {value.dim(0), out_of(down, from)}, value.dtype(), tp);
  const Tensor y = to_tokens(from, rows).sums;
  if (!recorded) return Var(y);
  const bool codes_move = choose_operands(recipe, GemmRole::wgrad).first.source == OperandSource::requantized;
  return record("combined_linear", y, {x, down.var(), bias},
                [gemms, from, codes_move, saved = SavedInput(x, input, gemms, false), columns = value.dim(1),
                 down_bias = DownBias{bias.value(), bias.leaf()}](const Tensor& dy) {
                  const Tensor dx = empty(dy.device(), dy.dtype(), {from.assignments.dim(0), columns});
                  const LinearInput kept = saved.get(gemms);
                  const Value moving = codes_move ? Value(gemms.codes_of_tokens(OperandRole::output_grad, dy)) : Value(dy);
                  const Value arrived = to_experts(from, moving).rows;
                  down_bias.backward(arrived, dy.dtype(), from);
                  if (codes_move) {
                    gemms.backward(kept, gemms.gradient_of_codes(std::get<QuantizedTensor>(arrived)), dx);
                  } else {
                    gemms.backward(kept, std::get<Tensor>(arrived), dx);
                  }
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
