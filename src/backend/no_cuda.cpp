#include "backend/gpus.h"

namespace mantissa {

std::unique_ptr<Backend> make_cuda_backend(int) {
  fail(ExitCode::environment,
       "this build has no backend cuda, because it was made without the CUDA toolkit (12.8 or later); it has cpu and cpu_reference");
}

Gpus find_gpus() { return {.usable = false, .text = "not looked for: this build was made without the CUDA toolkit"}; }
int count_gpus() { return 0; }
std::optional<Gpu> find_gpu(int) { return {}; }

}  // namespace mantissa
