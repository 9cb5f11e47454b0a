#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"

namespace mantissa {
namespace {

// One row, or one head of a row: y = x * rstd * weight. Returns rstd.
template <class T>
Arithmetic<T> rms_norm_row(const T* x, const T* weight, T* y, int64_t channels, double eps) {
  using S = Arithmetic<T>;
  S squares = 0;
  for (int64_t j = 0; j < channels; ++j) squares += load(x[j]) * load(x[j]);
  const S rstd = S{1} / std::sqrt(squares / static_cast<S>(channels) + static_cast<S>(eps));
  for (int64_t j = 0; j < channels; ++j) y[j] = store<T>(load(x[j]) * rstd * load(weight[j]));
  return rstd;
}

// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g n)); dweight += dy n.
template <class T>
void rms_norm_row_backward(const T* x, const T* weight, Arithmetic<T> rstd, const T* dy, T* dx, Arithmetic<T>* dweight, int64_t channels) {
  using S = Arithmetic<T>;
  S sum = 0;
  for (int64_t j = 0; j < channels; ++j) sum += load(dy[j]) * load(weight[j]) * (load(x[j]) * rstd);
  const S mean = sum / static_cast<S>(channels);
  for (int64_t j = 0; j < channels; ++j) {
    const S n = load(x[j]) * rstd;
    dx[j] = store<T>(rstd * (load(dy[j]) * load(weight[j]) - n * mean));
    dweight[j] += load(dy[j]) * n;
  }
}

// Sums of a parameter gradient: collected over all rows first, then written or added.
template <class S>
class ParameterSums {
 public:
  explicit ParameterSums(int64_t channels) : sums_(static_cast<size_t>(channels), S{0}) {}
  S* data() { return sums_.data(); }
  void write(const Tensor& out, bool accumulate) const {
    S* target = out.device_data<S>();
    for (const S sum : sums_) {
      *target = accumulate ? *target + sum : sum;
      ++target;
    }
  }

 private:
  std::vector<S> sums_;
};

// Packed rows of one query head are the rows of RMS normalization; they have no k_weight.
HeadLayout one_head(int64_t channels) { return {.heads = 1, .kv_heads = 0, .head_dim = channels}; }

}  // namespace

// Each CPU backend has its own kernel for packed rows.
void CpuReference::execute(const RmsNormForward& k) {
  if (k.sum.defined()) return add_and_normalize(k);
  execute(QkNormForward{
      .x = k.x, .q_weight = k.weight, .k_weight = {}, .y = k.y, .rstd = k.rstd, .layout = one_head(k.x.dim(1)), .eps = k.eps});
}

void CpuReference::execute(const RmsNormBackward& k) {
  if (k.other.defined()) return differentiate_and_add(k);
  execute(QkNormBackward{.x = k.x,
                         .q_weight = k.weight,
                         .k_weight = {},
                         .rstd = k.rstd,
                         .dy = k.dy,
                         .dx = k.dx,
                         .dq_weight = k.dweight,
                         .dk_weight = {},
                         .layout = one_head(k.x.dim(1)),
                         .accumulate = k.accumulate});
}

void CpuReference::execute(const LayerNormForward& k) {
  if (k.sum.defined()) return add_and_normalize(k);
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t channels = k.x.dim(1);
    const T *weight = k.weight.device_data<T>(), *bias = k.bias.defined() ? k.bias.device_data<T>() : nullptr;
    for (int64_t i = 0; i < k.x.dim(0); ++i) {
      const T* x = k.x.device_data<T>() + i * channels;
      T* y = k.y.device_data<T>() + i * channels;
      S sum = 0, squares = 0;
      for (int64_t j = 0; j < channels; ++j) sum += load(x[j]);
      const S mean = sum / static_cast<S>(channels);
      for (int64_t j = 0; j < channels; ++j) squares += (load(x[j]) - mean) * (load(x[j]) - mean);
      const S rstd = S{1} / std::sqrt(squares / static_cast<S>(channels) + static_cast<S>(k.eps));
      for (int64_t j = 0; j < channels; ++j) {
        const S scaled = (load(x[j]) - mean) * rstd * load(weight[j]);
        y[j] = store<T>(bias != nullptr ? scaled + load(bias[j]) : scaled);
      }
      k.mean.device_data<S>()[i] = mean;
      k.rstd.device_data<S>()[i] = rstd;
    }
  });
}

// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g n)); dweight += dy n; dbias += dy.
void CpuReference::execute(const LayerNormBackward& k) {
  if (k.other.defined()) return differentiate_and_add(k);
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t channels = k.x.dim(1);
    const T* weight = k.weight.device_data<T>();
    ParameterSums<S> dweight(channels), dbias(channels);
    for (int64_t i = 0; i < k.x.dim(0); ++i) {
      const T *x = k.x.device_data<T>() + i * channels, *dy = k.dy.device_data<T>() + i * channels;
      T* dx = k.dx.device_data<T>() + i * channels;
      const S mean = k.mean.device_data<S>()[i], rstd = k.rstd.device_data<S>()[i];
      S sum_g = 0, sum_gn = 0;
      for (int64_t j = 0; j < channels; ++j) {
        const S g = load(dy[j]) * load(weight[j]);
        sum_g += g;
        sum_gn += g * ((load(x[j]) - mean) * rstd);
      }
      const S mean_g = sum_g / static_cast<S>(channels), mean_gn = sum_gn / static_cast<S>(channels);
      for (int64_t j = 0; j < channels; ++j) {
        const S n = (load(x[j]) - mean) * rstd;
        dx[j] = store<T>(rstd * (load(dy[j]) * load(weight[j]) - mean_g - n * mean_gn));
        dweight.data()[j] += load(dy[j]) * n;
        dbias.data()[j] += load(dy[j]);
      }
    }
    dweight.write(k.dweight, k.accumulate);
    if (k.dbias.defined()) dbias.write(k.dbias, k.accumulate);
  });
}

void CpuReference::execute(const QkNormForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const HeadLayout& layout = k.layout;
    const int64_t normed = layout.heads + layout.kv_heads, d = layout.head_dim;
    for (int64_t i = 0; i < k.x.dim(0); ++i) {
      const T* x = k.x.device_data<T>() + i * layout.row();
      T* y = k.y.device_data<T>() + i * layout.row();
      for (int64_t h = 0; h < normed; ++h) {
        const T* weight = (h < layout.heads ? k.q_weight : k.k_weight).device_data<T>();
        k.rstd.device_data<Arithmetic<T>>()[i * normed + h] = rms_norm_row<T>(x + h * d, weight, y + h * d, d, k.eps);
      }
      std::copy(x + normed * d, x + layout.row(), y + normed * d);
    }
  });
}

void CpuReference::execute(const QkNormBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const HeadLayout& layout = k.layout;
    const int64_t normed = layout.heads + layout.kv_heads, d = layout.head_dim;
    ParameterSums<S> dq(d), dk(d);
    for (int64_t i = 0; i < k.x.dim(0); ++i) {
      const int64_t at = i * layout.row();
      const T *x = k.x.device_data<T>() + at, *dy = k.dy.device_data<T>() + at;
      T* dx = k.dx.device_data<T>() + at;
      for (int64_t h = 0; h < normed; ++h) {
        const bool query = h < layout.heads;
        rms_norm_row_backward<T>(x + h * d, (query ? k.q_weight : k.k_weight).device_data<T>(), k.rstd.device_data<S>()[i * normed + h],
                                 dy + h * d, dx + h * d, query ? dq.data() : dk.data(), d);
      }
      std::copy(dy + normed * d, dy + layout.row(), dx + normed * d);
    }
    dq.write(k.dq_weight, k.accumulate);
    if (k.dk_weight.defined()) dk.write(k.dk_weight, k.accumulate);
  });
}

void CpuReference::execute(const Rope& k) {
  check_indices(k.positions, IndexRule::below(ExitCode::internal, "rope", "positions", k.table.dim(0)));
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t d = k.layout.head_dim, half = d / 2, rotated = (k.layout.heads + k.layout.kv_heads) * d, row = k.layout.row();
    for (int64_t i = 0; i < k.x.dim(0); ++i) {
      const T* x = k.x.device_data<T>() + i * row;
      T* y = k.y.device_data<T>() + i * row;
      const float* table = k.table.device_data<float>() + k.positions.device_data<int32_t>()[i] * d;
      for (int64_t head = 0; head < rotated; head += d) {
        for (int64_t j = 0; j < half; ++j) {
          const S cosine = static_cast<S>(table[j]), sine = static_cast<S>(k.inverse ? -table[half + j] : table[half + j]);
          const S first = load(x[head + j]), second = load(x[head + half + j]);
          y[head + j] = store<T>(first * cosine - second * sine);
          y[head + half + j] = store<T>(second * cosine + first * sine);
        }
      }
      if (x != y) std::copy(x + rotated, x + row, y + rotated);
    }
  });
}

}  // namespace mantissa
