// consumer CONFIG TEXT: prints what training CONFIG on TEXT would take.
#include <cstdio>

#include "mantissa/base/version.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/train.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const mantissa::LoadedConfig loaded =
        mantissa::load_run_config({.file = argv[1], .sets = {mantissa::text("data.path=", argv[2]), "eval.samples=null"}});
    const mantissa::RunPreview plan = mantissa::preview_run(loaded);
    std::printf("mantissa %s: %lld parameters\n", mantissa::version().c_str(), static_cast<long long>(plan.precision.parameters()));
  } catch (const mantissa::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
