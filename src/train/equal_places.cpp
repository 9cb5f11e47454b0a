#include "mantissa/train/equal_places.h"

#include "mantissa/backend/ceilings.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Says what would not hold; empty if nothing relies on equal places.
std::string broken_promise(const RunConfig& config) {
  if (config.model.moe) return "what an expert makes of a token would depend on the tokens beside it";
  if (config.parallel.world() > 1) return "results would depend on the number of ranks";
  if (config.model.pad_vocab_to > 1) return "results would depend on the padding of the vocabulary";
  return "";
}

}  // namespace

void require_equal_places(const Backend& device, const std::string& consequence) {
  const std::string unequal = device.unequal_places();
  require(unequal.empty(), ExitCode::environment, "matmuls on this CPU (", gemm_instruction_set(),
          ") give equal operands other bits at other places or depths of a tile (", unequal, "): ", consequence,
          "; ONEDNN_MAX_CPU_ISA chooses other kernels (SSE41, AVX2, AVX512_CORE, AVX512_CORE_BF16), and mantissa doctor tells whether they "
          "pass");
}

void require_equal_places(const RunConfig& config, const Backend& device) {
  const std::string broken = broken_promise(config);
  if (broken.empty()) return;
  if (device.gemm_device().architecture > 0) {
    log_info("matmuls: whether rows and columns have the same bits at every place is not measured on GPUs; otherwise ", broken);
    return;
  }
  require_equal_places(device, broken);
  log_info("matmuls: rows and columns have the same bits at every place and depth of a tile");
}

}  // namespace mantissa
