// GEMMs by the path that backend/gemm_path.h gives them. Codes that are multiplied as values become values in scratch. Where a block of
// them has an extreme scale, a flag goes up on the device: then the scratch is zero, so that the library adds nothing, and our kernel
// multiplies in fp32, which otherwise ends at once. The host reads nothing.
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

using gpu::LibraryMatrix;
using gpu::ScaleLayout;

LibraryMatrix matrix_of(const Tensor& values, bool transposed) {
  return {.data = values.device_bytes(), .dtype = values.dtype(), .transposed = transposed};
}

bool begins_at_16_bytes(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.device_bytes()) % 16 == 0; }

}  // namespace

GemmDevice CudaBackend::gemm_device() const {
  return {.architecture = facts_.architecture, .library = library_ ? library_->version() : 0, .native = native_gemms_};
}

void CudaBackend::execute(const Gemm& k) {
  if (k.out.elements() == 0) return;
  const GemmForm form = form_of(k);
  const GemmRoute route = route_gemm(form, gemm_device());
  const bool ours = route.path == GemmPath::plain || route.path == GemmPath::mma;
  if (!ours && multiply_by_library(k, form, route)) return;
  const GemmRoute own = ours ? route : route_without_library(form, gemm_device(), GemmObstacle::none);
  count_gemm(own.path);
  if (own.path == GemmPath::mma) return multiply_on_tensor_cores(k, own);
  multiply_plainly(k, nullptr);
}

void CudaBackend::execute(const GroupedGemm& k) {
  const Tensor offsets = checked_offsets("grouped_gemm", k.offsets, k.out.dim(0));
  const GemmRoute route = route_grouped_gemm(form_of(k), gemm_device());
  count_gemm(route.path);
  if (route.path == GemmPath::mma) {
    Scratch scratch = scratch_for(route);
    const Tensor a = values_of(k.a.value, scratch), b = values_of(k.b.value, scratch);
    multiply_groups(a, b, k.b.transposed, offsets, k.out);
    if (scratch.flag.defined()) multiply_groups_plainly(k, offsets, scratch.flag.device_data<int32_t>());
  } else {
    multiply_groups_plainly(k, offsets, nullptr);
  }
  clear_rows_of_no_group(k.out, offsets);
}

void CudaBackend::execute(const GroupedWeightGradient& k) {
  const Tensor offsets = checked_offsets("grouped_weight_gradient", k.offsets, shape_of(k.a)[0]);
  const GemmRoute route = route_grouped_gemm(form_of(k), gemm_device());
  count_gemm(route.path);
  if (route.path != GemmPath::mma) return multiply_groups_plainly(k, offsets, nullptr);
  Scratch scratch = scratch_for(route);
  const Tensor a = values_of(k.a, scratch), b = values_of(k.b, scratch);
  multiply_groups_for_weights(a, b, offsets, k.out, k.accumulate);
  if (scratch.flag.defined()) multiply_groups_plainly(k, offsets, scratch.flag.device_data<int32_t>());
}

CudaBackend::Scratch CudaBackend::scratch_for(const GemmRoute& route) {
  Scratch out{.native = is_native(route.path), .values = route.path == GemmPath::fp32 ? Dtype::f32 : Dtype::bf16};
  if (route.dequantized > 0 && out.values == Dtype::bf16) out.flag = zeros(*this, Dtype::i32, {1});
  return out;
}

// Values as they are, or of codes, in scratch.
Tensor CudaBackend::values_of(const Value& value, Scratch& scratch) {
  const auto* const codes = std::get_if<QuantizedTensor>(&value);
  if (codes == nullptr) return std::get<Tensor>(value);
  const Tensor& values = scratch.held.emplace_back(empty(*this, scratch.values, codes->shape));
  execute(Dequantize{.x = *codes, .out = values, .extreme = scratch.flag});
  if (scratch.flag.defined()) clear_where(scratch.flag, values);
  return values;
}

bool CudaBackend::multiply_by_library(const Gemm& k, const GemmForm& form, const GemmRoute& route) {
  // A bias is added in the dtype of out; FP8 adds none in fp32.
  if (k.bias.defined() && k.bias.dtype() == Dtype::f32 && k.out.dtype() == Dtype::bf16) return false;
  const Tensor bias = k.bias.defined() ? converted(k.bias, k.out.dtype()) : k.bias;
  const bool fused = bias.defined() && (!is_native(route.path) || bias.dtype() == Dtype::bf16) && begins_at_16_bytes(bias);
  const bool adds_later = bias.defined() && !fused;
  if ((adds_later && k.accumulate) || (!refused_.empty() && refused_.contains(form_text(form)))) return false;
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
  if (!library_->multiply(stream(), gemm, [this](int64_t bytes) { return allocate(bytes); })) {
    report_refused(form);
    return false;
  }
  count_gemm(route.path);
  if (adds_later) execute(AddBias{.x = out, .bias = bias, .out = k.out});
  add_extremes(k, scratch);
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
  multiply_plainly(rest, scratch.flag.device_data<int32_t>());
}

// Once for each form, whatever its rows, because such a GEMM takes many times as long.
void CudaBackend::report_refused(const GemmForm& form) {
  refused_.insert(form_text(form));
  GemmForm any = form;
  any.m = 0;
  const std::string what = form_text(any);
  if (!refused_.insert(what).second) return;
  log_warning("cuBLASLt has no algorithm for ", what, " on sm_", facts_.architecture, ": our kernel multiplies, which is slow");
}

// What the library reads of an operand. `left`: it is a, whose contraction lies along its rows unless it is transposed.
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
