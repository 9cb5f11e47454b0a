// Opens what a DeviceChoice names.
#pragma once

#include <memory>

#include "backend/gpus.h"
#include "mantissa/backend/backend.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Returns the name of the backend, as make_backend() takes it.
inline std::string backend_name(DeviceChoice device) {
  if (device != DeviceChoice::automatic) return choice_name(device);
  return find_gpus().usable ? "cuda" : "cpu";
}

// Throws Error(environment) for a device that this build or this host lacks; `instead` is the setting that takes the CPU.
inline std::unique_ptr<Backend> make_backend(DeviceChoice device, const char* instead = "training.device=cpu") {
  try {
    return make_backend(backend_name(device));
  } catch (const Error& error) {
    if (device != DeviceChoice::cuda || error.code() != ExitCode::environment) throw;
    fail(error.code(), error.what(), "; ", instead, " computes without one");
  }
}

}  // namespace mantissa
