#include "backend/cuda/cuda_backend.h"
#include "backend/gpus.h"

namespace mantissa {

int count_gpus() { return gpu::count_gpus(); }

void* cuda_stream(Backend& device) {
  auto* const cuda = dynamic_cast<CudaBackend*>(&device);
  require(cuda != nullptr, "a device of ", device.name(), " has no stream of CUDA");
  return gpu::handle_of(cuda->stream());
}

CudaScratch::CudaScratch(int64_t bytes) {
  gpu::open_device(default_gpu());
  stream_ = gpu::make_stream();
  memory_ = gpu::take_memory(bytes);
  require(memory_ != nullptr, ExitCode::environment, "out of memory of the GPU: ", bytes, " bytes are needed");
}
CudaScratch::~CudaScratch() {
  gpu::drain(*stream_);
  gpu::give_memory(memory_);
}
void* CudaScratch::stream() const { return gpu::handle_of(*stream_); }
bool CudaScratch::finished() {
  if (!end_) end_ = gpu::record(*stream_);
  return gpu::reached(end_);
}

}  // namespace mantissa
