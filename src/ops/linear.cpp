#include "ops/linear.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

thread_local const RoundingPosition* current_position = nullptr;

}  // namespace

RoundingScope::RoundingScope(const RoundingPosition& position)
    : position_(position), previous_(std::exchange(current_position, &position_)) {}
RoundingScope::~RoundingScope() { current_position = previous_; }

const RoundingPosition* rounding_position() { return current_position; }

namespace {

// Returns how many matrices of weights the groups have here.
int64_t matrices_of(const Dispatch& groups) { return groups.offsets.defined() ? groups.offsets.dim(0) - 1 : 1; }

// Returns, for each row or column of a rank's share, its index among those of all `ranks`; empty for one rank, where both are equal.
// `parts` are this rank's sizes of fused parts (q, k and v; gate and up), each of which is divided among the ranks by itself.
std::vector<int64_t> places_of_share(int64_t size, int ranks, int rank, const std::vector<int64_t>& parts) {
  std::vector<int64_t> out;
  if (ranks == 1) return out;
  int64_t before = 0;  // every rank has the same number of elements of a part
  for (const int64_t part : parts.empty() ? std::vector<int64_t>{size} : parts) {
    for (int64_t i = 0; i < part; ++i) out.push_back(before * ranks + part * rank + i);
    before += part;
  }
  return out;
}

// Returns the numbers from which the random bits of an operand of this shape are drawn. No number is used twice in a run: rows of a
// weight go on counting from step to step, rows of tokens have the number of the token (with experts, of the assignment).
RoundingDraws draws_of(const WeightPlace& weight, const Dispatch& groups, GemmRole gemm, OperandRole role, const Shape& shape,
                       const RoundingPosition& at) {
  const ModelRanks& ranks = weight.sharding.ranks;
  const int of_out = weight.sharding.row_ranks(), of_in = weight.sharding.column_ranks();
  const bool along_out = role == OperandRole::output_grad;
  const int columns = along_out ? of_out : of_in;
  std::vector<int64_t> parts;  // columns of each matrix
  if (along_out) parts.assign(weight.parts.begin(), weight.parts.begin() + std::ssize(weight.parts) / matrices_of(groups));
  RoundingDraws draws{.seed = at.seed,
                      .what = weight.number * 16 + static_cast<uint32_t>(gemm) * 4 + static_cast<uint32_t>(role),
                      .columns = shape[1] * columns,
                      .row_places = {},
                      .column_places = places_of_share(shape[1], columns, ranks.tensor_rank, parts)};
  int64_t first = 0;
  if (role == OperandRole::weight) {
    draws.row_places = places_of_share(shape[0], of_out, ranks.tensor_rank, weight.parts);
    const int64_t expert_rank = ranks.expert > 1 ? ranks.expert_rank : 0;
    first = (at.step * ranks.expert + expert_rank) * shape[0] * of_out;
  } else if (groups.numbered) {
    draws.row_places = groups.numbered->assignments;
  } else {
    first = at.token;
  }
  draws.first = static_cast<uint64_t>(first) * static_cast<uint64_t>(draws.columns);
  return draws;
}

// Returns the draws of these rows.
RoundingDraws slice(const RoundingDraws& all, int64_t begin, int64_t end) {
  RoundingDraws out = all;
  if (all.row_places.empty()) {
    out.first += static_cast<uint64_t>(begin * all.columns);
  } else {
    out.row_places.assign(all.row_places.begin() + begin, all.row_places.begin() + end);
  }
  return out;
}

// Operands are quantized from bf16, whatever the GEMMs compute in.
Tensor source_of(const Tensor& x) { return converted(x, Dtype::bf16); }

// Returns a place for the columnwise codes of a matrix or, transposed, for rowwise ones of its transpose.
QuantizedTensor empty_columns(Backend& device, const Shape& shape, const Quantization& rowwise, bool transposed) {
  return transposed ? empty_quantized(device, {shape[1], shape[0]}, rowwise) : empty_quantized(device, shape, rowwise.transposed());
}

QuantizedTensor columnwise(const QuantizedTensor& rowwise, bool transposed) {
  QuantizedTensor out = empty_columns(rowwise.device(), rowwise.shape, rowwise.how, transposed);
  rowwise.device().run(RequantizeColumns{.x = rowwise, .out = out});
  return out;
}

// Codes along rows and along columns, quantized in one pass.
struct BothWays {
  QuantizedTensor rows, columns;

  BothWays(const Tensor& x, const Quantization& how, bool transposed) {
    const Shape padded = x.shape().with_dim0(round_up(x.dim(0), how.block()));
    rows = empty_quantized(x.device(), padded, how), columns = empty_columns(x.device(), padded, how, transposed);
    x.device().run(Quantize{.x = source_of(x), .out = rows, .second = columns});
  }
};

// wgrad sums over tokens. If one operand is codes, padded to whole blocks of tokens, the other one gets as many rows by zeros.
Value padded(const Value& value, int64_t rows) {
  if (shape_of(value)[0] == rows) return value;
  const Tensor& tensor = std::get<Tensor>(value);
  Tensor out = zeros(tensor.device(), tensor.dtype(), tensor.shape().with_dim0(rows));
  tensor.device().run(Convert{.x = tensor, .out = out.slice(0, tensor.dim(0))});
  return out;
}

}  // namespace

// A forward pass that backward repeats (recompute) draws the same bits as before, and its operands are not observed a second time. An
// operand whose transform mixes tokens with padding is not observed at all.
Tensor LinearGemms::read(GemmRole gemm, OperandRole role, const Tensor& high) const {
  const bool is_first = role == OperandRole::output_grad || (role == OperandRole::input && gemm == GemmRole::fprop);
  const OperandChoice& choice = is_first ? operands_.gemm(gemm).first : operands_.gemm(gemm).second;
  if (choice.source != OperandSource::simulated) return converted(high, compute());
  const Simulation& how = choice.simulation;
  const bool over_rows = how.hadamard > 0 && how.contraction == 0, of_groups = groups_.offsets.defined() && role != OperandRole::weight;
  const Tensor x = source_of(high);
  const int64_t rows = over_rows && !of_groups ? round_up(x.dim(0), how.hadamard) : x.dim(0);
  const Tensor out = empty(x.device(), compute(), x.shape().with_dim0(rows));
  const RoundingPosition* const position = rounding_position();
  const bool at_random = position && how.rounding == Rounding::stochastic;
  const RoundingDraws draws = at_random ? draws_of(weight_.place, groups_, gemm, role, out.shape(), *position) : RoundingDraws();
  const bool again = gemm == GemmRole::fprop && Tape::in_backward(), of_weight = role == OperandRole::weight;
  const Tensor counted = of_groups ? groups_.assignments : of_weight ? Tensor() : counted_rows(x.device(), first_token_, x.dim(0));
  const bool observed = observing_quantization() && weight_.leaf && !again && !(over_rows && counted.defined());
  // Each matrix is rounded on its own: the weights of the experts, or the tokens that an expert has of one rank.
  require(!of_groups || groups_.numbered, "experts whose operands are simulated need number_rows()");
  std::vector<int64_t> ends;
  if (of_groups) {
    ends = groups_.numbered->ends;
  } else {
    for (int64_t i = 0, matrices = matrices_of(groups_); i <= matrices; ++i) ends.push_back(rows * i / matrices);
  }
  for (size_t i = 1; i < ends.size(); ++i) {
    const int64_t begin = ends[i - 1], end = ends[i];
    if (begin == end) continue;
    Simulate kernel{.x = x.slice(begin, std::min(end, x.dim(0))), .out = out.slice(begin, end), .how = how};
    if (!at_random) kernel.how.rounding = Rounding::nearest;
    if (at_random) kernel.draws = slice(draws, begin, end);
    if (observed) kernel.error = empty(x.device(), Dtype::f64, {QuantizationError::size});
    if (observed && counted.defined()) kernel.rows = counted.slice(begin, end);
    x.device().run(kernel);
    if (observed) observe_quantization({.weight = weight_.leaf, .role = role, .x = kernel.x, .codes = {}, .error = kernel.error});
  }
  return out;
}

bool LinearGemms::transposes_columns() const {
  const auto side = [](const OperandChoice& choice, bool transposed) {
    return GemmOperandForm{.how = choice.is_codes() ? choice.how : Quantization(), .transposed = transposed};
  };
  const GemmForm form{.a = side(operands_.wgrad.first, true),
                      .b = side(operands_.wgrad.second, false),
                      .out = Dtype::f32,
                      .m = weight_.shape()[0],
                      .n = weight_.shape()[1],
                      .k = operands_.block};
  return !groups_.offsets.defined() && along_rows(form, weight_.device().gemm_device()).b.transposed;
}

// If dgrad and wgrad both read codes of the values, one pass makes both. Only codes that are made here are shown to the
// observer: codes_of_tokens() has already shown those that arrive.
LinearGemms::OutputGradient LinearGemms::output_gradient(const Value& dy, bool wants_rows) const {
  if (const auto* codes = std::get_if<QuantizedTensor>(&dy)) return {*codes, columnwise(*codes, transposes_columns())};
  const Tensor& values = std::get<Tensor>(dy);
  const bool wants_columns = weight_.leaf != nullptr;
  const Tensor high = converted(values, compute());
  const OperandChoice &rows = operands_.dgrad.first, &columns = operands_.wgrad.first;
  require(!operands_.takes_gradient_codes(), "requantized output gradients must come as codes");
  OutputGradient out{high, high};
  const auto operand = [&](GemmRole gemm, const OperandChoice& choice) -> Value {
    if (choice.is_codes())
      return choice.how.columnwise() ? quantized_padded(source_of(values), choice.how) : quantized(source_of(values), choice.how);
    return choice.source == OperandSource::simulated ? read(gemm, OperandRole::output_grad, values) : high;
  };
  if (wants_rows && rows.is_codes() && wants_columns && columns.is_codes()) {
    const BothWays codes(values, rows.how, transposes_columns());
    out = {slice(codes.rows, 0, values.dim(0)), codes.columns};
  } else {
    if (wants_rows) out.rows = operand(GemmRole::dgrad, rows);
    if (wants_columns) out.columns = operand(GemmRole::wgrad, columns);
  }
  const auto* const along_rows = std::get_if<QuantizedTensor>(&out.rows);
  if (const auto* codes = along_rows ? along_rows : std::get_if<QuantizedTensor>(&out.columns))
    observe(OperandRole::output_grad, values, *codes);
  return out;
}

LinearInput LinearGemms::input(const Tensor& x, bool recorded) const {
  const OperandChoice& choice = operands_.fprop.first;
  LinearInput out{.high = x};
  if (!choice.is_codes()) return out;
  if (recorded && operands_.saved_input == SavedAs::columns) {
    const BothWays codes(x, choice.how, transposes_columns());
    out.codes = codes.rows, out.columns = codes.columns;
  } else {
    out.codes = quantized_padded(source_of(x), choice.how);
  }
  if (!Tape::in_backward()) observe(OperandRole::input, x, out.codes);
  return out;
}

// Shows codes and their values to the observer. Rows of a dispatch are put in the order of tokens, without padding and without dropped
// assignments; columnwise codes of a dispatch are not shown, because a block of them holds several tokens, which have no order.
void LinearGemms::observe(OperandRole role, const Tensor& x, const QuantizedTensor& codes) const {
  const auto show = [&](const Tensor& of, const QuantizedTensor& are, const Tensor& rows) {
    observe_quantization({.weight = weight_.leaf, .role = role, .x = of, .codes = are, .rows = rows});
  };
  if (!groups_.offsets.defined()) return show(x, codes, counted_rows(x.device(), first_token_, x.dim(0)));
  if (!observing_quantization() || !codes.how.rowwise()) return;
  const Tensor rows = groups_.rows.view({groups_.rows.elements()});
  const Tensor values = empty(x.device(), x.dtype(), x.shape().with_dim0(rows.dim(0)));
  const QuantizedTensor compact = empty_quantized(x.device(), values.shape(), codes.how);
  x.device().run(Permute{.x = x, .out = values, .assignments = rows, .per_row = 1});
  x.device().run(Permute{.x = codes, .out = compact, .assignments = rows, .per_row = 1});
  show(values, compact, rows);
}

QuantizedTensor LinearGemms::codes_of_tokens(OperandRole role, const Tensor& x) const {
  QuantizedTensor codes = quantized(source_of(x), role == OperandRole::input ? operands_.fprop.first.how : operands_.dgrad.first.how);
  const bool again = role == OperandRole::input && Tape::in_backward();
  if (!again)
    observe_quantization({.weight = weight_.leaf, .role = role, .x = x, .codes = codes, .rows = counted_rows(x.device(), 0, x.dim(0))});
  return codes;
}

// Blocks of 1 x b lie within a token, so each rank quantizes its own. Rows behind the last token are zeros, as in quantized_padded().
LinearInput LinearGemms::gathered_input(const TensorParallel& tp, const Tensor& x, bool recorded) const {
  if (!by_tokens(tp) || !operands_.moves_input_codes(recorded)) return input(gathered_rows(tp, x), recorded);
  const Quantization& how = operands_.fprop.first.how;
  const int64_t padded = round_up(tp.tokens, how.block());
  const RowRange own = share_of(tp.tokens, tp.group.rank(), tp.group.size());
  const QuantizedTensor all = empty_quantized(x.device(), {padded, x.dim(1)}, how);
  if (own.size() > 0) {
    const QuantizedTensor codes = slice(all, own.begin, own.end);
    x.device().run(Quantize{.x = source_of(x), .out = codes});
    if (!Tape::in_backward())
      observe_quantization({.weight = weight_.leaf,
                            .role = OperandRole::input,
                            .x = x,
                            .codes = codes,
                            .rows = counted_rows(x.device(), own.begin, own.size()),
                            .own_tokens = true});
  }
  if (tp.tokens < padded) {
    const Tensor nothing = zeros(x.device(), Dtype::bf16, {padded - tp.tokens, x.dim(1)});
    x.device().run(Quantize{.x = nothing, .out = slice(all, tp.tokens, padded)});
  }
  gather_rows(tp, all);
  return {.codes = all};
}

LinearInput LinearGemms::kept(const LinearInput& input) const {
  switch (operands_.saved_input) {
    case SavedAs::values: break;
    case SavedAs::rows: return {.codes = input.codes};
    case SavedAs::columns: return {.columns = input.columns};
  }
  return {.high = input.high};
}

Value LinearGemms::weight(GemmRole role) const {
  const OperandChoice& choice = operands_.gemm(role).second;
  switch (choice.source) {
    case OperandSource::high: return weight_.high;
    case OperandSource::simulated: return read(role, OperandRole::weight, weight_.high);
    case OperandSource::requantized: return columnwise(weight_.codes, false);
    case OperandSource::codes: return choice.how.columnwise() ? quantized(source_of(weight_.high), choice.how) : weight_.codes;
    case OperandSource::dequantized:
    case OperandSource::fake_codes: return weight_.codes;  // the GEMM decodes them: to the bit the values that the operand is to have
  }
  fail(ExitCode::internal, "no such operand of ", gemm_name(role));
}

void LinearGemms::multiply(const Value& a, GemmRole role, const Tensor& out, const Tensor& bias) const {
  const Operand b{.value = weight(role), .transposed = role == GemmRole::fprop};
  const bool same = out.dtype() == compute() || out.dtype() == stats_dtype(compute());
  const Tensor gemm = same ? out : empty(out.device(), compute(), out.shape());
  if (groups_.offsets.defined()) {
    require(!bias.defined(), "GEMMs of experts have no bias");
    out.device().run(GroupedGemm{.a = {a}, .b = b, .out = gemm, .offsets = groups_.offsets, .host = groups_.host});
  } else {
    out.device().run(Gemm{.a = {a}, .b = b, .out = gemm, .accumulate = false, .bias = bias});
  }
  if (!same) out.device().run(Convert{.x = gemm, .out = out});
}

void LinearGemms::fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const {
  const TraceSpan span(Track::gemm, "fprop");
  const Value a = x.codes.defined() ? Value(slice(x.codes, 0, y.dim(0))) : Value(read(GemmRole::fprop, OperandRole::input, x.high));
  multiply(a, GemmRole::fprop, y, bias);
}

void LinearGemms::wgrad(const LinearInput& x, const Value& dy) const {
  const TraceSpan span(Track::gemm, "wgrad");
  const auto [dweight, accumulate] = weight_.leaf->target();
  const OperandChoice& choice = operands_.wgrad.second;
  Value input;
  if (choice.source == OperandSource::dequantized) {
    input = decoded(x.codes, compute());
  } else if (!choice.is_codes()) {
    input = read(GemmRole::wgrad, OperandRole::input, x.high);
  } else if (x.columns.defined()) {
    input = x.columns;
  } else if (choice.source == OperandSource::requantized) {
    input = columnwise(x.codes, transposes_columns());
  } else {
    const QuantizedTensor codes = quantized_padded(source_of(x.high), choice.how);
    observe(OperandRole::input, x.high, codes);
    input = codes;
  }
  if (groups_.offsets.defined()) {
    const bool own = groups_.gradient_offsets.defined();
    return dweight.device().run(GroupedWeightGradient{.a = dy,
                                                      .b = input,
                                                      .out = dweight,
                                                      .offsets = own ? groups_.gradient_offsets : groups_.offsets,
                                                      .accumulate = accumulate,
                                                      .host = own ? nullptr : groups_.host});
  }
  const auto transposed = [](const Value& value) {  // rowwise codes: of the transpose
    const auto* const codes = std::get_if<QuantizedTensor>(&value);
    return codes != nullptr && codes->how.rowwise();
  };
  const bool of_dy = transposed(dy), of_input = transposed(input);
  const int64_t rows = std::max(shape_of(dy)[of_dy ? 1 : 0], shape_of(input)[of_input ? 1 : 0]);
  const Operand a{.value = of_dy ? dy : padded(dy, rows), .transposed = !of_dy},
      b{.value = of_input ? input : padded(input, rows), .transposed = of_input};
  dweight.device().run(Gemm{.a = a, .b = b, .out = dweight, .accumulate = accumulate});
}

void LinearGemms::backward(const LinearInput& x, const Value& dy, const Tensor& dx) const {
  const OutputGradient gradient = output_gradient(dy, dx.defined());
  if (weight_.leaf) wgrad(x, gradient.columns);
  if (!dx.defined()) return;
  const TraceSpan span(Track::gemm, "dgrad");
  multiply(gradient.rows, GemmRole::dgrad, dx, {});
}

Tensor linear_fprop(const Tensor& x, const LinearWeight& weight, Dtype out, const LinearOperands& operands, const TensorParallel& tp) {
  require(tp.split != Split::row_parallel, "linear_fprop: the weight must not be row-parallel");
  require_own_rows("linear_fprop", tp, x);
  const LinearGemms gemms(weight, operands);
  Tensor y = empty(weight.device(), out, {by_tokens(tp) ? tp.tokens : x.dim(0), weight.shape()[0]});
  gemms.fprop(gemms.gathered_input(tp, x, false), {}, y);
  return gathered_columns(tp, y);
}

// `own` is the gradient of the rows that this rank returned, `dy` that of all rows. They differ in a row-parallel layer under sequence
// parallelism, which returns this rank's share of tokens. The bias was added to that share, so its gradient is the sum of `own`.
Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const LinearOperands& operands, const TensorParallel& tp) {
  const Tensor& value = x.value();
  const LinearGemms gemms(weight, operands);
  const bool gathers = by_tokens(tp) && tp.split == Split::column_parallel, recorded = recording({x, weight.var(), bias});
  const bool sums_y = shared(tp, Split::row_parallel), sums_dx = shared(tp, Split::column_parallel);
  if (gathers) require_own_rows("linear", tp, value);
  require(gathers || !by_tokens(tp) || value.dim(0) == tp.tokens, "linear: ", value.dim(0), " rows of ", tp.tokens, " tokens");
  const bool kept = recorded && weight.leaf != nullptr;  // wgrad reads it
  const LinearInput input = gathers ? gemms.gathered_input(tp, value, kept) : gemms.input(value, kept);
  Tensor y =
      empty(value.device(), sums_y ? stats_dtype(value.dtype()) : value.dtype(), {gathers ? tp.tokens : value.dim(0), weight.shape()[0]});
  gemms.fprop(input, sums_y ? Tensor() : bias.value(), y);
  if (sums_y) y = summed(tp, y, bias.value(), value.dtype());
  if (!recorded) return Var(y);
  return record("linear", y, {x, weight.var(), bias},
                [saved = kept ? SavedInput(x, input, gemms, gathers) : SavedInput(), gemms, tp, sums_y, sums_dx,
                 wants_dx = x.wants_gradient(), columns = weight.shape()[1], bias_leaf = bias.leaf()](const Tensor& own) {
                  const Tensor dy = sums_y ? gathered_rows(tp, own) : own;
                  const LinearInput read = saved.get(gemms);
                  Tensor dx;
                  if (wants_dx) dx = empty(dy.device(), sums_dx ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
                  gemms.backward(read, dy, dx);
                  if (wants_dx && sums_dx) dx = summed(tp, dx, {}, dy.dtype());
                  if (bias_leaf) {
                    const auto [dbias, accumulate] = bias_leaf->target();
                    own.device().run(SumRows{.x = own, .out = dbias, .accumulate = accumulate});
                  }
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
