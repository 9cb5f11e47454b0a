// A libFuzzer program of the target MANTISSA_FUZZ_TARGET. Every other change is one of the structure of JSON where the input has any.
#include <cstring>
#include <random>

#include "json_changes.h"
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mantissa::fuzz::MANTISSA_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned int seed) {
  std::minstd_rand numbers(seed);
  const auto draw = [&numbers](size_t below) { return static_cast<size_t>(numbers()) % below; };
  if (draw(2) == 0) {
    const auto changed = mantissa::fuzz::with_changed_json({reinterpret_cast<const char*>(data), size}, draw);
    if (changed && changed->size() <= most) {
      std::memcpy(data, changed->data(), changed->size());
      return changed->size();
    }
  }
  return LLVMFuzzerMutate(data, size, most);
}
