// The six operands of a linear layer under mxfp8_te, bit for bit those of scripts/interop/te_linear.py, which follows Transformer Engine.
#include <gtest/gtest.h>

#include <utility>

#include "backend/cpu/reference/reference.h"
#include "io/safetensors.h"
#include "mantissa/backend/functions.h"
#include "mantissa/precision/config.h"
#include "ops/ops.h"
#include "testing.h"

namespace mantissa::test::te_linear_test {

struct Product {
  QuantizedTensor a, b;
  bool a_transposed, b_transposed;
};

// The reference, which keeps what it is asked to multiply.
class KeepingOperands : public CpuReference {
 public:
  std::vector<Product> products;

 protected:
  void execute(const Gemm& k) override {
    const bool asked = !std::exchange(inside_, true);  // not by the reference itself, which multiplies the values of codes
    if (asked)
      products.push_back({std::get<QuantizedTensor>(k.a.value), std::get<QuantizedTensor>(k.b.value), k.a.transposed, k.b.transposed});
    CpuReference::execute(k);
    if (asked) inside_ = false;
  }

 private:
  bool inside_ = false;
};

class TransformerEngineLinear : public ::testing::Test {
 protected:
  std::vector<std::byte> bytes(const std::string& name) const {
    const SafetensorsEntry* const entry = file_.find(name);
    require(entry != nullptr, "no tensor ", name);
    std::vector<std::byte> out(static_cast<size_t>(safetensors_bytes(*entry)));
    file_.read(*entry, 0, out);
    return out;
  }
  Tensor tensor(const std::string& name) {
    const SafetensorsEntry* const entry = file_.find(name);
    return from_host(device_, Dtype::bf16, {entry->shape[0], entry->shape[1]}, bytes(name).data());
  }
  void expect_codes(const QuantizedTensor& found, const std::string& name) const {
    EXPECT_EQ(host_bytes(found.codes), bytes(name + ".codes")) << name;
    EXPECT_EQ(host_bytes(found.scales), bytes(name + ".scales")) << name;
  }
  static std::vector<std::byte> host_bytes(const Tensor& tensor) {
    const HostBytes held(tensor);
    return {held.get().begin(), held.get().end()};
  }

  KeepingOperands device_;
  SafetensorsFile file_{std::string(MANTISSA_SOURCE_DIR) + "/tests/golden/linears/te.safetensors"};
};

TEST_F(TransformerEngineLinear, ReadsTheCodesOfItsRecipe) {
  const Recipe recipe = preset_recipe("mxfp8_te");
  const Tensor w = tensor("w"), dy = tensor("dy");
  Leaf leaf{zeros(device_, Dtype::f32, w.shape())};
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var y = linear(tape.input(tensor("x")), LinearWeight(w, quantized(w, recipe.weight), &leaf), Var(), recipe);
  tape.backward(y, dy);
  ASSERT_EQ(device_.products.size(), 3U);
  const Product &fprop = device_.products[0], &wgrad = device_.products[1], &dgrad = device_.products[2];
  expect_codes(fprop.a, "fprop.x");
  expect_codes(fprop.b, "fprop.w");
  expect_codes(dgrad.a, "dgrad.dy");
  expect_codes(dgrad.b, "dgrad.w");
  expect_codes(wgrad.a, "wgrad.dy");
  expect_codes(wgrad.b, "wgrad.x");
  EXPECT_TRUE(fprop.b_transposed && wgrad.a_transposed);
  EXPECT_FALSE(dgrad.b_transposed || wgrad.b_transposed);
}

}  // namespace mantissa::test::te_linear_test
