// Faults of operands that contracts leave open.
#pragma once

#include <map>
#include <set>
#include <string>

namespace mantissa::test {

// Faults that a contract leaves open, by kernel: all others of an operand are refused.
inline const std::map<std::string, std::set<std::string>>& left_open() {
  static const std::map<std::string, std::set<std::string>> all{
      {"Fill", {"out: dtype", "out: floating dtype", "out: rank", "out: rows"}},
      {"Convert", {"out: floating dtype", "x: floating dtype"}},
      {"RandomNormal", {"out: floating dtype", "out: rank", "out: rows"}},
      {"Add", {"out: memory of a", "out: memory of b"}},
      {"TreeSum", {"others: rows"}},
      {"AddBias", {"x: memory of out"}},
      {"AddGroupedBias", {"out: memory of bias", "row_weights: memory of out", "x: memory of out"}},  // the first two of one element
      {"GroupedBiasGradient", {"dy: floating dtype", "dy: rows"}},                                    // without weights of rows
      {"Gemm", {"out: floating dtype"}},                                                              // values or stats
      {"Quantize", {"second is missing", "x: floating dtype", "x: rows"}},                            // rows up to whole blocks
      {"Dequantize", {"out: columns", "out: floating dtype"}},                                        // columns of blocks that are one wide
      {"QuantizationError", {"x: floating dtype", "x: rows"}},
      {"Simulate", {"out: floating dtype", "out: rows", "x: floating dtype", "x: rows"}},  // fp32 of either; rows of zeros behind x
      {"SumRows", {"x: floating dtype", "x: rows"}},                                       // fp32 and bf16 values have the same stats
      {"EmbeddingForward", {"weight: rows"}},
      {"EmbeddingBackward", {"dweight: rows", "dy: floating dtype"}},
      {"Rope", {"table: rows", "y: memory of x"}},
      {"CrossEntropy", {"dlogits: memory of logits", "logits: columns", "logits: floating dtype"}},  // the last two without dlogits
      {"CrossEntropyShare", {"logits: columns", "logits: floating dtype"}},  // fp32 and bf16 values have the same stats
      {"CrossEntropyOfShares", {"dlogits: memory of logits", "logits: columns", "logits: floating dtype", "sums: rows"}},
      {"DistillationOfShares", {"dlogits: memory of logits", "dlogits: memory of teacher", "sums: rows"}},
      {"RouteForward", {"counts: rows"}},
      {"RouteBackward", {"counts: rows"}},
      {"RouterLosses", {"counts: rows"}},
      {"DispatchTable", {"assignments: rows", "offsets: rows"}},  // room for more than there is
      {"ArrivalTable", {"assignments: rows", "rows: rows"}},      // as many as counts say, which the kernel reads
      {"SumCounts", {"counts: rows"}},
      {"Permute", {"x: rows"}},
      {"Unpermute", {"rows: columns", "x: rows"}},
      {"GroupedGemm", {"a: floating dtype", "out: floating dtype"}},  // values or stats, and values of either dtype beside codes
      {"AdamW", {"value: floating dtype"}},
      {"MuonMomentum", {"grad: floating dtype", "m: floating dtype", "out: floating dtype"}},  // m may be bf16 beside any
      {"DivideByNorm", {"out: memory of x"}},
      {"NewtonSchulzPolynomial", {"gram: floating dtype"}},  // fp32 and bf16 values have the same stats
      {"MuonUpdate", {"direction: floating dtype", "master: floating dtype", "value: floating dtype"}},
      {"FinishGradients", {"flags: rows", "partials: rows"}},
      {"Sum", {"x: floating dtype", "x: rank", "x: rows"}},
      {"SquaredNorm", {"x: columns", "x: floating dtype", "x: rank", "x: rows"}},
  };
  return all;
}

}  // namespace mantissa::test
