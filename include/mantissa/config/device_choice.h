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

inline constexpr const char* kDeviceChoices = "auto: the fastest there is; cpu_reference: plain kernels, slow";

// Returns the name of the backend, as make_backend() takes it.
inline std::string backend_name(DeviceChoice device) { return device == DeviceChoice::automatic ? "cpu" : choice_name(device); }

}  // namespace mantissa
