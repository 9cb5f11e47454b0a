// The updates of AdamW and Muon.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "backend/adamw_rule.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/philox_lanes.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "backend/muon_rule.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats;

// Words of moments that follow each other, in one draw.
struct RunOfWords {
  static constexpr int64_t kMost = 4 * kDrawsAtOnce - 8;  // elements
  alignas(64) uint32_t words[4 * kDrawsAtOnce + simd::kLanes];
};

// Calls body(first, count, words) for runs of [begin, end): their elements lie in one row, and each has its word.
template <class Body>
[[gnu::always_inline]] inline void for_runs(const MomentWords& of, int64_t begin, int64_t end, const Body& body) {
  RunOfWords run;
  for (int64_t i = begin; i < end;) {
    const int64_t count = std::min({end - i, RunOfWords::kMost, of.columns - i % of.columns});
    const uint64_t number = of.number(i);
    DrawnWords<4> drawn;
    draw_words({of.rounding.seed, RngStream::moments}, of.rounding.what, number / 4, drawn);
    for (int64_t j = 0; j < kDrawsAtOnce; ++j) {
      for (int64_t word = 0; word < 4; ++word) run.words[4 * j + word] = drawn.of[word][j];
    }
    body(i, count, run.words + number % 4);
    i += count;
  }
}

// Rounds to the same bits as to_bf16_at_random(), with the lower halves of the words moved down by `shift`.
template <class Count>
[[gnu::always_inline]] inline void store_at_random(bf16* to, Floats value, const uint32_t* random, int shift, Count part) {
  const auto bits = reinterpret_cast<simd::Words>(value);
  simd::Words added;
  for (int i = 0; i < simd::kLanes; ++i) added[i] = (random[i] >> shift) & 0xFFFFU;
  const simd::Words rounded = (bits & 0x7FFFFFFFU) < 0x7F800000U ? (bits + added) & 0xFFFF0000U : bits;
  simd::store(to, reinterpret_cast<Floats>(rounded), part);
}

// M is the type of the moments, T that of the values, void where none are wanted.
template <class M, class T>
struct Update {
  AdamWRule<float> rule;
  AdamWStep<float> now;
  float* master;
  M *m, *v;
  const float* grad;
  T* value;
};

// Does the reference's operations in the reference's order, without fma, which gives the same bits. store(to, moment, shift) rounds and
// writes a moment; `shift` chooses the half of a word that rounds it.
template <class M, class T, class Count, class Store>
[[gnu::always_inline]] inline void update(const Update<M, T>& u, int64_t i, Count part, const Store& store) {
  const Floats g = simd::load(u.grad + i, part) * u.now.clip_factor;
  const Floats m = u.rule.beta1 * simd::load(u.m + i, part) + u.rule.one_minus_beta1 * g;
  const Floats v = u.rule.beta2 * simd::load(u.v + i, part) + u.rule.one_minus_beta2 * g * g;
  const Floats m_hat = m * u.now.inverse_bias_correction1, v_hat = v * u.now.inverse_bias_correction2;
  Floats master = simd::load(u.master + i, part);
  const Floats step = m_hat / (simd::sqrt(v_hat) + u.rule.eps) + u.rule.weight_decay * master;
  master -= u.now.lr * step;
  store(u.m + i, m, 0);
  store(u.v + i, v, 16);
  simd::store(u.master + i, master, part);
  if constexpr (!std::is_void_v<T>) simd::store(u.value + i, master, part);
}

template <class M, class T>
[[gnu::always_inline]] inline void adamw_range(Update<M, T> u, MomentWords words, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<M, float>) {
    simd::for_lanes(
        end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) {
          update(
              u, begin + j, part, [part](float* to, Floats moment, int) __attribute__((always_inline)) { simd::store(to, moment, part); });
        });
  } else {
    for_runs(
        words, begin, end, [&](int64_t first, int64_t count, const uint32_t* random) __attribute__((always_inline)) {
          simd::for_lanes(
              count, [&](int64_t j, auto part) __attribute__((always_inline)) {
                update(
                    u, first + j, part, [=](bf16 * to, Floats moment, int shift) __attribute__((always_inline)) {
                      store_at_random(to, moment, random + j, shift, part);
                    });
              });
        });
  }
}

// Nesterov's momentum is a template parameter: g++ 12 makes of a choice between two vectors by a bool one of their first lanes alone.
template <class M, class T, bool kNesterov>
struct Momentum {
  MuonMomentumRule<float> rule;
  AdamWStep<float> now;
  M* m;
  const float* grad;
  T* out;

  // Writes out, and returns the momentum.
  template <class Count>
  [[gnu::always_inline]] Floats operator()(int64_t i, Count part) const {
    const Floats g = simd::load(grad + i, part) * now.clip_factor;
    const Floats next = rule.momentum * simd::load(m + i, part) + rule.one_minus_momentum * g;
    if constexpr (kNesterov)
      simd::store(out + i, rule.one_minus_momentum * g + rule.momentum * next, part);
    else
      simd::store(out + i, next, part);
    return next;
  }
};

template <class M, class T, bool kNesterov>
[[gnu::always_inline]] inline void momentum_range(Momentum<M, T, kNesterov> u, MomentWords words, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<M, float>) {
    simd::for_lanes(
        end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) { simd::store(u.m + begin + j, u(begin + j, part), part); });
  } else {
    for_runs(
        words, begin, end, [&](int64_t first, int64_t count, const uint32_t* random) __attribute__((always_inline)) {
          simd::for_lanes(
              count, [&](int64_t j, auto part)
                         __attribute__((always_inline)) { store_at_random(u.m + first + j, u(first + j, part), random + j, 0, part); });
        });
  }
}

// T is the type of the values, void where none are wanted.
template <class D, class T>
struct Step {
  MuonUpdateRule<float> rule;
  AdamWStep<float> now;
  float* master;
  const D* direction;
  T* value;
};

template <class D, class T>
[[gnu::always_inline]] inline void update_range(Step<D, T> u, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const int64_t i = begin + j;
        Floats master = simd::load(u.master + i, part);
        master -= u.now.lr * (u.rule.scale * simd::load(u.direction + i, part) + u.rule.weight_decay * master);
        simd::store(u.master + i, master, part);
        if constexpr (!std::is_void_v<T>) simd::store(u.value + i, master, part);
      });
}

template <class T>
[[gnu::always_inline]] inline void divide_range(const T* x, T* out, float norm, int64_t n) {
  simd::for_lanes(
      n, [&](int64_t j, auto part) __attribute__((always_inline)) { simd::store(out + j, simd::load(x + j, part) / norm, part); });
}

struct Polynomial {
  float a, b, c;
};

// Rows [begin, end) of a square matrix.
template <class T>
[[gnu::always_inline]] inline void polynomial_rows(T* gram, const float* square, Polynomial p, int64_t columns, int64_t begin,
                                                   int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* own = gram + row * columns;
    const float* of_square = square + row * columns;
    const float diagonal = p.b * load(own[row]) + p.c * of_square[row] + p.a;
    simd::for_lanes(
        columns, [&](int64_t j, auto part) __attribute__((always_inline)) {
          simd::store(own + j, p.b * simd::load(own + j, part) + p.c * simd::load(of_square + j, part), part);
        });
    own[row] = store<T>(diagonal);
  }
}

template <class Run>
void with_value(const Tensor& value, const Run& run) {
  if (!value.defined()) return run(static_cast<void*>(nullptr));
  with_narrow_values(value.dtype(), [&]<class T>() { run(value.device_data<T>()); });
}

bool skipped(const Tensor& step) { return step.device_data<float>()[static_cast<int>(StepValue::skip)] != 0.0F; }

}  // namespace

void CpuBackend::execute(const AdamW& k) {
  if (skipped(k.step)) return CpuReference::execute(k);
  const MomentWords words(k.rounding, k.m.shape());
  with_narrow_values(k.m.dtype(), [&]<class M>() {
    with_value(k.value, [&]<class T>(T* value) {
      const Update<M, T> u{.rule = AdamWRule<float>(k),
                           .now = AdamWStep<float>(k.step.device_data<float>()),
                           .master = k.master.device_data<float>(),
                           .m = k.m.device_data<M>(),
                           .v = k.v.device_data<M>(),
                           .grad = k.grad.device_data<float>(),
                           .value = value};
      parallel_for(k.master.elements(), kPieceElements / 2,
                   [&](int64_t begin, int64_t end) { cloned<adamw_range<M, T>>(u, words, begin, end); });
    });
  });
}

void CpuBackend::execute(const MuonMomentum& k) {
  if (skipped(k.step)) return CpuReference::execute(k);
  const MomentWords words(k.rounding, k.m.shape());
  const auto run = [&]<class M, class T, bool kNesterov>() {
    const Momentum<M, T, kNesterov> u{.rule = MuonMomentumRule<float>(k),
                                      .now = AdamWStep<float>(k.step.device_data<float>()),
                                      .m = k.m.device_data<M>(),
                                      .grad = k.grad.device_data<float>(),
                                      .out = k.out.device_data<T>()};
    parallel_for(k.m.elements(), kPieceElements / 2,
                 [&](int64_t begin, int64_t end) { cloned<momentum_range<M, T, kNesterov>>(u, words, begin, end); });
  };
  with_narrow_values(k.m.dtype(), [&]<class M>() {
    with_narrow_values(k.out.dtype(),
                       [&]<class T>() { k.nesterov ? run.template operator()<M, T, true>() : run.template operator()<M, T, false>(); });
  });
}

void CpuBackend::execute(const MuonUpdate& k) {
  if (skipped(k.step)) return CpuReference::execute(k);
  with_narrow_values(k.direction.dtype(), [&]<class D>() {
    with_value(k.value, [&]<class T>(T* value) {
      const Step<D, T> u{.rule = MuonUpdateRule<float>(k),
                         .now = AdamWStep<float>(k.step.device_data<float>()),
                         .master = k.master.device_data<float>(),
                         .direction = k.direction.device_data<D>(),
                         .value = value};
      parallel_for(k.master.elements(), kPieceElements, [&](int64_t begin, int64_t end) { cloned<update_range<D, T>>(u, begin, end); });
    });
  });
}

void CpuBackend::execute(const DivideByNorm& k) {
  const double* partials = k.partials.device_data<double>();
  const double norm = std::max(std::sqrt(std::accumulate(partials, partials + k.partials.elements(), 0.0)), kSmallestNorm);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    T* out = k.out.device_data<T>();
    parallel_for(k.x.elements(), kPieceElements, [&](int64_t begin, int64_t end) {
      cloned<divide_range<T>>(x + begin, out + begin, static_cast<float>(norm), end - begin);
    });
  });
}

void CpuBackend::execute(const NewtonSchulzPolynomial& k) {
  const int64_t columns = k.gram.dim(0);
  const Polynomial p{.a = static_cast<float>(k.a), .b = static_cast<float>(k.b), .c = static_cast<float>(k.c)};
  with_narrow_values(k.gram.dtype(), [&]<class T>() {
    T* gram = k.gram.device_data<T>();
    const float* square = k.square.device_data<float>();
    parallel_for(columns, rows_per_piece(columns),
                 [&](int64_t begin, int64_t end) { cloned<polynomial_rows<T>>(gram, square, p, columns, begin, end); });
  });
}

}  // namespace mantissa
