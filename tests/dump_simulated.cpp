// Writes operands, and their rounded values or codes, for scripts/interop/nvfp4.py: dump_simulated FILE CODES. Little-endian; a case of
// CODES is rows, columns and exponent of the tensor's scale in 32 bits, the input in fp32, and scales and codes of NVFP4. A case of FILE is
// 16 words of 32 bits (rows, columns, rows of the result, exponent bits, mantissa bits, rows and columns of a block, scale 0 e8m0 or 1
// e4m3, rule, rounding 0 nearest or 1 stochastic, Hadamard length, contraction, what, seed, first, 0), then input and result in fp32.
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/rng.h"

namespace {

using namespace mantissa;

constexpr uint64_t kSeed = 11, kFirst = 1000;

// Values of bf16: normal, over rows of different sizes; with zeros; all zeros; so small that scales overflow; one number far above all
// others.
std::vector<float> input_of(int64_t rows, int64_t columns, uint32_t what) {
  std::vector<float> out;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const auto words = random_words({.seed = 12}, what, static_cast<uint64_t>(i));
    float x = random_normal({.seed = 13}, what, static_cast<uint64_t>(i));
    if (what % 7 == 1) x = std::ldexp(x, static_cast<int>(i / columns % 21) - 10);
    if (what % 7 == 2 && words[0] % 3 == 0) x = std::copysign(0.0F, x);
    if (what % 7 == 3) x = 0.0F;
    if (what % 7 == 4) x = std::ldexp(x, -118);
    if (what % 7 == 5 && i == rows * columns / 2) x = 3e4F;
    if (what % 7 == 6) x = std::ldexp(x, static_cast<int>(words[1] % 61) - 30);
    out.push_back(to_float(to_bf16(x)));
  }
  return out;
}

class Dump {
 public:
  explicit Dump(const std::string& path) : out_(path, std::ios::binary | std::ios::trunc), device_(make_backend("cpu")) {}

  void add(int64_t rows, int64_t columns, const Simulation& how) {
    const std::vector<float> from = input_of(rows, columns, what_);
    const int64_t result_rows = how.hadamard > 0 && how.contraction == 0 ? round_up(rows, how.hadamard) : rows;
    const Tensor x = converted(from_host(*device_, Dtype::f32, {rows, columns}, from.data()), Dtype::bf16);
    const Tensor out = empty(*device_, Dtype::f32, {result_rows, columns});
    device_->run(Simulate{.x = x, .out = out, .how = how, .draws = {.seed = kSeed, .what = what_, .first = kFirst, .columns = columns}});
    const int64_t header[16] = {rows,
                                columns,
                                result_rows,
                                how.element.exponent_bits,
                                how.element.mantissa_bits,
                                how.block_rows,
                                how.block_cols,
                                how.scale == SimulatedScale::e4m3,
                                static_cast<int64_t>(how.rule),
                                how.rounding == Rounding::stochastic,
                                how.hadamard,
                                how.contraction,
                                what_++,
                                kSeed,
                                kFirst,
                                0};
    for (const int64_t word : header) write(static_cast<int32_t>(word));
    for (const float value : from) write(value);
    for (const float value : to_host<float>(out)) write(value);
  }
  void add(int64_t rows, int64_t columns, const Quantization& how) {
    const std::vector<float> from = input_of(rows, columns, what_++);
    const Tensor x = converted(from_host(*device_, Dtype::f32, {rows, columns}, from.data()), Dtype::bf16);
    const QuantizedTensor codes = quantized(x, how);
    for (const int64_t word : {rows, columns, int64_t{how.tensor_exponent}}) write(static_cast<int32_t>(word));
    for (const float value : from) write(value);
    for (const uint8_t byte : to_host<uint8_t>(codes.scales)) write(byte);
    for (const uint8_t byte : to_host<uint8_t>(codes.codes)) write(byte);
  }
  bool good() { return static_cast<bool>(out_ << std::flush); }

 private:
  template <class T>
  void write(T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.write(bytes, sizeof value);
  }

  std::ofstream out_;
  std::unique_ptr<Backend> device_;
  uint32_t what_ = 0;
};

// Each of the seven inputs: weights, inputs and output gradients of NVFP4, rowwise and columnwise, and other formats.
void add_all(Dump& dump) {
  for (int input = 0; input < 7; ++input)
    dump.add(64, 96, {.element = {2, 1}, .block_rows = 16, .block_cols = 16, .scale = SimulatedScale::e4m3});
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    const Simulation rows{.element = {2, 1}, .block_cols = 16, .scale = SimulatedScale::e4m3, .rounding = rounding};
    for (int input = 0; input < 7; ++input) dump.add(50, 128, rows.along(1, 0));
    for (int input = 0; input < 7; ++input) dump.add(64, 48, rows.along(0, 16));
    for (int input = 0; input < 7; ++input) dump.add(61, 48, rows.along(0, 16));
    for (int input = 0; input < 7; ++input) dump.add(40, 64, rows.along(1, 32));
  }
  for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil}) {
    for (const FreeElement element : {FreeElement{3, 2}, {2, 3}, {1, 2}, {4, 3}, {5, 2}, {4, 0}}) {
      dump.add(33, 75, {.element = element, .block_rows = 1, .block_cols = 32, .rule = rule});
    }
  }
  for (int input = 0; input < 7; ++input)
    dump.add(33, 75, {.element = {3, 2}, .block_rows = 5, .block_cols = 7, .scale = SimulatedScale::e4m3});
}

void add_codes(Dump& dump) {
  for (const int8_t exponent : std::initializer_list<int8_t>{-8, -2, 0, 9}) {
    for (int input = 0; input < 7; ++input) dump.add(64, 256, {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, exponent});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: dump_simulated FILE CODES\n";
    return 2;
  }
  Dump values(argv[1]), codes(argv[2]);
  add_all(values);
  add_codes(codes);
  if (values.good() && codes.good()) return 0;
  std::cerr << "cannot write " << argv[1] << " and " << argv[2] << '\n';
  return 1;
}
