// Muon (Jordan et al. 2024): the momentum of each matrix, orthogonalized by Newton-Schulz, is the direction in which it is updated.
//
// A matrix is a part of a fused weight (q, k and v; gate and up), of every expert for itself, and whole: as a checkpoint of Hugging Face
// has it, however ranks share it. The momentum is sharded by rows like all of the optimizer's state, so the ranks send the rows of a matrix
// to one of them, which computes its direction and sends the rows back. So the bits are those of one process, and no matrix is computed
// twice.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "comm/mesh.h"
#include "mantissa/config/run_config.h"
#include "nn/shards.h"

namespace mantissa {

// Replaces x [R, C], which need not be scaled, by an approximation of the nearest matrix with orthonormal rows or columns: `steps` steps of
// Newton-Schulz with the quintic of torch.optim.Muon, in the dtype of x, with singular values from about 0.7 to 1.2.
void orthogonalize(const Tensor& x, int64_t steps);

// A matrix and who has its rows.
struct MuonMatrix {
  size_t parameter;       // in the order of the layout
  int64_t begin, end;     // rows of the parameter on each rank that shares the matrix
  int64_t rows, columns;  // size of the whole matrix
  int owner = 0;          // rank of the world that computes it
  // Rows of the parameter that a rank of the world owns, in the order of the tensor ranks, then of the rows.
  struct Piece {
    int rank, tensor;
    int64_t begin, end;
  };
  std::vector<Piece> pieces = {};

  double scale(MuonScale how) const;
};

// Returns the matrices of all ranks, in the order of the parameters. Each goes to the rank that has least to do so far, the largest first.
std::vector<MuonMatrix> muon_matrices(const Layout& layout, int data_ranks, const ModelRanks& ranks);

// Returns the bytes that the rank which needs most allocates for directions, beside what its kernels do.
int64_t muon_workspace(const Layout& layout, std::span<const MuonMatrix> matrices, int64_t world, Dtype dtype);

class Muon {
 public:
  // `own` are the shards of this rank. Directions are computed in `dtype`.
  Muon(const Layout& layout, Mesh mesh, std::span<const ParameterShard> own, const MuonConfig& config, Dtype dtype, Backend& device);

  // Rows of an own shard that belong to one matrix, and the factor of their update.
  struct Rows {
    int64_t begin, end;
    double scale;
  };
  const std::vector<Rows>& parts(size_t shard) const { return parts_[shard]; }  // none: by AdamW
  // Says whether no rank has such a matrix, and whether this rank has all of every one.
  bool none() const { return none_; }
  bool alone() const { return mesh_.world.size() == 1; }
  Dtype dtype() const { return dtype_; }
  const MuonConfig& config() const { return config_; }

  // Replace momenta in dtype() by directions: that of one shard in a world of one; or those of all own shards (undefined: by AdamW), a call
  // of all ranks together.
  void direct(size_t shard, const Tensor& momentum) const;
  void direct(const std::vector<Tensor>& momenta) const;

 private:
  struct Sent {  // rows of an own shard, at an element of the message
    size_t shard;
    int64_t begin, end, at;
  };
  struct Received {  // a matrix that this rank computes, and where its pieces lie in the message, in their order
    MuonMatrix matrix;
    std::vector<int64_t> at;
    int64_t columns;  // width of a piece
  };
  void compute(const Received& one, const Tensor& message) const;

  Backend* device_;
  Mesh mesh_;
  MuonConfig config_;
  Dtype dtype_;
  bool none_ = false;
  std::vector<std::vector<Rows>> parts_;  // by own shard
  std::vector<Sent> sent_;
  std::vector<Received> received_;
  std::vector<int64_t> sent_bytes_, received_bytes_;  // by rank
  // Tensor ranks that divide columns send matrices side by side, which come one below the other: indices of rows, viewed in the width of a
  // piece, for each way, by the rows of a matrix.
  std::map<int64_t, std::pair<Tensor, Tensor>> beside_;
};

}  // namespace mantissa
