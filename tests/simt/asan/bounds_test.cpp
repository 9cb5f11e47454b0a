// Reports of AddressSanitizer about device code on the executor: it ends the process where a thread leaves its memory.
#include <gtest/gtest.h>

#include "gpu/device.h"
#include "kernel_operands.h"

namespace mantissa::bounds_test {

using namespace mantissa::gpu;

constexpr unsigned kThreadsOfBlock = 64;

template <class T>
void touch(const T* element) {
  static_cast<void>(*static_cast<const volatile T*>(element));
}

struct Values {
  int values[33];  // so many that no size of an allocation fits
};

void touch_shared(unsigned at) {
  simt::run_blocks(2, kThreadsOfBlock, 1, [=] {
    const int* const values = block_shared<Values>().values;
    barrier();
    if (thread() == 40) touch(values + at);
  });
}

TEST(BoundsDeathTest, SharedMemoryEndsWithItsType) {
  touch_shared(32);
  EXPECT_DEATH(touch_shared(33), "heap-buffer-overflow");
}

// An operand of five elements of two bytes, in memory that goes on behind it.
void touch_operand(int at) {
  const auto device = make_backend("cuda");
  test::Operands operands(*device, Dtype::bf16);
  const Tensor x = operands.input({5});
  device->synchronize();
  simt::run_blocks(1, kThreadsOfBlock, 1, [=] { touch(x.device_data<bf16>() + at); });
}

TEST(BoundsDeathTest, AnOperandEndsWithItsLastElement) {
  touch_operand(0);
  touch_operand(4);
  EXPECT_DEATH(touch_operand(5), "use-after-poison");
  EXPECT_DEATH(touch_operand(-1), "use-after-poison");
}

// Returns a number that no compiler knows, so that every call has its frame.
int deep(int calls) {
  volatile int frame[256] = {};
  frame[calls % 256] = calls;
  return calls == 0 ? 0 : deep(calls - 1) + frame[calls % 256];
}

TEST(BoundsDeathTest, AStackEndsAtItsGuardPage) {
  simt::run_blocks(2, kThreadsOfBlock, 1, [] { EXPECT_GT(deep(10), 0); });
  EXPECT_DEATH(simt::run_blocks(2, kThreadsOfBlock, 1, [] { deep(1000); }), "bounds_test::deep");  // whoever handles the signal
}

TEST(BoundsDeathTest, AVariableEndsOnTheStackOfAThreadOfABlock) {
  EXPECT_DEATH(simt::run_blocks(2, kThreadsOfBlock, 1,
                                [] {
                                  const int values[3] = {};
                                  barrier();
                                  touch(values + 3 + thread() / kThreadsOfBlock);
                                }),
               "stack-buffer-overflow");
}

}  // namespace mantissa::bounds_test
