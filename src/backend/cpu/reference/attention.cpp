// Attention, one query row at a time in two passes: the scores of the row, then their softmax and the weighted values. Memory is one row of
// scores.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

template <class T>
Arithmetic<T> dot(const T* a, const T* b, int64_t n) {
  Arithmetic<T> sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += load(a[i]) * load(b[i]);
  return sum;
}

// Rows of one head, `stride` elements apart.
template <class T>
struct HeadRows {
  T* first;
  int64_t stride;
  T* operator[](int64_t row) const { return first + row * stride; }
};

// The score of a head that stands beside those of keys; -Inf, which changes nothing, without sinks.
template <class T>
Arithmetic<T> sink_of(const Tensor& sinks, int64_t head) {
  return sinks.defined() ? load(sinks.device_data<T>()[head]) : -std::numeric_limits<Arithmetic<T>>::infinity();
}

// out = softmax(scale * q k^T) v over key rows [begin, end). Returns the log of the sum of exponentials.
template <class T>
Arithmetic<T> attend(const T* q, HeadRows<const T> keys, HeadRows<const T> values, T* out, int64_t begin, int64_t end, int64_t d,
                     double scale, Arithmetic<T> sink) {
  using S = Arithmetic<T>;
  std::vector<S> scores(static_cast<size_t>(end - begin)), mixed(static_cast<size_t>(d), S{0});
  for (int64_t j = begin; j < end; ++j) scores[static_cast<size_t>(j - begin)] = static_cast<S>(scale) * dot(q, keys[j], d);
  const S largest = std::max(*std::max_element(scores.begin(), scores.end()), sink);
  S sum = std::exp(sink - largest);
  for (S& score : scores) sum += score = std::exp(score - largest);
  for (int64_t j = begin; j < end; ++j) {
    const S p = scores[static_cast<size_t>(j - begin)] / sum;
    for (int64_t c = 0; c < d; ++c) mixed[static_cast<size_t>(c)] += p * load(values[j][c]);
  }
  for (int64_t c = 0; c < d; ++c) out[c] = store<T>(mixed[static_cast<size_t>(c)]);
  return largest + std::log(sum);
}

// The heads of one sequence of packed rows.
template <class T>
struct Sequence {
  T* first;
  HeadLayout layout;
  HeadRows<T> query(int64_t head) const { return {first + head * layout.head_dim, layout.row()}; }
  HeadRows<T> key(int64_t kv_head) const { return query(layout.heads + kv_head); }
  HeadRows<T> value(int64_t kv_head) const { return query(layout.heads + layout.kv_heads + kv_head); }
};

// The first key that the query at `position` of its sequence sees; it is row `row` of all.
int64_t first_key(const Tensor& segment_starts, int64_t row, int64_t position, int64_t window) {
  const int64_t start = segment_starts.defined() ? segment_starts.device_data<int32_t>()[row] : 0;
  return window > 0 ? std::max(start, position - window + 1) : start;
}

}  // namespace

void CpuReference::execute(const AttentionForward& k) {
  check_segment_starts("attention", k.segment_starts, k.qkv.dim(0) / k.batch);
  with_values(k.qkv.dtype(), [&]<class T>() {
    const HeadLayout& layout = k.layout;
    const int64_t length = k.qkv.dim(0) / k.batch, d = layout.head_dim, channels = layout.heads * d;
    parallel_for(k.batch * layout.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / layout.heads, h = item % layout.heads, kv = h / (layout.heads / layout.kv_heads);
        const Sequence<const T> rows{k.qkv.device_data<T>() + b * length * layout.row(), layout};
        for (int64_t i = 0; i < length; ++i) {
          const int64_t row = b * length + i;
          k.lse.device_data<Arithmetic<T>>()[item * length + i] =
              attend<T>(rows.query(h)[i], rows.key(kv), rows.value(kv), k.out.device_data<T>() + row * channels + h * d,
                        first_key(k.segment_starts, row, i, k.window), i + 1, d, k.scale, sink_of<T>(k.sinks, h));
        }
      }
    });
  });
}

// Goes over key heads, each with its query heads. With p = exp(scale q k - lse) and delta = dout out: ds = p (dout v - delta),
// dq = scale sum ds k, dk = scale sum ds q, dv = sum p dout.
void CpuReference::execute(const AttentionBackward& k) {
  const HeadLayout& layout = k.layout;
  const int64_t length = k.qkv.dim(0) / k.batch, d = layout.head_dim, group = layout.heads / layout.kv_heads;
  check_segment_starts("attention backward", k.segment_starts, length);
  with_values(k.qkv.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const S scale = static_cast<S>(k.scale);
    const auto write = [d](const S* from, T* to) {
      for (int64_t c = 0; c < d; ++c) to[c] = store<T>(from[c]);
    };
    parallel_for(k.batch * layout.kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / layout.kv_heads, kv = item % layout.kv_heads;
        const Sequence<const T> x{k.qkv.device_data<T>() + b * length * layout.row(), layout};
        const Sequence<T> dx{k.dqkv.device_data<T>() + b * length * layout.row(), layout};
        std::vector<S> dkey(static_cast<size_t>(length * d), S{0}), dvalue = dkey, dq(static_cast<size_t>(d));
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          for (int64_t i = 0; i < length; ++i) {
            const int64_t row = b * length + i, at = (row * layout.heads + h) * d;
            const T *q = x.query(h)[i], *dout = k.dout.device_data<T>() + at;
            const S lse = k.lse.device_data<S>()[(b * layout.heads + h) * length + i];
            const S delta = dot<T>(dout, k.out.device_data<T>() + at, d);
            std::fill(dq.begin(), dq.end(), S{0});
            for (int64_t j = first_key(k.segment_starts, row, i, k.window); j <= i; ++j) {
              const T *key = x.key(kv)[j], *value = x.value(kv)[j];
              const S p = std::exp(scale * dot<T>(q, key, d) - lse);
              const S ds = p * (dot<T>(dout, value, d) - delta) * scale;
              for (int64_t c = 0; c < d; ++c) {
                dq[static_cast<size_t>(c)] += ds * load(key[c]);
                dkey[static_cast<size_t>(j * d + c)] += ds * load(q[c]);
                dvalue[static_cast<size_t>(j * d + c)] += p * load(dout[c]);
              }
            }
            write(dq.data(), dx.query(h)[i]);
          }
        }
        for (int64_t i = 0; i < length; ++i) {
          write(dkey.data() + i * d, dx.key(kv)[i]);
          write(dvalue.data() + i * d, dx.value(kv)[i]);
        }
      }
    });
  });
}

// The sum over the rows of one head is fp64, in their order.
void CpuReference::execute(const AttentionSinkGradient& k) {
  with_values(k.out.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t heads = k.layout.heads, d = k.layout.head_dim, length = k.out.dim(0) / k.batch;
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        const S sink = load(k.sinks.device_data<T>()[h]);
        double sum = 0.0;
        for (int64_t row = 0; row < k.out.dim(0); ++row) {
          const int64_t at = (row * heads + h) * d;
          const S lse = k.lse.device_data<S>()[(row / length * heads + h) * length + row % length];
          sum -= static_cast<double>(std::exp(sink - lse) * dot<T>(k.dout.device_data<T>() + at, k.out.device_data<T>() + at, d));
        }
        S& out = k.dsinks.device_data<S>()[h];
        out = static_cast<S>(sum) + (k.accumulate ? out : S{0});
      }
    });
  });
}

void CpuReference::execute(const CachedAttention& k) {
  with_values(k.qkv.dtype(), [&]<class T>() {
    const HeadLayout& layout = k.layout;
    const int64_t rows = k.qkv.dim(0), d = layout.head_dim, channels = layout.kv_heads * d;
    const Sequence<const T> x{k.qkv.device_data<T>(), layout};
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(x.key(0)[i], channels, k.keys.device_data<T>() + (k.first + i) * channels);
      std::copy_n(x.value(0)[i], channels, k.values.device_data<T>() + (k.first + i) * channels);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < layout.heads; ++h) {
        const int64_t kv = h / (layout.heads / layout.kv_heads);
        attend<T>(x.query(h)[i], {k.keys.device_data<T>() + kv * d, channels}, {k.values.device_data<T>() + kv * d, channels},
                  k.out.device_data<T>() + (i * layout.heads + h) * d, first_key({}, i, k.first + i, k.window), k.first + i + 1, d, k.scale,
                  sink_of<T>(k.sinks, h));
      }
    }
  });
}

}  // namespace mantissa
