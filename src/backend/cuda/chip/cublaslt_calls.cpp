#include <dlfcn.h>

#include <string>

#include "backend/cuda/cublaslt/calls.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {
namespace {

// As the loader finds it, or where toolkits are installed.
void* open_library() {
  const std::string name = text("libcublasLt.so.", CUBLAS_VER_MAJOR);
  for (const std::string& path : {name, "/usr/local/cuda/lib64/" + name}) {
    if (void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

}  // namespace

std::optional<CublasLtCalls> load_cublaslt() {
  void* const library = open_library();
  if (library == nullptr) {
    const char* const why = dlerror();
    log_warning("cuBLASLt cannot be loaded (", why ? why : "no reason is known", "): GEMMs take our kernels, which are many times slower");
    return std::nullopt;
  }
  CublasLtCalls calls{};
  bool all = true;
#define MANTISSA_CALL(name)                                                              \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(library, "cublasLt" #name)); \
  all = all && calls.name != nullptr;
  MANTISSA_CUBLASLT_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  if (!all) log_warning("cuBLASLt lacks functions of its own header: GEMMs take our kernels, which are many times slower");
  return all ? std::optional(calls) : std::nullopt;
}

}  // namespace mantissa::gpu
