#include <dlfcn.h>

#include <array>

#include "backend/cuda/cudnn/calls.h"
#include "base/open_library.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {

CudnnCalls load_cudnn() {
  const OpenedLibrary library =
      open_library(nvidia_library_paths(text("libcudnn_graph.so.", CUDNN_MAJOR), std::array{"CUDNN_HOME", "CUDA_HOME", "CUDA_PATH"}));
  require(library.handle != nullptr, ExitCode::environment, "training.attention is cudnn, but cuDNN cannot be loaded (", library.text,
          "); own needs none");
  CudnnCalls calls{};
#define MANTISSA_CALL(name)                                                                  \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(library.handle, "cudnn" #name)); \
  require(calls.name != nullptr, ExitCode::environment, library.text, " has no function cudnn" #name ": set training.attention to own");
  MANTISSA_CUDNN_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  return calls;
}

}  // namespace mantissa::gpu
