// Fixtures shared by tests: backends, random tensors, comparison that says where it failed, numeric gradients.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <regex>
#include <string>
#include <type_traits>
#include <vector>

#include "autograd/tape.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/rng.h"
#include "models/model_shape.h"
#include "nn/parameter.h"

namespace mantissa::test {

// Both CPU backends, made once per test.
class BackendTest : public ::testing::Test {
 protected:
  BackendTest() : reference_(make_backend("cpu_reference")), fast_(make_backend("cpu")) {}
  Backend& reference() { return *reference_; }
  Backend& fast() { return *fast_; }

 private:
  std::unique_ptr<Backend> reference_, fast_;
};

// A plan without quantization; fp64 is for the reference backend.
inline PrecisionPlan high_plan(const ModelConfig& config, Dtype compute = Dtype::f32) {
  PrecisionConfig precision;
  precision.dtype = compute;
  ConfigReport report;
  return PrecisionPlan::resolve(precision, model_shape(config), report);
}

// Draws and stores all weights, and keeps no master.
inline void initialize(ParameterSet& parameters, uint64_t seed) {
  parameters.clear_nonfinite();
  for (const ParameterShard& shard : parameters.whole_shards()) {
    const Tensor master = parameters.room_for_master(shard);
    parameters.draw_initial(shard, seed, master);
    parameters.store(shard, master);
  }
}

// Sets the number of threads until the end of the block.
class Threads {
 public:
  explicit Threads(int count) { set_num_threads(count); }
  ~Threads() { set_num_threads(0); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
};

// The elements of a tensor, exactly.
inline std::vector<double> values(const Tensor& tensor) {
  const auto widened = [](const auto& elements) { return std::vector<double>(elements.begin(), elements.end()); };
  switch (tensor.dtype()) {
    case Dtype::f32: return widened(to_host<float>(tensor));
    case Dtype::bf16: break;
    case Dtype::f64: return to_host<double>(tensor);
    case Dtype::i32: return widened(to_host<int32_t>(tensor));
    case Dtype::u8: return widened(to_host<uint8_t>(tensor));
  }
  std::vector<double> out;
  for (const bf16 element : to_host<bf16>(tensor)) out.push_back(static_cast<double>(to_float(element)));
  return out;
}

template <class T>
void upload_rounded(const Tensor& tensor, const std::vector<double>& from, T (*rounded)(double)) {
  std::vector<T> elements(from.size());
  std::transform(from.begin(), from.end(), elements.begin(), rounded);
  tensor.device().upload(elements.data(), tensor);
}

// Writes values rounded to the tensor's dtype, without a kernel.
inline void assign(const Tensor& tensor, const std::vector<double>& from) {
  ASSERT_EQ(static_cast<size_t>(tensor.elements()), from.size());
  switch (tensor.dtype()) {
    case Dtype::f32: return upload_rounded<float>(tensor, from, [](double x) { return static_cast<float>(x); });
    case Dtype::bf16: return upload_rounded<bf16>(tensor, from, [](double x) { return to_bf16(static_cast<float>(x)); });
    case Dtype::f64: return tensor.device().upload(from.data(), tensor);
    case Dtype::i32: return upload_rounded<int32_t>(tensor, from, [](double x) { return static_cast<int32_t>(x); });
    case Dtype::u8: return upload_rounded<uint8_t>(tensor, from, [](double x) { return static_cast<uint8_t>(x); });
  }
}

// Like assign(), but for one element, by its number.
inline void set_value(const Tensor& tensor, int64_t at, double value) {
  assign(tensor.view({tensor.elements()}).slice(at, at + 1), {value});
}

inline std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  std::vector<uint8_t> out(static_cast<size_t>(tensor.bytes()));
  tensor.device().download(tensor, out.data());
  return out;
}

// Flips the lowest bit of a byte.
inline void flip_bit(const Tensor& tensor, int64_t byte) {
  std::vector<uint8_t> bytes = bytes_of(tensor);
  bytes[static_cast<size_t>(byte)] ^= 1;
  tensor.device().upload(bytes.data(), tensor);
}

// A copy of the bits in memory of this device.
inline Tensor copied(Backend& device, const Tensor& x) {
  return x.defined() ? from_host(device, x.dtype(), x.shape(), bytes_of(x).data()) : Tensor();
}
inline QuantizedTensor copied(Backend& device, const QuantizedTensor& x) {
  return {.codes = copied(device, x.codes), .scales = copied(device, x.scales), .shape = x.shape, .how = x.how};
}
inline Value copied(Backend& device, const Value& x) {
  return std::visit([&](const auto& of) { return Value(copied(device, of)); }, x);
}

inline Tensor tensor_of(Backend& device, Dtype dtype, Shape shape, const std::vector<double>& from) {
  const Tensor out = empty(device, dtype, shape);
  assign(out, from);
  return out;
}

// mean + scale * (uniform of variance 1). `what` tells the draws of one test apart; equal arguments give equal values on every backend.
inline std::vector<double> random_values(int64_t count, uint32_t what, double scale = 1.0, double mean = 0.0) {
  constexpr double kHalfWidth = 1.7320508;
  std::vector<double> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); i += 4) {
    const auto words = random_words({.seed = 7}, what, i);
    for (size_t j = i; j < std::min(i + 4, out.size()); ++j) {
      out[j] = mean + scale * kHalfWidth * (static_cast<double>(words[j - i] >> 8) * 0x1p-23 - 1.0);
    }
  }
  return out;
}

inline Tensor random_tensor(Backend& device, Dtype dtype, Shape shape, uint32_t what, double scale = 1.0, double mean = 0.0) {
  return tensor_of(device, dtype, shape, random_values(shape.elements(), what, scale, mean));
}

// Random i32 in [0, limit).
inline Tensor random_indices(Backend& device, int64_t count, int64_t limit, uint32_t what) {
  std::vector<double> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<double>(random_words({.seed = 7}, what, i)[0] % static_cast<uint64_t>(limit));
  return tensor_of(device, Dtype::i32, {count}, out);
}

inline ::testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected) {
  if (actual.dtype() != expected.dtype() || actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure() << "dtypes or shapes differ: " << actual.shape() << " and " << expected.shape();
  }
  const std::vector<uint8_t> found = bytes_of(actual), wanted = bytes_of(expected);
  if (found == wanted) return ::testing::AssertionSuccess();
  const auto first = std::mismatch(found.begin(), found.end(), wanted.begin()).first - found.begin();
  const auto at = static_cast<size_t>(first / dtype_bytes(actual.dtype()));
  return ::testing::AssertionFailure() << "bits differ first at [" << at << "] of " << actual.shape() << ": " << values(actual)[at]
                                       << ", expected " << values(expected)[at];
}

// |actual - expected| <= tolerance * max(|expected|, root mean square of all finite expected, 1e-20). NaN and infinities must coincide.
inline ::testing::AssertionResult close(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " elements, expected " << expected.size();
  }
  double squares = 0.0;
  for (const double e : expected) squares += std::isfinite(e) ? e * e : 0.0;
  const double rms = std::sqrt(squares / static_cast<double>(std::max<size_t>(expected.size(), 1)));
  size_t worst = 0, wrong = 0;
  double worst_error = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double a = actual[i], e = expected[i];
    if (a == e || (std::isnan(a) && std::isnan(e))) continue;
    const double error = std::isfinite(a) && std::isfinite(e) ? std::abs(a - e) / std::max({std::abs(e), rms, 1e-20}) : HUGE_VAL;
    wrong += error > tolerance;
    if (error > worst_error) worst = i, worst_error = error;
  }
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << expected.size() << " elements differ by more than " << tolerance
                                       << "; worst at [" << worst << "]: " << actual[worst] << ", expected " << expected[worst]
                                       << ", error " << worst_error;
}

inline ::testing::AssertionResult close(const Tensor& actual, const Tensor& expected, double tolerance) {
  if (actual.dtype() != expected.dtype() || actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure() << actual.dtype() << ' ' << actual.shape() << ", expected " << expected.dtype() << ' '
                                         << expected.shape();
  }
  return close(values(actual), values(expected), tolerance);
}

// Floats with all their digits, bytes in hexadecimal.
template <class T>
std::string element_text(const T& element) {
  char out[32];
  if constexpr (std::is_floating_point_v<T>) {
    std::snprintf(out, sizeof out, "%.17g", static_cast<double>(element));
  } else if constexpr (sizeof(T) == 1) {
    std::snprintf(out, sizeof out, "0x%02x", static_cast<unsigned>(static_cast<unsigned char>(element)));
  } else {
    return ::testing::PrintToString(element);
  }
  return out;
}

// Compares vectors, or strings of bytes, that are too long to be printed: says how many elements differ, and which is the first.
template <class Container>
::testing::AssertionResult same_elements(const Container& actual, const Container& expected) {
  if (actual == expected) return ::testing::AssertionSuccess();
  ::testing::AssertionResult out = ::testing::AssertionFailure();
  if (actual.size() != expected.size()) out << actual.size() << " elements, expected " << expected.size() << "; ";
  const size_t common = std::min(actual.size(), expected.size());
  size_t first = common, different = 0;
  for (size_t i = common; i-- > 0;) {
    if (!(actual[i] == expected[i])) first = i, ++different;
  }
  if (different == 0) return out << "the first " << common << " are equal";
  return out << different << " of " << common << " differ, first [" << first << "]: " << element_text(actual[first]) << ", expected "
             << element_text(expected[first]);
}

// The first group of every match of `pattern` in a file of the source tree: what a header declares, for tests that must cover all of it.
inline std::vector<std::string> declared_in(const std::string& path, const std::string& pattern) {
  std::ifstream file(std::string(MANTISSA_SOURCE_DIR) + "/" + path);
  EXPECT_TRUE(file.good()) << path;
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  const std::regex expression(pattern);
  std::vector<std::string> out;
  for (std::sregex_iterator match(content.begin(), content.end(), expression), end; match != end; ++match) out.push_back((*match)[1]);
  return out;
}

}  // namespace mantissa::test
