// Checks that a backend computes as golden vectors say: Quantize, Dequantize, SwizzleScales and Gemm of quantized operands, bit for bit,
// the GEMM to gemm_tolerance().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa::tools {

// Golden vectors: what a codec or a GEMM must give, bit for bit, made by an independent implementation. Little-endian; a header of 64
// bytes, then the payload without padding.
//
// .mxg, one quantized matrix. "MXG1", then u32: version 1; format 0 E4M3, 1 E5M2, 2 E2M1; rule 0 floor, 1 rceil, 2 flashinfer (E2M1 from
// bf16 only), 3 even, 4 ceil, 5 mse; input 0 bf16, 1 fp32; blocks 0 1x32, 1 32x1, 2 32x32; rows R; columns C; flags 1 dequantized values,
// 2 swizzled scales, 4 the input holds NaN or Inf; bytes of scales; of codes; of swizzled scales; crc32 (zlib) of the payload; three zeros.
// Payload: input bits [R, C]; scales, compact; codes [R, C], E2M1 two a byte; if flagged fp32 bits [R, C] of the dequantized values, any
// NaN standing for NaN; if flagged the scales in the 128x4 layout. Named <format>_<rule>_<kind>_<row|col|tile>.mxg, with _f32 before the
// last part for fp32 input, or swizzle_<R>x<C>_<row|col>.mxg.
//
// .mxm, one GEMM D[m, n] = sum over k of A[m, k] * B[n, k], both rowwise rceil. "MXM1", then u32: version 1; formats of A and B (0, 1);
// M; N; K; bytes of A's scales; of B's; three zeros; crc32; three zeros. Payload: scales u8 [M, K/32] and codes u8 [M, K] of A, the same
// of B, D fp64 [M, N], S fp64 [M, N] = sum of |A * B|. Named gemm_<A>_<B>.mxm.

struct GoldenQuantization {
  Quantization how;
  Dtype input_dtype = Dtype::bf16;
  int64_t rows = 0, columns = 0;
  bool nonfinite = false;
  std::vector<uint8_t> input;  // bytes of bf16 or fp32
  std::vector<uint8_t> scales, codes;
  std::vector<uint32_t> dequantized;  // empty if absent
  std::vector<uint8_t> swizzled;      // empty if absent
};

struct GoldenGemm {
  Format a_format = Format::none, b_format = Format::none;
  int64_t m = 0, n = 0, k = 0;
  std::vector<uint8_t> a_scales, a_codes, b_scales, b_codes;
  std::vector<double> product, magnitude;  // D, S
};

using GoldenFile = std::variant<GoldenQuantization, GoldenGemm>;

// `name` without folders decides by its ending. Throws Error(data) whose message begins with "name", "header" or "payload" unless the file
// is exactly as described above, its name included.
GoldenFile parse_golden_file(const std::string& name, std::string_view bytes);

// Returns how far a GEMM of depth k with fp32 accumulation may be from the exact one, as a share of the sum of magnitudes: data of one sign
// that is summed in sequence is off by 5.7e-7 at a depth of 4096, and errors grow with it.
double gemm_tolerance(int64_t k);

// Returns the first section that differs, its first differing index and both values, as in "codes: [3, 17] is 0x3a, expected 0x3b; 12 of
// 2048 differ"; empty if none does. Sections: scales, codes, dequantized, swizzled; GEMM.
std::string conformance_difference(const GoldenFile& file, Backend& device);

// Like conformance_difference(), for a file of readable blocks: a JSON list of {"title", "fmt", "mode", "input", "scale_code", "codes",
// "dequant"}, where the rest of a block of 32 is zeros. Inputs are taken as bf16 and, except under flashinfer, as fp32. The section is
// followed by the title. Throws Error(data) for a file that is something else.
std::string worked_examples_difference(std::string_view json, const std::string& source, Backend& device);

}  // namespace mantissa::tools
