// Kernel calls that both CPU backends accept, or refuse.
#pragma once

#include "testing.h"

namespace mantissa::test {

class ContractCheck : public BackendTest {
 protected:
  Tensor f32(Shape shape) { return random_tensor(reference(), Dtype::f32, shape, 1); }
  Tensor f64(Shape shape) { return zeros(reference(), Dtype::f64, shape); }
  Tensor bf16s(Shape shape) { return zeros(reference(), Dtype::bf16, shape); }
  Tensor i32(Shape shape) { return zeros(reference(), Dtype::i32, shape); }
  Tensor u8(Shape shape) { return zeros(reference(), Dtype::u8, shape); }
  QuantizedTensor codes(Shape shape, const Quantization& how) {
    return {.codes = u8(codes_shape(shape, how)), .scales = u8(scales_shape(shape, how)), .shape = shape, .how = how};
  }

  template <class Kernel>
  void accepts(const Kernel& k) {
    EXPECT_NO_THROW(reference().run(k));
    EXPECT_NO_THROW(fast().run(k));
  }

  // With the kernel and every given word in the message.
  template <class Kernel>
  void refuses(const Kernel& k, const std::string& kernel, const std::vector<std::string>& words, ExitCode code = ExitCode::internal) {
    for (Backend* device : {&reference(), &fast()}) {
      try {
        device->run(k);
        ADD_FAILURE() << kernel << " on " << device->name() << " accepts a fault in " << ::testing::PrintToString(words);
      } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(error.code(), code) << message;
        EXPECT_EQ(message.rfind(kernel + ": ", 0), 0U) << message;
        for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
      }
    }
  }
};

}  // namespace mantissa::test
