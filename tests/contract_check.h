// Kernel calls that every backend accepts, or refuses.
#pragma once

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::test {

class ContractCheck : public OnEachBackend {
 protected:
  Tensor f32(Shape shape) { return random_tensor(device(), Dtype::f32, shape, 1); }
  Tensor f64(Shape shape) { return zeros(device(), Dtype::f64, shape); }
  Tensor bf16s(Shape shape) { return zeros(device(), Dtype::bf16, shape); }
  Tensor i32(Shape shape) { return zeros(device(), Dtype::i32, shape); }
  Tensor u8(Shape shape) { return zeros(device(), Dtype::u8, shape); }
  QuantizedTensor codes(Shape shape, const Quantization& how) {
    return {.codes = u8(codes_shape(shape, how)), .scales = u8(scales_shape(shape, how)), .shape = shape, .how = how};
  }

  template <class Kernel>
  void accepts(const Kernel& k) {
    EXPECT_NO_THROW(run(k));
  }

  // Expects an error with the kernel and every given word in its message.
  template <class Kernel>
  void refuses(const Kernel& k, const std::string& kernel, const std::vector<std::string>& words, ExitCode code = ExitCode::internal) {
    try {
      run(k);
      ADD_FAILURE() << kernel << " on " << device().name() << " accepts a fault in " << ::testing::PrintToString(words);
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), code) << message;
      EXPECT_EQ(message.rfind(kernel + ": ", 0), 0U) << message;
      for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
    }
  }

 private:
  // Runs a kernel to its end, where a device that runs it later reports what it found.
  template <class Kernel>
  void run(const Kernel& k) {
    device().run(k);
    device().synchronize();
  }
};

}  // namespace mantissa::test
