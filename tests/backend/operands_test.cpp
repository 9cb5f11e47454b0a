// The comparison and the guards of kernel tests: on every backend they find a bit that differs and a byte written beside an operand.
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>

#include "kernel_backends.h"
#include "kernel_operands.h"

namespace mantissa::test::operands_test {

class OperandsTest : public OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(, OperandsTest, ::testing::ValuesIn(all_backends()), backend_of);

TEST_P(OperandsTest, KeepTheValuesThatTheyAreGivenInEveryDtype) {
  const std::vector<double> small{0, 1, 3, 255}, signs{-1.5, 0.25, 1e30, HUGE_VAL};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i32, Dtype::u8}) {
    const Tensor x = tensor_of(device(), dtype, {2, 2}, small);
    EXPECT_EQ(values(x), small) << dtype;
    set_value(x, 2, 7);
    EXPECT_EQ(values(x), (std::vector<double>{0, 1, 7, 255})) << dtype;
  }
  EXPECT_EQ(values(tensor_of(device(), Dtype::f32, {4}, signs))[3], HUGE_VAL);
  EXPECT_EQ(values(tensor_of(device(), Dtype::f64, {4}, signs)), signs);
  EXPECT_EQ(values(tensor_of(device(), Dtype::bf16, {1}, {1.0 + 0x1p-9})), std::vector<double>{1.0}) << "rounded";
}

TEST_P(OperandsTest, AreEqualToTheBitOrDifferByName) {
  const Tensor x = random_tensor(device(), Dtype::f32, {3, 4}, 1), same = copied(device(), x);
  EXPECT_TRUE(same_bits(same, x));
  flip_bit(same, 7 * 4);
  const ::testing::AssertionResult differs = same_bits(same, x);
  EXPECT_FALSE(differs);
  EXPECT_THAT(differs.message(), ::testing::StartsWith("bits differ first at [7] of [3, 4]: "));
  EXPECT_FALSE(same_bits(x, x.view({12}))) << "another shape";
  const Tensor zeros = tensor_of(device(), Dtype::f32, {1}, {0.0}), negative = tensor_of(device(), Dtype::f32, {1}, {-0.0});
  EXPECT_FALSE(same_bits(zeros, negative));
}

// A byte, by its distance from the first of an operand.
void write_beside(const Tensor& operand, int64_t at) {
  const std::shared_ptr<std::byte> nobody_owns(operand.device_bytes() + at, [](std::byte*) {});
  const Tensor byte(operand.device(), nobody_owns, operand.device().host_memory(), Dtype::u8, {1});
  set_value(byte, 0, 1);
}

TEST_P(OperandsTest, AreGuardedOnBothSides) {
  for (const Operands::Memory memory : {Operands::Memory::aligned, Operands::Memory::misaligned}) {
    for (const int64_t inside : {0, 11}) {
      Operands operands(device(), Dtype::f32, memory);
      write_beside(operands.input({3}), inside);
      operands.expect_margins_untouched();
    }
    for (const int64_t before : {-1, -256}) {
      Operands operands(device(), Dtype::f32, memory);
      write_beside(operands.input({3}), before);
      EXPECT_NONFATAL_FAILURE(operands.expect_margins_untouched(), "written before the first element of [3]");
    }
    for (const int64_t behind : {12, 12 + 255}) {
      Operands operands(device(), Dtype::f32, memory);
      write_beside(operands.input({3}), behind);
      EXPECT_NONFATAL_FAILURE(operands.expect_margins_untouched(), "written past the last element of [3]");
    }
  }
}

}  // namespace mantissa::test::operands_test
