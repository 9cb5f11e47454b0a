// Routes of GEMMs on a device: which code multiplies, which copies of operands are written first, and how far the result may be from the
// exact product. One table for the CUDA backend, which runs GEMMs, explain --device, which reports them, and tests, which hold them to
// their bounds.
//
// cuBLASLt multiplies column-major, so that our row-major product is its product with the operands exchanged. It has these GEMMs (its
// documentation, "cublasLtMatmul"):
//
//   operands                                      from              conditions
//   fp32 (never TF32), bf16                       any version       none
//   FP8, one fp32 scale per 128 or 128 x 128      12.9, on 9.0      TN: the contraction is contiguous in both; not 128 x 128 twice
//   FP8, one E8M0 scale per 32                    12.8, on 10.x     scales in the swizzled layout; on 12.x TN
//   E2M1, one E4M3 scale per 16                   12.8, on 10.x     scales in the swizzled layout; TN; the contraction a multiple of 32
//                                                 and 12.x
//   FP8 in general                                                  not E5M2 twice; pointers and rows of 16 bytes; sizes multiples of 16
//   groups of bf16 rows, sizes on the device      13.10, on 9.0     rows of 16 bytes
//                                                 and 10.x
//
// E2M1 codes, whose blocks are one or several of the other operand's 32, are multiplied as E4M3 codes with the same scales: E4M3 has all of
// their elements. Where their blocks lie across the contraction, as those of a weight in dgrad, they are multiplied as values: one scale
// for 32 rows would be exact only while the rows' own scales lie within 15 binades, which nobody promises. The scales of both tensors of
// NVFP4, powers of two, are a factor of their product.
//
// Groups need 13.10: libraries from 13.4.0 to 13.6.0 hang on 9.0 where calls share a workspace, and 13.10 is the first that promises the
// same bits to a row whatever rows are beside it (batch invariance). No GPU has confirmed them, so that they must be asked for
// (GemmDevice::grouped).
//
// Everything else is multiplied as the values that codes stand for, which bf16 holds exactly but for extreme scales: codes are dequantized
// before. That is reported as "emulated". Scales of native GEMMs are given to the library as they are, also extreme ones: whether it honors
// 2^-127 no GPU has shown.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

struct Gemm;
struct GroupedGemm;
struct GroupedWeightGradient;

// Versions of cuBLASLt as it numbers them itself: 120903 is 12.9.3. 0: there is no library.
struct GemmDevice {
  int architecture = 0;  // ten times the compute capability, 90 for 9.0; 0: a CPU
  int library = 0;
  bool native = true;    // codes may be multiplied as codes (precision.native_products)
  bool grouped = false;  // the library may multiply groups whose sizes only the device knows (precision.grouped_gemms)
};

// Takes "cpu" or "sm_80", with the library that explain supposes. Throws Error(usage) for another name.
GemmDevice gemm_device(const std::string& name);
inline constexpr int kSupposedLibrary = 131000;
std::string gemm_library_text(int version);  // "cuBLASLt 13.10"

// An operand as it lies in memory.
struct GemmOperandForm {
  Dtype dtype = Dtype::bf16;  // dtype of values
  Quantization how = {};      // format of codes; none: values
  bool transposed = false;    // like Operand::transposed
  int64_t alignment = 256;    // the address of codes is a multiple of it, in bytes; values that do not begin at 16 are copied before
};
struct GemmForm {  // out [m, n] (+)= op(a) [m, k] * op(b) [k, n]
  GemmOperandForm a, b;
  Dtype out = Dtype::bf16;
  int64_t m = 0, n = 0, k = 0;
};
GemmForm form_of(const Gemm& gemm);
// Form of a group that has all rows.
GemmForm form_of(const GroupedGemm& gemm);
GemmForm form_of(const GroupedWeightGradient& gemm);
std::string form_text(const GemmForm& form);  // "e4m3 1x32 * (e4m3 32x32)^T to bf16, 64 x 128 x 256"

enum class GemmPath : uint8_t {
  cpu,        // a GEMM of the CPU, in fp32
  plain,      // our kernel: decodes operands as it loads them, products and sums in fp32
  mma,        // our kernel for bf16 on tensor cores: groups of rows whose bounds are on the device, and what the library has not
  fp32,       // cuBLASLt
  bf16,       // cuBLASLt, on tensor cores
  fp8_block,  // cuBLASLt, codes with a scale per 128
  mxfp8,      // cuBLASLt, codes with a scale per 32
  nvfp4,      // cuBLASLt, codes of NVFP4
  grouped     // cuBLASLt, bf16 on tensor cores: groups of rows whose sizes are on the device, in one call
};
inline constexpr size_t kGemmPaths = 9;
const char* gemm_path_name(GemmPath path);
using GemmCounts = std::array<int64_t, kGemmPaths>;      // number of GEMMs that took each path
std::string gemm_counts_text(const GemmCounts& counts);  // "bf16 120, mma 48"; empty where nothing is counted, as on CPUs
constexpr bool is_native(GemmPath path) { return path == GemmPath::fp8_block || path == GemmPath::mxfp8 || path == GemmPath::nvfp4; }

// Reasons why codes are not multiplied as codes, or nothing by the library.
enum class GemmObstacle : uint8_t {
  none,
  switched_off,
  no_library,
  old_library,
  architecture,
  one_operand,  // the other one is values
  element_format,
  blocks,  // they do not lie along the contraction
  two_e5m2,
  two_tiles,
  sizes,  // a GEMM of codes does not take them
  rows,   // our kernel does not take them
  alignment,
  grouped,      // rows of several groups
  fp32_values,  // our kernel for tensor cores does not take them
  nothing       // an empty contraction, which the library refuses
};
// Returns a clause for "because ..."; empty for none.
std::string obstacle_text(GemmObstacle obstacle, const GemmForm& form, const GemmDevice& device);

struct GemmRoute {
  GemmPath path = GemmPath::cpu;
  GemmObstacle obstacle = GemmObstacle::none;
  int dequantized = 0;  // operands written as values before
  int widened = 0;      // operands whose E2M1 codes are written as E4M3 codes before
  int transposed = 0;   // operands whose codes are written transposed before
  int scales = 0;       // operands whose scales are written in the layout of the library before
  double bound = 0.0;   // limit of |error| / sum of |a b|, in fp32, before the result is rounded to its dtype

  bool operator==(const GemmRoute& other) const = default;
};
GemmRoute route_gemm(const GemmForm& form, const GemmDevice& device);
// Returns the form in which the device best reads a GEMM of columnwise codes: rowwise codes of the transposes where it multiplies codes
// along rows of memory only, else the form itself.
GemmForm along_rows(const GemmForm& form, const GemmDevice& device);
// Returns the route over our kernels, on a GPU where the library cannot multiply this because of `why`.
GemmRoute route_without_library(const GemmForm& form, const GemmDevice& device, GemmObstacle why);
// Returns true if the library multiplies groups whose sizes only the device knows, so that the host need not read them.
bool multiplies_groups(const GemmDevice& device);
// usual_rows: HostGroups::usual_rows, or 0 where only our kernel may multiply. From kRowsForLibrary on, the library multiplies one group
// after the other, unless it takes all at once.
GemmRoute route_grouped_gemm(const GemmForm& of_a_group, const GemmDevice& device, int64_t usual_rows = 0);
inline constexpr int64_t kRowsForLibrary = 512;

// Returns the length of the blocks that a native GEMM of these codes has along its contraction.
int64_t native_block(const GemmForm& form);

}  // namespace mantissa
