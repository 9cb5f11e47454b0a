// The device of a run (training.device) or of a command (--device). A checkpoint has none: what one device saved is used on any other.
#pragma once

#include <array>
#include <string>

#include "mantissa/json/fields.h"

namespace mantissa {

enum class DeviceChoice { automatic, cpu, cuda, cpu_reference };

constexpr auto choices(DeviceChoice) {
  return std::array{Choice{"auto", DeviceChoice::automatic}, Choice{"cpu", DeviceChoice::cpu}, Choice{"cuda", DeviceChoice::cuda},
                    Choice{"cpu_reference", DeviceChoice::cpu_reference}};
}

inline constexpr const char* kDeviceChoices = "auto: a GPU where there is one, else cpu; cpu_reference: plain kernels, slow";

}  // namespace mantissa
