#include "backend/cuda/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Where the codes of a matrix go, and its blocks.
struct Codes {
  uint8_t *codes, *scales;
  int64_t rows, cols;  // whole blocks
  int64_t block_rows, block_cols;
  ScaleRule rule;

  explicit Codes(const QuantizedTensor& tensor)
      : codes(tensor.codes.device_data<uint8_t>()),
        scales(tensor.scales.device_data<uint8_t>()),
        rows(tensor.shape[0]),
        cols(tensor.shape[1]),
        block_rows(tensor.how.block_rows),
        block_cols(tensor.how.block_cols),
        rule(tensor.how.rule) {}
  MANTISSA_HOST_DEVICE int64_t blocks() const { return rows / block_rows * (cols / block_cols); }
};

// The fp32 bits of x [rows, cols], and zeros below.
template <class T>
struct Source {
  const T* x;
  int64_t rows, cols;

  __device__ uint32_t bits(int64_t row, int64_t col) const {
    return row < rows ? __builtin_bit_cast(uint32_t, value_of(x[row * cols + col])) : 0U;
  }
};

// A warp has a block of the format, whose rows fill whole bytes. A lane has every 32nd byte.
template <class E, class From>
__global__ void __launch_bounds__(kThreads) quantize(From from, Codes to) {
  constexpr int64_t kEach = E::codes_per_byte;
  const int64_t index = block() * kWarpsOfBlock + warp();
  if (index >= to.blocks()) return;
  const int64_t across = to.cols / to.block_cols, first_row = index / across * to.block_rows, first_col = index % across * to.block_cols;
  const auto bytes_of_row = static_cast<uint32_t>(to.block_cols / kEach), bytes = static_cast<uint32_t>(to.block_rows) * bytes_of_row;
  const auto element = [&](uint32_t byte, int64_t i) {
    return from.bits(first_row + byte / bytes_of_row, first_col + byte % bytes_of_row * kEach + i);
  };
  uint32_t key = 0;
  for (uint32_t byte = lane(); byte < bytes; byte += kWarp)
    for (int64_t i = 0; i < kEach; ++i) key = Largest<uint32_t>()(key, amax_key(element(byte, i), to.rule));
  const uint8_t scale = block_scale<E>(amax_of_key(join_warp(key, Largest<uint32_t>())), to.rule);
  for (uint32_t byte = lane(); byte < bytes; byte += kWarp) {
    uint32_t codes = 0;
    for (int64_t i = 0; i < kEach; ++i) codes |= uint32_t{encode_in_block<E>(element(byte, i), scale, to.rule)} << (4 * i);
    to.codes[((first_row + byte / bytes_of_row) * to.cols + first_col) / kEach + byte % bytes_of_row] = static_cast<uint8_t>(codes);
  }
  if (lane() == 0) to.scales[index] = scale;
}

// The blocks number `index` of so many that begin in one byte.
template <class E, class From>
__device__ inline void quantize_blocks(const From& from, const Codes& to, int64_t index) {
  constexpr int64_t kEach = E::codes_per_byte;
  const int64_t across = to.cols / to.block_cols / kEach, first_row = index / across * to.block_rows;
  const int64_t first_col = index % across * kEach * to.block_cols, end_row = first_row + to.block_rows;
  uint8_t scales[size_t{kEach}];
  MANTISSA_UNROLL
  for (int64_t i = 0; i < kEach; ++i) {
    const int64_t col = first_col + i * to.block_cols;
    uint32_t key = 0;
    for (int64_t row = first_row; row < end_row; ++row)
      for (int64_t c = 0; c < to.block_cols; ++c) key = Largest<uint32_t>()(key, amax_key(from.bits(row, col + c), to.rule));
    to.scales[index * kEach + i] = scales[i] = block_scale<E>(amax_of_key(key), to.rule);
  }
  for (int64_t row = first_row; row < end_row; ++row) {
    for (int64_t byte = 0; byte < to.block_cols; ++byte) {
      uint32_t codes = 0;
      for (int64_t i = 0; i < kEach; ++i) {
        const int64_t c = byte * kEach + i;
        const uint8_t scale = c < to.block_cols ? scales[0] : scales[kEach - 1];
        codes |= uint32_t{encode_in_block<E>(from.bits(row, first_col + c), scale, to.rule)} << (4 * i);
      }
      to.codes[(row * to.cols + first_col) / kEach + byte] = static_cast<uint8_t>(codes);
    }
  }
}

// Where a block is a column, so that threads beside each other read neighbors, and where a row of a block ends within a byte: a thread has
// a block, or those that share their bytes. With room for more than four blocks of a multiprocessor the compiler would keep some of a
// thread's values in memory.
template <class E, class From>
__global__ void __launch_bounds__(kThreads, 4) quantize_alone(From from, Codes to) {
  for_each_element(to.blocks() / E::codes_per_byte, [=](int64_t index) { quantize_blocks<E>(from, to, index); });
}

template <class T>
__global__ void __launch_bounds__(kThreads) find_nonfinite(const T* x, int64_t count, int32_t* found) {
  for_each_element(count, [=](int64_t i) {
    if ((__builtin_bit_cast(uint32_t, value_of(x[i])) & ~kFp32Sign) >= kFp32Inf) fetch_or(reinterpret_cast<uint32_t*>(found), 1U);
  });
}

// out is the columns of x from `first` on, `width` of them. extreme may be null.
template <class E, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize(CodesToRead<E> x, T* out, int64_t count, int64_t width, int64_t first, int32_t* extreme) {
  for_each_element(count, [=](int64_t i) {
    const int64_t row = i / width, col = first + i % width;
    const uint8_t code = x.code(row, col), scale = x.scale(row, col);
    out[i] = rounded<T>(__builtin_bit_cast(float, decode_in_block<E>(code, scale, x.rule)));
    if (extreme != nullptr && (code & E::magnitude_mask) != 0 && extreme_scale<E>(scale))
      fetch_or(reinterpret_cast<uint32_t*>(extreme), 1U);
  });
}

// The opposite of swizzled_offset().
__global__ void __launch_bounds__(kThreads)
    swizzle(const uint8_t* scales, int64_t outer_count, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, uint8_t* out) {
  const int64_t tiles_across = ceil_div(inner_count, int64_t{4});
  for_each_element(swizzled_bytes(outer_count, inner_count), [=](int64_t i) {
    const int64_t tile = i / 512, place = i % 512;
    const int64_t outer = tile / tiles_across * 128 + place / 4 % 4 * 32 + place / 16, inner = tile % tiles_across * 4 + place % 4;
    out[i] = outer < outer_count && inner < inner_count ? scales[outer * outer_stride + inner * inner_stride] : uint8_t{0};
  });
}

template <class From>
struct QuantizeLaunch {
  void (*kernel)(From, Codes);
  Grid grid;
};
template <class E, class From>
QuantizeLaunch<From> quantize_launch(const From&, const Codes& to) {
  const bool alone = to.block_cols == 1 || to.block_cols % E::codes_per_byte != 0;
  if (alone) return {quantize_alone<E, From>, {blocks_for(to.blocks() / E::codes_per_byte), kThreads}};
  return {quantize<E, From>, {ceil_div(to.blocks(), int64_t{kWarpsOfBlock}), kThreads}};
}

}  // namespace

void CudaBackend::execute(const Quantize& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    const Source<T> from{x, k.x.dim(0), k.x.dim(1)};
    for (const QuantizedTensor* out : {&k.out, &k.second}) {
      if (!out->defined()) continue;
      const Codes codes(*out);
      with_element(out->how.format, [&]<class E>() {
        const auto [kernel, grid] = quantize_launch<E>(from, codes);
        launch(kernel, grid, from, codes);
      });
    }
    if (!k.nonfinite.defined()) return;
    launch(find_nonfinite<T>, {blocks_for(k.x.elements()), kThreads}, x, k.x.elements(), k.nonfinite.device_data<int32_t>());
  });
}

void CudaBackend::execute(const Dequantize& k) {
  int32_t* const extreme = data_or_null<int32_t>(k.extreme);
  const int64_t count = k.out.elements();
  with_element(k.x.how.format, [&]<class E>() {
    with_values(k.out.dtype(), [&]<class T>() {
      launch(dequantize<E, T>, {blocks_for(count), kThreads}, CodesToRead<E>(k.x), k.out.device_data<T>(), count, k.out.dim(1), k.first_col,
             extreme);
    });
  });
}

void CudaBackend::execute(const FakeQuantize& k) { execute(Dequantize{.x = quantized(k.x, k.how), .out = k.out}); }

void CudaBackend::execute(const RequantizeColumns& k) {
  const Codes to(k.out);
  with_element(k.x.how.format, [&]<class E>() {
    const CodesToRead<E> from(k.x);
    const auto [kernel, grid] = quantize_launch<E>(from, to);
    launch(kernel, grid, from, to);
  });
}

void CudaBackend::execute(const SwizzleScales& k) {
  const bool rows = k.x.how.rowwise();
  const int64_t stride = k.x.scales.dim(1);
  launch(swizzle, {blocks_for(k.out.elements()), kThreads}, k.x.scales.device_data<uint8_t>(), k.x.shape[rows ? 0 : 1],
         k.x.scales.dim(rows ? 1 : 0), rows ? stride : 1, rows ? 1 : stride, k.out.device_data<uint8_t>());
}

}  // namespace mantissa
