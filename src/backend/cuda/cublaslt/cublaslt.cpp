// cuBLASLt is column-major: to it a row-major matrix is its transpose, and our out is op(b)^T op(a)^T. So its A is our b and its B our a,
// and it transposes those that we transpose.
#include <algorithm>
#include <map>
#include <memory>
#include <tuple>

#include "backend/cuda/cublaslt/calls.h"
#include "backend/cuda/gemm/gemm_library.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {
namespace {

void check(cublasStatus_t status, const auto&... what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool of_environment =
      status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_ARCH_MISMATCH;
  const std::string why = status == CUBLAS_STATUS_ALLOC_FAILED       ? "no memory"
                          : status == CUBLAS_STATUS_EXECUTION_FAILED ? "a kernel failed"
                                                                     : text("status ", static_cast<int>(status));
  fail(of_environment ? ExitCode::environment : ExitCode::internal, "cuBLASLt: ", what..., " failed: ", why);
}

// Returns the number of an enumerator of scale modes, because headers before 12.9 lack some.
int32_t scale_mode(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::none: return 0;
    case ScaleLayout::swizzled_e8m0: return 2;
    case ScaleLayout::outer_fp32: return 4;
    case ScaleLayout::tiles_fp32: return 5;
  }
  return 0;
}

cudaDataType type_of(Dtype dtype) { return dtype == Dtype::f32 ? CUDA_R_32F : CUDA_R_16BF; }
cudaDataType type_of(const LibraryMatrix& matrix) {
  if (matrix.format == Format::none) return type_of(matrix.dtype);
  return matrix.format == Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

// An object that one call of the library makes and another one destroys.
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

// Holds what the library knows about a GEMM, but for addresses.
struct Chosen {
  Owned<cublasLtMatmulDesc_t> desc;
  Owned<cublasLtMatrixLayout_t> a, b, d;
  bool found = false;
  cublasLtMatmulHeuristicResult_t result{};
};

class CublasLt final : public GemmLibrary {
 public:
  explicit CublasLt(const CublasLtCalls& calls) : calls_(calls) { check(calls_.Create(&handle_), "creating a handle"); }
  ~CublasLt() override {
    chosen_.clear();
    calls_.Destroy(handle_);
  }
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  int version() const override { return static_cast<int>(calls_.GetVersion()); }

  bool multiply(Stream& stream, const LibraryGemm& g, const Memory& workspace) override {
    Chosen& chosen = choose(g, false);
    if (!chosen.found) return false;
    set_addresses(chosen.desc.get(), g);
    ask_for(stream, chosen, g, chosen.result.workspaceSize, workspace);
    return true;
  }

  bool multiply_groups(Stream& stream, const LibraryGemm& usual, std::span<const LibraryGemm> groups, const Memory& workspace) override {
    Chosen& chosen = choose(usual, true);
    size_t bytes = 0;
    const bool fits = chosen.found && std::ranges::all_of(groups, [&](const LibraryGemm& g) {
                        set_rows(chosen, g);
                        cublasLtMatmulHeuristicResult_t result{};
                        const cublasStatus_t status = calls_.MatmulAlgoCheck(handle_, chosen.desc.get(), chosen.a.get(), chosen.b.get(),
                                                                             chosen.d.get(), chosen.d.get(), &chosen.result.algo, &result);
                        bytes = std::max(bytes, result.workspaceSize);
                        return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= static_cast<size_t>(kGemmWorkspace);
                      });
    if (!fits) return false;
    for (const LibraryGemm& g : groups) {
      set_rows(chosen, g);
      ask_for(stream, chosen, g, bytes, workspace);
    }
    return true;
  }

 private:
  using Side = std::tuple<int, bool, ScaleLayout>;
  using Key = std::tuple<Side, Side, Dtype, uint32_t, bool, bool, int64_t, int64_t, int64_t, bool>;
  static Side side_of(const LibraryMatrix& matrix) { return {type_of(matrix), matrix.transposed, matrix.layout}; }

  void ask_for(Stream& stream, const Chosen& chosen, const LibraryGemm& g, size_t bytes, const Memory& workspace) {
    const std::shared_ptr<std::byte> memory = bytes > 0 ? workspace(static_cast<int64_t>(bytes)) : nullptr;
    const float alpha = 1.0F, beta = g.accumulate ? 1.0F : 0.0F;
    check(
        calls_.Matmul(handle_, chosen.desc.get(), &alpha, g.b.data, chosen.a.get(), g.a.data, chosen.b.get(), &beta, g.out, chosen.d.get(),
                      g.out, chosen.d.get(), &chosen.result.algo, memory.get(), bytes, static_cast<cudaStream_t>(handle_of(stream))),
        "a GEMM of ", g.m, " x ", g.n, " x ", g.k);
  }

  Chosen& choose(const LibraryGemm& g, bool grouped) {
    const Key key{side_of(g.a), side_of(g.b), g.out_dtype, g.alignment, g.accumulate, g.bias != nullptr, g.m, g.n, g.k, grouped};
    std::unique_ptr<Chosen>& chosen = chosen_[key];
    if (!chosen) {
      chosen = std::make_unique<Chosen>(Chosen{.desc = describe(g),
                                               .a = layout(type_of(g.b), rows_of_b(g), g.b.transposed ? g.k : g.n),
                                               .b = layout(type_of(g.a), rows_of_a(g), g.a.transposed ? g.m : g.k),
                                               .d = layout(type_of(g.out_dtype), g.m, g.n)});
      ask(*chosen, g, grouped);
    }
    return *chosen;
  }

  Owned<cublasLtMatrixLayout_t> layout(cudaDataType type, int64_t rows, int64_t row) {
    cublasLtMatrixLayout_t made = nullptr;
    check(calls_.MatrixLayoutCreate(&made, type, static_cast<uint64_t>(row), static_cast<uint64_t>(rows), row), "creating a layout");
    return {made, calls_.MatrixLayoutDestroy};
  }
  void set_rows(Chosen& chosen, const LibraryGemm& g) {
    const auto set_one = [this](const Owned<cublasLtMatrixLayout_t>& matrix, int64_t rows) {
      check(calls_.MatrixLayoutSetAttribute(matrix.get(), CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows), "setting the size of a layout");
    };
    set_one(chosen.a, rows_of_b(g)), set_one(chosen.b, rows_of_a(g)), set_one(chosen.d, g.m);
  }
  static int64_t rows_of_a(const LibraryGemm& g) { return g.a.transposed ? g.k : g.m; }
  static int64_t rows_of_b(const LibraryGemm& g) { return g.b.transposed ? g.n : g.k; }

  void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(calls_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value), "setting an attribute of a descriptor");
  }
  Owned<cublasLtMatmulDesc_t> describe(const LibraryGemm& g) {
    cublasLtMatmulDesc_t desc = nullptr;
    check(calls_.MatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "creating a descriptor");
    Owned<cublasLtMatmulDesc_t> out(desc, calls_.MatmulDescDestroy);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(g.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(g.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (g.bias) {
      set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(g.out_dtype)));
    }
    set_addresses(desc, g);
    if (g.a.layout == ScaleLayout::none) return out;
    set(desc, static_cast<cublasLtMatmulDescAttributes_t>(kScaleModeOfA), scale_mode(g.b.layout));
    set(desc, static_cast<cublasLtMatmulDescAttributes_t>(kScaleModeOfB), scale_mode(g.a.layout));
    return out;
  }
  static constexpr int kScaleModeOfA = 31, kScaleModeOfB = 32;

  void set_addresses(cublasLtMatmulDesc_t desc, const LibraryGemm& g) {
    if (g.bias) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    if (g.a.layout == ScaleLayout::none) return;
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.b.scales);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.a.scales);
  }

  void ask(Chosen& chosen, const LibraryGemm& g, bool grouped) {
    cublasLtMatmulPreference_t made = nullptr;
    check(calls_.MatmulPreferenceCreate(&made), "creating a preference");
    const Owned<cublasLtMatmulPreference_t> preference(made, calls_.MatmulPreferenceDestroy);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check(calls_.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), "setting an attribute of a preference");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspace));
    const bool splits = !grouped && (g.a.transposed || g.k >= kLongSum);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(splits ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
    for (const auto each : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(each, g.alignment);
    int found = 0;
    const cublasStatus_t status = calls_.MatmulAlgoGetHeuristic(handle_, chosen.desc.get(), chosen.a.get(), chosen.b.get(), chosen.d.get(),
                                                                chosen.d.get(), made, 1, &chosen.result, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "choosing an algorithm");
    chosen.found = status == CUBLAS_STATUS_SUCCESS && found > 0 && chosen.result.state == CUBLAS_STATUS_SUCCESS;
  }

  const CublasLtCalls calls_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Chosen>> chosen_;
};

}  // namespace

std::unique_ptr<GemmLibrary> load_gemm_library() {
  const std::optional<CublasLtCalls> calls = load_cublaslt();
  return calls ? std::make_unique<CublasLt>(*calls) : nullptr;
}

}  // namespace mantissa::gpu
