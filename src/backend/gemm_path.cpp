#include "mantissa/backend/gemm_path.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr int kFirstWithMx = 120800, kFirstWithBlocks = 120900, kFirstWithGroups = 131000;

bool is_codes(const GemmOperandForm& operand) { return static_cast<bool>(operand.how); }

// The bound of products and sums in fp32, in any order: 1e-6, which grows with the contraction.
double fp32_bound(int64_t k) { return 1e-6 * std::max(1.0, static_cast<double>(k) / 4096); }

// A step of a tensor core aligns its products and the sum so far to the largest of them, cuts what is below the 24 bits of fp32 and one
// more (8.x, 8 products) or two more (from 9.0 on, 16), and cuts its result to 24. Each of its terms is off by one unit of what is kept, at
// most. arXiv 2512.07004 is about this; no chip has confirmed these numbers. FP8 on 10.x and 12.x is supposed to do the same.
double bf16_bound(int64_t k, int architecture) {
  const int products = architecture < 90 ? 8 : 16;
  const double unit = architecture < 90 ? 0x1p-24 : 0x1p-25, of_result = 0x1p-23;
  return static_cast<double>(ceil_div(k, int64_t{products})) * ((products + 1) * unit + of_result);
}

// FP8 on 9.0 keeps 13 bits below the largest of 32 products and of the sum so far, over 128 elements; these sums are added in fp32
// (DeepSeek-V3, arXiv 2412.19437, 3.5.2).
double fp8_bound_of_hopper(int64_t k) { return 4.0 * 33 / (1 << 13) + fp32_bound(k); }

GemmObstacle obstacle_of_library(const GemmForm& form, const GemmDevice& device) {
  if (device.library == 0) return GemmObstacle::no_library;
  if (form.k == 0) return GemmObstacle::nothing;
  return GemmObstacle::none;
}

// Returns the multiple of which the rows of op(a), or the columns of op(b), must be: tiles are to be whole.
int64_t outer_multiple(const GemmOperandForm& operand) { return std::max<int64_t>(16, operand.how.tiles() ? operand.how.block() : 1); }

bool is_blackwell_of_servers(const GemmDevice& device) { return device.architecture / 10 == 10; }
bool is_blackwell_of_desktops(const GemmDevice& device) { return device.architecture / 10 == 12; }

bool is_nvfp4(const Quantization& how) { return how.format == Format::nvfp4; }

// Returns the multiple of which the contraction of a native GEMM must be: whole blocks, and rows of 16 bytes.
int64_t depth_multiple(const GemmForm& form) { return std::max<int64_t>(32, native_block(form)); }

// Returns true if these are FP8 codes in such blocks, or E2M1 codes that E4M3 codes in one or several blocks of 32 stand for.
bool fits_fp8(const Quantization& how, int64_t block) {
  if (how.format == Format::e2m1) return block == 32 && how.block() % block == 0 && !how.tiles();
  return (how.format == Format::e4m3 || how.format == Format::e5m2) && how.block() == block;
}

// Reasons against a product of codes: first those of the operands, whatever their blocks, then those of device and library.
GemmObstacle obstacle_of_codes(const GemmForm& form, const GemmDevice& device) {
  if (!is_codes(form.a) || !is_codes(form.b)) return GemmObstacle::one_operand;
  const int64_t block = native_block(form);
  const bool nvfp4 = is_nvfp4(form.a.how) && is_nvfp4(form.b.how);
  if (!nvfp4 && (!fits_fp8(form.a.how, block) || !fits_fp8(form.b.how, block))) return GemmObstacle::element_format;
  if (form.a.how.format == Format::e5m2 && form.b.how.format == Format::e5m2) return GemmObstacle::two_e5m2;
  const auto along = [](const Quantization& how, bool rows) { return how.tiles() || (rows ? how.rowwise() : how.columnwise()); };
  if (!along(form.a.how, !form.a.transposed) || !along(form.b.how, form.b.transposed)) return GemmObstacle::blocks;
  if (form.m % outer_multiple(form.a) != 0 || form.n % outer_multiple(form.b) != 0 || form.k % depth_multiple(form) != 0)
    return GemmObstacle::sizes;
  if (std::min(form.a.alignment, form.b.alignment) % 16 != 0) return GemmObstacle::alignment;
  if (nvfp4 || block == 32) {
    if (!is_blackwell_of_servers(device) && !is_blackwell_of_desktops(device)) return GemmObstacle::architecture;
    if (device.library < kFirstWithMx) return GemmObstacle::old_library;
  } else {
    if (block != 128 || device.architecture != 90) return GemmObstacle::architecture;
    if (device.library < kFirstWithBlocks) return GemmObstacle::old_library;
    if (form.a.how.tiles() && form.b.how.tiles()) return GemmObstacle::two_tiles;
  }
  return device.native ? GemmObstacle::none : GemmObstacle::switched_off;
}

// "n is 50257, no multiple of 16"
std::string ragged_size(const GemmForm& form) {
  for (const auto& [name, size, unit] :
       {std::tuple{'m', form.m, outer_multiple(form.a)}, {'n', form.n, outer_multiple(form.b)}, {'k', form.k, depth_multiple(form)}}) {
    if (unit > 0 && size % unit != 0) return text(name, " is ", size, ", not a multiple of ", unit);
  }
  return "";
}

int operands_of_codes(const GemmForm& form) { return (is_codes(form.a) ? 1 : 0) + (is_codes(form.b) ? 1 : 0); }

GemmRoute on_cpu(const GemmForm& form) {
  const GemmObstacle obstacle = operands_of_codes(form) > 0 ? GemmObstacle::architecture : GemmObstacle::none;
  return {.path = GemmPath::cpu, .obstacle = obstacle, .dequantized = operands_of_codes(form), .bound = fp32_bound(form.k)};
}

// Rows in memory are copied by 16 bytes.
GemmObstacle obstacle_of_mma(const GemmForm& form) {
  for (const GemmOperandForm& operand : {form.a, form.b}) {
    if (!is_codes(operand) && operand.dtype != Dtype::bf16) return GemmObstacle::fp32_values;
  }
  const int64_t row_of_a = form.a.transposed ? form.m : form.k, row_of_b = form.b.transposed ? form.k : form.n;
  return row_of_a % 8 == 0 && row_of_b % 8 == 0 ? GemmObstacle::none : GemmObstacle::rows;
}

// Our kernels: on tensor cores unless there is `hindrance`.
GemmRoute without_library(const GemmForm& form, const GemmDevice& device, GemmObstacle hindrance, GemmObstacle why) {
  if (hindrance != GemmObstacle::none) return {.path = GemmPath::plain, .obstacle = why, .bound = fp32_bound(form.k)};
  return {.path = GemmPath::mma, .obstacle = why, .dequantized = operands_of_codes(form), .bound = bf16_bound(form.k, device.architecture)};
}

GemmRoute native(const GemmForm& form, const GemmDevice& device) {
  const bool nvfp4 = is_nvfp4(form.a.how), mx = nvfp4 || native_block(form) == 32, by_depth = !mx || is_blackwell_of_desktops(device);
  const auto is_e2m1 = [](const GemmOperandForm& operand) { return operand.how.format == Format::e2m1 ? 1 : 0; };
  return {.path = nvfp4 ? GemmPath::nvfp4
                  : mx  ? GemmPath::mxfp8
                        : GemmPath::fp8_block,
          .widened = is_e2m1(form.a) + is_e2m1(form.b),
          .transposed = by_depth ? (form.a.transposed ? 1 : 0) + (form.b.transposed ? 0 : 1) : 0,
          .scales = 2,
          .bound = mx ? bf16_bound(form.k, device.architecture) : fp8_bound_of_hopper(form.k)};
}

// Codes are written as values of the other operand's dtype, or as bf16 where both are codes.
GemmRoute of_values(const GemmForm& form, const GemmDevice& device, GemmObstacle obstacle) {
  const Dtype dtype = !is_codes(form.a) ? form.a.dtype : !is_codes(form.b) ? form.b.dtype : Dtype::bf16;
  GemmRoute out{.path = dtype == Dtype::bf16 ? GemmPath::bf16 : GemmPath::fp32, .obstacle = obstacle};
  out.dequantized = operands_of_codes(form);
  out.bound = out.path == GemmPath::bf16 ? bf16_bound(form.k, device.architecture) : fp32_bound(form.k);
  return out;
}

GemmOperandForm form_of(const Operand& operand) {
  GemmOperandForm out{.transposed = operand.transposed};
  const auto aligned_to = [](const void* address) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    return static_cast<int64_t>(number == 0 ? 256 : std::min<uintptr_t>(number & -number, 256));
  };
  if (const QuantizedTensor* codes = operand.quantized()) {
    out.how = codes->how;
    out.alignment = aligned_to(codes->codes.device_bytes());
  } else {
    out.dtype = operand.dense().dtype();
  }
  return out;
}

GemmForm form_of_sides(const auto& gemm) {
  return {
      .a = form_of(gemm.a), .b = form_of(gemm.b), .out = gemm.out.dtype(), .m = gemm.out.dim(0), .n = gemm.out.dim(1), .k = gemm.a.cols()};
}

}  // namespace

GemmForm form_of(const GroupedGemm& gemm) { return form_of_sides(gemm); }
GemmForm form_of(const GroupedWeightGradient& gemm) {
  return {.a = form_of(Operand{.value = gemm.a, .transposed = true}),
          .b = form_of(Operand{.value = gemm.b}),
          .out = gemm.out.dtype(),
          .m = shape_of(gemm.a)[1],
          .n = gemm.out.dim(1),
          .k = shape_of(gemm.a)[0]};
}
GemmForm form_of(const Gemm& gemm) { return form_of_sides(gemm); }

std::string form_text(const GemmForm& form) {
  const auto side = [](const GemmOperandForm& o) {
    const std::string what = o.how ? text(o.how) : text(o.dtype);
    return o.transposed ? text('(', what, ")^T") : what;
  };
  return text(side(form.a), " * ", side(form.b), " to ", form.out, ", ", form.m, " x ", form.n, " x ", form.k);
}

GemmDevice gemm_device(const std::string& name) {
  constexpr std::array kArchitectures = {80, 86, 89, 90, 100, 103, 120};
  if (name == "cpu") return {};
  for (const int architecture : kArchitectures)
    if (name == text("sm_", architecture)) return {.architecture = architecture, .library = kSupposedLibrary};
  fail(ExitCode::usage, "there is no device \"", name,
       "\"; the devices are cpu, sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120 and here");
}

std::string gemm_library_text(int version) { return text("cuBLASLt ", version / 10000, '.', version / 100 % 100); }

std::string gemm_counts_text(const GemmCounts& counts) {
  std::string out;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) out += text(out.empty() ? "" : ", ", gemm_path_name(static_cast<GemmPath>(i)), ' ', counts[i]);
  }
  return out;
}

const char* gemm_path_name(GemmPath path) {
  switch (path) {
    case GemmPath::cpu: return "cpu";
    case GemmPath::plain: return "plain";
    case GemmPath::mma: return "mma";
    case GemmPath::fp32: return "fp32";
    case GemmPath::bf16: return "bf16";
    case GemmPath::fp8_block: return "fp8_block";
    case GemmPath::mxfp8: return "mxfp8";
    case GemmPath::nvfp4: return "nvfp4";
    case GemmPath::grouped: return "grouped";
  }
  return "unknown";
}

std::string obstacle_text(GemmObstacle obstacle, const GemmForm& form, const GemmDevice& device) {
  const std::string gpu = device.architecture == 0 ? "a CPU" : text("sm_", device.architecture);
  const Quantization& codes = is_codes(form.a) ? form.a.how : form.b.how;
  const int64_t block = is_codes(form.a) && is_codes(form.b) ? native_block(form) : codes.block();
  const std::string scales = text("scales per ", block);
  switch (obstacle) {
    case GemmObstacle::none: return "";
    case GemmObstacle::switched_off: return "precision.native_products is never";
    case GemmObstacle::no_library: return "there is no cuBLASLt";
    case GemmObstacle::old_library:
      return text(gemm_library_text(device.library), " has no ", scales, ", which came with ", block == 128 ? "12.9" : "12.8");
    case GemmObstacle::architecture: return text(gpu, " has no ", is_nvfp4(codes) ? "FP4" : "FP8", " GEMMs with ", scales);
    case GemmObstacle::one_operand: return "one operand is high-precision";
    case GemmObstacle::element_format: return "the elements are not FP8 with blocks of one length, nor both NVFP4";
    case GemmObstacle::blocks: return "blocks do not lie along the contraction";
    case GemmObstacle::two_e5m2: return "E5M2 is not multiplied by E5M2";
    case GemmObstacle::two_tiles: return "tiles are not multiplied by tiles";
    case GemmObstacle::sizes: return ragged_size(form);
    case GemmObstacle::rows: return "rows of an operand are not a multiple of 8 elements";
    case GemmObstacle::alignment: return "codes are not aligned to 16 bytes";
    case GemmObstacle::grouped: return "groups of rows are multiplied as values";
    case GemmObstacle::fp32_values: return "mantissa's kernel for groups multiplies only bf16 on tensor cores";
    case GemmObstacle::nothing: return "the contraction is empty";
  }
  return "unknown";
}

GemmRoute route_gemm(const GemmForm& form, const GemmDevice& device) {
  if (device.architecture == 0) return on_cpu(form);
  if (const GemmObstacle found = obstacle_of_library(form, device); found != GemmObstacle::none)
    return route_without_library(form, device, found);
  if (!is_codes(form.a) && !is_codes(form.b)) return of_values(form, device, GemmObstacle::none);
  const GemmObstacle found = obstacle_of_codes(form, device);
  return found == GemmObstacle::none ? native(form, device) : of_values(form, device, found);
}

GemmForm along_rows(const GemmForm& form, const GemmDevice& device) {
  GemmForm out = form;
  for (GemmOperandForm* const side : {&out.a, &out.b}) {
    if (side->how.columnwise()) side->how = side->how.transposed(), side->transposed = !side->transposed;
  }
  return route_gemm(out, device).path == GemmPath::fp8_block ? out : form;
}

GemmRoute route_without_library(const GemmForm& form, const GemmDevice& device, GemmObstacle why) {
  return without_library(form, device, form.k > 0 ? obstacle_of_mma(form) : GemmObstacle::nothing, why);
}

bool multiplies_groups(const GemmDevice& device) {
  return device.grouped && device.library >= kFirstWithGroups && (device.architecture == 90 || is_blackwell_of_servers(device));
}

GemmRoute route_grouped_gemm(const GemmForm& of_a_group, const GemmDevice& device, int64_t usual_rows) {
  if (device.architecture == 0) return on_cpu(of_a_group);
  const GemmObstacle grouped = operands_of_codes(of_a_group) > 0 ? GemmObstacle::grouped : GemmObstacle::none;
  const GemmObstacle hindrance = obstacle_of_mma(of_a_group);
  if (usual_rows > 0 && multiplies_groups(device) && hindrance == GemmObstacle::none &&
      of_a_group.n * dtype_bytes(of_a_group.out) % 16 == 0) {
    GemmRoute out = of_values(of_a_group, device, grouped);
    out.path = GemmPath::grouped;
    return out;
  }
  if (usual_rows >= kRowsForLibrary && obstacle_of_library(of_a_group, device) == GemmObstacle::none)
    return of_values(of_a_group, device, grouped);
  return without_library(of_a_group, device, hindrance, hindrance == GemmObstacle::none ? grouped : hindrance);
}

int64_t native_block(const GemmForm& form) { return std::min(form.a.how.block(), form.b.how.block()); }

}  // namespace mantissa
