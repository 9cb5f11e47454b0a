// cuBLASLt without a device: its descriptors, layouts and preferences are those of the real library, which needs no GPU for them. The
// choice of an algorithm refuses what the library refuses on an architecture; products are sums in fp64 of the values that the attributes
// describe. Where the real library is older than groups, this file keeps what only they have.
#include <dlfcn.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cuda/cublaslt/calls.h"
#include "backend/cuda/gemm/gemm_library.h"
#include "failing_library.h"
#include "gpu/runtime.h"
#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa::simt {
namespace {

std::atomic<int64_t> of_values, per_16, per_32, per_128, at_once, algorithms, checks;

}  // namespace

LibraryGemms library_gemms() {
  return {.of_values = of_values,
          .per_16 = per_16,
          .per_32 = per_32,
          .per_128 = per_128,
          .at_once = at_once,
          .algorithms = algorithms,
          .checks = checks};
}
std::atomic<int64_t>& refused_columns() {
  static std::atomic<int64_t> columns;
  return columns;
}
std::atomic<bool>& refuses_codes() {
  static std::atomic<bool> refuses;
  return refuses;
}
std::atomic<bool>& refuses_groups() {
  static std::atomic<bool> refuses;
  return refuses;
}
std::atomic<int>& status_of_gemms() {
  static std::atomic<int> status;
  return status;
}

}  // namespace mantissa::simt

namespace mantissa::gpu {
namespace {

constexpr size_t kWorkspace = 4096;
constexpr int kScaleModeOfA = 31, kScaleModeOfB = 32;
enum class ScaleMode : int32_t { scalar = 0, per_16 = 1, per_32 = 2, per_128 = 4, per_tile = 5 };

// Functions of the real library: those that read attributes back, and those that stand behind functions of this file.
struct Real {
  decltype(&cublasLtMatmulDescGetAttribute) MatmulDescGetAttribute;
  decltype(&cublasLtMatrixLayoutGetAttribute) MatrixLayoutGetAttribute;
  decltype(&cublasLtMatmulPreferenceGetAttribute) MatmulPreferenceGetAttribute;
  CublasLtCalls calls;
};
Real& real() {
  static Real functions{};
  return functions;
}

// Attributes that a library before 13.10 lacks, by object and number. A later one keeps them itself.
class LaterAttributes {
 public:
  void set(const void* object, int which, const void* value, size_t bytes) {
    const std::scoped_lock lock(mutex_);
    const auto* const first = static_cast<const std::byte*>(value);
    kept_[{object, which}].assign(first, first + bytes);
  }
  bool get(const void* object, int which, void* value, size_t bytes, size_t& written) {
    const std::scoped_lock lock(mutex_);
    const auto found = kept_.find({object, which});
    if (found == kept_.end()) return false;
    written = found->second.size();
    if (written == bytes) std::memcpy(value, found->second.data(), bytes);
    return true;
  }
  void forget(const void* object) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(kept_, [&](const auto& each) { return each.first.first == object; });
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const void*, int>, std::vector<std::byte>> kept_;
};
LaterAttributes& later() {
  static LaterAttributes attributes;
  return attributes;
}
constexpr int kBatchMode = 8, kRowsOfGroups = 9, kColumnsOfGroups = 10, kLeadingDimensionsOfGroups = 11, kBatchInvariance = 41;
constexpr int kAverageDepth = 13, kAverageRows = 14, kAverageColumns = 15;

cublasStatus_t set_in_desc(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which, const void* value, size_t bytes) {
  if (which != kBatchInvariance) return real().calls.MatmulDescSetAttribute(desc, which, value, bytes);
  if (bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
  later().set(desc, which, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t set_in_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which, const void* value, size_t bytes) {
  if (which < kRowsOfGroups) return real().calls.MatrixLayoutSetAttribute(layout, which, value, bytes);
  if (bytes != 8 || which > kLeadingDimensionsOfGroups) return CUBLAS_STATUS_INVALID_VALUE;
  later().set(layout, which, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t set_in_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t which, const void* value,
                                 size_t bytes) {
  if (which < kAverageDepth) return real().calls.MatmulPreferenceSetAttribute(preference, which, value, bytes);
  if (bytes != 8) return CUBLAS_STATUS_INVALID_VALUE;  // so does the real one, whose header speaks of 4
  later().set(preference, which, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t create_layout_of_groups(cublasLtMatrixLayout_t* layout, cudaDataType type, int groups, const void* rows, const void* columns,
                                       const void* leading_dimensions) {
  const cublasStatus_t status = real().calls.MatrixLayoutCreate(layout, type, 0, 0, 0);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const uint32_t grouped = 2;
  later().set(*layout, kBatchMode, &grouped, sizeof grouped);
  const int which[] = {kRowsOfGroups, kColumnsOfGroups, kLeadingDimensionsOfGroups};
  const void* const arrays[] = {rows, columns, leading_dimensions};
  for (size_t i = 0; i < 3; ++i) later().set(*layout, which[i], &arrays[i], sizeof arrays[i]);
  return real().calls.MatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &groups, sizeof groups);
}
cublasStatus_t destroy_desc(cublasLtMatmulDesc_t desc) {
  later().forget(desc);
  return real().calls.MatmulDescDestroy(desc);
}
cublasStatus_t destroy_layout(cublasLtMatrixLayout_t layout) {
  later().forget(layout);
  return real().calls.MatrixLayoutDestroy(layout);
}
cublasStatus_t destroy_preference(cublasLtMatmulPreference_t preference) {
  later().forget(preference);
  return real().calls.MatmulPreferenceDestroy(preference);
}
size_t version() {
  const char* const given = std::getenv("MANTISSA_SIMT_CUBLASLT_VERSION");
  return given ? static_cast<size_t>(std::atoi(given)) : real().calls.GetVersion();
}

template <class T, class Object, class Which>
T attribute(cublasStatus_t (*read)(Object, Which, void*, size_t, size_t*), std::type_identity_t<Object> object, int which) {
  T value{};
  size_t written = 0;
  if (!later().get(object, which, &value, sizeof value, written)) {
    const cublasStatus_t status = read(object, static_cast<Which>(which), &value, sizeof value, &written);
    require(status == CUBLAS_STATUS_SUCCESS, "attribute ", which, " is not to be had");
  }
  require(written == sizeof value, "attribute ", which, " has ", written, " bytes");
  return value;
}
template <class T>
T attribute(cublasLtMatmulDesc_t desc, int which) {
  return attribute<T>(real().MatmulDescGetAttribute, desc, which);
}
template <class T>
T attribute(cublasLtMatrixLayout_t layout, int which) {
  return attribute<T>(real().MatrixLayoutGetAttribute, layout, which);
}
template <class T>
T attribute(cublasLtMatmulPreference_t preference, int which) {
  return attribute<T>(real().MatmulPreferenceGetAttribute, preference, which);
}

double power_of(uint8_t scale) { return scale == 255 ? std::nan("") : std::ldexp(1.0, scale - 127); }
template <class E>
double element_of(uint8_t code) {
  return double{std::bit_cast<float>(E::decode(code, uint8_t{127}))};
}

// A column-major matrix as a layout says.
struct Matrix {
  explicit Matrix(cublasLtMatrixLayout_t layout)
      : type(static_cast<cudaDataType>(attribute<uint32_t>(layout, CUBLASLT_MATRIX_LAYOUT_TYPE))),
        rows(attribute<int64_t>(layout, CUBLASLT_MATRIX_LAYOUT_ROWS)),
        cols(attribute<int64_t>(layout, CUBLASLT_MATRIX_LAYOUT_COLS)),
        column(attribute<int64_t>(layout, CUBLASLT_MATRIX_LAYOUT_LD)) {
    require(attribute<int32_t>(layout, CUBLASLT_MATRIX_LAYOUT_ORDER) == CUBLASLT_ORDER_COL, "a layout is not column-major");
    require(column >= rows, "columns of ", rows, " elements lie ", column, " apart");
  }
  Matrix(cudaDataType of, int64_t row_count, int64_t col_count, int64_t leading_dimension)
      : type(of), rows(row_count), cols(col_count), column(leading_dimension) {}
  bool fp4() const { return type == CUDA_R_4F_E2M1; }
  bool codes() const { return fp4() || type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
  int64_t element_bytes() const { return codes() ? 1 : type == CUDA_R_16BF ? 2 : 4; }

  cudaDataType type;
  int64_t rows, cols, column;
};

// A side of the product, op(A) [m, k] or op(B)^T [n, k].
struct Side {
  Side(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t layout, bool is_a) : Side(desc, Matrix(layout), is_a) {}
  Side(cublasLtMatmulDesc_t desc, const Matrix& of, bool is_a)
      : matrix(of),
        transposed(attribute<int32_t>(desc, is_a ? CUBLASLT_MATMUL_DESC_TRANSA : CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_T),
        by_column(transposed == is_a),
        outer(by_column ? matrix.cols : matrix.rows),
        depth(by_column ? matrix.rows : matrix.cols),
        mode(static_cast<ScaleMode>(attribute<int32_t>(desc, is_a ? kScaleModeOfA : kScaleModeOfB))),
        scales(attribute<const void*>(desc, is_a ? CUBLASLT_MATMUL_DESC_A_SCALE_POINTER : CUBLASLT_MATMUL_DESC_B_SCALE_POINTER)) {}

  double scale(int64_t i, int64_t k) const {
    const auto* const values = static_cast<const float*>(scales);
    switch (mode) {
      case ScaleMode::scalar: return 1.0;
      case ScaleMode::per_16: return element_of<E4M3>(static_cast<const uint8_t*>(scales)[swizzled_offset(i, k / 16, depth / 16)] & 0x7FU);
      case ScaleMode::per_32: return power_of(static_cast<const uint8_t*>(scales)[swizzled_offset(i, k / 32, depth / 32)]);
      case ScaleMode::per_128: return double{values[k / 128 * outer + i]};
      case ScaleMode::per_tile: return double{values[i / 128 * round_up(ceil_div(depth, int64_t{128}), 4) + k / 128]};
    }
    return 0.0;
  }
  double element(const void* data, int64_t i, int64_t k) const {
    const int64_t at = by_column ? i * matrix.column + k : k * matrix.column + i;
    switch (matrix.type) {
      case CUDA_R_32F: return double{static_cast<const float*>(data)[at]};
      case CUDA_R_16BF: return double{to_float(static_cast<const bf16*>(data)[at])};
      case CUDA_R_8F_E4M3: return element_of<E4M3>(static_cast<const uint8_t*>(data)[at]);
      case CUDA_R_8F_E5M2: return element_of<E5M2>(static_cast<const uint8_t*>(data)[at]);
      case CUDA_R_4F_E2M1: return element_of<E2M1>(unpack_nibble(static_cast<const uint8_t*>(data)[at / 2], at));
      default: fail(ExitCode::internal, "a matrix of type ", static_cast<int>(matrix.type));
    }
  }
  Side with(const Matrix& of) const {  // a side of the same operation
    Side out = *this;
    out.matrix = of;
    out.outer = by_column ? of.cols : of.rows, out.depth = by_column ? of.rows : of.cols;
    return out;
  }
  // Some kernels of the library read padding, which is therefore 0.
  void require_padding() const {
    if (mode != ScaleMode::per_16 && mode != ScaleMode::per_32) return;
    const int64_t inner = depth / (mode == ScaleMode::per_16 ? 16 : 32);
    for (int64_t i = 0; i < round_up(outer, 128); ++i) {
      for (int64_t j = 0; j < round_up(inner, 4); ++j) {
        const bool zero = static_cast<const uint8_t*>(scales)[swizzled_offset(i, j, inner)] == 0;
        require(zero || (i < outer && j < inner), "the padding of scales is not 0 at ", i, ", ", j);
      }
    }
  }
  std::vector<double> values(const void* data) const {
    require_padding();
    std::vector<double> out;
    out.reserve(static_cast<size_t>(outer * depth));
    for (int64_t i = 0; i < outer; ++i)
      for (int64_t k = 0; k < depth; ++k) out.push_back(element(data, i, k) * scale(i, k));
    return out;
  }

  Matrix matrix;
  bool transposed;
  bool by_column;  // the contraction lies along the columns of the matrix
  int64_t outer, depth;
  ScaleMode mode;
  const void* scales;
};

// Returns true if the library has FP8 or FP4 for this (its documentation, "cublasLtMatmul").
bool has_codes(const Side& a, const Side& b, int architecture) {
  if (architecture < 89 || (a.matrix.type == CUDA_R_8F_E5M2 && b.matrix.type == CUDA_R_8F_E5M2)) return false;
  const bool tn = a.by_column && b.by_column;
  for (const Side* side : {&a, &b}) {
    if (side->outer % 16 != 0 || side->depth % 16 != 0 || side->matrix.column % 16 != 0 || side->scales == nullptr) return false;
    if (side->matrix.fp4() && (side->mode != ScaleMode::per_16 || !tn || side->matrix.column % 32 != 0)) return false;
    if (reinterpret_cast<uintptr_t>(side->scales) % 16 != 0) return false;
  }
  if (a.mode == ScaleMode::per_32 && b.mode == ScaleMode::per_32)
    return (architecture / 10 == 10 || (architecture / 10 == 12 && tn)) && a.depth % 32 == 0;
  if (a.matrix.fp4() || b.matrix.fp4()) return a.matrix.type == b.matrix.type && architecture >= 100;
  const auto block = [](const Side& side) { return side.mode == ScaleMode::per_128 || side.mode == ScaleMode::per_tile; };
  return architecture == 90 && tn && block(a) && block(b) && !(a.mode == ScaleMode::per_tile && b.mode == ScaleMode::per_tile);
}

bool is_supported(cublasLtMatmulDesc_t desc, const Side& a, const Side& b, const Matrix& d) {
  if (attribute<int32_t>(desc, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE) != CUBLAS_COMPUTE_32F) return false;
  if (attribute<int8_t>(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM) != 0) return false;
  if (d.type != CUDA_R_32F && d.type != CUDA_R_16BF) return false;
  const bool biased = attribute<uint32_t>(desc, CUBLASLT_MATMUL_DESC_EPILOGUE) == CUBLASLT_EPILOGUE_BIAS;
  require(!biased || d.type == CUDA_R_32F || d.rows % 8 == 0, "some kernels of the library round before they add this bias");
  if (a.matrix.codes() && simt::refuses_codes()) return false;
  if (a.matrix.codes() && biased && d.type == CUDA_R_32F) return false;
  if (a.matrix.codes() || b.matrix.codes()) return a.matrix.codes() && b.matrix.codes() && has_codes(a, b, simt::architecture());
  if (a.mode != ScaleMode::scalar || b.mode != ScaleMode::scalar || a.scales || b.scales) return false;
  return a.matrix.type == b.matrix.type && (a.matrix.type == CUDA_R_16BF || d.type == CUDA_R_32F);
}

// An algorithm keeps the alignments that its addresses must have, whether it may split a sum, and whether it is for groups at once.
struct Promised {
  uint32_t a, b, c, d;
  bool splits, at_once;
};
Promised promised_of(const cublasLtMatmulAlgo_t& algorithm) {
  Promised out{};
  std::memcpy(&out, &algorithm, sizeof out);
  return out;
}

cublasStatus_t create(cublasLtHandle_t* handle) {
  static int library = 0;
  *handle = reinterpret_cast<cublasLtHandle_t>(&library);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t destroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

// Matrices of groups as a layout says, which a product reads when the stream comes to it.
struct Matrices {
  explicit Matrices(cublasLtMatrixLayout_t layout)
      : type(static_cast<cudaDataType>(attribute<uint32_t>(layout, CUBLASLT_MATRIX_LAYOUT_TYPE))),
        groups(attribute<int32_t>(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)),
        rows(attribute<const int32_t*>(layout, kRowsOfGroups)),
        columns(attribute<const int32_t*>(layout, kColumnsOfGroups)),
        leading_dimensions(attribute<const int32_t*>(layout, kLeadingDimensionsOfGroups)) {}
  static bool are(cublasLtMatrixLayout_t layout) {
    uint32_t mode = 0;
    size_t written = 0;
    if (!later().get(layout, kBatchMode, &mode, sizeof mode, written))
      real().MatrixLayoutGetAttribute(layout, static_cast<cublasLtMatrixLayoutAttribute_t>(kBatchMode), &mode, sizeof mode, &written);
    return mode == 2;
  }
  Matrix of(int64_t group) const {
    const Matrix out(type, rows[group], columns[group], leading_dimensions[group]);
    require(out.column >= out.rows && out.column * out.element_bytes() % 16 == 0, "a matrix of a group has columns of ", out.rows, ", ",
            out.column, " apart");
    return out;
  }

  cudaDataType type;
  int groups;
  const int32_t *rows, *columns, *leading_dimensions;
};

void choose_for_groups(cublasLtMatmulDesc_t desc, const Matrices& a, const Matrices& b, const Matrices& d,
                       cublasLtMatmulPreference_t preference, cublasLtMatmulHeuristicResult_t* results, int* found) {
  const auto average = [&](int which) { return attribute<int64_t>(preference, which); };
  require(a.groups == d.groups && b.groups == d.groups && d.groups > 0, "groups of ", a.groups, ", ", b.groups, " and ", d.groups);
  require(attribute<int32_t>(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE) == CUBLASLT_POINTER_MODE_DEVICE,
          "on 9.0 groups with factors of the host are wrong in cuBLASLt 13.4 to 13.8");
  require(attribute<int32_t>(desc, kBatchInvariance) == 4, "the bits of a row may depend on others");
  require(attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) == CUBLASLT_REDUCTION_SCHEME_NONE,
          "the sum of a group may be split");
  require(average(kAverageRows) > 0 && average(kAverageColumns) > 0 && average(kAverageDepth) > 0, "the usual sizes of groups are unknown");
  for (const int each : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    require(attribute<uint32_t>(preference, each) == 16, "groups of any alignment");
  const int architecture = simt::architecture();
  const bool is = version() >= 131000 && (architecture == 90 || architecture / 10 == 10) && a.type == CUDA_R_16BF && b.type == a.type;
  if (!is || simt::refuses_groups() || attribute<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) < kWorkspace) return;
  const Promised promised{16, 16, 16, 16, false, true};
  std::memcpy(&results->algo, &promised, sizeof promised);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->workspaceSize = kWorkspace;
  *found = 1;
  ++simt::algorithms;
}

cublasStatus_t choose(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int requested,
                      cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  if (Matrices::are(d)) {
    choose_for_groups(desc, Matrices(a), Matrices(b), Matrices(d), preference, results, found);
    return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const Side left(desc, a, true), right(desc, b, false);
  const Matrix out(d), in(c);
  require(requested > 0 && left.depth == right.depth && out.rows == left.outer && out.cols == right.outer, "layouts do not fit each other");
  require(in.type == out.type && in.column == out.column, "C is not laid out as D");
  const auto reductions = attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
  const bool may = attribute<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_T || left.depth >= gpu::kLongSum;
  require(reductions == CUBLASLT_REDUCTION_SCHEME_NONE || (may && reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
          "a sum may be split");
  if (!is_supported(desc, left, right, out) || attribute<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) < kWorkspace)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const Promised promised{attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES),
                          attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES),
                          attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES),
                          attribute<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES),
                          reductions != CUBLASLT_REDUCTION_SCHEME_NONE,
                          false};
  std::memcpy(&results->algo, &promised, sizeof promised);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->workspaceSize = kWorkspace;
  *found = 1;
  ++simt::algorithms;
  return CUBLAS_STATUS_SUCCESS;
}

// Groups alone ask this: the algorithm was chosen for the sizes of another.
cublasStatus_t check_algorithm(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                               cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algorithm,
                               cublasLtMatmulHeuristicResult_t* result) {
  require(!promised_of(*algorithm).splits, "the sum of a group may be split, by sizes of another");
  require(version() < 131000 || attribute<int32_t>(desc, kBatchInvariance) == std::countr_zero(promised_of(*algorithm).a),
          "the bits of a row may depend on others");
  ++simt::checks;
  const Side left(desc, a, true), right(desc, b, false);
  const Matrix out(d);
  const bool fit = left.depth == right.depth && out.rows == left.outer && out.cols == right.outer;
  if (!fit || !is_supported(desc, left, right, out) || out.cols == simt::refused_columns()) return CUBLAS_STATUS_NOT_SUPPORTED;
  result->workspaceSize = kWorkspace;
  return CUBLAS_STATUS_SUCCESS;
}

void require_aligned(const void* address, uint32_t promised, const Matrix& matrix, const char* what) {
  const uint32_t least = matrix.codes() ? 16 : static_cast<uint32_t>(matrix.element_bytes());
  require(promised >= least && reinterpret_cast<uintptr_t>(address) % promised == 0, what, " is not aligned to the ", promised,
          " bytes that its algorithm was chosen for");
}

// D = alpha op(A) op(B) + beta C + bias of the row, in fp64, rounded once.
struct Product {
  Side a, b;
  Matrix d;
  const void *of_a, *of_b, *of_c, *bias;
  void* out;
  bool bias_is_fp32;
  double beta, alpha = 1.0;

  double bias_at(int64_t i) const {
    if (bias == nullptr) return 0.0;
    return double{bias_is_fp32 ? static_cast<const float*>(bias)[i] : to_float(static_cast<const bf16*>(bias)[i])};
  }
  void compute() const {
    const std::vector<double> left = a.values(of_a), right = b.values(of_b);
    for (int64_t j = 0; j < d.cols; ++j) {
      for (int64_t i = 0; i < d.rows; ++i) {
        const double* const x = left.data() + i * a.depth;
        const double* const y = right.data() + j * b.depth;
        double sum = 0.0;
        for (int64_t k = 0; k < a.depth; ++k) sum += x[k] * y[k];
        write(j * d.column + i, bias_at(i) + alpha * sum);
      }
    }
  }
  void write(int64_t at, double sum) const {
    if (d.type == CUDA_R_32F) {
      const double before = beta == 0.0 ? 0.0 : beta * double{static_cast<const float*>(of_c)[at]};
      static_cast<float*>(out)[at] = static_cast<float>(sum + before);
    } else {
      const double before = beta == 0.0 ? 0.0 : beta * double{to_float(static_cast<const bf16*>(of_c)[at])};
      static_cast<bf16*>(out)[at] = to_bf16(static_cast<float>(sum + before));
    }
  }
};

// GEMMs of groups, read when the stream comes to them. Like the real library before 13.3, it leaves alone what has an empty contraction.
struct ProductsOfGroups {
  Side a, b;  // sides of the operation, with no matrix
  Matrices of_a, of_b, of_d;
  const void* const* addresses[3];
  const float *alpha, *beta;

  void compute() const {
    require(*alpha == 1.0F, "a product of groups is multiplied by ", *alpha);
    for (int64_t g = 0; g < of_d.groups; ++g) {
      Product product{.a = a.with(of_a.of(g)),
                      .b = b.with(of_b.of(g)),
                      .d = of_d.of(g),
                      .of_a = addresses[0][g],
                      .of_b = addresses[1][g],
                      .of_c = addresses[2][g],
                      .bias = nullptr,
                      .out = const_cast<void*>(addresses[2][g]),
                      .bias_is_fp32 = false,
                      .beta = double{*beta}};
      require(product.a.depth == product.b.depth && product.d.rows == product.a.outer && product.d.cols == product.b.outer,
              "the matrices of group ", g, " do not fit each other");
      for (const auto& each : addresses) require_aligned(each[g], 16, product.d, "a matrix of a group");
      if (product.a.depth > 0) product.compute();
    }
  }
};

cublasStatus_t multiply(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a, cublasLtMatrixLayout_t layout_a,
                        const void* b, cublasLtMatrixLayout_t layout_b, const void* beta, const void* c, cublasLtMatrixLayout_t, void* d,
                        cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t bytes,
                        cudaStream_t stream) {
  if (Matrices::are(layout_d)) {
    const auto promised = promised_of(*algorithm);
    require(promised.at_once && bytes >= kWorkspace && workspace != nullptr && c == d, "groups without an algorithm or a workspace");
    const Matrix none(CUDA_R_16BF, 0, 0, 0);
    const ProductsOfGroups products{
        .a = Side(desc, none, true),
        .b = Side(desc, none, false),
        .of_a = Matrices(layout_a),
        .of_b = Matrices(layout_b),
        .of_d = Matrices(layout_d),
        .addresses = {static_cast<const void* const*>(a), static_cast<const void* const*>(b), static_cast<const void* const*>(d)},
        .alpha = static_cast<const float*>(alpha),
        .beta = static_cast<const float*>(beta)};
    if (const int status = simt::status_of_gemms(); status != 0) return static_cast<cublasStatus_t>(status);
    ++simt::at_once;
    submit(*reinterpret_cast<Stream*>(stream), [=] {
      std::memset(workspace, 0xff, bytes);
      products.compute();
    });
    return CUBLAS_STATUS_SUCCESS;
  }
  const bool biased = attribute<uint32_t>(desc, CUBLASLT_MATMUL_DESC_EPILOGUE) == CUBLASLT_EPILOGUE_BIAS;
  const Product product{.a = Side(desc, layout_a, true),
                        .b = Side(desc, layout_b, false),
                        .d = Matrix(layout_d),
                        .of_a = a,
                        .of_b = b,
                        .of_c = c,
                        .bias = biased ? attribute<const void*>(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER) : nullptr,
                        .out = d,
                        .bias_is_fp32 = attribute<int32_t>(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) == CUDA_R_32F,
                        .beta = double{*static_cast<const float*>(beta)},
                        .alpha = double{*static_cast<const float*>(alpha)}};
  if (const int status = simt::status_of_gemms(); status != 0) return static_cast<cublasStatus_t>(status);
  const Promised promised = promised_of(*algorithm);
  require((product.alpha == 1.0 || product.a.matrix.fp4()) && is_supported(desc, product.a, product.b, product.d),
          "this product has no algorithm");
  require(bytes >= kWorkspace && workspace != nullptr, "the workspace is too small");
  require_aligned(a, promised.a, product.a.matrix, "A");
  require_aligned(b, promised.b, product.b.matrix, "B");
  require_aligned(c, promised.c, product.d, "C");
  require_aligned(d, promised.d, product.d, "D");
  ++(product.a.mode == ScaleMode::scalar   ? simt::of_values
     : product.a.mode == ScaleMode::per_16 ? simt::per_16
     : product.a.mode == ScaleMode::per_32 ? simt::per_32
                                           : simt::per_128);
  submit(*reinterpret_cast<Stream*>(stream), [=] {
    std::memset(workspace, 0xff, bytes);
    product.compute();
  });
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// None unless the executor stands for an architecture.
std::optional<CublasLtCalls> load_cublaslt() {
  if (!simt::stands_for_a_chip()) return std::nullopt;
  // Another library than that of the toolkit, whose descriptors are to be read back (tests/interop/cublaslt.sh).
  const char* const given = std::getenv("MANTISSA_SIMT_CUBLASLT");
  static void* const library = dlopen(given ? given : MANTISSA_CUBLASLT, RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, ExitCode::environment, "no cuBLASLt can be loaded");
  const auto take = [](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  CublasLtCalls calls{};
#define MANTISSA_CALL(name) require(take(calls.name, "cublasLt" #name), ExitCode::environment, "cuBLASLt has no function ", #name);
  MANTISSA_CUBLASLT_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  const bool has_groups = take(calls.GroupedMatrixLayoutCreate, "cublasLtGroupedMatrixLayoutCreate");
  take(real().MatmulDescGetAttribute, "cublasLtMatmulDescGetAttribute");
  take(real().MatrixLayoutGetAttribute, "cublasLtMatrixLayoutGetAttribute");
  take(real().MatmulPreferenceGetAttribute, "cublasLtMatmulPreferenceGetAttribute");
  real().calls = calls;
  calls.GetVersion = version;
  if (!has_groups) {
    calls.GroupedMatrixLayoutCreate = create_layout_of_groups;
    calls.MatmulDescSetAttribute = set_in_desc, calls.MatmulDescDestroy = destroy_desc;
    calls.MatrixLayoutSetAttribute = set_in_layout, calls.MatrixLayoutDestroy = destroy_layout;
    calls.MatmulPreferenceSetAttribute = set_in_preference, calls.MatmulPreferenceDestroy = destroy_preference;
  }
  calls.Create = create, calls.Destroy = destroy, calls.MatmulAlgoGetHeuristic = choose;
  calls.MatmulAlgoCheck = check_algorithm, calls.Matmul = multiply;
  return calls;
}

}  // namespace mantissa::gpu
