#include <iostream>
#include <memory>

#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/trace/step_shares.h"

namespace mantissa::tools {
namespace {

struct TraceArguments {
  std::string run;
  std::optional<int64_t> step;
  int64_t top = 20;
  bool json = false;
};

ExitCode trace(const TraceArguments& arguments) {
  require(arguments.top > 0, ExitCode::usage, "--top: must be positive, got ", arguments.top);
  const StepShares shares = step_shares(read_trace(arguments.run), arguments.step);
  if (arguments.json) {
    std::cout << shares_json(shares, arguments.run).dump(1, Json::Order::keys) << '\n';
  } else {
    std::cout << printable(shares_table(shares, arguments.run, static_cast<size_t>(arguments.top)), "\n");
  }
  return ExitCode::ok;
}

}  // namespace

Command trace_command() {
  const auto arguments = std::make_shared<TraceArguments>();
  return {.name = "trace",
          .summary = "show where traced steps of a run went: by rank, pass, kernel and module",
          .example =
              "mantissa trace runs/quickstart\n"
              "mantissa trace runs/quickstart --step 2 --json",
          .options = {{.name = "RUN",
                       .target = &arguments->run,
                       .description = "folder of a run with training.trace, or a trace file in one",
                       .required = true},
                      {"--step", &arguments->step, "this step alone"},
                      {"--top", &arguments->top, "rows of each table; what is left becomes one row"},
                      {"--json", &arguments->json, "one JSON object, with all rows: seconds, calls, FLOPs and bytes of a step"}},
          .run = [arguments] { return trace(*arguments); }};
}

}  // namespace mantissa::tools
