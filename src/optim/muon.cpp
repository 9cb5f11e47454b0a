#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {

void orthogonalize(const Tensor& x, int64_t steps) {
  // The slope at 0 is large, so that small singular values grow fast; those near 1 go to and fro (Jordan et al. 2024).
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  Backend& device = x.device();
  const bool tall = x.dim(0) > x.dim(1);
  const int64_t least = std::min(x.dim(0), x.dim(1));
  const Tensor partials = empty(device, Dtype::f64, {ceil_div(x.dim(0), int64_t{32})});
  device.run(SquaredNorm{.x = x, .partials = partials});
  device.run(DivideByNorm{.x = x, .partials = partials, .out = x});
  const Tensor gram = empty(device, x.dtype(), {least, least}), square = empty(device, stats_dtype(x.dtype()), {least, least});
  Tensor from = x, to = empty(device, x.dtype(), x.shape());
  for (int64_t step = 0; step < steps; ++step) {
    const Operand as_it_is{.value = from}, transposed{.value = from, .transposed = true}, polynomial{.value = gram};
    device.run(Gemm{.a = tall ? transposed : as_it_is, .b = tall ? as_it_is : transposed, .out = gram, .accumulate = false});
    device.run(Gemm{.a = polynomial, .b = polynomial, .out = square, .accumulate = false});
    device.run(NewtonSchulzPolynomial{.gram = gram, .square = square, .a = kA, .b = kB, .c = kC});
    device.run(Gemm{.a = tall ? as_it_is : polynomial, .b = tall ? polynomial : as_it_is, .out = to, .accumulate = false});
    std::swap(from, to);
  }
  if (steps % 2 != 0) device.run(Convert{.x = from, .out = x});
}

double MuonMatrix::scale(MuonScale how) const {
  const auto out = static_cast<double>(rows), in = static_cast<double>(columns);
  return how == MuonScale::original ? std::sqrt(std::max(1.0, out / in)) : 0.2 * std::sqrt(std::max(out, in));
}

namespace {

// Returns the matrices of one parameter that the data ranks of `expert` have, without pieces and owner.
std::vector<MuonMatrix> matrices_of(const ParameterSpec& parameter, size_t index) {
  const int64_t matrices = parameter.matrices, each = parameter.shape[0] / matrices;
  std::vector<int64_t> parts = parameter.parts;
  if (parts.empty()) parts.assign(static_cast<size_t>(matrices), each);
  std::vector<MuonMatrix> out;
  int64_t begin = 0;
  for (const int64_t rows : parts) {
    out.push_back({.parameter = index,
                   .begin = begin,
                   .end = begin + rows,
                   .rows = rows * parameter.sharding.row_ranks(),
                   .columns = parameter.shape[1] * parameter.sharding.column_ranks()});
    begin += rows;
  }
  return out;
}

void choose_owners(std::vector<MuonMatrix>& matrices, int world) {
  const auto cost = [&](size_t i) {
    const MuonMatrix& m = matrices[i];
    return static_cast<double>(m.rows) * static_cast<double>(m.columns) * static_cast<double>(std::min(m.rows, m.columns));
  };
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{}, cost);
  std::vector<double> loads(static_cast<size_t>(world));
  for (const size_t i : order) {
    const auto least = std::ranges::min_element(loads);
    matrices[i].owner = static_cast<int>(least - loads.begin());
    *least += cost(i);
  }
}

}  // namespace

std::vector<MuonMatrix> muon_matrices(const Layout& layout, int data_ranks, const ModelRanks& ranks) {
  std::vector<MuonMatrix> out;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const int experts = layout.expert_ranks(bucket), holders = data_ranks / experts;
    const std::vector<Layout::Boundary> boundaries = layout.boundaries(bucket, holders);
    for (size_t i = bucket.first; i < bucket.last; ++i) {
      const ParameterSpec& parameter = layout.parameters()[i];
      if (!parameter.by_muon()) continue;
      const bool copied = parameter.sharding.split == Split::none;  // each tensor rank has the matrix, and computes by itself
      const auto row = [&](const Layout::Boundary& at) { return at.parameter < i ? 0 : at.parameter > i ? parameter.shape[0] : at.row; };
      for (int expert = 0; expert < experts; ++expert) {
        for (int copy = 0; copy < (copied ? ranks.tensor : 1); ++copy) {
          for (MuonMatrix& matrix : matrices_of(parameter, i)) {
            for (int tensor = copied ? copy : 0; tensor < (copied ? copy + 1 : ranks.tensor); ++tensor) {
              for (int holder = 0; holder < holders; ++holder) {
                const auto at = static_cast<size_t>(holder);
                const int64_t begin = std::max(matrix.begin, row(boundaries[at])), end = std::min(matrix.end, row(boundaries[at + 1]));
                const int rank = (holder * experts + expert) * ranks.tensor + tensor;
                if (begin < end) matrix.pieces.push_back({.rank = rank, .tensor = tensor, .begin = begin, .end = end});
              }
            }
            out.push_back(std::move(matrix));
          }
        }
      }
    }
  }
  choose_owners(out, data_ranks * ranks.tensor);
  return out;
}

int64_t muon_workspace(const Layout& layout, std::span<const MuonMatrix> matrices, int64_t world, Dtype dtype) {
  struct Needs {
    int64_t rows = 0, computed = 0, largest = 0;  // bytes of own rows, of matrices that it computes, and to compute one
  };
  std::vector<Needs> ranks(static_cast<size_t>(world));
  std::vector<int64_t> whole(layout.parameters().size());  // bytes of own rows by parameter; all of it in a world of one
  for (const MuonMatrix& matrix : matrices) {
    const int64_t value = dtype_bytes(dtype), columns = layout.parameters()[matrix.parameter].shape[1],
                  bytes = matrix.rows * matrix.columns * value;
    const int64_t least = std::min(matrix.rows, matrix.columns);
    const int64_t copies = world == 1 ? 1 : columns == matrix.columns ? 2 : 3;
    for (const MuonMatrix::Piece& piece : matrix.pieces)
      ranks[static_cast<size_t>(piece.rank)].rows += (piece.end - piece.begin) * columns * value;
    Needs& owner = ranks[static_cast<size_t>(matrix.owner)];
    owner.computed += bytes;
    owner.largest = std::max(owner.largest, copies * bytes + least * least * (value + dtype_bytes(stats_dtype(dtype))));
    whole[matrix.parameter] += bytes;
  }
  if (world == 1) return std::ranges::max(whole) + ranks[0].largest;
  int64_t most = 0;
  for (const Needs& rank : ranks) most = std::max(most, 2 * rank.rows + rank.computed + rank.largest);
  return most;
}

Muon::Muon(const Layout& layout, Mesh mesh, std::span<const ParameterShard> own, const MuonConfig& config, Dtype dtype, Backend& device)
    : device_(&device), mesh_(std::move(mesh)), config_(config), dtype_(dtype), parts_(own.size()) {
  const int world = mesh_.world.size(), here = mesh_.world.rank();
  const ModelRanks ranks = mesh_.ranks();
  std::map<size_t, size_t> shard_of;  // by parameter
  for (size_t i = 0; i < own.size(); ++i) shard_of.emplace(own[i].of->number(), i);
  const std::vector<MuonMatrix> matrices = muon_matrices(layout, mesh_.data.size(), ranks);
  none_ = matrices.empty();
  sent_bytes_.assign(static_cast<size_t>(world), 0), received_bytes_ = sent_bytes_;
  for (int peer = 0; peer < world; ++peer) {
    for (const MuonMatrix& matrix : matrices) {
      const int64_t columns = layout.parameters()[matrix.parameter].shape[1];
      for (const MuonMatrix::Piece& piece : matrix.pieces) {
        const int64_t bytes = (piece.end - piece.begin) * columns * dtype_bytes(dtype_);
        if (piece.rank != here || matrix.owner != peer) continue;
        const size_t shard = shard_of.at(matrix.parameter);
        const int64_t at = std::accumulate(sent_bytes_.begin(), sent_bytes_.end(), int64_t{0}) / dtype_bytes(dtype_);
        sent_.push_back({.shard = shard, .begin = piece.begin - own[shard].begin, .end = piece.end - own[shard].begin, .at = at});
        sent_bytes_[static_cast<size_t>(peer)] += bytes;
        parts_[shard].push_back({.begin = sent_.back().begin, .end = sent_.back().end, .scale = matrix.scale(config_.scale)});
      }
    }
  }
  for (std::vector<Rows>& parts : parts_) std::ranges::sort(parts, {}, &Rows::begin);
  if (alone()) return;
  for (const MuonMatrix& matrix : matrices) {
    if (matrix.owner != here) continue;
    const int64_t columns = layout.parameters()[matrix.parameter].shape[1];
    received_.push_back({.matrix = matrix, .at = std::vector<int64_t>(matrix.pieces.size()), .columns = columns});
    if (columns == matrix.columns || beside_.contains(matrix.rows)) continue;
    std::vector<int32_t> in, out;
    for (int64_t row = 0; row < matrix.rows; ++row) {
      for (int64_t tensor = 0; tensor < ranks.tensor; ++tensor) in.push_back(static_cast<int32_t>(tensor * matrix.rows + row));
    }
    for (int64_t tensor = 0; tensor < ranks.tensor; ++tensor) {
      for (int64_t row = 0; row < matrix.rows; ++row) out.push_back(static_cast<int32_t>(row * ranks.tensor + tensor));
    }
    const Shape shape{std::ssize(in)};
    beside_.emplace(matrix.rows,
                    std::pair{from_host(device, Dtype::i32, shape, in.data()), from_host(device, Dtype::i32, shape, out.data())});
  }
  int64_t at = 0;
  for (int peer = 0; peer < world; ++peer) {
    const int64_t begin = at;
    for (Received& one : received_) {
      for (size_t i = 0; i < one.at.size(); ++i) {
        const MuonMatrix::Piece& piece = one.matrix.pieces[i];
        if (piece.rank == peer) one.at[i] = std::exchange(at, at + (piece.end - piece.begin) * one.columns);
      }
    }
    received_bytes_[static_cast<size_t>(peer)] = (at - begin) * dtype_bytes(dtype_);
  }
}

void Muon::direct(size_t shard, const Tensor& momentum) const {
  for (const Rows& part : parts_[shard]) orthogonalize(momentum.slice(part.begin, part.end), config_.ns_steps);
}

// Puts the pieces one below the other, orthogonalizes the matrix, and puts them back.
void Muon::compute(const Received& one, const Tensor& message) const {
  Backend& device = message.device();
  const MuonMatrix& matrix = one.matrix;
  const Tensor below = empty(device, dtype_, {matrix.rows * (matrix.columns / one.columns), one.columns});
  const auto each_piece = [&](const auto& body) {
    int64_t row = 0;
    for (size_t i = 0; i < one.at.size(); ++i) {
      const int64_t rows = matrix.pieces[i].end - matrix.pieces[i].begin;
      body(message.slice(one.at[i], one.at[i] + rows * one.columns).view({rows, one.columns}), below.slice(row, row + rows));
      row += rows;
    }
  };
  each_piece([&](const Tensor& piece, const Tensor& place) { device.run(Convert{.x = piece, .out = place}); });
  if (one.columns == matrix.columns) {
    orthogonalize(below, config_.ns_steps);
  } else {
    const auto& [in, out] = beside_.at(matrix.rows);
    const Tensor whole = empty(device, dtype_, {matrix.rows, matrix.columns}), narrow = whole.view(below.shape());
    device.run(EmbeddingForward{.ids = in, .weight = below, .out = narrow});
    orthogonalize(whole, config_.ns_steps);
    device.run(EmbeddingForward{.ids = out, .weight = narrow, .out = below});
  }
  each_piece([&](const Tensor& piece, const Tensor& place) { device.run(Convert{.x = place, .out = piece}); });
}

void Muon::direct(const std::vector<Tensor>& momenta) const {
  const auto elements = [&](const std::vector<int64_t>& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) / dtype_bytes(dtype_);
  };
  Backend& device = *device_;
  const Tensor sent = empty(device, dtype_, {elements(sent_bytes_)}), received = empty(device, dtype_, {elements(received_bytes_)});
  const auto each = [&](const auto& body) {
    for (const Sent& rows : sent_) {
      const Tensor own = momenta[rows.shard].slice(rows.begin, rows.end);
      body(own, sent.slice(rows.at, rows.at + own.elements()).view(own.shape()));
    }
  };
  each([&](const Tensor& own, const Tensor& place) { device.run(Convert{.x = own, .out = place}); });
  const Communicator::Exchange there{.in = sent, .in_counts = sent_bytes_, .out = received, .out_counts = received_bytes_};
  mesh_.world.all_to_all({&there, 1}, Purpose::gradients);
  for (const Received& one : received_) compute(one, received);
  const Communicator::Exchange back{.in = received, .in_counts = received_bytes_, .out = sent, .out_counts = sent_bytes_};
  mesh_.world.all_to_all({&back, 1}, Purpose::parameters);
  each([&](const Tensor& own, const Tensor& place) { device.run(Convert{.x = place, .out = own}); });
}

}  // namespace mantissa
