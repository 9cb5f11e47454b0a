#include "backend/make_cuda.h"

namespace mantissa {

std::unique_ptr<Backend> make_cuda_backend() {
  fail(ExitCode::environment, "this build has no backend cuda; there are cpu and cpu_reference");
}

}  // namespace mantissa
