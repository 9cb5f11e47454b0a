// Statistics of codes against the values they stand for: of pieces of a matrix, then their sums in order.
#include "backend/cuda/codes/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/reduce.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

constexpr int64_t kScaleCodes = 256, kElementsOfThread = 16, kMostPieces = 1024;
static_assert(kScaleCodes == kThreads, "a thread has a scale code");

struct ErrorSums {
  double signal, noise;
  int64_t clipped, flushed, elements;
  uint32_t amax;  // fp32 bits; those of NaN are the largest

  __device__ void add(uint32_t x, uint32_t code, uint32_t largest) {
    const uint32_t magnitude = x & ~kFp32Sign;
    const double value = __builtin_bit_cast(float, x), error = value - static_cast<double>(__builtin_bit_cast(float, code));
    signal += value * value;
    noise += error * error;
    clipped += magnitude > largest && magnitude <= kFp32Inf ? 1 : 0;
    flushed += magnitude != 0 && (code & ~kFp32Sign) == 0 ? 1 : 0;
    ++elements;
    amax = Largest<uint32_t>()(amax, magnitude);
  }
  __device__ void add(const ErrorSums& other) {
    signal += other.signal;
    noise += other.noise;
    clipped += other.clipped;
    flushed += other.flushed;
    elements += other.elements;
    amax = Largest<uint32_t>()(amax, other.amax);
  }
};

// Joins the sums of a block; every thread gets the same.
__device__ ErrorSums of_block(const ErrorSums& own) {
  return {block_sum(own.signal),  block_sum(own.noise),    block_sum(own.clipped),
          block_sum(own.flushed), block_sum(own.elements), join_block(own.amax, 0U, Largest<uint32_t>())};
}

// A block has every so many elements of x [M, C]; rows may be null: all count.
template <class E, class T>
__global__ void __launch_bounds__(kThreads)
    sum_errors(const T* x, CodesToRead<E> codes, const int32_t* rows, int64_t count, int64_t cols, ErrorSums* sums) {
  ErrorSums own{};
  for_each_element(count, [&](int64_t i) {
    const int64_t row = i / cols, col = i % cols;
    if (rows != nullptr && rows[row] < 0) return;
    const uint8_t scale = codes.scale(row, col);
    own.add(__builtin_bit_cast(uint32_t, value_of(x[i])), decode_in_block<E>(codes.code(row, col), scale, codes.rule),
            decode_in_block<E>(static_cast<uint8_t>(E::max_code), scale, codes.rule));
  });
  const ErrorSums all = of_block(own);
  if (thread() == 0) sums[block()] = all;
}

struct Histogram {
  uint32_t blocks[kScaleCodes];
};

// `across` scales have one row of blocks, each of block_rows rows of x; rows, of which some count, may be null: all do.
__global__ void __launch_bounds__(kThreads) count_scales(const uint8_t* scales, const int32_t* rows, int64_t block_rows, int64_t all_rows,
                                                         int64_t count, int64_t across, Histogram* histograms) {
  auto& own = block_shared<Histogram>().blocks;
  own[thread()] = 0;
  barrier();
  for_each_element(count, [&](int64_t i) {
    const int64_t first = i / across * block_rows;
    bool any = rows == nullptr;
    for (int64_t r = first; !any && r < all_rows && r < first + block_rows; ++r) any = rows[r] >= 0;
    if (any) fetch_add(&own[scales[i]], 1);
  });
  barrier();
  histograms[block()].blocks[thread()] = own[thread()];
}

// Runs as one block.
__global__ void __launch_bounds__(kThreads)
    finish_errors(const ErrorSums* sums, int64_t pieces, const Histogram* histograms, int64_t histogram_count, double* out) {
  ErrorSums own{};
  for (int64_t i = thread(); i < pieces; i += kThreads) own.add(sums[i]);
  const ErrorSums all = of_block(own);
  if (thread() == 0) {
    out[QuantizationError::signal] = all.signal;
    out[QuantizationError::noise] = all.noise;
    out[QuantizationError::clipped] = static_cast<double>(all.clipped);
    out[QuantizationError::flushed] = static_cast<double>(all.flushed);
    out[QuantizationError::amax] = static_cast<double>(__builtin_bit_cast(float, all.amax));
    out[QuantizationError::elements] = static_cast<double>(all.elements);
  }
  int64_t blocks = 0;
  for (int64_t i = 0; i < histogram_count; ++i) blocks += histograms[i].blocks[thread()];
  out[QuantizationError::scales + thread()] = static_cast<double>(blocks);
}

int64_t pieces_of(int64_t elements) { return std::min(ceil_div(elements, kThreads * kElementsOfThread), kMostPieces); }

}  // namespace

void CudaBackend::execute(const QuantizationError& k) {
  const int64_t elements = k.x.elements(), across = k.q.scales.dim(1), scales = ceil_div(k.x.dim(0), k.q.how.block_rows) * across;
  const int64_t pieces = pieces_of(elements), histograms = pieces_of(scales);
  const Tensor sum_memory = empty(*this, Dtype::u8, {pieces * int64_t{sizeof(ErrorSums)}}),
               histogram_memory = empty(*this, Dtype::u8, {histograms * int64_t{sizeof(Histogram)}});
  auto* const sums = reinterpret_cast<ErrorSums*>(sum_memory.device_bytes());
  auto* const counts = reinterpret_cast<Histogram*>(histogram_memory.device_bytes());
  const int32_t* const rows = data_or_null<int32_t>(k.rows);
  with_any_element(k.q.how.format, [&]<class E>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(sum_errors<E, T>, {pieces, kThreads}, k.x.device_data<T>(), CodesToRead<E>(k.q), rows, elements, k.x.dim(1), sums);
    });
  });
  launch(count_scales, {histograms, kThreads}, k.q.scales.device_data<uint8_t>(), rows, k.q.how.block_rows, k.x.dim(0), scales, across,
         counts);
  launch(finish_errors, {1, kThreads}, sums, pieces, counts, histograms, k.out.device_data<double>());
}

}  // namespace mantissa
