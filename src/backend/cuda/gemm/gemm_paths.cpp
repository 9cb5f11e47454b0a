// GEMMs by the path that backend/gemm_path.h gives them. Codes that are multiplied as values become values in scratch. Where a block of
// them has an extreme scale, a flag goes up on the device: then the scratch is zero, so that the library adds nothing, and our kernel
// multiplies in fp32, which otherwise ends at once. The host reads nothing.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/aligned.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

using gpu::Contents;
using gpu::LibraryMatrix;
using gpu::ScaleLayout;

LibraryMatrix matrix_of(const Tensor& values, bool transposed) {
  return {.data = values.device_bytes(), .dtype = values.dtype(), .transposed = transposed};
}

bool is_ours(const GemmRoute& route) { return route.path == GemmPath::plain || route.path == GemmPath::mma; }

// Alignment of the rows of all operands, wherever groups of them begin.
uint32_t alignment_of_rows(std::initializer_list<Tensor> all) {
  uint64_t bits = gpu::kLibraryAlignment;
  for (const Tensor& each : all) bits |= static_cast<uint64_t>(each.dim(1) * dtype_bytes(each.dtype()));
  return static_cast<uint32_t>(bits & -bits);
}

// Returns a GEMM for each group that has rows.
std::vector<gpu::LibraryGemm> groups_of_rows(const GroupedGemm& k, const Tensor& a, const Tensor& b) {
  const std::vector<int64_t>& ends = k.host->offsets;
  const int64_t rows_of_b = b.dim(0) / (std::ssize(ends) - 1);
  std::vector<gpu::LibraryGemm> groups;
  for (size_t g = 0; g + 1 < ends.size(); ++g) {
    if (ends[g] == ends[g + 1]) continue;
    const int64_t first = static_cast<int64_t>(g) * rows_of_b;
    groups.push_back({.a = matrix_of(a.slice(ends[g], ends[g + 1]), false),
                      .b = matrix_of(b.slice(first, first + rows_of_b), k.b.transposed),
                      .out = k.out.slice(ends[g], ends[g + 1]).device_bytes(),
                      .out_dtype = k.out.dtype(),
                      .accumulate = false,
                      .bias = nullptr,
                      .m = ends[g + 1] - ends[g],
                      .n = k.out.dim(1),
                      .k = a.dim(1)});
  }
  return groups;
}

// Key of a GEMM that the library refused: all that its answer may depend on.
std::string refusal_key(const Gemm& k, const GemmForm& form, const GemmRoute& route) {
  return text(gemm_path_name(route.path), ' ', form_text(form), k.bias.defined() ? " and a bias" : "", k.accumulate ? " adds" : "");
}

// Where rows of out are not whole 16 bytes, kernels of cuBLASLt 13.1 were seen to round first.
bool adds_biases_before_rounding(const GemmForm& form) { return form.out == Dtype::f32 || form.n % 8 == 0; }

Contents contents_of_out(const Gemm& k) { return k.accumulate ? Contents::read : Contents::overwritten; }
Contents contents_of_out(const GroupedGemm&) { return Contents::overwritten; }

// Returns the GEMM with operands that begin at multiples of 16 bytes, copied where they did not.
template <class Product>
Product placed(Backend& device, const Product& k) {
  Product out = k;
  out.a.value = gpu::aligned(device, k.a.value), out.b.value = gpu::aligned(device, k.b.value);
  out.out = gpu::aligned(device, k.out, contents_of_out(k));
  return out;
}

}  // namespace

GemmDevice CudaBackend::gemm_device() const {
  return {.architecture = facts_.architecture, .library = library_ ? library_->version() : 0, .native = native_gemms_};
}

void CudaBackend::execute(const Gemm& k) {
  if (k.out.elements() == 0) return;
  Gemm at = placed(*this, k);
  if (k.bias.defined()) at.bias = gpu::aligned(*this, k.bias, Contents::read);
  multiply(at);
  gpu::copy_back(*this, at.out, k.out);
}
void CudaBackend::execute(const GroupedGemm& k) {
  const GroupedGemm at = placed(*this, k);
  multiply(at);
  gpu::copy_back(*this, at.out, k.out);
}
void CudaBackend::execute(const GroupedWeightGradient& k) {
  GroupedWeightGradient at = k;
  at.a = gpu::aligned(*this, k.a), at.b = gpu::aligned(*this, k.b);
  at.out = gpu::aligned(*this, k.out, k.accumulate ? Contents::read : Contents::overwritten);
  multiply(at);
  gpu::copy_back(*this, at.out, k.out);
}

void CudaBackend::multiply(const Gemm& k) {
  const GemmForm form = form_of(k);
  GemmDevice device = gemm_device();
  GemmRoute route = route_gemm(form, device);
  if (!is_ours(route) && multiply_by_library(k, form, route)) return;
  if (is_native(route.path)) {  // refused by the library, which may have it as values
    device.native = false;
    route = route_gemm(form, device);
    if (multiply_by_library(k, form, route)) return;
  }
  const GemmRoute own = is_ours(route) ? route : route_without_library(form, device, GemmObstacle::none);
  count_gemm(own.path);
  if (own.path == GemmPath::mma) return multiply_on_tensor_cores(k, own);
  multiply_plainly(k);
}

// If the library refuses the groups, our kernels multiply them. The refusal holds for this call only, because the groups depend on the
// data.
void CudaBackend::multiply(const GroupedGemm& k) {
  const Tensor offsets = checked_offsets("grouped_gemm", k.offsets, k.out.dim(0));
  const GemmForm form = form_of(k);
  GemmForm usual = form;
  usual.m = k.host ? k.host->usual_rows : 0;
  const GemmRoute own = route_grouped_gemm(form, gemm_device()), route = route_grouped_gemm(usual, gemm_device(), usual.m);
  Scratch scratch = scratch_for(route);
  if (!is_ours(route)) {
    const Tensor a = values_of(k.a.value, scratch), b = values_of(k.b.value, scratch);
    if (ask_library(usual, route, groups_of_rows(k, a, b), alignment_of_rows({a, b, k.out}))) {
      add_extremes(k, offsets, scratch);
      return clear_rows_of_no_group(k.out, offsets);
    }
    scratch = scratch_for(own);
  }
  count_gemm(own.path);
  if (own.path == GemmPath::mma) {
    const Tensor a = values_of(k.a.value, scratch), b = values_of(k.b.value, scratch);
    multiply_groups(a, b, k.b.transposed, offsets, k.out);
    add_extremes(k, offsets, scratch);
  } else {
    multiply_groups_plainly(k, offsets);
  }
  clear_rows_of_no_group(k.out, offsets);
}

void CudaBackend::multiply(const GroupedWeightGradient& k) {
  const Tensor offsets = checked_offsets("grouped_weight_gradient", k.offsets, shape_of(k.a)[0]);
  const GemmForm form = form_of(k);
  GemmForm usual = form;
  usual.k = k.host ? k.host->usual_rows : 0;
  const GemmRoute own = route_grouped_gemm(form, gemm_device()), route = route_grouped_gemm(usual, gemm_device(), usual.k);
  Scratch scratch = scratch_for(route);
  if (!is_ours(route)) {
    const Tensor a = values_of(k.a, scratch), b = values_of(k.b, scratch);
    if (ask_library(usual, route, groups_of_weights(k, a, b), alignment_of_rows({a, b, k.out}))) return add_extremes(k, offsets, scratch);
    scratch = scratch_for(own);
  }
  count_gemm(own.path);
  if (own.path != GemmPath::mma) return multiply_groups_plainly(k, offsets);
  const Tensor a = values_of(k.a, scratch), b = values_of(k.b, scratch);
  multiply_groups_for_weights(a, b, offsets, k.out, k.accumulate);
  add_extremes(k, offsets, scratch);
}

CudaBackend::Scratch CudaBackend::scratch_for(const GemmRoute& route) {
  Scratch out{.native = is_native(route.path), .values = route.path == GemmPath::fp32 ? Dtype::f32 : Dtype::bf16};
  if (route.dequantized > 0 && out.values == Dtype::bf16) out.flag = zeros(*this, Dtype::i32, {1});
  return out;
}

// Returns values as they are, and those of codes in scratch.
Tensor CudaBackend::values_of(const Value& value, Scratch& scratch) {
  const auto* const codes = std::get_if<QuantizedTensor>(&value);
  if (codes == nullptr) return std::get<Tensor>(value);
  const Tensor& values = scratch.held.emplace_back(empty(*this, scratch.values, codes->shape));
  execute(Dequantize{.x = *codes, .out = values, .extreme = scratch.flag});
  if (scratch.flag.defined()) clear_where(scratch.flag, values);
  return values;
}

bool CudaBackend::is_refused(const Gemm& k, const GemmForm& form, const GemmRoute& route) const {
  return !refused_.empty() && refused_.contains(refusal_key(k, form, route));
}

bool CudaBackend::multiply_by_library(const Gemm& k, const GemmForm& form, const GemmRoute& route) {
  // A bias is added in the dtype of out; FP8 adds none in fp32.
  if (k.bias.defined() && k.bias.dtype() == Dtype::f32 && k.out.dtype() == Dtype::bf16) return false;
  const Tensor bias = k.bias.defined() ? converted(k.bias, k.out.dtype()) : k.bias;
  const bool fused = bias.defined() && (!is_native(route.path) || bias.dtype() == Dtype::bf16) && adds_biases_before_rounding(form);
  const bool adds_later = bias.defined() && !fused;
  if ((adds_later && k.accumulate) || is_refused(k, form, route)) return false;
  Scratch scratch = scratch_for(route);
  const LibraryMatrix a = side_of(k.a, true, route, scratch), b = side_of(k.b, false, route, scratch);
  const Tensor out = adds_later ? empty(*this, Dtype::f32, k.out.shape()) : k.out;
  const gpu::LibraryGemm gemm{.a = a,
                              .b = b,
                              .out = out.device_bytes(),
                              .out_dtype = out.dtype(),
                              .accumulate = k.accumulate,
                              .bias = fused ? bias.device_bytes() : nullptr,
                              .m = form.m,
                              .n = form.n,
                              .k = form.k};
  const auto memory = [this](int64_t bytes) { return allocate(bytes); };
  if (!asked([&] { return library_->multiply(stream(), gemm, memory); })) {
    refused_.insert(refusal_key(k, form, route));
    report_refused(form, route);
    return false;
  }
  count_gemm(route.path);
  if (adds_later) execute(AddBias{.x = out, .bias = bias, .out = k.out});
  add_extremes(k, scratch);
  return true;
}

// Like groups_of_rows(), but gradients of groups without rows are written as well.
std::vector<gpu::LibraryGemm> CudaBackend::groups_of_weights(const GroupedWeightGradient& k, const Tensor& a, const Tensor& b) {
  const std::vector<int64_t>& ends = k.host->offsets;
  std::vector<gpu::LibraryGemm> groups;
  for (size_t g = 0; g + 1 < ends.size(); ++g) {
    const int64_t first = static_cast<int64_t>(g) * a.dim(1);
    const Tensor out = k.out.slice(first, first + a.dim(1));
    if (ends[g] == ends[g + 1]) {
      if (!k.accumulate) execute(Fill{.out = out, .value = 0.0});
      continue;
    }
    groups.push_back({.a = matrix_of(a.slice(ends[g], ends[g + 1]), true),
                      .b = matrix_of(b.slice(ends[g], ends[g + 1]), false),
                      .out = out.device_bytes(),
                      .out_dtype = out.dtype(),
                      .accumulate = k.accumulate,
                      .bias = nullptr,
                      .m = a.dim(1),
                      .n = b.dim(1),
                      .k = ends[g + 1] - ends[g]});
  }
  return groups;
}

bool CudaBackend::ask_library(const GemmForm& usual, const GemmRoute& route, const std::vector<gpu::LibraryGemm>& groups,
                              uint32_t alignment) {
  if (groups.empty()) return true;
  gpu::LibraryGemm like = groups.front();
  like.m = usual.m, like.k = usual.k, like.alignment = alignment;
  const auto memory = [this](int64_t bytes) { return allocate(bytes); };
  if (!asked([&] { return library_->multiply_groups(stream(), like, groups, memory); })) {
    report_refused(usual, route);
    return false;
  }
  count_gemm(route.path);
  return true;
}

void CudaBackend::multiply_on_tensor_cores(const Gemm& k, const GemmRoute& route) {
  Scratch scratch = scratch_for(route);
  Gemm of_values = k;
  of_values.a.value = values_of(k.a.value, scratch);
  of_values.b.value = values_of(k.b.value, scratch);
  multiply_values(of_values);
  add_extremes(k, scratch);
}

// Multiplies in fp32 what has extreme scales.
void CudaBackend::add_extremes(const Gemm& k, const Scratch& scratch) {
  if (!scratch.flag.defined()) return;
  Gemm rest = k;
  if (k.accumulate) rest.bias = {};  // which has been added to zeros
  multiply_plainly(rest, only_if_extreme(scratch));
}

void CudaBackend::add_extremes(const auto& groups, const Tensor& offsets, const Scratch& scratch) {
  if (scratch.flag.defined()) multiply_groups_plainly(groups, offsets, only_if_extreme(scratch));
}

// Reports once for each form, whatever its rows, because such a GEMM takes many times as long.
void CudaBackend::report_refused(const GemmForm& form, const GemmRoute& route) {
  GemmForm any = form;
  any.m = 0;
  if (!refused_.insert(text(gemm_path_name(route.path), ' ', form_text(any))).second) return;
  log_warning("cuBLASLt has no algorithm for ", form_text(form), " by ", gemm_path_name(route.path), " on sm_", facts_.architecture,
              is_native(route.path) ? ": codes are multiplied as values" : ": our kernel multiplies, which is slow");
}

// Returns an operand as the library reads it. `left`: it is a, whose contraction lies along its rows unless it is transposed.
gpu::LibraryMatrix CudaBackend::side_of(const Operand& operand, bool left, const GemmRoute& route, Scratch& scratch) {
  const QuantizedTensor* const codes = operand.quantized();
  if (codes == nullptr) return matrix_of(operand.dense(), operand.transposed);
  if (!scratch.native) return matrix_of(values_of(operand.value, scratch), operand.transposed);
  const bool along_rows = left != operand.transposed;
  const ScaleLayout layout = route.path == GemmPath::mxfp8 ? ScaleLayout::swizzled_e8m0
                             : codes->how.tiles()          ? ScaleLayout::tiles_fp32
                                                           : ScaleLayout::outer_fp32;
  LibraryMatrix out{.data = codes->codes.device_bytes(), .format = codes->how.format, .transposed = operand.transposed, .layout = layout};
  if (route.path == GemmPath::fp8_block && !along_rows) {
    out.data = scratch.held.emplace_back(transposed_codes(*codes)).device_bytes();
    out.transposed = !out.transposed;
  }
  out.scales = scratch.held.emplace_back(scales_of_side(*codes, along_rows, layout)).device_bytes();
  return out;
}

}  // namespace mantissa
