#include <algorithm>
#include <filesystem>
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
  std::vector<std::string> folders;
  Json::Entries analyses;
  for (const std::string& path : arguments.runs) {
    if (std::filesystem::is_regular_file(path)) {
      analyses.push_back(read_analysis(path));
    } else {
      runs.push_back(read_run_metrics(path));
      folders.push_back(path);
    }
  }
  name_apart(runs, folders);
  write_file_atomically(arguments.output, report_page(runs, analyses));
  std::cout << printable(arguments.output) << ": " << count_text(runs.size(), "run");
  if (!analyses.empty()) std::cout << ", " << analyses.size() << (analyses.size() == 1 ? " analysis" : " analyses");
  std::cout << '\n';
  return ExitCode::ok;
}

}  // namespace

Command report_command() {
  const auto arguments = std::make_shared<ReportArguments>();
  return {.name = "report",
          .summary = "draw the metrics of runs, and analyses of models, into one HTML file",
          .example = "mantissa report runs/quickstart runs/short --output report.html",
          .options = {{.name = "RUN",
                       .target = &arguments->runs,
                       .description = "run folder, or a file that analyze --json wrote",
                       .required = true},
                      {.name = "--output", .target = &arguments->output, .description = "file to write; replaced if it exists"}},
          .run = [arguments] { return report(*arguments); }};
}

}  // namespace mantissa::tools
