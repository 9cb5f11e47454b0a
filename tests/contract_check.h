// Good kernel calls and the faults derived from them.
#pragma once

#include "testing.h"

namespace mantissa::test {

// On both CPU backends.
class ContractCheck {
 public:
  Tensor f32(Shape shape) { return random_tensor(*reference_, Dtype::f32, shape, 1); }
  Tensor i32(Shape shape) { return zeros(*reference_, Dtype::i32, shape); }
  Tensor bf16s(Shape shape) { return zeros(*reference_, Dtype::bf16, shape); }
  Tensor u8(Shape shape) { return zeros(*reference_, Dtype::u8, shape); }
  QuantizedTensor codes(Shape shape, const Quantization& how) {
    return {.codes = u8(codes_shape(shape, how)), .scales = u8(scales_shape(shape, how)), .shape = shape, .how = how};
  }
  Tensor f64(Shape shape) { return zeros(*reference_, Dtype::f64, shape); }

  template <class Kernel>
  void accepts(const Kernel& k) {
    EXPECT_NO_THROW(reference_->run(k));
    EXPECT_NO_THROW(fast_->run(k));
  }

  // With the kernel and every given word in the message.
  template <class Kernel>
  void refuses(const Kernel& k, const std::string& kernel, const std::vector<std::string>& words, ExitCode code = ExitCode::internal) {
    for (Backend* device : {reference_.get(), fast_.get()}) {
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

  template <class Kernel>
  using Members = std::initializer_list<std::pair<const char*, Tensor Kernel::*>>;

  // A good call, then one fault at a time in each operand. Only for operands whose dtype and shape follow from others.
  template <class Kernel>
  void operands(const std::string& kernel, const Kernel& good, Members<Kernel> members) {
    accepts(good);
    for (const auto& [name, member] : members) {
      const Tensor operand = good.*member;
      Kernel bad = good;
      bad.*member = Tensor();
      refuses(bad, kernel, {std::string(name) + " is missing"});
      bad.*member = zeros(*reference_, operand.dtype() == Dtype::i32 ? Dtype::f32 : Dtype::i32, operand.shape());
      refuses(bad, kernel, {});
      bad.*member = zeros(*reference_, operand.dtype(), operand.shape().with_dim0(operand.dim(0) + 1));
      refuses(bad, kernel, {});
      bad.*member = operand.view({1, 1, operand.elements()});
      refuses(bad, kernel, {});
    }
  }

  // Each optional operand of a good call that has them: wrong shape and dtype; and without it.
  template <class Kernel>
  void optional_operands(const std::string& kernel, const Kernel& good, Members<Kernel> members) {
    accepts(good);
    for (const auto& [name, member] : members) {
      Kernel other = good;
      other.*member = Tensor();
      accepts(other);
      other.*member = zeros(*reference_, Dtype::f64, (good.*member).shape());
      if ((good.*member).dtype() == Dtype::i32) refuses(other, kernel, {name});
      other.*member = zeros(*reference_, (good.*member).dtype(), (good.*member).shape().with_dim0((good.*member).dim(0) + 1));
      refuses(other, kernel, {name});
    }
  }

 private:
  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), fast_ = make_backend("cpu");
};

}  // namespace mantissa::test
