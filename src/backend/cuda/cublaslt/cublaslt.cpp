// cuBLASLt is column-major: to it a row-major matrix is its transpose, and our out is op(b)^T op(a)^T. So its A is our b and its B our a,
// and it transposes those that we transpose.
#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

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
    case ScaleLayout::swizzled_e4m3: return 1;
    case ScaleLayout::swizzled_e8m0: return 2;
    case ScaleLayout::outer_fp32: return 4;
    case ScaleLayout::tiles_fp32: return 5;
  }
  return 0;
}

cudaDataType type_of(Dtype dtype) { return dtype == Dtype::f32 ? CUDA_R_32F : CUDA_R_16BF; }
cudaDataType type_of(const LibraryMatrix& matrix) {
  if (matrix.format == Format::none) return type_of(matrix.dtype);
  if (matrix.format == Format::nvfp4) return CUDA_R_4F_E2M1;
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
  std::map<std::pair<int64_t, int64_t>, std::optional<size_t>>
      workspaces{};  // bytes by m and k of a group; none: the algorithm does not fit
};

// Numbers of enumerators that headers before 13.10 lack. The averages are int64_t, whatever the header says: the library refuses others.
constexpr auto kBatchInvariance = static_cast<cublasLtMatmulDescAttributes_t>(41);
constexpr int kFirstWithBatchInvariance = 131000;
constexpr std::array kArraysOfGroups{static_cast<cublasLtMatrixLayoutAttribute_t>(9), static_cast<cublasLtMatrixLayoutAttribute_t>(10),
                                     static_cast<cublasLtMatrixLayoutAttribute_t>(11)};  // rows, columns, leading dimensions
constexpr auto kAverageDepth = static_cast<cublasLtMatmulPreferenceAttributes_t>(13),
               kAverageRows = static_cast<cublasLtMatmulPreferenceAttributes_t>(14),
               kAverageColumns = static_cast<cublasLtMatmulPreferenceAttributes_t>(15);

class CublasLt final : public GemmLibrary {
 public:
  explicit CublasLt(const CublasLtCalls& calls) : calls_(calls) { check(calls_.Create(&handle_), "creating a handle"); }
  ~CublasLt() override {
    chosen_.clear(), chosen_for_groups_.clear();
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
    if (!chosen.found) return false;
    for (const LibraryGemm& g : groups) {
      const std::optional<size_t>& needed = workspace_of_group(chosen, g);
      if (!needed) return false;
      bytes = std::max(bytes, *needed);
    }
    for (const LibraryGemm& g : groups) {
      set_rows(chosen, g);
      ask_for(stream, chosen, g, bytes, workspace);
    }
    return true;
  }

  bool multiply_at_once(Stream& stream, const GroupedProduct& p, const Memory& workspace) override {
    if (calls_.GroupedMatrixLayoutCreate == nullptr) return false;
    Chosen& chosen = choose(p);
    if (!chosen.found) return false;
    set_arrays(chosen.a, p.b), set_arrays(chosen.b, p.a), set_arrays(chosen.d, p.out);
    const size_t bytes = chosen.result.workspaceSize;
    const std::shared_ptr<std::byte> memory = taken(workspace, bytes);
    // Sums that go on are in C, which lies as D.
    check(calls_.Matmul(handle_, chosen.desc.get(), p.factors, p.b.addresses, chosen.a.get(), p.a.addresses, chosen.b.get(), p.factors + 1,
                        p.out.addresses, chosen.d.get(), p.out.addresses, chosen.d.get(), &chosen.result.algo, memory.get(), bytes,
                        static_cast<cudaStream_t>(handle_of(stream))),
          "a GEMM of ", p.groups, " groups, usually of ", p.m, " x ", p.n, " x ", p.k);
    return true;
  }

 private:
  using Side = std::tuple<int, bool, ScaleLayout>;
  using Key = std::tuple<Side, Side, Dtype, uint32_t, bool, bool, int64_t, int64_t, int64_t, bool>;
  static Side side_of(const LibraryMatrix& matrix) { return {type_of(matrix), matrix.transposed, matrix.layout}; }

  static std::shared_ptr<std::byte> taken(const Memory& workspace, size_t bytes) {
    return bytes > 0 ? workspace(static_cast<int64_t>(bytes)) : nullptr;
  }
  void ask_for(Stream& stream, const Chosen& chosen, const LibraryGemm& g, size_t bytes, const Memory& workspace) {
    const std::shared_ptr<std::byte> memory = taken(workspace, bytes);
    const float alpha = g.factor, beta = g.accumulate ? 1.0F : 0.0F;
    check(
        calls_.Matmul(handle_, chosen.desc.get(), &alpha, g.b.data, chosen.a.get(), g.a.data, chosen.b.get(), &beta, g.out, chosen.d.get(),
                      g.out, chosen.d.get(), &chosen.result.algo, memory.get(), bytes, static_cast<cudaStream_t>(handle_of(stream))),
        "a GEMM of ", g.m, " x ", g.n, " x ", g.k);
  }

  Chosen& choose(const LibraryGemm& g, bool grouped) {
    const Key key{side_of(g.a), side_of(g.b), g.out_dtype, g.alignment, g.accumulate, g.bias != nullptr, g.m, g.n, g.k, grouped};
    std::unique_ptr<Chosen>& chosen = chosen_[key];
    if (!chosen) {
      chosen = std::make_unique<Chosen>(Chosen{.desc = describe(g, grouped),
                                               .a = layout(type_of(g.b), rows_of_b(g), g.b.transposed ? g.k : g.n),
                                               .b = layout(type_of(g.a), rows_of_a(g), g.a.transposed ? g.m : g.k),
                                               .d = layout(type_of(g.out_dtype), g.m, g.n)});
      ask(*chosen, g, grouped);
    }
    return *chosen;
  }

  using GroupsKey = std::tuple<Dtype, bool, Dtype, bool, Dtype, int, int64_t, int64_t, int64_t>;
  Chosen& choose(const GroupedProduct& p) {
    const GroupsKey key{p.a.dtype, p.a.transposed, p.b.dtype, p.b.transposed, p.out.dtype, p.groups, p.m, p.n, p.k};
    std::unique_ptr<Chosen>& chosen = chosen_for_groups_[key];
    if (chosen) return *chosen;
    const auto layout = [&](const GroupedMatrix& x) {
      cublasLtMatrixLayout_t made = nullptr;
      check(calls_.GroupedMatrixLayoutCreate(&made, type_of(x.dtype), p.groups, x.cols, x.rows, x.cols), "creating a layout of groups");
      return Owned<cublasLtMatrixLayout_t>{made, calls_.MatrixLayoutDestroy};
    };
    chosen = std::make_unique<Chosen>(
        Chosen{.desc = describe(p.a.transposed, p.b.transposed), .a = layout(p.b), .b = layout(p.a), .d = layout(p.out)});
    cublasLtMatmulDesc_t desc = chosen->desc.get();
    set(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
    promise_batch_invariance(desc, kLibraryAlignment);
    Preference preference = prefer(CUBLASLT_REDUCTION_SCHEME_NONE, kLibraryAlignment);
    set(preference, kAverageRows, p.n), set(preference, kAverageColumns, p.m), set(preference, kAverageDepth, p.k);
    ask(*chosen, preference);
    return *chosen;
  }
  // The library's rows are our columns.
  void set_arrays(const Owned<cublasLtMatrixLayout_t>& layout, const GroupedMatrix& x) {
    const std::array<const int32_t*, 3> arrays{x.cols, x.rows, x.cols};
    for (size_t i = 0; i < arrays.size(); ++i)
      check(calls_.MatrixLayoutSetAttribute(layout.get(), kArraysOfGroups[i], &arrays[i], sizeof arrays[i]),
            "setting an array of a layout of groups");
  }

  const std::optional<size_t>& workspace_of_group(Chosen& chosen, const LibraryGemm& g) {
    const auto [place, added] = chosen.workspaces.insert({{g.m, g.k}, std::nullopt});
    if (!added) return place->second;
    set_rows(chosen, g);
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status = calls_.MatmulAlgoCheck(handle_, chosen.desc.get(), chosen.a.get(), chosen.b.get(), chosen.d.get(),
                                                         chosen.d.get(), &chosen.result.algo, &result);
    if (status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= static_cast<size_t>(kGemmWorkspace))
      place->second = result.workspaceSize;
    return place->second;
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
  Owned<cublasLtMatmulDesc_t> describe(bool a_transposed, bool b_transposed) {
    cublasLtMatmulDesc_t desc = nullptr;
    check(calls_.MatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "creating a descriptor");
    Owned<cublasLtMatmulDesc_t> out(desc, calls_.MatmulDescDestroy);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    return out;
  }
  // Asks for the same bits of a row whatever its neighbors are, where the library can promise that. Before, only that sums are whole speaks
  // for it.
  void promise_batch_invariance(cublasLtMatmulDesc_t desc, uint32_t alignment) {
    if (version() < kFirstWithBatchInvariance) return;
    set(desc, kBatchInvariance, static_cast<int32_t>(std::countr_zero(alignment)));  // 2, 4, 8, 16 bytes are 1, 2, 3, 4
  }
  Owned<cublasLtMatmulDesc_t> describe(const LibraryGemm& g, bool grouped) {
    Owned<cublasLtMatmulDesc_t> out = describe(g.a.transposed, g.b.transposed);
    cublasLtMatmulDesc_t desc = out.get();
    if (grouped) promise_batch_invariance(desc, g.alignment);
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

  using Preference = Owned<cublasLtMatmulPreference_t>;
  void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(calls_.MatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value), "setting an attribute of a preference");
  }
  Preference prefer(uint32_t reductions, uint32_t alignment) {
    cublasLtMatmulPreference_t made = nullptr;
    check(calls_.MatmulPreferenceCreate(&made), "creating a preference");
    Preference out(made, calls_.MatmulPreferenceDestroy);
    set(out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspace));
    set(out, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    for (const auto each : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      set(out, each, alignment);
    return out;
  }
  void ask(Chosen& chosen, const LibraryGemm& g, bool grouped) {
    const bool splits = !grouped && (g.a.transposed || g.k >= kLongSum);
    ask(chosen, prefer(splits ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE, g.alignment));
  }
  void ask(Chosen& chosen, const Preference& preference) {
    int found = 0;
    const cublasStatus_t status = calls_.MatmulAlgoGetHeuristic(handle_, chosen.desc.get(), chosen.a.get(), chosen.b.get(), chosen.d.get(),
                                                                chosen.d.get(), preference.get(), 1, &chosen.result, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "choosing an algorithm");
    chosen.found = status == CUBLAS_STATUS_SUCCESS && found > 0 && chosen.result.state == CUBLAS_STATUS_SUCCESS;
  }

  const CublasLtCalls calls_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Chosen>> chosen_;
  std::map<GroupsKey, std::unique_ptr<Chosen>> chosen_for_groups_;
};

}  // namespace

std::unique_ptr<GemmLibrary> load_gemm_library() {
  const std::optional<CublasLtCalls> calls = load_cublaslt();
  return calls ? std::make_unique<CublasLt>(*calls) : nullptr;
}

}  // namespace mantissa::gpu
