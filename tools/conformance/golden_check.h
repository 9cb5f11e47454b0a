// Checks that a backend computes as golden vectors say: Quantize, Dequantize, SwizzleScales and Gemm of quantized operands, bit for bit,
// the GEMM to gemm_tolerance().
#pragma once

#include <string>
#include <string_view>

#include "mantissa/backend/backend.h"
#include "tools/conformance/golden_file.h"

namespace mantissa::tools {

// Returns how far a GEMM of depth k with fp32 accumulation may be from the exact one, as a share of the sum of magnitudes: data of one sign
// that is summed in sequence is off by 5.7e-7 at a depth of 4096, and errors grow with it.
double gemm_tolerance(int64_t k);

// Returns the first section that differs, its first differing index and both values, as in "codes: [3, 17] is 0x3a, expected 0x3b; 12 of
// 2048 differ"; empty if none does. Sections: scales, codes, dequantized, swizzled; GEMM.
std::string conformance_difference(const GoldenFile& file, Backend& device);

// In worked_examples.cpp. Like conformance_difference(), for a file of readable blocks: a JSON list of {"title", "fmt", "mode", "input",
// "scale_code", "codes", "dequant"}, where the rest of a block of 32 is zeros. Inputs are taken as bf16 and, except under flashinfer, as
// fp32. The section is followed by the title. Throws Error(data) for a file that is something else.
std::string worked_examples_difference(std::string_view json, const std::string& source, Backend& device);

}  // namespace mantissa::tools
