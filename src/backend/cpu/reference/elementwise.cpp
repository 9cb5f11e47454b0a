// Fill, Convert, RandomNormal, Add, AddBias, and the allocator behind every tensor.
#include <cstring>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

template <class T>
void fill(const Fill& k) {
  T* out = k.out.device_data<T>();
  for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(k.value);
}

template <class From, class To>
void convert(const Convert& k) {
  const From* x = k.x.device_data<From>();
  To* out = k.out.device_data<To>();
  for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<To>(load(x[i]));
}

template <class T>
void random_normals(const RandomNormal& k) {
  const int64_t columns = k.out.shape().rank() > 0 ? k.out.shape()[-1] : 1, stride = k.row_stride > 0 ? k.row_stride : columns;
  T* out = k.out.device_data<T>();
  for (int64_t i = 0; i < k.out.elements(); ++i) {
    const int64_t index = k.first_index + i / columns * stride + i % columns;
    out[i] = store<T>(k.std * static_cast<double>(random_normal(k.key, k.what, static_cast<uint64_t>(index))));
  }
}

template <class T>
void add(const Add& k) {
  const T *a = k.a.device_data<T>(), *b = k.b.device_data<T>();
  T* out = k.out.device_data<T>();
  for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(load(a[i]) + load(b[i]));
}

template <class T>
void add_bias(const AddBias& k) {
  const auto* x = k.x.device_data<Arithmetic<T>>();
  const T* bias = k.bias.device_data<T>();
  T* out = k.out.device_data<T>();
  const int64_t columns = k.x.dim(1);
  for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(x[i] + load(bias[i % columns]));
}

}  // namespace

CpuReference::CpuReference() { start_threads(); }

std::shared_ptr<std::byte> CpuReference::allocate(int64_t bytes) { return allocator_->allocate(bytes); }
AllocatorStats CpuReference::allocator_stats() const { return allocator_->stats(); }
void CpuReference::upload(const void* from, const Tensor& to) {
  std::copy_n(static_cast<const std::byte*>(from), to.bytes(), to.device_bytes());
}
void CpuReference::download(const Tensor& from, void* to) { std::copy_n(from.device_bytes(), from.bytes(), static_cast<std::byte*>(to)); }

void CpuReference::execute(const Fill& k) {
  if (k.out.dtype() == Dtype::i32) return fill<int32_t>(k);
  if (k.out.dtype() == Dtype::u8) return fill<uint8_t>(k);
  with_values(k.out.dtype(), [&]<class T>() { fill<T>(k); });
}

void CpuReference::execute(const Convert& k) {
  if (k.x.dtype() == k.out.dtype()) {
    std::memcpy(k.out.device_bytes(), k.x.device_bytes(), static_cast<size_t>(k.x.bytes()));
    return;
  }
  with_values(k.x.dtype(), [&]<class From>() { with_values(k.out.dtype(), [&]<class To>() { convert<From, To>(k); }); });
}

void CpuReference::execute(const RandomNormal& k) {
  with_values(k.out.dtype(), [&]<class T>() { random_normals<T>(k); });
}

void CpuReference::execute(const Add& k) {
  with_values(k.out.dtype(), [&]<class T>() { add<T>(k); });
}

void CpuReference::execute(const AddBias& k) {
  with_values(k.out.dtype(), [&]<class T>() { add_bias<T>(k); });
}

}  // namespace mantissa
