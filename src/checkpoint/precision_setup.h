// Records the precision plan of a run in its checkpoints, and compares it with that of the run that loads one.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/quantized_tensor.h"
#include "nn/parameter.h"

namespace mantissa {

// Hashes quantized tensors independently of how they are divided into shards.

// Sums of xxh64 mod 2^64 over cells of 32 x 32 elements, or as many more as make whole blocks in either direction; the last cell of a row
// or column may be short. Where the matrices of a grouped weight are not whole cells, a cell has gcd(32, rows of a matrix) rows, so that
// none lies in two matrices. A cell is hashed as its code bytes by row, then its scale bytes by row; for `values` as the fp32 values that
// they stand for, by row. Its seed is (row of cells) * (cells in a row) + (column of cells) of the whole tensor, so the sums of shards add
// up to its sums.
struct CodeSums {
  uint64_t codes = 0, values = 0;

  CodeSums& operator+=(const CodeSums& other) {
    codes += other.codes;
    values += other.values;
    return *this;
  }
  bool operator==(const CodeSums&) const = default;
};

// Locates a shard in the whole tensor. Rows from `rows` on are not counted (padding); first_row and first_col must be boundaries of cells.
// Throws Error(internal) otherwise, if the shard has fewer rows, or if a cell is not whole blocks, as those of tiles across two matrices.
struct CodePlace {
  int64_t rows;
  int64_t columns;  // width of the whole tensor
  int64_t first_row = 0, first_col = 0;
  int64_t matrix_rows = 0;  // rows of each matrix of a grouped weight [E * matrix_rows, columns]; 0: it is not grouped
};
CodeSums code_sums(const QuantizedTensor& shard, const CodePlace& place);

// Hashes by matrix: adds to sums[i] what the shard holds of matrix i of a grouped weight, or everything to sums[0] without one. The sums
// together equal code_sums().
void add_code_sums(const QuantizedTensor& shard, const CodePlace& place, std::span<CodeSums> sums);

// Says what a checkpoint is loaded for. resume_changed: under checkpoint.allow_recipe_change; use: a new run from its weights, evaluation,
// generation.
enum class LoadFor { resume, resume_changed, use };

// Identifies the codes of a weight by their sums.
struct WeightCodes {
  std::string how;             // "e4m3 32x32 rceil"
  std::vector<CodeSums> sums;  // one, or for a grouped weight one for each expert
};
using CodesByWeight = std::map<std::string, WeightCodes>;  // by parameter that is kept as codes

// Hashes the shards that this rank owns and sums over all ranks, which call it together.
CodesByWeight codes_by_weight(const ParameterSet& parameters, const PrecisionPlan& plan, const std::vector<ParameterShard>& own,
                              const Communicator& ranks = {});

// Returns the manifest's "plan": PrecisionPlan::to_json() and, by parameter, how its codes are made, "codes_sum", "values_sum" and, of a
// grouped weight, the sums by expert: "codes_by_expert", "values_by_expert". The sum of the values survives requantization, where a scale
// may drop by one.
std::string plan_manifest(const PrecisionPlan& plan, const CodesByWeight& codes);

// Returns "layers.{0..1}.attn.qkv: mxfp8 -> high" for modules whose GEMMs read other formats under `plan` than in the manifest's. Throws
// Error(usage) that names them, unless resume_changed; the output projection may always differ, because its parameter is high precision
// either way. Throws Error(data) if `saved` is no plan of this model.
std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose);

std::string precision_text(const PrecisionConfig& config);  // "bf16, mxfp8, 2 rules, fp8_output_proj"

// Compares the codes, made from the loaded masters, with those of the manifest's plan, for every weight that has the formats it had then.
// Throws Error(data) that names the first that differs, and of a grouped weight its experts; only warns for resume_changed. This is no
// CheckpointDamage: if this build quantizes differently, older checkpoints would differ as well, so the search for a good one ends.
void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const CodesByWeight& codes, const std::string& source,
                        LoadFor purpose);

// Returns the weights whose codes have the same format in both manifests' plans but differ, and how: "e4m3 32x32 rceil, experts 1, 3 of 8".
struct CodesDifference {
  std::string weight, what;
};
std::vector<CodesDifference> codes_that_differ(const std::string& plan, const std::string& other);

}  // namespace mantissa
