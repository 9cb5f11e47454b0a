#include <algorithm>
#include <iostream>
#include <memory>

#include "base/file.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/report/report_page.h"

namespace mantissa::tools {
namespace {

struct ReportArguments {
  std::vector<std::string> runs;
  std::string output = "report.html";
};

// Folders of one name are told apart by their paths.
void name_apart(std::vector<RunMetrics>& runs, const std::vector<std::string>& paths) {
  std::vector<std::string> names;
  for (const RunMetrics& run : runs) names.push_back(run.name);
  for (size_t i = 0; i < runs.size(); ++i) {
    if (std::count(names.begin(), names.end(), names[i]) > 1) runs[i].name += " (" + paths[i] + ")";
  }
}

ExitCode report(const ReportArguments& arguments) {
  require_output_file(arguments.output);
  std::vector<RunMetrics> runs;
  for (const std::string& path : arguments.runs) runs.push_back(read_run_metrics(path));
  name_apart(runs, arguments.runs);
  write_file_atomically(arguments.output, report_page(runs));
  std::cout << printable(arguments.output) << ": " << count_text(runs.size(), "run") << '\n';
  return ExitCode::ok;
}

}  // namespace

Command report_command() {
  const auto arguments = std::make_shared<ReportArguments>();
  return {.name = "report",
          .summary = "draw the metrics of one or several runs into one HTML file",
          .example = "mantissa report runs/quickstart runs/short --output report.html",
          .options = {{.name = "RUN", .target = &arguments->runs, .description = "run folder", .required = true},
                      {.name = "--output", .target = &arguments->output, .description = "file to write; replaced if it exists"}},
          .run = [arguments] { return report(*arguments); }};
}

}  // namespace mantissa::tools
