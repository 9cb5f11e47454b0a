#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

// A block has a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_grouped_bias(const float* x, const T* bias, const float* row_weights, GroupOffsets groups, T* out, int64_t columns) {
  const int64_t first = block() * columns, group = groups.of(block());
  const float weight = row_weights ? row_weights[block()] : 1.0F;
  for (int64_t c = thread(); c < columns; c += kThreads) {
    const float sum = x[first + c];
    out[first + c] = rounded<T>(group < 0 ? sum : sum + weight * value_of(bias[group * columns + c]));
  }
}

struct OfColumns {  // sums of each warp
  double sums[kWarpsOfBlock][kWarp];
};

// A block has kWarp columns of a group; a warp sums every eighth row of it, in fp64.
template <class T>
__global__ void __launch_bounds__(kThreads)
    grouped_bias_gradient(const T* dy, const float* row_weights, GroupOffsets groups, float* dbias, int64_t columns, bool accumulate) {
  auto& shared = block_shared<OfColumns>();
  const int64_t across = ceil_div(columns, int64_t{kWarp}), group = block() / across, column = block() % across * kWarp + lane();
  double sum = 0.0;
  for (int64_t row = groups.begin(group) + warp(); row < groups.end(group) && column < columns; row += kWarpsOfBlock) {
    const double weight = row_weights ? static_cast<double>(row_weights[row]) : 1.0;
    sum += weight * static_cast<double>(value_of(dy[row * columns + column]));
  }
  shared.sums[warp()][lane()] = sum;
  barrier();
  if (warp() > 0 || column >= columns) return;
  for (unsigned other = 1; other < kWarpsOfBlock; ++other) sum += shared.sums[other][lane()];
  float& out = dbias[group * columns + column];
  out = static_cast<float>(sum) + (accumulate ? out : 0.0F);
}

// A block has a row.
template <class T>
__global__ void __launch_bounds__(kThreads) grouped_bias_dot(const T* dy, const T* bias, GroupOffsets groups, float* out, int64_t columns) {
  const int64_t group = groups.of(block());
  double sum = 0.0;
  for (int64_t c = thread(); c < columns && group >= 0; c += kThreads)
    sum += static_cast<double>(value_of(dy[block() * columns + c])) * static_cast<double>(value_of(bias[group * columns + c]));
  sum = block_sum(sum);
  if (thread() == 0) out[block()] = static_cast<float>(sum);
}

}  // namespace

void CudaBackend::execute(const AddGroupedBias& k) {
  const Tensor offsets = checked_offsets("add_grouped_bias", k.offsets, k.x.dim(0));
  with_values(k.out.dtype(), [&]<class T>() {
    launch(add_grouped_bias<T>, {k.x.dim(0), kThreads}, k.x.device_data<float>(), k.bias.device_data<T>(),
           data_or_null<float>(k.row_weights), groups_of(offsets), k.out.device_data<T>(), k.x.dim(1));
  });
}

void CudaBackend::execute(const GroupedBiasGradient& k) {
  const int64_t columns = k.dy.dim(1);
  const Tensor offsets = checked_offsets("grouped_bias_gradient", k.offsets, k.dy.dim(0));
  const GroupOffsets groups = groups_of(offsets);
  with_values(k.dy.dtype(), [&]<class T>() {
    launch(grouped_bias_gradient<T>, {groups.count * ceil_div(columns, int64_t{kWarp}), kThreads}, k.dy.device_data<T>(),
           data_or_null<float>(k.row_weights), groups, k.dbias.device_data<float>(), columns, k.accumulate);
  });
}

void CudaBackend::execute(const GroupedBiasDot& k) {
  const Tensor offsets = checked_offsets("grouped_bias_dot", k.offsets, k.dy.dim(0));
  with_values(k.dy.dtype(), [&]<class T>() {
    launch(grouped_bias_dot<T>, {k.dy.dim(0), kThreads}, k.dy.device_data<T>(), k.bias.device_data<T>(), groups_of(offsets),
           k.out.device_data<float>(), k.dy.dim(1));
  });
}

}  // namespace mantissa
