#include "mantissa/train/train.h"

#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <memory>

#include "checkpoint/precision_setup.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/train/load_config.h"
#include "plan/cost.h"
#include "tools/command.h"
#include "tools/console.h"
#include "tools/rank_session.h"
#include "tools/signals.h"

namespace mantissa::tools {
namespace {

struct TrainArguments {
  ConfigSources sources;
  bool resume = false, dry_run = false;
  std::optional<int64_t> world;
};

// Returns the words of this process, for run.json.
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

// Returns "lr 0.0003, cosine after 50 steps of warmup | learns from Qwen3-0.6B by kl".
std::string learning_text(const RunConfig& config) {
  const ScheduleConfig& schedule = config.schedule;
  std::string out = text("lr ", config.optimizer.lr, ", ", choice_name(schedule.type));
  if (schedule.warmup_steps > 0) out += text(" after ", count_text(schedule.warmup_steps, "step"), " of warmup");
  if (const std::optional<std::string> teacher = config.teacher_path())
    out += text(" | learns from ", printable(*teacher), " by ", objective_name(config.training.teacher_weight));
  return out;
}

std::string start_line(const StartEvent& event, const RunConfig& config) {
  const ParallelConfig& parallel = config.parallel;
  std::string line =
      text("run ", printable(event.folder), " | ", parallel.world() > 1 ? layout_text(parallel) + " | " : "",
           counted(static_cast<double>(event.parameters)), " parameters",
           event.trained_parameters < event.parameters ? ", " + counted(static_cast<double>(event.trained_parameters)) + " trained" : "",
           " | ", event.training_tokens, " training tokens | ", event.precision, " | ", event.device, ", ",
           count_text(event.threads, "thread"), " | ", length_text(event.steps, event.epochs), " | ", learning_text(config));
  if (!event.resumed.empty()) line += text(" | continues at ", event.step, " from ", printable(event.resumed));
  if (event.resumed.empty() && config.checkpoint.resume != "never")
    line += text(" | starts afresh: no checkpoint in ", printable(config.checkpoint.dir));
  return line;
}

std::string save_line(const char* what, const SaveEvent& event) {
  if (!event.problem.empty()) return text(what, ' ', event.step, " | FAILED: ", printable(event.problem));
  return text(what, ' ', event.step, " | ", printable(event.path), " | ", duration_text(event.seconds));
}

void print_summary(Console& console, const TrainSummary& summary, bool exports) {
  std::string line = summary.exit == ExitCode::stopped ? "stopped" : summary.exit == ExitCode::storage ? "not saved" : "done";
  line += text(" | step ", summary.steps);
  if (summary.best_valid_loss) line += text(" | best validation ", summary.best_is, ' ', *summary.best_valid_loss);
  line += text(" | ", summary.tokens, " tokens | ", duration_text(summary.seconds), " | ", static_cast<int64_t>(summary.tokens_per_second),
               " tok/s");
  if (summary.skipped_steps > 0) line += text(" | ", count_text(summary.skipped_steps, "step"), " skipped");
  if (summary.failed_saves > 0) line += text(" | ", count_text(summary.failed_saves, "save"), " failed");
  console.finish();
  const int64_t dropped = summary.dropped_lines + console.dropped_lines() + dropped_log_lines();
  if (dropped > 0) line += text(" | ", count_text(dropped, "line"), " of output dropped");
  line +=
      text("\nfiles | ", printable(summary.folder), " | checkpoint ", summary.checkpoint.empty() ? "none" : printable(summary.checkpoint),
           summary.best_step ? text(" | best ", printable(summary.best_checkpoint), ", of step ", *summary.best_step) : "");
  if (summary.exit == ExitCode::stopped) line += "\nThe same command with --resume continues.";
  if (summary.exit == ExitCode::ok && summary.best_step && !exports)
    line += text("\nTo export the best one: mantissa export ", printable(summary.best_checkpoint), " --output FOLDER");
  console.line(line);
  log_info(line);
}

TrainEvents events_for(Console& console, const RunConfig& config) {
  const auto show = [&console](const std::string& line, Console::Tone tone = Console::Tone::normal) {
    console.line(line, tone);
    log_info(line);
  };
  TrainEvents events;
  events.started = [show, config](const StartEvent& event) {
    open_log({.level = config.logging.level, .console = true, .console_level = LogLevel::warning, .file = event.folder + "/log.txt"});
    show(start_line(event, config));
  };
  events.step = [&console](const StepEvent& event) {
    console.line(step_line(event), event.skipped ? Console::Tone::alarm : Console::Tone::normal);
    console.progress(event);
  };
  events.evaluated = [show](const EvaluationEvent& event) { show(evaluation_line(event)); };
  events.wrote = [&console](const SampleEvent& event) { console.line(sample_box(event)); };
  const auto show_save = [show](const char* what, const SaveEvent& event) {
    show(save_line(what, event), event.problem.empty() ? Console::Tone::normal : Console::Tone::alarm);
  };
  events.saved = [show_save](const SaveEvent& event) { show_save("save ", event); };
  events.exported = [show_save](const ExportEvent& event) { show_save("export", event); };
  events.request = take_request;
  return events;
}

void print_memory(const RunConfig& config, const MemoryEstimate& memory) {
  const bool together = config.parallel.world() > 1;
  std::cout << "memory   " << bytes_text(memory.total()) << (memory.on_gpu() ? " of GPU memory" : "") << (together ? " on each rank" : "")
            << '\n'
            << "  master weights  " << bytes_text(memory.masters) << '\n'
            << "  weights beside  " << bytes_text(memory.values) << '\n'
            << "  gradients       " << bytes_text(memory.gradients) << '\n'
            << "  optimizer       " << bytes_text(memory.optimizer) << '\n'
            << "  activations     " << bytes_text(memory.activations) << " (recompute " << choice_name(config.training.recompute) << ")\n"
            << "  workspace       " << bytes_text(memory.workspace) << " (logits or one block's backward pass)\n";
  if (together) std::cout << "  exchange        " << bytes_text(memory.exchange) << " (gradients from other ranks)\n";
  if (memory.teacher > 0) std::cout << "  teacher         " << bytes_text(memory.teacher) << " (weights of training.teacher)\n";
  if (!memory.on_gpu()) {
    std::cout << "  program         " << bytes_text(memory.program) << " (code, libraries, stacks" << (together ? ", transport)\n" : ")\n");
    return;
  }
  std::cout << "  inputs          " << bytes_text(memory.inputs) << " (the batch of a step)\n"
            << "  CUDA context    " << bytes_text(memory.cuda_context) << " (supposed; with the code of kernels)\n"
            << "  cuBLASLt        " << bytes_text(memory.cublaslt) << " (its workspace, at most)\n";
  if (together) std::cout << "  NCCL            " << bytes_text(memory.nccl) << " (supposed)\n";
}

// The rate of whole steps is known only when some are taken.
std::string time_line(const RunPreview& preview, double training_flops) {
  const double seconds = (training_flops + preview.evaluation_flops) / *preview.gemm_rate;
  return text("time     at least ", duration_text(seconds), " at ", std::setprecision(3), *preview.gemm_rate,
              " FLOP/s, which GEMMs alone reach here now; the eta of a run is that of whole steps, mfu_meas their share of this rate\n");
}

void print_preview(const RunPreview& preview) {
  const TrainingConfig& training = preview.config.training;
  const ParallelConfig& parallel = preview.config.parallel;
  const double step_flops = preview.flops_per_token * static_cast<double>(training.tokens_per_step());
  const int64_t parameters = preview.precision.parameters(), trained = preview.precision.trained_parameters();
  std::cout << "model    " << counted(static_cast<double>(parameters)) << " parameters, "
            << (trained < parameters ? counted(static_cast<double>(trained)) + " of them trained, " : "") << "vocabulary "
            << *preview.config.model.vocab_size << '\n'
            << "data     " << preview.training_tokens << " training tokens, " << preview.validation_windows << " validation windows\n"
            << (parallel.world() > 1 ? text("layout   ", layout_text(parallel), '\n') : "") << "step     "
            << (parallel.data > 1 ? text(parallel.data, " data ranks x ") : "") << *training.grad_accum << " x "
            << training.micro_batch_size << " sequences of " << training.seq_len << " = " << training.tokens_per_step() << " tokens; "
            << length_text(*training.steps, training.epochs) << "\n"
            << "compute  " << preview.flops_per_token << " FLOP per token, " << step_flops << " per step, "
            << step_flops * static_cast<double>(*training.steps) << " in all\n";
  print_memory(preview.config, preview.memory);
  if (preview.gemm_rate) std::cout << time_line(preview, step_flops * static_cast<double>(*training.steps));
}

// Returns how many ranks the run has; 0: as many as the config asks for, if nothing else is said before a dry run.
int64_t ranks(const TrainArguments& arguments, const Launch& launch) {
  require(
      !arguments.world || arguments.dry_run, ExitCode::usage,
      "--world needs --dry-run, whose number of ranks it is; to train, start the ranks: mantissa launch --nproc-per-node N -- train ...");
  const int64_t wanted = ranks_of(arguments.world);
  const bool launched = launch.launcher != Launch{}.launcher;
  if (!arguments.dry_run || launched) {
    require(wanted == 0 || wanted == launch.world, ExitCode::usage, "--world ", wanted, ", but this is ", describe(launch));
    return launch.world;
  }
  return wanted;
}

ExitCode run_training(const TrainArguments& arguments) {
  const Launch launch = launch_from_environment();
  // A job that its launcher starts again goes on where it was.
  const Start start = arguments.resume ? Start::resumed : launch.restart > 0 ? Start::restarted : Start::as_configured;
  LoadedConfig loaded = load_run_config(arguments.sources, Inputs::must_exist, ranks(arguments, launch), start);
  share_host(launch);
  open_log({.level = loaded.config.logging.level,
            .console = true,
            .console_level = LogLevel::warning,
            .file = {},
            .who = launch.rank > 0 ? text("rank ", launch.rank, ": ") : ""});
  if (arguments.dry_run) {
    if (launch.rank > 0) return ExitCode::ok;
    const RunPreview preview = preview_run(loaded);
    print_preview(preview);
    for (const std::string& warning : run_warnings(preview.config, preview.precision)) log_warning(warning);
    return ExitCode::ok;
  }
  watch_signals();
  RankSession session(launch, loaded.config, stop_requested);
  Console console(launch.rank == 0 ? loaded.config.logging.console : ConsoleMode::off);
  session.watch(loaded.config.parallel);
  TrainSummary summary;
  TrainEvents events = events_for(console, loaded.config);
  events.set_phase = [&](int64_t step, const char* section) {
    report_step(step);
    console.progress_to(step);
    session.set_phase(step, section);
  };
  session.run([&] { summary = train(loaded, command_line(), events, session.world()); });
  if (launch.rank == 0) print_summary(console, summary, loaded.config.checkpoint.exported.has_value());
  return summary.exit;
}

}  // namespace

Command train_command() {
  const auto arguments = std::make_shared<TrainArguments>();
  return {.name = "train",
          .summary = "train a GPT",
          .example =
              "mantissa train configs/quickstart.json --set training.steps=200 --set logging.run_name=short\n"
              "mantissa train configs/quickstart.json --set precision.recipe=mxfp8 --set logging.run_name=mx",
          .options = config_options(
              arguments->sources,
              {{"--resume", &arguments->resume,
                "continue from the checkpoint that `latest` names, else the newest valid one; an error if there is none"},
               {"--dry-run", &arguments->dry_run,
                "check the configuration and what the run starts from, open the data, estimate memory and FLOPs; write nothing"},
               world_option(arguments->world, "with --dry-run: ")}),
          .run = [arguments] { return run_training(*arguments); },
          .many_ranks = true};
}

}  // namespace mantissa::tools
