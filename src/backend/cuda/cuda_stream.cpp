#include "mantissa/backend/cuda_stream.h"

#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/gpus.h"

namespace mantissa {

int count_gpus() { return gpu::count_gpus(); }
void use_default_gpu() { gpu::open_device(default_gpu()); }

void* cuda_stream(Backend& device) {
  auto* const cuda = dynamic_cast<CudaBackend*>(&device);
  require(cuda != nullptr, "a device of ", device.name(), " has no stream of CUDA");
  return gpu::handle_of(cuda->stream());
}

}  // namespace mantissa
