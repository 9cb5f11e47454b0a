#include "mantissa/train/train.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

#include "command.h"
#include "console.h"
#include "mantissa/base/log.h"
#include "mantissa/base/printable.h"
#include "mantissa/train/precision_setup.h"
#include "signals.h"

namespace mantissa::tools {
namespace {

struct TrainArguments {
  ConfigSources sources;
  bool resume = false, dry_run = false;
};

// The words of this process, for run.json.
std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

std::string counted(double value) {
  std::ostringstream out;
  out.precision(3);
  if (value >= 1e9) {
    out << value * 1e-9 << "B";
  } else if (value >= 1e6) {
    out << value * 1e-6 << "M";
  } else {
    out << value * 1e-3 << "k";
  }
  return out.str();
}

std::string start_line(const StartReport& report) {
  std::string line = text("run ", printable(report.folder), " | ", counted(static_cast<double>(report.parameters)), " parameters | ",
                          report.training_tokens, " training tokens | ", report.precision, " | ", report.device, ", ",
                          count_text(report.threads, "thread"), " | ", count_text(report.steps, "step"));
  if (!report.resumed.empty()) line += text(" | continues at ", report.step, " from ", printable(report.resumed));
  return line;
}

std::string save_line(const SaveReport& report) {
  if (!report.problem.empty()) return text("save  ", report.step, " | FAILED: ", printable(report.problem));
  return text("save  ", report.step, " | ", printable(report.path), " | ", duration_text(report.seconds));
}

void print_summary(Console& console, const TrainSummary& summary) {
  std::string line = summary.exit == ExitCode::stopped ? "stopped" : summary.exit == ExitCode::storage ? "not saved" : "done";
  line += text(" | step ", summary.steps);
  if (summary.best_valid_loss) line += text(" | best validation loss ", *summary.best_valid_loss);
  line += text(" | ", summary.tokens, " tokens | ", duration_text(summary.seconds), " | ", static_cast<int64_t>(summary.tokens_per_second),
               " tok/s");
  if (summary.skipped_steps > 0) line += text(" | ", count_text(summary.skipped_steps, "step"), " skipped");
  if (summary.failed_saves > 0) line += text(" | ", count_text(summary.failed_saves, "save"), " failed");
  const int64_t dropped = summary.dropped_lines + console.dropped_lines() + dropped_log_lines();
  if (dropped > 0) line += text(" | ", count_text(dropped, "line"), " of output dropped");
  line +=
      text("\nfiles | ", printable(summary.folder), " | checkpoint ", summary.checkpoint.empty() ? "none" : printable(summary.checkpoint));
  if (summary.exit == ExitCode::stopped) line += "\nThe same command with --resume continues.";
  console.line(line);
  log_info(line);
}

TrainEvents events_for(Console& console, LogLevel level) {
  const auto show = [&console](const std::string& line, Console::Tone tone = Console::Tone::normal) {
    console.line(line, tone);
    log_info(line);
  };
  TrainEvents events;
  events.started = [show, level](const StartReport& report) {
    open_log({.level = level, .console = true, .console_level = LogLevel::warning, .file = report.folder + "/log.txt"});
    show(start_line(report));
  };
  events.step = [&console](const StepReport& report) {
    console.line(step_line(report), report.skipped ? Console::Tone::alarm : Console::Tone::normal);
    console.progress(report);
  };
  events.evaluated = [show](const EvaluationReport& report) { show(evaluation_line(report)); };
  events.sampled = [&console](const SampleReport& report) { console.line(sample_box(report)); };
  events.saved = [show](const SaveReport& report) {
    show(save_line(report), report.problem.empty() ? Console::Tone::normal : Console::Tone::alarm);
  };
  events.request = take_request;
  return events;
}

void print_plan(const RunPlan& plan) {
  const TrainingConfig& training = plan.config.training;
  const MemoryEstimate& memory = plan.memory;
  const double step_flops = plan.flops_per_token * static_cast<double>(training.tokens_per_step());
  std::cout << "model    " << counted(static_cast<double>(plan.precision.parameters())) << " parameters, vocabulary " << *plan.config.model.vocab_size
            << '\n'
            << "data     " << plan.training_tokens << " training tokens, " << plan.validation_windows << " validation windows\n"
            << "step     " << *training.grad_accum << " x " << training.micro_batch_size << " sequences of " << training.seq_len << " = "
            << training.tokens_per_step() << " tokens; " << count_text(training.steps, "step") << "\n"
            << "compute  " << plan.flops_per_token << " FLOP per token, " << step_flops << " per step, "
            << step_flops * static_cast<double>(training.steps) << " in all\n"
            << "memory   " << bytes_text(memory.total()) << " of tensors\n"
            << "  master weights  " << bytes_text(memory.masters) << '\n'
            << "  weights beside  " << bytes_text(memory.values) << '\n'
            << "  gradients       " << bytes_text(memory.gradients) << '\n'
            << "  optimizer       " << bytes_text(memory.optimizer) << '\n'
            << "  activations     " << bytes_text(memory.activations) << " (recompute " << choice_name(training.recompute) << ")\n"
            << "  workspace       " << bytes_text(memory.workspace) << " (logits or one block's backward pass)\n";
}

LoadedConfig load(const TrainArguments& arguments) {
  LoadedConfig loaded = load_run_config(arguments.sources);
  if (!arguments.resume) return loaded;
  const std::string& resume = loaded.config.checkpoint.resume;
  require(resume == "never" || resume == "auto", ExitCode::usage, "--resume continues this run, but checkpoint.resume names ", resume,
          "; leave out the one or the other (--set checkpoint.resume=never)");
  ConfigSources sources = arguments.sources;
  sources.sets.emplace_back("checkpoint.resume=\"auto\"");
  return load_run_config(sources);
}

ExitCode run_training(const TrainArguments& arguments) {
  const LoadedConfig loaded = load(arguments);
  const LogLevel level = loaded.config.logging.level;
  open_log({.level = level, .console = true, .console_level = LogLevel::warning, .file = {}});
  if (arguments.dry_run) {
    const RunPlan plan = plan_run(loaded);
    print_plan(plan);
    for (const std::string& warning : plan.precision.warnings()) log_warning(warning);
    return ExitCode::ok;
  }
  watch_signals();
  Console console(loaded.config.logging.console);
  const TrainSummary summary = train(loaded, command_line(), events_for(console, level));
  print_summary(console, summary);
  return summary.exit;
}

}  // namespace

Command train_command() {
  const auto arguments = std::make_shared<TrainArguments>();
  std::vector<Option> options = config_options(arguments->sources);
  options.push_back(
      {.name = "--resume",
       .target = &arguments->resume,
       .description = "continue from the checkpoint that `latest` names, else the newest valid one, or start if there is none"});
  options.push_back({.name = "--dry-run",
                     .target = &arguments->dry_run,
                     .description = "check the configuration, open the data, estimate memory and FLOPs; write nothing"});
  return {.name = "train",
          .summary = "train a GPT",
          .example = "mantissa train configs/quickstart.json --set training.steps=200 --set logging.run_name=short",
          .options = options,
          .run = [arguments] { return run_training(*arguments); }};
}

}  // namespace mantissa::tools
