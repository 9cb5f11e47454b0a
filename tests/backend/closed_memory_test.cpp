// The cases of all kernels on a device whose memory its kernels, upload() and download() alone may touch: any other access would end in a
// segmentation fault. Its kernels are those of the CPU, and so are the bits.
#include "closed_device.h"
#include "kernel_cases.h"

namespace mantissa::test::closed_memory_test {

TEST(ClosedMemory, OfADeviceIsEnoughForEveryCaseOfEveryKernel) {
  const auto cpu = make_backend("cpu");
  std::unique_ptr<ClosedDevice> closed;
  std::string kernel;
  for (const KernelCase& c : kernel_cases()) {
    SCOPED_TRACE(c.kernel + " " + c.variant);
    if (c.kernel != kernel) closed = std::make_unique<ClosedDevice>();  // with no more memory than a kernel needs
    kernel = c.kernel;
    Operands expected(*cpu, Dtype::bf16), actual(*closed, Dtype::bf16);
    c.run(expected);
    c.run(actual);
    for (size_t i = 0; i < expected.results().size(); ++i)
      EXPECT_TRUE(same_bits(actual.results()[i].tensor, expected.results()[i].tensor)) << expected.results()[i].name;
    actual.expect_margins_untouched();
    if (HasFailure()) return;
  }
}

}  // namespace mantissa::test::closed_memory_test
