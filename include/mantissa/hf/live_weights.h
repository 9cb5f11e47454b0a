// Gathers what forward multiplies by in a model that trains, from the ranks that share it to rank 0: codes and scales as bytes, values in
// their dtype.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "mantissa/base/progressed.h"
#include "mantissa/comm/mesh.h"
#include "mantissa/hf/forward_weights.h"
#include "mantissa/nn/parameter.h"

namespace mantissa {

// All ranks of the mesh construct it and make the same calls; rank 0 writes. The ranks that hold the first replica send what is read, the
// others wait in at_writer(). Parameters must not change meanwhile.
class LiveWeights : public ForwardReader {
 public:
  // Set and plan must outlive this. progressed is called between chunks.
  LiveWeights(const ParameterSet& parameters, const PrecisionPlan& plan, const Mesh& mesh, Progressed progressed = {});

  std::string where() const override { return "the model in training"; }
  void read(const std::string& parameter, int64_t begin, int64_t end, std::span<float> out) override;
  std::vector<std::byte> codes(const std::string& parameter, int64_t begin, int64_t end) override;
  std::vector<std::byte> scales(const std::string& parameter, int64_t begin, int64_t end) override;
  void at_writer(const std::function<void()>& body) override;

 private:
  enum class Kind { values, codes, scales };
  // Rows of a rank that lie in the rows asked for: `row` of these is its first, from column `column` on.
  struct Piece {
    int64_t begin, end, row, column;
  };
  struct Rows {
    const Parameter& of;
    int64_t begin, end;  // of the whole tensor, as it is stored
    Kind kind;
  };
  static int64_t row_bytes(const Rows& rows, int64_t columns);
  bool writes() const { return world_.rank() == 0; }
  std::vector<Piece> pieces(const Rows& rows, int rank) const;
  std::vector<std::byte> own_bytes(const Rows& rows) const;
  std::vector<std::byte> gathered(const Rows& rows) const;
  std::vector<std::byte> joined(const Rows& rows, std::span<const std::byte> by_rank) const;
  const Parameter& parameter_of(const std::string& name) const;

  const ParameterSet& parameters_;
  Communicator world_, replica_;  // replica_: those that together hold one model
  int tensor_ranks_;
  Progressed progressed_;
  std::unique_ptr<Backend> device_;  // of the writer
};

}  // namespace mantissa
