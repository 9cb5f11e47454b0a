// GEMMs by the path that backend/gemm_path.h gives them. Codes that are multiplied as values become values in scratch. Where a block of
// them has an extreme scale, a flag goes up on the device: then the scratch is zero, so that the library adds nothing, and our kernel
// multiplies in fp32, which otherwise ends at once. The host reads nothing.
#include <cmath>

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

// Key of a GEMM that the library refused: all that its answer may depend on.
std::string refusal_key(const Gemm& k, const GemmForm& form, const GemmRoute& route) {
  return text(gemm_path_name(route.path), ' ', form_text(form), k.bias.defined() ? " and a bias" : "", k.accumulate ? " adds" : "");
}

// Returns whether groups of products are added to what is there, and whether b is transposed.
std::pair<bool, bool> flags_of(const GroupedGemm& k) { return {false, k.b.transposed}; }
std::pair<bool, bool> flags_of(const GroupedWeightGradient& k) { return {k.accumulate, false}; }

// Returns the values of a side, which may be an Operand.
auto& value_in(auto& side) {
  if constexpr (requires { side.value; })
    return side.value;
  else
    return side;
}

}  // namespace

GemmDevice CudaBackend::gemm_device() const {
  return {.architecture = facts_.architecture,
          .library = library_ ? library_->version() : 0,
          .native = native_gemms_,
          .grouped = grouped_gemms_};
}

template <class Product>
void CudaBackend::multiply_aligned(const Product& k, bool accumulate) {
  Product at = k;
  value_in(at.a) = gpu::aligned(*this, value_in(k.a)), value_in(at.b) = gpu::aligned(*this, value_in(k.b));
  if constexpr (std::is_same_v<Product, Gemm>) {
    if (k.bias.defined()) at.bias = gpu::aligned(*this, k.bias);
  }
  at.out = gpu::aligned(*this, k.out, accumulate ? Contents::read : Contents::overwritten);
  multiply(at);
  gpu::copy_back(*this, at.out, k.out);
}

void CudaBackend::execute(const Gemm& k) {
  if (k.out.elements() > 0) multiply_aligned(k, k.accumulate);
}
void CudaBackend::execute(const GroupedGemm& k) { multiply_aligned(k, false); }
void CudaBackend::execute(const GroupedWeightGradient& k) { multiply_aligned(k, k.accumulate); }

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
  if (own.path != GemmPath::mma) return multiply_plainly(k);
  Scratch scratch = scratch_for(own);
  Gemm values = k;
  values.a.value = values_of(k.a.value, scratch), values.b.value = values_of(k.b.value, scratch);
  multiply_values(values);
  add_extremes(k, scratch);
}

// The library may have groups one after the other that it refuses at once, and our kernels multiply those that it refuses then. That
// refusal holds for this call only, because the groups depend on the data.
template <class Groups>
void CudaBackend::multiply(const Groups& k) {
  constexpr bool kForWeights = std::is_same_v<Groups, GroupedWeightGradient>;
  const Tensor offsets = checked_offsets(kForWeights ? "grouped_weight_gradient" : "grouped_gemm", k.offsets,
                                         kForWeights ? shape_of(value_in(k.a))[0] : k.out.dim(0));
  const GemmForm form = form_of(k);
  GemmForm usual = form;
  GemmDevice device = gemm_device();
  const int64_t usual_rows = k.host ? k.host->usual_rows : 0;
  (kForWeights ? usual.k : usual.m) = usual_rows;
  const auto multiplied = [&](const GemmRoute& route, const auto& product) {  // product(a, b) returns false where it is refused
    Scratch scratch = scratch_for(route);
    const Tensor a = values_of(value_in(k.a), scratch), b = values_of(value_in(k.b), scratch);
    if (!product(a, b)) {
      report_refused(usual, route);
      return false;
    }
    count_gemm(route.path);
    if (scratch.flag.defined()) multiply_plainly(k, offsets, only_if_extreme(scratch));
    return true;
  };
  const auto by_library = [&] {
    GemmRoute route = route_grouped_gemm(usual, device, usual_rows);
    if (route.path == GemmPath::grouped) {
      if (multiplied(route, [&](const Tensor& a, const Tensor& b) { return multiply_at_once(k, a, b, offsets, usual); })) return true;
      device.grouped = false;
      route = route_grouped_gemm(usual, device, usual_rows);
    }
    return !is_ours(route) &&
           multiplied(route, [&](const Tensor& a, const Tensor& b) { return multiply_one_by_one(k, a, b, offsets, usual); });
  };
  if (!by_library()) {
    const GemmRoute own = route_grouped_gemm(form, device);
    if (own.path == GemmPath::mma) {
      multiplied(own, [&](const Tensor& a, const Tensor& b) { return multiply_values(k, a, b, offsets), true; });
    } else {
      count_gemm(own.path);
      multiply_plainly(k, offsets);
    }
  }
  if constexpr (!kForWeights) clear_rows_of_no_group(k.out, offsets);
}

template <class Groups>
bool CudaBackend::multiply_one_by_one(const Groups& k, const Tensor& a, const Tensor& b, const Tensor& offsets, const GemmForm& usual) {
  std::vector<int64_t> ends = k.host->offsets;
  if (ends.empty()) {  // they were to be multiplied at once: now the host waits
    const std::vector<int32_t> read = to_host<int32_t>(offsets);
    ends.assign(read.begin(), read.end());
  }
  const std::vector<gpu::LibraryGemm> groups = library_groups(k, a, b, ends);
  if (groups.empty()) return true;
  gpu::LibraryGemm like = groups.front();  // a group that has the usual rows
  like.m = usual.m, like.k = usual.k, like.alignment = alignment_of_rows({a, b, k.out});
  const auto memory = [this](int64_t bytes) { return allocate(bytes); };
  return asked([&] { return library_->multiply_groups(stream(), like, groups, memory); });
}

template <class Groups>
bool CudaBackend::multiply_at_once(const Groups& k, const Tensor& a, const Tensor& b, const Tensor& offsets, const GemmForm& usual) {
  constexpr bool kForWeights = std::is_same_v<Groups, GroupedWeightGradient>;
  const auto [accumulate, b_transposed] = flags_of(k);
  const int64_t groups = offsets.elements() - 1;
  const Tensor addresses = empty(*this, Dtype::u8, {3 * groups * static_cast<int64_t>(sizeof(void*))});
  const Tensor sizes = empty(*this, Dtype::i32, {6 * groups}), factors = empty(*this, Dtype::f32, {2});
  const gpu::TablesOfGroups tables{.addresses = reinterpret_cast<std::byte**>(addresses.device_bytes()),
                                   .rows = sizes.device_data<int32_t>(),
                                   .cols = sizes.device_data<int32_t>() + 3 * groups,
                                   .factors = factors.device_data<float>()};
  const auto lying = [&](const Tensor& x, bool of_tokens) {
    return gpu::MatrixOfGroups{.first = x.device_bytes(),
                               .row_bytes = x.dim(1) * static_cast<int64_t>(dtype_bytes(x.dtype())),
                               .rows = static_cast<int32_t>(x.dim(0) / groups),
                               .cols = static_cast<int32_t>(x.dim(1)),
                               .of_tokens = of_tokens};
  };
  describe_groups({lying(a, true), lying(b, kForWeights), lying(k.out, !kForWeights)}, offsets, tables, accumulate);
  const auto described = [&](int64_t matrix, const Tensor& x, bool transposed) {
    const int64_t at = matrix * groups;
    return gpu::GroupedMatrix{.addresses = tables.addresses + at,
                              .rows = tables.rows + at,
                              .cols = tables.cols + at,
                              .dtype = x.dtype(),
                              .transposed = transposed};
  };
  const gpu::GroupedProduct product{.a = described(0, a, kForWeights),
                                    .b = described(1, b, b_transposed),
                                    .out = described(2, k.out, false),
                                    .groups = static_cast<int>(groups),
                                    .factors = tables.factors,
                                    .m = usual.m,
                                    .n = usual.n,
                                    .k = usual.k};
  const auto memory = [this](int64_t bytes) { return allocate(bytes); };
  if (!asked([&] { return library_->multiply_at_once(stream(), product, memory); })) return false;
  if (kForWeights && !accumulate) clear_groups_without_rows(k.out, offsets);
  return true;
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

bool CudaBackend::multiply_by_library(const Gemm& k, const GemmForm& form, const GemmRoute& route) {
  // A bias is added in the dtype of out; FP8 adds none in fp32.
  if (k.bias.defined() && k.bias.dtype() == Dtype::f32 && k.out.dtype() == Dtype::bf16) return false;
  const Tensor bias = k.bias.defined() ? converted(k.bias, k.out.dtype()) : k.bias;
  // Where rows of out are not whole 16 bytes, kernels of cuBLASLt 13.1 were seen to round before they add a bias.
  const bool adds_first = form.out == Dtype::f32 || form.n % 8 == 0;
  const bool fused = bias.defined() && (!is_native(route.path) || bias.dtype() == Dtype::bf16) && adds_first;
  const bool adds_later = bias.defined() && !fused;
  if (adds_later && k.accumulate) return false;
  if (!refused_.empty() && refused_.contains(refusal_key(k, form, route))) return false;
  Scratch scratch = scratch_for(route);
  const int64_t block = native_block(form);
  const LibraryMatrix a = side_of(k.a, true, route, block, scratch), b = side_of(k.b, false, route, block, scratch);
  const Tensor out = adds_later ? empty(*this, Dtype::f32, k.out.shape()) : k.out;
  const gpu::LibraryGemm gemm{.a = a,
                              .b = b,
                              .out = out.device_bytes(),
                              .out_dtype = out.dtype(),
                              .accumulate = k.accumulate,
                              .bias = fused ? bias.device_bytes() : nullptr,
                              .m = form.m,
                              .n = form.n,
                              .k = form.k,
                              .factor = scratch.native ? std::ldexp(1.0F, form.a.how.tensor_exponent + form.b.how.tensor_exponent) : 1.0F};
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

// Returns a GEMM for each group that has rows. Gradients of groups without rows are written at once.
template <class Groups>
std::vector<gpu::LibraryGemm> CudaBackend::library_groups(const Groups& k, const Tensor& a, const Tensor& b,
                                                          const std::vector<int64_t>& ends) {
  constexpr bool kForWeights = std::is_same_v<Groups, GroupedWeightGradient>;
  const auto [accumulate, b_transposed] = flags_of(k);
  std::vector<gpu::LibraryGemm> groups;
  for (size_t g = 0; g + 1 < ends.size(); ++g) {
    const auto matrix = [&](const Tensor& x) {  // the one of group g
      const int64_t rows = x.dim(0) / (std::ssize(ends) - 1), first = static_cast<int64_t>(g) * rows;
      return x.slice(first, first + rows);
    };
    const auto tokens = [&](const Tensor& x) { return x.slice(ends[g], ends[g + 1]); };
    const int64_t count = ends[g + 1] - ends[g];
    if (count == 0) {
      if (kForWeights && !accumulate) execute(Fill{.out = matrix(k.out), .value = 0.0});
      continue;
    }
    groups.push_back({.a = matrix_of(tokens(a), kForWeights),
                      .b = matrix_of(kForWeights ? tokens(b) : matrix(b), b_transposed),
                      .out = (kForWeights ? matrix(k.out) : tokens(k.out)).device_bytes(),
                      .out_dtype = k.out.dtype(),
                      .accumulate = accumulate,
                      .bias = nullptr,
                      .m = kForWeights ? a.dim(1) : count,
                      .n = k.out.dim(1),
                      .k = kForWeights ? count : a.dim(1)});
  }
  return groups;
}

// Multiplies in fp32 what has extreme scales.
void CudaBackend::add_extremes(const Gemm& k, const Scratch& scratch) {
  if (!scratch.flag.defined()) return;
  Gemm rest = k;
  if (k.accumulate) rest.bias = {};  // which has been added to zeros
  multiply_plainly(rest, only_if_extreme(scratch));
}

// Reports once for each form, whatever its rows, because such a GEMM takes many times as long.
void CudaBackend::report_refused(const GemmForm& form, const GemmRoute& route) {
  GemmForm any = form;
  any.m = 0;
  if (!refused_.insert(text(gemm_path_name(route.path), ' ', form_text(any))).second) return;
  log_warning("cuBLASLt has no algorithm for ", form_text(form), " by ", gemm_path_name(route.path), " on sm_", facts_.architecture,
              is_native(route.path)             ? ": codes are dequantized first"
              : route.path == GemmPath::grouped ? ": groups are multiplied one after the other, or by mantissa's own kernel"
                                                : ": mantissa's own kernel multiplies, which is slow");
}

// Returns an operand as the library reads it. `left`: it is a, whose contraction lies along its rows unless it is transposed.
gpu::LibraryMatrix CudaBackend::side_of(const Operand& operand, bool left, const GemmRoute& route, int64_t block, Scratch& scratch) {
  const QuantizedTensor* const codes = operand.quantized();
  if (codes == nullptr) return matrix_of(operand.dense(), operand.transposed);
  if (!scratch.native) return matrix_of(values_of(operand.value, scratch), operand.transposed);
  const bool along_rows = left != operand.transposed, by_depth = route.transposed > 0;
  const ScaleLayout layout = route.path == GemmPath::nvfp4   ? ScaleLayout::swizzled_e4m3
                             : route.path == GemmPath::mxfp8 ? ScaleLayout::swizzled_e8m0
                             : codes->how.tiles()            ? ScaleLayout::tiles_fp32
                                                             : ScaleLayout::outer_fp32;
  const QuantizedTensor wide = codes->how.format == Format::e2m1 ? widened_codes(*codes) : *codes;
  scratch.held.push_back(wide.codes);
  LibraryMatrix out{.data = wide.codes.device_bytes(), .format = wide.how.format, .transposed = operand.transposed, .layout = layout};
  if (by_depth && !along_rows) {
    const Tensor transposed = scratch.held.emplace_back(empty(*this, Dtype::u8, {wide.shape[1], wide.shape[0]}));
    transpose(wide.codes, transposed);
    out.data = transposed.device_bytes();
    out.transposed = !out.transposed;
  }
  out.scales = scratch.held.emplace_back(scales_of_side(wide, along_rows, block, layout)).device_bytes();
  return out;
}

}  // namespace mantissa
