#include "backend/cuda/attention/attention_library.h"
#include "mantissa/base/error.h"

namespace mantissa::gpu {

std::unique_ptr<AttentionLibrary> load_attention_library() {
  fail(ExitCode::environment, "training.attention is cudnn, but this build was made without the header of cuDNN: set it to own");
}

}  // namespace mantissa::gpu
