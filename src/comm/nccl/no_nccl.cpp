#include "comm/nccl_link.h"
#include "mantissa/base/error.h"

namespace mantissa {

Nccl find_nccl() { return {.usable = false, .text = "not looked for: this build was made without CUDA or the header of NCCL"}; }

MakeDeviceLink nccl_links(NcclOptions) { fail(ExitCode::environment, "NCCL: ", find_nccl().text); }

}  // namespace mantissa
