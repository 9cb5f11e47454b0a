#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/checkpoint_search.h"
#include "io/pending_folder.h"
#include "mantissa/base/error.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/metrics/events.h"
#include "mantissa/train/train.h"
#include "metrics/run_folder.h"
#include "tools/command.h"
#include "tools/compare/comparison.h"
#include "tools/compare/comparison_plan.h"
#include "tools/compare/run_folders.h"
#include "tools/compare/train_runs.h"
#include "tools/report/report_page.h"
#include "train/run_comparison.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

// Returns the command line of a run behind the name of the program.
std::vector<std::string> words_of(const ConfigSources& sources) {
  std::vector<std::string> words = {"train", sources.file};
  for (const std::string& file : sources.set_files) words.insert(words.end(), {"--set-file", file});
  for (const std::string& set : sources.sets) words.insert(words.end(), {"--set", set});
  return words;
}

// A comparison needs the metrics of a finished run alone.
void delete_checkpoints(const CompareArguments& arguments, const fs::path& folder) {
  if (!arguments.keep_checkpoints) fs::remove_all(folder / "checkpoints");
}

// Returns the last error in the output of a run, indented; "" if there is none.
std::string last_error(const fs::path& log) {
  constexpr int64_t kMost = 64 << 10;
  const File file = File::open_input(log);
  std::string output(static_cast<size_t>(std::min(file.size(), kMost)), '\0');
  file.read_at(file.size() - std::ssize(output), std::as_writable_bytes(std::span(output)));
  const size_t begin = output.rfind("error: ");
  return begin == std::string::npos ? "" : "\n" + output.substr(begin, output.find('\n', begin) - begin);
}

// Returns the runs that have neither finished nor diverged. Deletes what is left of those that were killed before their first save.
std::vector<ComparedRun> runs_to_train(const CompareArguments& arguments, const ComparisonPlan& plan) {
  std::vector<ComparedRun> left;
  for (const PlannedRun& run : plan.runs()) {
    const fs::path folder = plan.folder() / run.name;
    require_same_run(run, folder);
    std::error_code none;
    const bool ended = finished_metrics(run, folder).has_value() || (fs::is_directory(folder, none) && read_state(folder).diverged),
               saved = fs::is_directory(folder / "checkpoints", none) &&
                       !checkpoint_candidates({.folder = folder / "checkpoints", .name = ""}).empty();
    if (ended || saved) require_same_inputs(folder, run.inputs);
    if (ended) {
      delete_checkpoints(arguments, folder);
      continue;
    }
    require_nobody_trains(run.loaded.config);
    if (!saved) {
      fs::remove_all(folder);
      write_inputs(folder, run.inputs);
      write_state(folder, {});
    }
    left.push_back({.name = run.name, .log = plan.folder() / (run.name + ".log"), .words = words_of(run.sources)});
  }
  return left;
}

// Trains all runs that have not ended. Returns the exit code with which to end; ok: all have.
ExitCode train_all(const CompareArguments& arguments, const ComparisonPlan& plan) {
  const std::vector<ComparedRun> left = runs_to_train(arguments, plan);
  size_t done = plan.runs().size() - left.size();
  if (!left.empty() && done > 0) std::cerr << "compare: " << done << " of " << plan.runs().size() << " runs have finished before\n";
  const auto began = std::chrono::steady_clock::now();
  const auto ended = [&](const ComparedRun& run, const std::string& how) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::cerr << "compare: " << ++done << " of " << plan.runs().size() << " | " << printable(run.name) << " | " << how << " | "
              << duration_text(seconds) << '\n';
    delete_checkpoints(arguments, plan.folder() / run.name);
  };
  const auto changed = [&](const ComparedRun& run, const auto& change) {
    RunState state = read_state(plan.folder() / run.name);
    change(state);
    write_state(plan.folder() / run.name, state);
  };
  const RunEvents events{
      .starts =
          [&](const ComparedRun& run, int at_a_time) {
            changed(run, [&](RunState& state) { state.starts.push_back({.at_a_time = at_a_time, .threads = plan.threads()}); });
          },
      .ends = [&](const ComparedRun& run,
                  int at_a_time) { changed(run, [&](RunState& state) { state.starts.back().at_a_time = at_a_time; }); },
      .finished =
          [&](const ComparedRun& run) {
            const RunMetrics metrics = read_run_metrics(plan.folder() / run.name);
            ended(run, text("loss ", metrics.valid_loss.empty() ? 0.0 : metrics.valid_loss.back().value));
          },
      .diverged =
          [&](const ComparedRun& run) {
            std::error_code none;
            if (!fs::exists(plan.folder() / run.name / "metrics.jsonl", none)) return false;  // its first step did not begin
            changed(run, [](RunState& state) { state.diverged = true; });
            ended(run, "diverged");
            return true;
          }};
  const UnfinishedRuns end = train_runs(left, arguments.jobs, events);
  if (end.killed) return static_cast<ExitCode>(128 + SIGINT);
  if (end.failure) {
    const auto& [name, code, log] = *end.failure;
    fail(static_cast<ExitCode>(code), name, ": training ended with exit code ", code, "; it printed ", log.string(),
         "; once that is mended, the same command goes on where the runs were", last_error(log));
  }
  if (!end.stopped) return ExitCode::ok;
  std::cerr << "compare: stopped | " << done << " of " << plan.runs().size() << " runs have finished; the same command continues\n";
  return ExitCode::stopped;
}

// Returns "-part" if compare.json holds runs that this comparison lacks: then it stays, and the files of this one lie beside.
std::string part_suffix(const fs::path& folder, const Comparison& comparison) {
  std::error_code none;
  const fs::path file = folder / "compare.json";
  if (!fs::is_regular_file(file, none)) return "";
  const ParsedJson there = parse_commented_json(File::open_input(file).content(kLargestRunFile));
  const auto here = [&](const Json& cost) {
    const auto is_it = [&](const RecipeCost& own) { return cost.get("recipe") == Json(own.recipe); };
    const auto own = std::ranges::find_if(comparison.recipes, is_it);
    return own != comparison.recipes.end() && own->losses.size() >= cost.get("losses").size();
  };
  return std::ranges::all_of(there.root.get("recipes").entries(), here) ? "" : "-part";
}

PrecisionPlan plan_of(const PlannedRun& run) {
  RunConfig config = run.loaded.config;
  set_vocabulary(config);
  return resolve_plan(config);
}

// The first step of a recipe's first run.
struct FirstStep {
  PrecisionPlan plan;
  Gradients gradients;
  std::string problem;  // why they have no direction
};

FirstStep first_step_of(const PlannedRun& run) {
  FirstStep out{.plan = plan_of(run), .gradients = {}, .problem = {}};
  try {
    out.gradients = first_gradients(run.loaded);
  } catch (const Error& error) {
    if (error.code() != ExitCode::numerical) throw;
    out.problem = "are not finite";
    return out;
  }
  const auto is_zero = [](const auto& gradient) { return std::ranges::all_of(gradient.second, [](float value) { return value == 0.0f; }); };
  if (std::ranges::all_of(out.gradients, is_zero)) out.problem = "are all 0, as where a model is its own teacher";
  return out;
}

void add_cosines(RecipeCost& cost, const FirstStep& own, const FirstStep& baseline) {
  const std::string difference = tensor_difference(own.plan, baseline.plan);
  if (!difference.empty()) {
    cost.no_cosines = "the models differ: " + difference;
  } else if (!own.problem.empty()) {
    cost.no_cosines = "the gradients of its first step " + own.problem;
  } else if (!baseline.problem.empty()) {
    cost.no_cosines = "the gradients of the baseline's first step " + baseline.problem;
  } else if (&own != &baseline) {
    cost.cosines = gradient_cosines(own.gradients, baseline.gradients);
    if (cost.cosines.empty()) cost.no_cosines = "no weight has gradients in both";
  }
}

std::optional<Learning> learning_of(const PlannedRun& run) {
  if (!run.loaded.config.teacher) return {};
  return Learning{.teacher = run.inputs.at("training.teacher"), .weight = run.loaded.config.training.teacher_weight};
}

ExitCode compare(const CompareArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  const ComparisonPlan plan(arguments);
  require_folder_of_comparison(plan.folder());
  make_folders(plan.folder());
  const FolderLock lock(plan.folder(), "mantissa compare");
  if (const ExitCode code = train_all(arguments, plan); code != ExitCode::ok) return code;
  const size_t count = plan.recipes().size();
  for (size_t r = 0; r < count; ++r)  // runs that were trained last may have read something else
    require_same_inputs(plan.folder() / plan.runs()[r].name, run_inputs(plan.runs()[r].loaded));
  Comparison comparison{.name = arguments.sources.file, .recipes = {}};
  std::vector<RunMetrics> all;
  for (const PlannedRun& run : plan.runs()) all.push_back(read_run_metrics(plan.folder() / run.name));
  std::optional<FirstStep> baseline;
  for (size_t r = 0; r < count; ++r) {
    std::vector<ComparedMetrics> runs;
    for (size_t i = r; i < all.size(); i += count) {
      const RunState state = read_state(plan.folder() / plan.runs()[i].name);
      runs.push_back({.metrics = all[i], .measured = state.measured(), .diverged = state.diverged});
    }
    const PlannedRun first_run = plan.first_step(r);
    FirstStep first_step = first_step_of(first_run);
    RecipeCost& cost =
        comparison.recipes.emplace_back(recipe_cost(plan.recipes()[r].name, first_step.plan, runs, learning_of(plan.runs()[r])));
    const TrainingConfig& training = first_run.loaded.config.training;
    cost.steps = *training.steps;
    cost.tokens_per_step = training.tokens_per_step();
    if (r == 0) baseline = std::move(first_step);
    add_cosines(cost, r == 0 ? *baseline : first_step, *baseline);
  }
  compare_with_first(comparison.recipes);
  const Json json = comparison_json(comparison);
  const std::string part = part_suffix(plan.folder(), comparison);
  const fs::path figures = plan.folder() / ("compare" + part + ".json"), page = plan.folder() / ("report" + part + ".html");
  write_file_atomically(figures, json.dump(1, Json::Order::keys) + "\n");
  write_file_atomically(page, report_page(all, {}, {}, comparison_page(comparison)));
  if (arguments.json) {
    std::cout << json.dump(1, Json::Order::keys) << '\n';
  } else {
    std::cout << printable(comparison_table(comparison), "\n") << "files: " << printable(figures.string()) << ", "
              << printable(page.string()) << (part.empty() ? "" : "; compare.json is kept, which has more runs") << '\n';
  }
  return ExitCode::ok;
}

}  // namespace

Command compare_command() {
  const auto arguments = std::make_shared<CompareArguments>();
  return {.name = "compare",
          .summary = "train with several recipes from the same seeds, and show what each costs: loss, gradients, time, bytes",
          .example =
              "mantissa compare configs/quickstart.json --recipes high,mxfp8,mxfp4_qat --seeds 3 --jobs 2\n"
              "mantissa compare configs/quickstart.json --recipes high,mxfp4_qat --match 'layers.*.mlp.*' --output runs/mlps",
          .options = config_options(
              arguments->sources,
              {{.name = "--recipes",
                .target = &arguments->recipes,
                .description = "recipes, as in high,mxfp8; the first is the baseline. A name that ends with .json is a file that is merged "
                               "over the configuration, as by --set-file",
                .required = true},
               {"--seeds", &arguments->seeds, "runs of each recipe: training.seed is 1, 2, ..."},
               {"--jobs", &arguments->jobs, "runs at a time, which share the cores; times of a step are then those of runs side by side"},
               {"--match", &arguments->match,
                "pattern of modules: each recipe applies to these, by a rule before those of the configuration, not to all linears"},
               {"--output", &arguments->output, "folder of the runs (runs/compare-NAME); what has finished there is not repeated"},
               {"--keep-checkpoints", &arguments->keep_checkpoints, "keep the checkpoints of finished runs, which are else deleted"},
               {"--json", &arguments->json, "one JSON object, with the losses of all seeds and the cosines of all weights"}}),
          .run = [arguments] { return compare(*arguments); }};
}

}  // namespace mantissa::tools
