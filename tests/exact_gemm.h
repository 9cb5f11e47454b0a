// GEMMs against sums in fp64 of what their operands hold. Elements of codes are dyadic rationals, and sums of these lengths lose less in
// fp64 than any bound by far.
#pragma once

#include "mantissa/formats/with_element.h"
#include "quantized_matrices.h"

namespace mantissa::test {

// The element of a code that is a number.
template <class E>
double exact_element(int code) {
  const int magnitude = code & static_cast<int>(E::magnitude_mask), field = magnitude >> E::mantissa_bits,
            fraction = magnitude & static_cast<int>(E::mantissa_mask);
  const double value =
      std::ldexp(field > 0 ? (1 << E::mantissa_bits) + fraction : fraction, std::max(field, 1) - E::bias - E::mantissa_bits);
  return (code & static_cast<int>(E::sign_bit)) != 0 ? -value : value;
}

// Values dequantized in fp64 from the codes alone, row by row.
inline std::vector<double> exact_values(const QuantizedTensor& x) {
  const std::vector<uint8_t> codes = codes_of(x);
  const std::vector<int> scales = scales_of(x);
  std::vector<double> out;
  for (size_t i = 0; i < codes.size(); ++i) {
    const double element = with_element(x.how.format, [&]<class E>() { return exact_element<E>(codes[i]); });
    out.push_back(x.how.format == Format::nvfp4 ? std::ldexp(element * exact_element<E4M3>(scales[i]), x.how.tensor_exponent)
                                                : std::ldexp(element, scales[i] - 127));
  }
  return out;
}
inline std::vector<double> exact_values(const Value& value) {
  const auto* const codes = std::get_if<QuantizedTensor>(&value);
  return codes ? exact_values(*codes) : values(std::get<Tensor>(value));
}
// Values of an operand in the order in which a GEMM reads it, row by row of op(a) or op(b).
inline std::vector<double> exact_values(const Operand& operand) {
  const std::vector<double> out = exact_values(operand.value);
  return operand.transposed && !out.empty() ? transposed(out, shape_of(operand.value)[1]) : out;
}

// A product a [M, K] b [K, N] and what it is added to [M, N], if that is not empty. Sums of K terms in fp32 lie within a bound of the sum
// of magnitudes; the result is rounded.
struct ExactProduct {
  std::vector<double> a, b, before = {};
  int64_t depth, columns;
  double bound, unit;

  void expect(const std::vector<double>& found) const {
    const auto n = static_cast<size_t>(columns), k = static_cast<size_t>(depth);
    for (size_t row = 0; row * n < found.size(); ++row) {
      std::vector<double> sums(n), magnitudes(n);
      double* const sum = sums.data();  // tests are compiled without optimization that inlines the calls of a vector
      double* const magnitude = magnitudes.data();
      for (size_t j = 0; j < n && !before.empty(); ++j) sums[j] = before[row * n + j], magnitudes[j] = std::abs(sums[j]);
      for (size_t i = 0; i < k; ++i) {
        const double x = a[row * k + i];
        const double* const y = b.data() + i * n;
        for (size_t j = 0; j < n; ++j) sum[j] += x * y[j], magnitude[j] += std::abs(x * y[j]);
      }
      for (size_t j = 0; j < n; ++j) {
        ASSERT_LE(std::abs(found[row * n + j] - sums[j]), bound * magnitudes[j] + unit * std::abs(sums[j]) + 0x1p-133)
            << "at " << row << ", " << j << ": " << found[row * n + j];
      }
    }
  }
};

inline double rounding_unit(const Tensor& out) { return out.dtype() == Dtype::bf16 ? 0x1p-8 : 0x1p-23; }

inline std::vector<double> part_of(const std::vector<double>& matrix, int64_t begin, int64_t end, int64_t columns) {
  return {matrix.begin() + begin * columns, matrix.begin() + end * columns};
}

// `before` is what lay in the output.
inline void expect_exact(const Gemm& gemm, const std::vector<double>& before, double bound) {
  const int64_t columns = gemm.out.dim(1);
  std::vector<double> added = gemm.accumulate ? before : std::vector<double>();
  if (gemm.bias.defined()) {
    const std::vector<double> bias = values(gemm.bias);
    added.resize(static_cast<size_t>(gemm.out.elements()));
    for (size_t i = 0; i < added.size(); ++i) added[i] += bias[i % bias.size()];
  }
  ExactProduct{.a = exact_values(gemm.a),
               .b = exact_values(gemm.b),
               .before = added,
               .depth = gemm.a.cols(),
               .columns = columns,
               .bound = bound,
               .unit = rounding_unit(gemm.out)}
      .expect(values(gemm.out));
}

// Rows of no group are zeros.
inline void expect_exact(const GroupedGemm& gemm, double bound) {
  const std::vector<double> offsets = values(gemm.offsets), a = exact_values(gemm.a), found = values(gemm.out);
  const int64_t groups = std::ssize(offsets) - 1, n = gemm.out.dim(1), k = gemm.a.cols(), rows_of_b = shape_of(gemm.b.value)[0] / groups;
  const std::vector<double> matrices = exact_values(gemm.b.value);
  const auto end = static_cast<int64_t>(offsets.back());
  for (int64_t g = 0; g < groups; ++g) {
    const auto first = static_cast<int64_t>(offsets[static_cast<size_t>(g)]),
               last = static_cast<int64_t>(offsets[static_cast<size_t>(g) + 1]);
    const std::vector<double> b = part_of(matrices, g * rows_of_b, (g + 1) * rows_of_b, shape_of(gemm.b.value)[1]);
    ExactProduct{.a = part_of(a, first, last, k),
                 .b = gemm.b.transposed ? transposed(b, k) : b,
                 .depth = k,
                 .columns = n,
                 .bound = bound,
                 .unit = rounding_unit(gemm.out)}
        .expect(part_of(found, first, last, n));
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (int64_t i = end * n; i < std::ssize(found); ++i) ASSERT_EQ(found[static_cast<size_t>(i)], 0.0) << "of no group";
}

inline void expect_exact(const GroupedWeightGradient& gemm, const std::vector<double>& before, double bound) {
  const std::vector<double> offsets = values(gemm.offsets), a = exact_values(gemm.a), b = exact_values(gemm.b), found = values(gemm.out);
  const int64_t groups = std::ssize(offsets) - 1, m = gemm.out.dim(0) / groups, n = gemm.out.dim(1);
  for (int64_t g = 0; g < groups; ++g) {
    const auto first = static_cast<int64_t>(offsets[static_cast<size_t>(g)]),
               last = static_cast<int64_t>(offsets[static_cast<size_t>(g) + 1]);
    const std::vector<double> rows = part_of(a, first, last, m);
    ExactProduct{.a = rows.empty() ? rows : transposed(rows, m),
                 .b = part_of(b, first, last, n),
                 .before = gemm.accumulate ? part_of(before, g * m, (g + 1) * m, n) : std::vector<double>(),
                 .depth = last - first,
                 .columns = n,
                 .bound = bound,
                 .unit = rounding_unit(gemm.out)}
        .expect(part_of(found, g * m, (g + 1) * m, n));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace mantissa::test
