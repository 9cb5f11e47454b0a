#include "mantissa/hf/live_weights.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

int64_t columns_of(const Shape& shape) { return shape.with_dim0(1).elements(); }

void append(std::vector<std::byte>& out, std::span<const std::byte> bytes) { out.insert(out.end(), bytes.begin(), bytes.end()); }

void append_scales(std::vector<std::byte>& out, const QuantizedTensor& of, int64_t begin, int64_t end) {
  const int64_t height = of.how.block_rows, first = begin / height;
  const HostBytes scales(of.scales.slice(first, (end + height - 1) / height));
  const auto width = static_cast<size_t>(of.scales.dim(1));
  for (int64_t row = begin; row < end; ++row) append(out, scales.get().subspan(static_cast<size_t>(row / height - first) * width, width));
}

}  // namespace

LiveWeights::LiveWeights(const ParameterSet& parameters, const PrecisionPlan& plan, const Mesh& mesh, Progressed progressed)
    : ForwardReader(plan),
      parameters_(parameters),
      world_(mesh.world),
      tensor_ranks_(mesh.tensor.size()),
      progressed_(std::move(progressed)) {
  const int ranks = tensor_ranks_ * mesh.expert.size();
  if (ranks > 1) replica_ = world_.split(world_.rank() / ranks);
  if (writes()) device_ = make_backend("cpu");
}

// Counts the bytes of one row of a matrix, or an element of a vector. There is one scale for each block along the row, whatever its height.
int64_t LiveWeights::row_bytes(const Rows& rows, int64_t columns) {
  const Quantization& how = rows.of.quantized;
  if (rows.kind == Kind::scales) return columns / how.block_cols;
  if (rows.kind == Kind::codes) return how.format == Format::e2m1 ? columns / 2 : columns;
  return columns * dtype_bytes(rows.of.dtype);
}

const Parameter& LiveWeights::parameter_of(const std::string& name) const {
  const Parameter* const found = parameters_.find(name);
  require(found != nullptr, "the model has no parameter ", name);
  return *found;
}

// Tensors that several ranks hold alike come from the first of them.
std::vector<LiveWeights::Piece> LiveWeights::pieces(const Rows& rows, int rank) const {
  const int tensor = rank % tensor_ranks_, expert = rank / tensor_ranks_;
  const bool alike = (rows.of.split == Split::none && tensor > 0) || (!rows.of.among_experts() && expert > 0);
  if (alike) return {};
  Parameter of(as_of(rows.of, tensor, expert));
  std::vector<Piece> found;
  for (const ParameterShard::Chunk& chunk : ParameterShard{.of = &of, .begin = 0, .end = of.shape[0]}.chunks()) {
    const int64_t first = std::max(chunk.row, rows.begin), last = std::min(chunk.row + chunk.end - chunk.begin, rows.end);
    if (first >= last) continue;
    const int64_t begin = chunk.begin + first - chunk.row;
    found.push_back({.begin = begin, .end = begin + last - first, .row = first - rows.begin, .column = chunk.column});
  }
  return found;
}

std::vector<std::byte> LiveWeights::own_bytes(const Rows& rows) const {
  std::vector<std::byte> out;
  for (const Piece& piece : pieces(rows, replica_.rank())) {
    if (rows.kind == Kind::scales) {
      append_scales(out, rows.of.codes(), piece.begin, piece.end);
      continue;
    }
    const Tensor& of = rows.kind == Kind::codes ? rows.of.codes().codes : rows.of.value();
    append(out, HostBytes(of.slice(piece.begin, piece.end)).get());
  }
  return out;
}

std::vector<std::byte> LiveWeights::gathered(const Rows& rows) const {
  if (world_.rank() >= replica_.size()) return {};
  const std::vector<std::byte> own = own_bytes(rows);
  if (replica_.size() == 1) return joined(rows, own);
  const int64_t width = row_bytes(rows, columns_of(rows.of.shape));
  std::vector<int64_t> from(static_cast<size_t>(replica_.size())), to(from.size());
  to.front() = static_cast<int64_t>(own.size());
  int64_t all = 0;
  for (size_t r = 0; writes() && r < from.size(); ++r) {
    for (const Piece& piece : pieces(rows, static_cast<int>(r))) from[r] += (piece.end - piece.begin) * width;
    all += from[r];
  }
  from[static_cast<size_t>(replica_.rank())] = to[static_cast<size_t>(replica_.rank())];
  std::vector<std::byte> by_rank(static_cast<size_t>(all));
  replica_.all_to_all(own, to, by_rank, from, Purpose::other);
  return writes() ? joined(rows, by_rank) : std::vector<std::byte>();
}

// Puts the pieces of all ranks in place.
std::vector<std::byte> LiveWeights::joined(const Rows& rows, std::span<const std::byte> by_rank) const {
  const auto bytes = [&](int64_t columns) { return static_cast<size_t>(row_bytes(rows, columns)); };
  const size_t width = bytes(columns_of(rows.of.shape)), whole = bytes(columns_of(rows.of.stored_shape()));
  std::vector<std::byte> out(static_cast<size_t>(rows.end - rows.begin) * whole);
  for (int r = 0; r < replica_.size(); ++r) {
    for (const Piece& piece : pieces(rows, r)) {
      for (int64_t row = piece.row; row < piece.row + piece.end - piece.begin; ++row, by_rank = by_rank.subspan(width))
        std::memcpy(out.data() + static_cast<size_t>(row) * whole + bytes(piece.column), by_rank.data(), width);
    }
  }
  return out;
}

std::vector<std::byte> LiveWeights::codes(const std::string& parameter, int64_t begin, int64_t end) {
  return gathered({.of = parameter_of(parameter), .begin = begin, .end = end, .kind = Kind::codes});
}

std::vector<std::byte> LiveWeights::scales(const std::string& parameter, int64_t begin, int64_t end) {
  const Parameter& of = parameter_of(parameter);
  const std::vector<std::byte> all = gathered({.of = of, .begin = begin, .end = end, .kind = Kind::scales});
  if (!writes()) return {};
  Quantization by_row = of.quantized;
  by_row.block_rows = 1;
  return packed_scales(all, columns_of(of.stored_shape()), by_row, 0, end - begin);
}

void LiveWeights::read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) {
  const Parameter& of = parameter_of(parameter);
  const Rows rows{.of = of, .begin = begin, .end = end, .kind = Kind::values};
  const Shape shape = of.stored_shape().with_dim0(end - begin);
  if (!quantized(parameter)) {
    const std::vector<std::byte> values = gathered(rows);
    if (!writes()) return;
    const Tensor wide = converted(from_host(*device_, of.dtype, shape, values.data()), Dtype::f32);
    std::copy_n(wide.data<float>(), out.size(), out.begin());
    return;
  }
  const std::vector<std::byte> codes = this->codes(parameter, begin, end),
                               scales = gathered({.of = of, .begin = begin, .end = end, .kind = Kind::scales});
  if (!writes()) return;
  Quantization by_row = of.quantized;
  by_row.block_rows = 1;
  const QuantizedTensor both{.codes = from_host(*device_, Dtype::u8, codes_shape(shape, by_row), codes.data()),
                             .scales = from_host(*device_, Dtype::u8, scales_shape(shape, by_row), scales.data()),
                             .shape = shape,
                             .how = by_row};
  const Tensor wide = empty(*device_, Dtype::f32, shape);
  device_->run(Dequantize{.x = both, .out = wide});
  std::copy_n(wide.data<float>(), out.size(), out.begin());
}

void LiveWeights::at_writer(const std::function<void()>& body) {
  if (progressed_) progressed_();
  agree(world_, [&] {
    if (writes()) body();
  });
}

}  // namespace mantissa
