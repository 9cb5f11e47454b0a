// Random numbers by counter: Philox4x32-10 (Salmon et al., SC'11; Random123). A draw depends on what it is for, never on who computes it or
// when: key = (seed, stream), counter = (what, index). Thread, rank and call order play no part.
#pragma once

#include <Random123/philox.h>

#include <array>
#include <cstdint>

#include "mantissa/base/host_device.h"

namespace mantissa {

enum class RngStream : uint32_t { init = 1, data = 2, sample = 3, test = 4, rounding = 5, moments = 6 };

struct RngKey {
  uint64_t seed = 0;
  RngStream stream = RngStream::test;
};

// Returns four independent uniform 32-bit words for (key, what, index). The stream enters the upper half of the counter, the seed is the
// key.
MANTISSA_HOST_DEVICE inline std::array<uint32_t, 4> random_words(RngKey key, uint32_t what, uint64_t index) {
  const r123::Philox4x32::ctr_type counter = {
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), what, static_cast<uint32_t>(key.stream)}};
  const r123::Philox4x32::key_type philox_key = {{static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)}};
  const auto words = r123::Philox4x32()(counter, philox_key);
  return {words[0], words[1], words[2], words[3]};
}

// Returns standard normal draw number `index` (Box-Muller in double, rounded once to float).
float random_normal(RngKey key, uint32_t what, uint64_t index);

}  // namespace mantissa
