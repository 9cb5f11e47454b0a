#include <dlfcn.h>

#include <vector>

#include "comm/nccl/calls.h"
#include "mantissa/base/text.h"

namespace mantissa {

NcclLibrary open_nccl(std::span<const std::string> paths) {
  std::string why;
  for (const std::string& path : paths) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const reason = dlerror();
      why += text(why.empty() ? "" : "; ", reason ? reason : path);
      continue;
    }
    NcclCalls calls{};
    std::string missing;
#define MANTISSA_CALL(name)                                                          \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(library, "nccl" #name)); \
  if (calls.name == nullptr) missing = "nccl" #name;
    MANTISSA_NCCL_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
    if (missing.empty()) return {.calls = calls, .text = path};
    return {.calls = std::nullopt, .text = text(path, " has no function ", missing)};
  }
  return {.calls = std::nullopt, .text = why};
}

// As the loader finds it, or where toolkits are installed.
NcclLibrary load_nccl() {
  const std::string name = text("libnccl.so.", NCCL_MAJOR);
  return open_nccl(std::vector{name, "/usr/local/cuda/lib64/" + name});
}

}  // namespace mantissa
