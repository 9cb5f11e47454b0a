#include <iostream>
#include <memory>

#include "command.h"
#include "mantissa/base/printable.h"
#include "mantissa/io/checkpoint_search.h"
#include "mantissa/train/checkpoint.h"

namespace mantissa::tools {
namespace {

ExitCode verify(const std::string& path) {
  CheckpointReader reader = open_checkpoint(path);
  reader.verify();
  const int64_t quantised = verify_codes(reader);
  const Manifest& manifest = reader.manifest();
  std::cout << printable(reader.directory().string()) << ": intact: step " << manifest.step << ", " << manifest.tensors.size()
            << " tensors, " << reader.bytes() << " bytes in " << count_text(manifest.shards.size(), "shard");
  if (quantised > 0) std::cout << "; the codes of " << count_text(quantised, "weight") << " follow from their masters";
  std::cout << '\n';
  return ExitCode::ok;
}

}  // namespace

Command verify_command() {
  const auto path = std::make_shared<std::string>();
  return {.name = "verify",
          .summary = "read and hash every byte of a checkpoint, and make its codes again; damage is exit code 4",
          .example = "mantissa verify runs/quickstart/checkpoints/step-00000500",
          .options = {{.name = "CHECKPOINT",
                       .target = path.get(),
                       .description = "checkpoint folder; of a run or a folder of checkpoints, the one that `latest` names",
                       .required = true}},
          .run = [path] { return verify(*path); }};
}

}  // namespace mantissa::tools
