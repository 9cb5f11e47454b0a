#include <dlfcn.h>

#include <array>
#include <string>

#include "backend/cuda/cublaslt/calls.h"
#include "base/open_library.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {

std::optional<CublasLtCalls> load_cublaslt() {
  const std::string slow = ": GEMMs run on mantissa's own kernels, which are many times slower";
  const OpenedLibrary library =
      open_library(nvidia_library_paths(text("libcublasLt.so.", CUBLAS_VER_MAJOR), std::array{"CUDA_HOME", "CUDA_PATH"}));
  if (library.handle == nullptr) {
    log_warning("cuBLASLt cannot be loaded (", library.text, ')', slow);
    return std::nullopt;
  }
  CublasLtCalls calls{};
  std::string missing;
#define MANTISSA_CALL(name)                                                                     \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(library.handle, "cublasLt" #name)); \
  if (calls.name == nullptr) missing = "cublasLt" #name;
  MANTISSA_CUBLASLT_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  const auto take_if_there = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library.handle, name));
  };
  take_if_there(calls.GroupedMatrixLayoutCreate, "cublasLtGroupedMatrixLayoutCreate");
  if (missing.empty()) return calls;
  log_warning(library.text, " has no function ", missing, slow);
  return std::nullopt;
}

}  // namespace mantissa::gpu
