#include <type_traits>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "base/parallel.h"

namespace mantissa::lane {

// Elementwise functions over rows, for the bodies of cloned<> (simd.h). f(float...) is given elements and returns the result, or Two of
// them; it must be always_inline. Memory that is __restrict must be a parameter: GCC does not believe it of local variables.

// out = f(in...)
template <class T, class F, class... In>
[[gnu::always_inline]] inline void map(const F& f, int64_t n, T* __restrict out, const In* __restrict... in) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) out[j] = f(in[j]...);
  } else {
    for (int64_t j = 0; j < n / 2; ++j) {
      words(out)[j] = word(f(low(words(in)[j])...), f(high(words(in)[j])...));
    }
    if (n % 2 != 0) lane::store(out[n - 1], f(lane::load(in[n - 1])...));
  }
}

struct Two {
  float first, second;
};

// {first, second} = f(in...)
template <class T, class F, class... In>
[[gnu::always_inline]] inline void map(const F& f, int64_t n, T* __restrict first, T* __restrict second, const In* __restrict... in) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) {
      const Two out = f(in[j]...);
      first[j] = out.first;
      second[j] = out.second;
    }
  } else {
    for (int64_t j = 0; j < n / 2; ++j) {
      const Two a = f(low(words(in)[j])...), b = f(high(words(in)[j])...);
      words(first)[j] = word(a.first, b.first);
      words(second)[j] = word(a.second, b.second);
    }
    if (n % 2 == 0) return;
    const Two out = f(lane::load(in[n - 1])...);
    lane::store(first[n - 1], out.first);
    lane::store(second[n - 1], out.second);
  }
}

// out = f(in..., f.first(in...)), for functions that are so long that the CPU has no more than four vectors of one in flight and waits for
// results although none depends on another. On bf16 each step goes through a block before the other does.
constexpr int64_t kStepWords = 128;

template <class F>
struct BothSteps {
  F f;
  template <class... In>
  [[gnu::always_inline]] auto operator()(In... in) const {
    return f(in..., f.first(in...));
  }
};

template <class T, class F, class... In>
[[gnu::always_inline]] inline void map_steps(const F& f, int64_t n, T* __restrict out, const In* __restrict... in) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    alignas(64) float lows[kStepWords];
    alignas(64) float highs[kStepWords];
    for (; i + 2 * kStepWords <= n; i += 2 * kStepWords) {
      for (int64_t j = 0; j < kStepWords; ++j) {
        lows[j] = f.first(low(words(in + i)[j])...);
        highs[j] = f.first(high(words(in + i)[j])...);
      }
      for (int64_t j = 0; j < kStepWords; ++j) {
        words(out + i)[j] = word(f(low(words(in + i)[j])..., lows[j]), f(high(words(in + i)[j])..., highs[j]));
      }
    }
  }
  map(BothSteps<F>{f}, n - i, out + i, (in + i)...);
}

}  // namespace mantissa::lane

namespace mantissa {
namespace {

// Elements of a piece: an exponential costs several copies.
constexpr int64_t kPiece = kPieceElements / 4;

template <class T>
[[gnu::always_inline]] inline float sigmoid(float x) {
  return 1.0F / (1.0F + lane::exp2_inside<T>(lane::exponent(x * -lane::kLog2E)));
}

template <class T>
struct SwiGlu {
  [[gnu::always_inline]] float first(float gate, float) const { return lane::exponent(gate * -lane::kLog2E); }
  [[gnu::always_inline]] float operator()(float gate, float up, float t) const { return gate * up / (1.0F + lane::exp2_inside<T>(t)); }
  // With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
  [[gnu::always_inline]] lane::Two slopes(float gate, float up, float dy) const {
    const float s = sigmoid<T>(gate), ds = dy * s;
    return {ds * up * lane::fma(gate, 1.0F - s, 1.0F), ds * gate};
  }
  [[gnu::always_inline]] SwiGlu<float> exact() const { return {}; }
};

template <class T>
struct ClampedSwiGlu {
  static constexpr float kSlope = 1.702F;
  float limit;
  [[gnu::always_inline]] float inside(float up) const { return lane::cut_below(lane::cut_above(up, limit), -limit); }
  [[gnu::always_inline]] float first(float gate, float) const {
    return lane::exponent(lane::cut_above(gate, limit) * (-lane::kLog2E * kSlope));
  }
  [[gnu::always_inline]] float operator()(float gate, float up, float t) const {
    return lane::cut_above(gate, limit) * (inside(up) + 1.0F) / (1.0F + lane::exp2_inside<T>(t));
  }
  // With s = sigmoid(1.702 gate): dgate = dy (up + 1) s (1 + 1.702 gate (1 - s)), dup = dy gate s; 0 beyond the limits.
  [[gnu::always_inline]] lane::Two slopes(float gate, float up, float dy) const {
    const float g = lane::cut_above(gate, limit), s = sigmoid<T>(g * kSlope), ds = dy * s;
    const float dgate = ds * (inside(up) + 1.0F) * lane::fma(g * kSlope, 1.0F - s, 1.0F);
    const float magnitude = __builtin_fabsf(up);
    return {lane::chosen(0.0F, dgate, gate > limit ? ~0U : 0U), lane::chosen(0.0F, ds * g, magnitude > limit ? ~0U : 0U)};
  }
  [[gnu::always_inline]] ClampedSwiGlu<float> exact() const { return {limit}; }
};

template <class Glu>
struct Weighted {
  Glu glu;
  float weight;
  [[gnu::always_inline]] float first(float gate, float up) const { return glu.first(gate, up); }
  [[gnu::always_inline]] float operator()(float gate, float up, float t) const { return glu(gate, up, t) * weight; }
};

// dy times the value, for the gradient of a row's weight: a sum, so as exact for bf16 as for fp32.
template <class Exact>
[[gnu::always_inline]] inline float weight_slope(const Exact& glu, float gate, float up, float dy) {
  return dy * glu(gate, up, glu.first(gate, up));
}

// Writes the terms of n elements, bf16 ones added in pairs. Returns the number of terms.
template <class T, class Exact>
[[gnu::always_inline]] inline int64_t weight_slopes(const Exact& glu, const T* __restrict gate, const T* __restrict up,
                                                    const T* __restrict dy, int64_t n, float* __restrict terms) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) terms[j] = weight_slope(glu, gate[j], up[j], dy[j]);
    return n;
  } else {
    using lane::high, lane::low, lane::words;
    for (int64_t j = 0; j < n / 2; ++j) {
      const uint32_t g = words(gate)[j], u = words(up)[j], d = words(dy)[j];
      terms[j] = weight_slope(glu, low(g), low(u), low(d)) + weight_slope(glu, high(g), high(u), high(d));
    }
    if (n % 2 != 0) terms[n / 2] = weight_slope(glu, lane::load(gate[n - 1]), lane::load(up[n - 1]), lane::load(dy[n - 1]));
    return (n + 1) / 2;
  }
}

// Sums in blocks that stay in the L1 cache; the order of the sum depends on the width only.
template <class T, class Exact>
[[gnu::always_inline]] inline float weight_gradient(const Exact& glu, const T* gate, const T* up, const T* dy, int64_t width) {
  constexpr int64_t kBlock = 1024;
  alignas(64) float terms[kBlock];
  simd::Slots sums;
  for (int64_t j = 0; j < width; j += kBlock) {
    const int64_t n = weight_slopes(glu, gate + j, up + j, dy + j, std::min(kBlock, width - j), terms);
    simd::for_values(
        terms, n, 0.0F, [&](simd::Floats value, int slot) __attribute__((always_inline)) { sums.slot[slot] += value; });
  }
  return simd::sum(sums);
}

template <class Glu, class T>
[[gnu::always_inline]] inline void swiglu_rows(Glu glu, const SwiGluForward& k, int64_t begin, int64_t end) {
  const int64_t width = k.out.dim(1);
  const T* gate = k.x.device_data<T>() + 2 * begin * width;
  T* out = k.out.device_data<T>() + begin * width;
  const float* weights = k.row_weights.defined() ? k.row_weights.device_data<float>() : nullptr;
  for (int64_t i = begin; i < end; ++i, gate += 2 * width, out += width) {
    lane::prefetch_row(gate + 2 * width, 2 * width);
    if (weights == nullptr) {
      lane::map_steps(glu, width, out, gate, gate + width);
    } else {
      lane::map_steps(Weighted<Glu>{glu, weights[i]}, width, out, gate, gate + width);
    }
  }
}
template <class Glu, class T>
[[gnu::always_inline]] inline void swiglu_rows_backward(Glu glu, const SwiGluBackward& k, int64_t begin, int64_t end) {
  const int64_t width = k.dy.dim(1);
  const T *gate = k.x.device_data<T>() + 2 * begin * width, *dy = k.dy.device_data<T>() + begin * width;
  T* dgate = k.dx.device_data<T>() + 2 * begin * width;
  const float* weights = k.row_weights.defined() ? k.row_weights.device_data<float>() : nullptr;
  for (int64_t i = begin; i < end; ++i, gate += 2 * width, dgate += 2 * width, dy += width) {
    const T* up = gate + width;
    lane::prefetch_row(gate + 2 * width, 2 * width);
    if (weights == nullptr) {
      const auto slopes = [=](float g, float u, float d) __attribute__((always_inline)) { return glu.slopes(g, u, d); };
      lane::map(slopes, width, dgate, dgate + width, gate, up, dy);
    } else {
      const float weight = weights[i];
      const auto slopes = [=](float g, float u, float d) __attribute__((always_inline)) { return glu.slopes(g, u, d * weight); };
      lane::map(slopes, width, dgate, dgate + width, gate, up, dy);
      k.drow_weights.device_data<float>()[i] = weight_gradient(glu.exact(), gate, up, dy, width);
    }
  }
}

int64_t rows_of_work(int64_t width) { return std::max<int64_t>(1, kPiece / std::max<int64_t>(1, width)); }

// 0.5 (1 + tanh(u)) is sigmoid(2u): one exponential, and no cancellation for negative x.
template <class T>
struct GeluTanh {
  static constexpr float kFactor = -lane::kLog2E * 1.59576912F, kCubic = kFactor * 0.044715F;  // 2 sqrt(2/pi), for 2^-2u
  [[gnu::always_inline]] float first(float x) const { return lane::exponent(x * lane::fma(x * x, kCubic, kFactor)); }
  [[gnu::always_inline]] float operator()(float x, float t) const { return x / (1.0F + lane::exp2_inside<T>(t)); }
};
template <class T>
struct GeluTanhSlope {
  [[gnu::always_inline]] float first(float x, float) const { return GeluTanh<T>{}.first(x); }
  [[gnu::always_inline]] float operator()(float x, float dy, float t) const {
    constexpr float kFactor = 1.59576912F, kCubic = 3.0F * kFactor * 0.044715F;
    const float s = 1.0F / (1.0F + lane::exp2_inside<T>(t));
    return dy * lane::fma(x * s * (1.0F - s), lane::fma(x * x, kCubic, kFactor), s);
  }
};

// x (1 - tail) for positive x, x tail for negative ones.
[[gnu::always_inline]] inline float gelu_of_tail(float x, float inside, float tail) {
  return lane::fma(-inside, tail, x < 0.0F ? 0.0F : x);
}

template <class T>
struct GeluErf;
template <>
struct GeluErf<float> {
  [[gnu::always_inline]] float first(float x) const { return lane::normal_tail<float>(x).tail; }
  [[gnu::always_inline]] float operator()(float x, float tail) const {
    return gelu_of_tail(x, lane::at_most(__builtin_fabsf(x), lane::kNormalEnd), tail);
  }
};
template <>
struct GeluErf<bf16> {
  [[gnu::always_inline]] static float inside(float x) { return lane::at_most(__builtin_fabsf(x), lane::kTailEnd); }
  [[gnu::always_inline]] float first(float x) const { return lane::log2_tail(inside(x)); }
  [[gnu::always_inline]] float operator()(float x, float t) const { return gelu_of_tail(x, inside(x), lane::exp2_inside<bf16>(t)); }
};
template <class T>
struct GeluErfSlope {
  [[gnu::always_inline]] float operator()(float x, float dy) const {
    constexpr float kDensity = 0.398942280F;  // 1 / sqrt(2 pi)
    const lane::NormalTail normal = lane::normal_tail<T>(x);
    const float cdf = __builtin_fabsf((x < 0.0F ? 0.0F : 1.0F) - normal.tail);  // without a branch
    return dy * lane::fma(x * normal.bell, kDensity, cdf);
  }
};

template <class F, class T>
[[gnu::always_inline]] inline void gelu(const T* x, T* out, int64_t n) {
  lane::map_steps(F{}, n, out, x);
}
template <class T>
[[gnu::always_inline]] inline void gelu_tanh_backward(const T* x, const T* dy, T* dx, int64_t n) {
  lane::map_steps(GeluTanhSlope<T>{}, n, dx, x, dy);
}
template <class T>
[[gnu::always_inline]] inline void gelu_erf_backward(const T* x, const T* dy, T* dx, int64_t n) {
  lane::map(GeluErfSlope<T>{}, n, dx, x, dy);
}

}  // namespace

void CpuBackend::execute(const SwiGluForward& k) {
  const float limit = static_cast<float>(k.limit);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.out.dim(0), rows_of_work(k.out.dim(1)), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      k.limit > 0.0 ? cloned<swiglu_rows<ClampedSwiGlu<T>, T>>({limit}, k, begin, end)
                    : cloned<swiglu_rows<SwiGlu<T>, T>>({}, k, begin, end);
    });
  });
}

void CpuBackend::execute(const SwiGluBackward& k) {
  const float limit = static_cast<float>(k.limit);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.dy.dim(0), rows_of_work(k.dy.dim(1)), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      k.limit > 0.0 ? cloned<swiglu_rows_backward<ClampedSwiGlu<T>, T>>({limit}, k, begin, end)
                    : cloned<swiglu_rows_backward<SwiGlu<T>, T>>({}, k, begin, end);
    });
  });
}

void CpuBackend::execute(const GeluForward& k) {
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    T* out = k.out.device_data<T>();
    parallel_for(k.x.elements(), kPiece, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      k.form == GeluForm::tanh ? cloned<gelu<GeluTanh<T>, T>>(x + begin, out + begin, end - begin)
                               : cloned<gelu<GeluErf<T>, T>>(x + begin, out + begin, end - begin);
    });
  });
}

void CpuBackend::execute(const GeluBackward& k) {
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
    T* dx = k.dx.device_data<T>();
    parallel_for(k.x.elements(), kPiece, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      k.form == GeluForm::tanh ? cloned<gelu_tanh_backward<T>>(x + begin, dy + begin, dx + begin, end - begin)
                               : cloned<gelu_erf_backward<T>>(x + begin, dy + begin, dx + begin, end - begin);
    });
  });
}

}  // namespace mantissa
