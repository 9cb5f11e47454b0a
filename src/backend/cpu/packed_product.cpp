#include "backend/cpu/packed_product.h"

#include <algorithm>
#include <new>
#include <optional>
#include <unordered_map>

#include "backend/cpu/gemm_engine.h"
#include "backend/cpu/onednn_matmul.h"
#include "mantissa/base/generated_call.h"
#include "mantissa/base/limits.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

using dnnl::memory;

constexpr std::align_val_t kCacheLine{64};

// The library writes its kernels without a look at whether there was memory for them.
constexpr int64_t kRelayoutBytes = int64_t{2} << 20;

// Columns behind those of a tile of b that is stored row by row: rows at a distance of a power of two would share few sets of the cache.
constexpr int64_t kColumnPadding = 16;

// A conversion of one layout into another, with the memory that it is told anew each time.
class Relayout {
 public:
  Relayout(const memory::desc& from, const memory::desc& to) : from_(from, cpu_engine(), nullptr), to_(to, cpu_engine(), nullptr) {
    reorder_ = dnnl::reorder(from_, to_);
  }
  void run(const dnnl::stream& stream, std::byte* from, std::byte* to) {
    from_.set_data_handle(from);
    to_.set_data_handle(to);
    const GeneratedCall here;
    reorder_.execute(stream, from_, to_);
  }

 private:
  memory from_, to_;
  dnnl::reorder reorder_;
};

}  // namespace

TileShape tile_shape(Dtype dtype) {
  if (dtype == Dtype::bf16 && onednn_has_amx()) return {.rows = 64, .cols = 256, .depth = 256};
  return {.rows = 64, .cols = 128, .depth = 128};
}

std::byte* AlignedBytes::at_least(int64_t bytes) {
  if (size_ < bytes) {
    bytes_.reset();
    size_ = 0;
    bytes_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kCacheLine)));
    size_ = bytes;
  }
  return bytes_.get();
}

void AlignedBytes::Free::operator()(std::byte* bytes) const { ::operator delete(bytes, kCacheLine); }

struct PackedProduct::Library {
  memory::desc a, b, sums, scratchpad;
  TileLayout stored_a, stored_b;  // of b before the library lays it out, if it does
  bool own_layout_of_b;
  dnnl::matmul matmul;
};

PackedProduct::PackedProduct(Dtype dtype, const TileShape& shape) : dtype_(dtype), shape_(shape) {
  const auto [rows, cols, depth] = shape;
  const std::string which = text(rows, " x ", cols, " x ", depth, " for ", dtype);
  MatmulOperands operands{.a = matrix_description(rows, depth, dtype, depth, 1),
                          .b = memory::desc({depth, cols}, data_type_of(dtype), memory::format_tag::any),  // as the library likes it
                          .c = matrix_description(rows, cols, Dtype::f32, cols, 1),
                          .bias = {},
                          .with_bias = false};
  auto primitive = describe_product(operands, true, which);
  const bool own_layout = primitive.weights_desc() != matrix_description(depth, cols, dtype, cols, 1);
  const int64_t ld = own_layout ? cols : cols + kColumnPadding;
  if (!own_layout) {
    operands.b = matrix_description(depth, cols, dtype, ld, 1);
    primitive = describe_product(operands, true, which);
  }
  library_ = std::make_unique<Library>(Library{.a = operands.a,
                                               .b = primitive.weights_desc(),
                                               .sums = operands.c,
                                               .scratchpad = primitive.scratchpad_desc(),
                                               .stored_a = {.dtype = dtype, .rows = rows, .cols = depth, .ld = depth},
                                               .stored_b = {.dtype = dtype, .rows = depth, .cols = cols, .ld = ld},
                                               .own_layout_of_b = own_layout,
                                               .matmul = dnnl::matmul(primitive)});
  b_bytes_ = depth * ld * dtype_bytes(dtype);
  if (own_layout) b_bytes_ = static_cast<int64_t>(library_->b.get_size());
}

PackedProduct::~PackedProduct() = default;

const PackedProduct& packed_product(Dtype dtype) {
  const auto make = [](Dtype packed) {
    const PackedProduct* product = nullptr;  // never destroyed: threads keep workers of it
    parallel_for(1, 1, [&](int64_t, int64_t) { product = new PackedProduct(packed, tile_shape(packed)); });
    return product;
  };
  if (dtype == Dtype::bf16) {
    static const PackedProduct& bf16_product = *make(Dtype::bf16);
    return bf16_product;
  }
  static const PackedProduct& fp32_product = *make(Dtype::f32);
  return fp32_product;
}

struct TileWorker::Calls {
  dnnl::stream stream;
  std::optional<Relayout> b_layout, b_layout_of_transposed;
  memory a, b, sums, scratchpad;
  std::unordered_map<int, memory> arguments;
};

TileWorker::TileWorker(const PackedProduct& product) : product_(product), calls_(std::make_unique<Calls>()) {
  const PackedProduct::Library& library = *product.library_;
  const auto bound = [](const memory::desc& description) { return memory(description, cpu_engine(), nullptr); };
  Calls& calls = *calls_;
  calls.stream = dnnl::stream(cpu_engine());
  if (library.own_layout_of_b) {
    require_memory(kRelayoutBytes, "matrix products of a thread");
    const auto [rows, cols, depth] = product.shape();
    calls.b_layout.emplace(matrix_description(depth, cols, product.dtype(), cols, 1), library.b);
    calls.b_layout_of_transposed.emplace(matrix_description(depth, cols, product.dtype(), 1, depth), library.b);
  }
  calls.a = bound(library.a), calls.b = bound(library.b), calls.sums = bound(library.sums);
  calls.scratchpad = bound(library.scratchpad);
  calls.scratchpad.set_data_handle(scratchpad_.at_least(std::max<int64_t>(1, static_cast<int64_t>(library.scratchpad.get_size()))));
  calls.arguments = {
      {DNNL_ARG_SRC, calls.a}, {DNNL_ARG_WEIGHTS, calls.b}, {DNNL_ARG_DST, calls.sums}, {DNNL_ARG_SCRATCHPAD, calls.scratchpad}};
}

TileWorker::~TileWorker() = default;

void TileWorker::pack_a(const Block& block, std::byte* to) { pack_block(block, product_.library_->stored_a, to); }

void TileWorker::pack_b(const Block& block, std::byte* to) {
  const TileLayout& tile = product_.library_->stored_b;
  if (!calls_->b_layout) return pack_block(block, tile, to);
  std::byte* const staging = staging_.at_least(tile.rows * tile.cols * dtype_bytes(tile.dtype));
  if (block.transposed) {
    pack_block(block.flipped(), {.dtype = tile.dtype, .rows = tile.cols, .cols = tile.rows, .ld = tile.rows}, staging);
    calls_->b_layout_of_transposed->run(calls_->stream, staging, to);
  } else {
    pack_block(block, tile, staging);
    calls_->b_layout->run(calls_->stream, staging, to);
  }
}

void TileWorker::add(const std::byte* a, const std::byte* b, float* sums) {
  calls_->a.set_data_handle(const_cast<std::byte*>(a));
  calls_->b.set_data_handle(const_cast<std::byte*>(b));
  calls_->sums.set_data_handle(sums);
  const GeneratedCall here;
  product_.library_->matmul.execute(calls_->stream, calls_->arguments);
}

TileWorker& tile_worker(Dtype dtype) {
  if (dtype == Dtype::bf16) {
    thread_local TileWorker bf16_worker(packed_product(Dtype::bf16));
    return bf16_worker;
  }
  thread_local TileWorker fp32_worker(packed_product(Dtype::f32));
  return fp32_worker;
}

}  // namespace mantissa
