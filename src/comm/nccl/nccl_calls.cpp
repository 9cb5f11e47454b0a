#include <dlfcn.h>

#include <array>

#include "base/open_library.h"
#include "comm/nccl/calls.h"
#include "mantissa/base/text.h"

namespace mantissa {

NcclLibrary open_nccl(std::span<const std::string> paths) {
  const OpenedLibrary library = open_library(paths);
  if (library.handle == nullptr) return {.calls = std::nullopt, .text = library.text};
  NcclCalls calls{};
  std::string missing;
#define MANTISSA_CALL(name)                                                                 \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(library.handle, "nccl" #name)); \
  if (calls.name == nullptr) missing = "nccl" #name;
  MANTISSA_NCCL_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  if (missing.empty()) return {.calls = calls, .text = library.text};
  return {.calls = std::nullopt, .text = text(library.text, " has no function ", missing)};
}

NcclLibrary load_nccl() {
  return open_nccl(nvidia_library_paths(text("libnccl.so.", NCCL_MAJOR), std::array{"NCCL_HOME", "CUDA_HOME", "CUDA_PATH"}));
}

}  // namespace mantissa
