// A libFuzzer program of the target MANTISSA_FUZZ_TARGET.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mantissa::fuzz::MANTISSA_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
