// Opens what a DeviceChoice names.
#pragma once

#include <memory>

#include "mantissa/backend/backend.h"
#include "mantissa/config/device_choice.h"

namespace mantissa {

// Throws Error(environment) for a device that this build lacks.
inline std::unique_ptr<Backend> make_backend(DeviceChoice device) { return make_backend(backend_name(device)); }

}  // namespace mantissa
