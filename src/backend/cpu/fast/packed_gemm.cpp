#include "backend/cpu/fast/packed_gemm.h"

#include <algorithm>
#include <new>
#include <unordered_map>

#include "backend/cpu/fast/gemm_engine.h"
#include "backend/cpu/fast/onednn_matmul.h"
#include "mantissa/base/generated_call.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

using dnnl::memory;

constexpr std::align_val_t kCacheLine{64};

// Kernels of oneDNN prefetch behind the operand that they multiply by: jit_avx_gemm_f32 of 2.6 up to 55 KB, brgemm a step of the depth. A
// prefetch from a page that was never written finds no translation, looks for it again each time, and costs a hundred times as much.
constexpr int64_t kReadAhead = int64_t{64} << 10, kPage = 4096;

// Columns behind those of a tile of b that is stored row by row: rows at a distance of a power of two would share few sets of the cache.
constexpr int64_t kColumnPadding = 16;

// The layouts that the library reads without a copy of its own, for a tile whose columns are a multiple of the panel.
struct KnownLayout {
  int64_t panel;
  memory::format_tag tag;
  bool pairs;
};
using Tag = memory::format_tag;
constexpr KnownLayout kKnownLayouts[] = {{64, Tag::BA16a64b, false},  {64, Tag::BA16a64b2a, true}, {48, Tag::BA16a48b, false},
                                         {48, Tag::BA16a48b2a, true}, {32, Tag::BA16a32b, false},  {32, Tag::BA16a32b2a, true},
                                         {16, Tag::BA16a16b, false},  {16, Tag::BA16a16b2a, true}};

// Returns the layout that the library prefers for this GEMM, or else rows.
PanelLayout layout_of_b(const MatmulOperands& operands, Dtype dtype, const TileShape& shape, const std::string& which) {
  MatmulOperands any = operands;
  any.b = memory::desc({shape.depth, shape.cols}, data_type_of(dtype), memory::format_tag::any);
  const memory::desc liked = describe_gemm(any, true, which).weights_desc();
  for (const auto& [panel, tag, pairs] : kKnownLayouts) {
    if (shape.cols % panel != 0 || pairs != (dtype == Dtype::bf16)) continue;
    if (liked != memory::desc({shape.depth, shape.cols}, data_type_of(dtype), tag)) continue;
    return {.dtype = dtype, .rows = shape.depth, .cols = shape.cols, .panel = panel, .ld = panel, .pairs = pairs};
  }
  return {.dtype = dtype, .rows = shape.depth, .cols = shape.cols, .panel = shape.cols, .ld = shape.cols + kColumnPadding, .pairs = false};
}

memory::desc description_of_b(const PanelLayout& layout) {
  for (const auto& [panel, tag, pairs] : kKnownLayouts) {
    if (panel == layout.panel && pairs == layout.pairs && layout.ld == panel) {
      return {{layout.rows, layout.cols}, data_type_of(layout.dtype), tag};
    }
  }
  return matrix_description(layout.rows, layout.cols, layout.dtype, layout.ld, 1);
}

}  // namespace

TileShape tile_shape(Dtype dtype) {
  if (dtype == Dtype::bf16 && onednn_has_amx()) return {.rows = 64, .cols = 256, .depth = 256};
  return {.rows = 64, .cols = 128, .depth = 256};
}

std::byte* AlignedBytes::at_least(int64_t bytes) {
  if (size_ < bytes) {
    bytes_.reset();
    size_ = 0;
    bytes_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes + kReadAhead), kCacheLine)));
    for (int64_t at = 0; at < bytes + kReadAhead; at += kPage) bytes_.get()[at] = {};
    size_ = bytes;
  }
  return bytes_.get();
}

void AlignedBytes::Free::operator()(std::byte* bytes) const { ::operator delete(bytes, kCacheLine); }

struct PackedGemm::Library {
  memory::desc a, b, sums, scratchpad;  // scratchpad is the larger one
  dnnl::matmul set, add;
};

PackedGemm::PackedGemm(Dtype dtype, const TileShape& shape) : dtype_(dtype), shape_(shape) {
  const auto [rows, cols, depth] = shape;
  const std::string which = text(rows, " x ", cols, " x ", depth, " for ", dtype);
  MatmulOperands operands{.a = matrix_description(rows, depth, dtype, depth, 1),
                          .b = {},
                          .c = matrix_description(rows, cols, Dtype::f32, cols, 1),
                          .bias = {},
                          .with_bias = false};
  layout_of_b_ = layout_of_b(operands, dtype, shape, which);
  operands.b = description_of_b(layout_of_b_);
  const auto set = describe_gemm(operands, false, which), add = describe_gemm(operands, true, which);
  const memory::desc scratchpad[] = {set.scratchpad_desc(), add.scratchpad_desc()};
  library_ = std::make_unique<Library>(Library{.a = operands.a,
                                               .b = operands.b,
                                               .sums = operands.c,
                                               .scratchpad = scratchpad[scratchpad[0].get_size() < scratchpad[1].get_size() ? 1 : 0],
                                               .set = dnnl::matmul(set),
                                               .add = dnnl::matmul(add)});
}

PackedGemm::~PackedGemm() = default;

void PackedGemm::pack_a(const Block& block, std::byte* to) const {
  pack_block(block, {.dtype = dtype_, .rows = shape_.rows, .cols = shape_.depth, .ld = shape_.depth}, to);
}

void PackedGemm::pack_b(const Block& block, std::byte* to) const { pack_panels(block, layout_of_b_, to); }

const PackedGemms& packed_gemms(Dtype dtype) {
  const auto make = [](Dtype packed) {
    const PackedGemms* gemms = nullptr;  // never destroyed: threads keep workers of them
    const TileShape whole = tile_shape(packed), half{.rows = whole.rows, .cols = whole.cols, .depth = whole.depth / 2};
    parallel_for(1, 1,
                 [&](int64_t, int64_t) { gemms = new PackedGemms{.whole = PackedGemm(packed, whole), .half = PackedGemm(packed, half)}; });
    return gemms;
  };
  if (dtype == Dtype::bf16) {
    static const PackedGemms& bf16_gemms = *make(Dtype::bf16);
    return bf16_gemms;
  }
  static const PackedGemms& fp32_gemms = *make(Dtype::f32);
  return fp32_gemms;
}

struct TileWorker::Calls {
  dnnl::stream stream;
  memory a, b, sums, scratchpad;
  std::unordered_map<int, memory> arguments;
};

TileWorker::TileWorker(const PackedGemm& gemm) : gemm_(gemm), calls_(std::make_unique<Calls>()) {
  const PackedGemm::Library& library = *gemm.library_;
  const auto bound = [](const memory::desc& description) { return memory(description, cpu_engine(), nullptr); };
  Calls& calls = *calls_;
  calls.stream = dnnl::stream(cpu_engine());
  calls.a = bound(library.a), calls.b = bound(library.b), calls.sums = bound(library.sums);
  calls.scratchpad = bound(library.scratchpad);
  calls.scratchpad.set_data_handle(scratchpad_.at_least(std::max<int64_t>(1, static_cast<int64_t>(library.scratchpad.get_size()))));
  calls.arguments = {
      {DNNL_ARG_SRC, calls.a}, {DNNL_ARG_WEIGHTS, calls.b}, {DNNL_ARG_DST, calls.sums}, {DNNL_ARG_SCRATCHPAD, calls.scratchpad}};
}

TileWorker::~TileWorker() = default;

void TileWorker::run(const std::byte* a, const std::byte* b, bool accumulate, float* sums) {
  calls_->a.set_data_handle(const_cast<std::byte*>(a));
  calls_->b.set_data_handle(const_cast<std::byte*>(b));
  calls_->sums.set_data_handle(sums);
  const GeneratedCall here;
  (accumulate ? gemm_.library_->add : gemm_.library_->set).execute(calls_->stream, calls_->arguments);
}

TileWorkers& tile_workers(Dtype dtype) {
  const auto make = [](Dtype packed) {
    const auto& [whole, half] = packed_gemms(packed);
    return TileWorkers{.whole = TileWorker(whole), .half = TileWorker(half)};
  };
  if (dtype == Dtype::bf16) {
    thread_local TileWorkers bf16_workers = make(Dtype::bf16);
    return bf16_workers;
  }
  thread_local TileWorkers fp32_workers = make(Dtype::f32);
  return fp32_workers;
}

}  // namespace mantissa
