// Random GEMMs that any model might ask for, held against the reference: every dimension from 1 to 3,000, both transpositions, dense and
// quantized operands. A case is drawn from its number alone.
#pragma once

#include <cmath>

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::test {

// Numbers of one case, in the order in which they are asked for.
class CaseDraw {
 public:
  explicit CaseDraw(uint32_t number) : number_(number) {}
  uint32_t number() const { return number_; }
  int64_t below(int64_t count) {
    return static_cast<int64_t>(random_words({.seed = 31, .stream = RngStream::test}, number_, next_++)[0]) % count;
  }
  bool one_in(int64_t count) { return below(count) == 0; }
  template <class T>
  T from(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int64_t>(all.size()))];
  }
  int64_t log_uniform(double lowest, double highest) {
    return std::llround(std::exp(std::log(lowest) + (std::log(highest) - std::log(lowest)) * static_cast<double>(below(1 << 20)) / 0x1p20));
  }

 private:
  uint32_t number_;
  uint64_t next_ = 0;
};

inline constexpr int64_t kLargestDimension = 3000, kLargestGemm = int64_t{1} << 28;

// Draws a dimension: half of them are log-uniform, the others multiples of a block or of a tile of the fast path, and their neighbors.
inline int64_t gemm_dimension(CaseDraw& draw) {
  if (draw.one_in(2)) return draw.log_uniform(1, static_cast<double>(kLargestDimension));
  const int64_t step = draw.from<int64_t>({32, 384});
  const int64_t around = (1 + draw.below(kLargestDimension / step)) * step + draw.below(3) - 1;
  return std::min(around, kLargestDimension);
}

struct GemmCase {
  int64_t m = 1, n = 1, k = 1;
  Quantization a = {}, b = {};  // none: dense
  Dtype dense = Dtype::f32, out = Dtype::f32;
  bool a_transposed = false, b_transposed = false, accumulate = false, bias = false;
  bool extreme = false;  // a scale of b that bf16 cannot follow

  // True if the fast path dequantizes b in several column blocks, which it does not if b fits 8 MiB, a is transposed or the sum goes on.
  bool banded() const {
    const bool whole = !b || a_transposed || accumulate;
    return !whole && n * k * 2 > (int64_t{1} << 23) + 768 * k * 2;
  }
};

inline std::ostream& operator<<(std::ostream& out, const GemmCase& c) {
  out << c.m << " x " << c.n << " x " << c.k << " a " << c.a << (c.a_transposed ? " transposed" : "") << " b " << c.b
      << (c.b_transposed ? " transposed" : "") << ' ' << c.dense << " to " << c.out;
  return out << (c.accumulate ? " accumulated" : "") << (c.bias ? " with bias" : "") << (c.extreme ? " with an extreme scale" : "");
}

inline Quantization drawn_quantization(CaseDraw& draw) {
  const auto format = draw.from({Format::e4m3, Format::e4m3, Format::e5m2, Format::e2m1});
  const int64_t block = format == Format::e2m1 ? draw.from<int64_t>({16, 32}) : draw.from<int64_t>({32, 32, 128});
  const ScaleRule rule = format == Format::e2m1 ? ScaleRule::flashinfer : ScaleRule::rceil;
  const int64_t rows = format == Format::e2m1 ? 1 : draw.from<int64_t>({1, block, block});
  const Quantization how{format, rows, block, rule};
  return rows == 1 && format != Format::e2m1 && draw.one_in(2) ? how.transposed() : how;
}

// Rounds two dimensions up to whole blocks of a matrix that is stored, or read transposed, with them as rows and columns; or, unless it is
// to have whole blocks, to the bytes of two columns.
inline void whole_blocks_of(const Quantization& how, bool transposed, int64_t& rows, int64_t& cols, bool whole = true) {
  if (!how) return;
  const auto round_up = [](int64_t& size, int64_t block) { size = (size + block - 1) / block * block; };
  if (!whole) return how.format == Format::e2m1 ? round_up(transposed ? rows : cols, 2) : void();
  round_up(rows, transposed ? how.block_cols : how.block_rows);
  round_up(cols, transposed ? how.block_rows : how.block_cols);
}

inline GemmCase drawn_case(CaseDraw& draw) {
  GemmCase c;
  const bool deep = draw.number() % 5 < 2;  // a weight that is cut into column blocks
  c.a_transposed = !deep && draw.one_in(2), c.b_transposed = draw.one_in(2);
  if (draw.one_in(3)) c.a = drawn_quantization(draw);
  if (deep && c.a) c.a = {c.a.format, 1, c.a.block(), c.a.rule};  // a few rows will do
  if (deep || draw.one_in(2)) c.b = drawn_quantization(draw);
  c.dense = draw.from({Dtype::f32, Dtype::bf16});
  c.accumulate = draw.one_in(4), c.bias = draw.one_in(3);
  c.extreme = c.b && draw.one_in(8);
  const Dtype narrow = c.a && c.b ? Dtype::bf16 : c.dense;
  c.out = c.accumulate ? Dtype::f32 : draw.from({narrow, Dtype::f32});
  const bool whole = draw.one_in(2);
  do {
    c.k = deep ? 2300 + draw.below(700) : gemm_dimension(draw);
    c.n = deep ? 2600 + draw.below(400) : gemm_dimension(draw);
    c.m = deep ? draw.log_uniform(1, 48) : gemm_dimension(draw);
    whole_blocks_of(c.a, c.a_transposed, c.m, c.k, whole);
    whole_blocks_of(c.b, c.b_transposed, c.k, c.n, whole);
    whole_blocks_of(c.a, c.a_transposed, c.m, c.k, whole);
  } while (c.m * c.n * c.k > kLargestGemm);
  return c;
}

// Codes of finite elements, scales from 2^-6 to 2^6, the last one where bf16 ends if that is asked for.
inline QuantizedTensor drawn_codes(Backend& device, Shape shape, const Quantization& how, uint32_t what, bool extreme) {
  const auto filled = [&](Shape bytes, uint64_t first, auto&& byte_of) {
    std::vector<uint8_t> out(static_cast<size_t>(bytes.elements()));
    for (size_t i = 0; i < out.size(); i += 16) {
      const auto words = random_words({.seed = 32}, what, first + i);
      const auto* drawn = reinterpret_cast<const uint8_t*>(words.data());
      for (size_t j = i; j < std::min(i + 16, out.size()); ++j) out[j] = byte_of(drawn[j - i]);
    }
    return from_host(device, Dtype::u8, bytes, out.data());
  };
  const int largest = how.format == Format::e4m3 ? 0x7e : 0x7b;  // in e2m1 every code is finite
  const auto finite = [&](uint8_t byte) {
    const bool foreign = how.format != Format::e2m1 && (byte & 0x7f) > largest;
    return foreign ? static_cast<uint8_t>(byte ^ 0x04) : byte;
  };
  const auto moderate = [](uint8_t byte) { return static_cast<uint8_t>(121 + byte % 13); };
  const QuantizedTensor out{.codes = filled(codes_shape(shape, how), 0, finite),
                            .scales = filled(scales_shape(shape, how), uint64_t{1} << 40, moderate),
                            .shape = shape,
                            .how = how};
  if (extreme) set_value(out.scales, out.scales.elements() - 1, 2);
  return out;
}

inline Value drawn_value(Backend& device, const GemmCase& c, Shape shape, const Quantization& how, uint32_t what, bool extreme) {
  if (how) return drawn_codes(device, shape, how, what, extreme);
  return random_tensor(device, c.dense, shape, what);
}

// Widens to fp64, exactly.
inline Tensor widened(Backend& reference, const Value& value) {
  if (const auto* const x = std::get_if<Tensor>(&value)) return tensor_of(reference, Dtype::f64, x->shape(), values(*x));
  const QuantizedTensor codes = copied(reference, std::get<QuantizedTensor>(value));
  const Tensor decoded = empty(reference, Dtype::f32, codes.shape);
  reference.run(Dequantize{.x = codes, .out = decoded});
  return converted(decoded, Dtype::f64);
}

inline Tensor magnitudes_of(const Tensor& x) {
  std::vector<double> out = values(x);
  for (double& value : out) value = std::abs(value);
  return tensor_of(x.device(), x.dtype(), x.shape(), out);
}

// Tolerance: |device - reference in fp64| <= 2e-6 sum |a b|, a bound that an fp32 sum of up to 4,096 terms keeps in any order. A bf16
// result is rounded, which is 2^-8 |D| more. The bias and the values that are accumulated into, each below 2, take part in the sum.
inline ::testing::AssertionResult gemms_agree(Backend& device, Backend& reference, const GemmCase& c, uint32_t what) {
  const Value a = drawn_value(device, c, c.a_transposed ? Shape{c.k, c.m} : Shape{c.m, c.k}, c.a, 3 * what, false);
  const Value b = drawn_value(device, c, c.b_transposed ? Shape{c.n, c.k} : Shape{c.k, c.n}, c.b, 3 * what + 1, c.extreme);
  const Tensor bias = c.bias ? random_tensor(device, c.a && c.b ? Dtype::f32 : c.dense, {c.n}, 3 * what + 2) : Tensor();
  const Tensor actual = c.accumulate ? random_tensor(device, c.out, {c.m, c.n}, 3 * what) : empty(device, c.out, {c.m, c.n});
  const Tensor expected = c.accumulate ? widened(reference, actual) : empty(reference, Dtype::f64, {c.m, c.n});
  const Tensor left = widened(reference, a), right = widened(reference, b), magnitudes = empty_like(expected);
  const auto gemm = [&](const Value& x, const Value& y, const Tensor& out, bool accumulate, const Tensor& added) {
    return Gemm{.a = {x, c.a_transposed}, .b = {y, c.b_transposed}, .out = out, .accumulate = accumulate, .bias = added};
  };
  device.run(gemm(a, b, actual, c.accumulate, bias));
  reference.run(gemm(left, right, expected, c.accumulate, bias.defined() ? widened(reference, bias) : Tensor()));
  reference.run(gemm(magnitudes_of(left), magnitudes_of(right), magnitudes, false, {}));
  const std::vector<double> d = values(actual), e = values(expected), m = values(magnitudes);
  const double relative = std::max(2e-6, route_gemm(form_of(gemm(a, b, actual, c.accumulate, bias)), device.gemm_device()).bound);
  for (size_t i = 0; i < d.size(); ++i) {
    const double bound = relative * (m[i] + 4) + (c.out == Dtype::bf16 ? 0x1p-8 * std::abs(e[i]) : 0.0);
    if (std::abs(d[i] - e[i]) <= bound) continue;
    const auto at = static_cast<int64_t>(i);
    return ::testing::AssertionFailure() << c << " on " << device.name() << ": [" << at / c.n << ", " << at % c.n << "] is " << d[i]
                                         << ", expected " << e[i] << " within " << bound;
  }
  return ::testing::AssertionSuccess();
}

// Checks cases [first, first + count). Returns the number of those that were cut into column blocks.
inline int64_t expect_gemms(uint32_t first, uint32_t count) {
  const KernelBackends backends;
  int64_t banded = 0;
  for (uint32_t i = first; i < first + count; ++i) {
    CaseDraw draw(i);
    const GemmCase c = drawn_case(draw);
    banded += c.banded();
    for (Backend* device : backends.tested()) EXPECT_TRUE(gemms_agree(*device, backends.reference(), c, i)) << "case " << i;
  }
  return banded;
}

}  // namespace mantissa::test
