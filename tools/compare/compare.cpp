#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/file.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint_search.h"
#include "io/pending_folder.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/metrics/events.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/train.h"
#include "metrics/run_folder.h"
#include "tools/command.h"
#include "tools/compare/comparison.h"
#include "tools/launch/launch_workers.h"
#include "tools/report/report_page.h"
#include "train/run_comparison.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostSeeds = 10'000;

struct CompareArguments {
  ConfigSources sources;
  std::string recipes;
  std::optional<std::string> match, output;
  int64_t seeds = 5;
  int jobs = 1;
  bool keep_checkpoints = false, json = false;
};

// One of --recipes: a name for precision.recipe, or a file that is merged over the configuration and is called as that.
struct ComparedRecipe {
  std::string name, file;
};

std::vector<ComparedRecipe> recipes_of(const CompareArguments& arguments) {
  std::vector<ComparedRecipe> out;
  std::set<std::string> names;
  for (const std::string& item : split(arguments.recipes, ',')) {
    const bool is_file = item.ends_with(".json");
    const ComparedRecipe& recipe =
        out.emplace_back(ComparedRecipe{.name = is_file ? fs::path(item).stem().string() : item, .file = is_file ? item : ""});
    require(!item.empty(), ExitCode::usage, "--recipes: a name is missing in \"", printable(arguments.recipes), "\"");
    require(is_file || item.find('/') == std::string::npos, ExitCode::usage, "--recipes: '", printable(item),
            "' is no name of a recipe; a file ends with .json");
    require(!is_file || !arguments.match, ExitCode::usage, "--match gives recipes by name to modules, but ", printable(item),
            " is a file, which may have rules of its own");
    require(names.insert(recipe.name).second, ExitCode::usage, "--recipes: ", printable(recipe.name), " is there twice");
  }
  require(out.size() > 1, ExitCode::usage, "--recipes: needs the baseline and at least one recipe to compare with it, as in high,mxfp8");
  return out;
}

void check(const CompareArguments& arguments) {
  require(arguments.seeds >= 1 && arguments.seeds <= kMostSeeds, ExitCode::usage, "--seeds: must be 1 to ", kMostSeeds, ", got ",
          arguments.seeds);
  require(arguments.jobs >= 1 && arguments.jobs <= num_threads(), ExitCode::usage, "--jobs: must be 1 to ", num_threads(),
          ", the cores that this process may use, got ", arguments.jobs);
  for (const std::string& set : arguments.sources.sets) {
    const std::string key = set.substr(0, set.find('='));
    for (const char* const own : {"training.seed", "precision.recipe", "logging.dir", "logging.run_name", "logging.jsonl",
                                  "logging.console", "checkpoint.dir", "checkpoint.resume"}) {
      const bool differs = key == own && !(arguments.match && key == "precision.recipe");
      require(!differs, ExitCode::usage, "--set ", key, ": compare sets it for each run by --recipes, --seeds and --output");
    }
  }
}

// Loads the configuration of a run of one process, which each run of a comparison is. What is wrong otherwise is told by the loader.
LoadedConfig load_alone(const ConfigSources& sources) {
  RunConfig given;
  ConfigReport report;
  const bool known = read_config(sources, fields_of(given), report) && !report.failed("parallel");
  const auto& [data, tensor, expert] = std::tie(given.parallel.data, given.parallel.tensor, given.parallel.expert);
  require(!known || (data <= 1 && tensor == 1 && expert == 1), ExitCode::usage, "parallel asks for several ranks (data ", data, ", tensor ",
          tensor, ", expert ", expert, "), but compare trains each run as one process: set these keys to 1");
  LoadedConfig loaded = load_run_config(sources, Inputs::must_exist, 1);
  if (loaded.config.training.epochs) resolve_by_data(loaded);
  return loaded;
}

// The configuration as it is given, without what compare sets.
RunConfig given_config(const CompareArguments& arguments) {
  const RunConfig config = load_alone(arguments.sources).config;
  require(!config.checkpoint.resumes_named(), ExitCode::usage, "checkpoint.resume names ", config.checkpoint.resume,
          ", but the runs of a comparison are new; checkpoint.init_from starts them from the weights of a model");
  require(config.data.has_validation(), ExitCode::usage,
          "there is no validation data to compare losses on: give data.valid, or data.valid_fraction");
  return config;
}

// A run of the comparison, or the first step of one.
struct PlannedRun {
  std::string name;
  ConfigSources sources;
  LoadedConfig loaded;
  RunInputs inputs = {};
};

class ComparisonPlan {
 public:
  explicit ComparisonPlan(const CompareArguments& arguments) : arguments_(arguments), recipes_(recipes_of(arguments)) {
    check(arguments);
    config_ = given_config(arguments);
    const int own = config_.training.threads;
    threads_ = own > 0 ? own : std::max(1, num_threads() / arguments.jobs);
    folder_ = arguments.output.value_or("runs/compare-" + fs::path(arguments.sources.file).stem().string());
    for (int64_t seed = 1; seed <= arguments.seeds; ++seed) {  // pairs are complete as early as may be
      for (size_t r = 0; r < recipes_.size(); ++r) {
        const std::string& recipe = recipes_[r].name;
        PlannedRun& run =
            runs_.emplace_back(planned(recipes_[r], {.name = text(recipe, "-seed", seed), .seed = seed, .threads = threads_}));
        run.inputs = seed == 1 ? run_inputs(run.loaded) : runs_[r].inputs;
      }
    }
  }

  const fs::path& folder() const { return folder_; }
  const std::vector<ComparedRecipe>& recipes() const { return recipes_; }
  const std::vector<PlannedRun>& runs() const { return runs_; }  // by seed, then by recipe
  const RunConfig& config() const { return config_; }
  int threads() const { return threads_; }

  // Returns a run for first_gradients(), which makes no folder.
  PlannedRun first_step(size_t recipe) const {
    return planned(recipes_[recipe], {.name = "first-step", .resume = "never", .threads = config_.training.threads});
  }

 private:
  struct Settings {
    std::string name;
    int64_t seed = 1;
    std::string resume = "auto";
    int threads = 0;
  };
  PlannedRun planned(const ComparedRecipe& recipe, const Settings& settings) const {
    PlannedRun run{.name = settings.name, .sources = arguments_.sources, .loaded = {}};
    if (!recipe.file.empty()) run.sources.set_files.push_back(recipe.file);
    std::vector<std::string>& sets = run.sources.sets;
    if (arguments_.match) {
      std::vector<RuleConfig> rules = config_.precision.rules;
      rules.insert(rules.begin(), RuleConfig{.match = *arguments_.match, .recipe = recipe.name});
      sets.push_back("precision.rules=" + json_text(rules));
    } else if (recipe.file.empty()) {
      sets.push_back("precision.recipe=" + recipe.name);
    }
    std::string folder;  // logging.dir replaces %
    for (const char c : (folder_ / settings.name).string()) folder += c == '%' ? std::string("%%") : std::string(1, c);
    sets.insert(sets.end(),
                {text("training.seed=", settings.seed), text("training.threads=", settings.threads), "logging.run_name=" + settings.name,
                 "logging.dir=" + folder, "logging.jsonl=true", "logging.console=plain", "checkpoint.dir=%d/checkpoints",
                 "checkpoint.resume=" + settings.resume, "checkpoint.export=null"});  // the baseline may not have the form that it names
    try {
      run.loaded = load_alone(run.sources);
    } catch (const Error& error) {
      fail(error.code(), "with the recipe ", printable(recipe.name), ": ", error.what());
    }
    return run;
  }

  const CompareArguments& arguments_;
  std::vector<ComparedRecipe> recipes_;
  RunConfig config_;
  int threads_ = 1;
  fs::path folder_;
  std::vector<PlannedRun> runs_;
};

// Trains the runs: child processes of this executable, so many at a time.

struct ComparedRun {
  std::string name;                // name of its folder
  fs::path log;                    // takes what the process prints
  std::vector<std::string> words;  // command line behind the name of the program
};

// Says how training ended before all runs had finished; if nothing is set, all have.
struct UnfinishedRuns {
  struct Failure {
    std::string name;
    int code = 0;  // exit code; 128 + n if signal n killed it
    fs::path log;
  };
  std::optional<Failure> failure = {};  // the first
  bool stopped = false;                 // a signal asked for it, or a run stopped by itself
  bool killed = false;                  // by a second Ctrl-C
};

// Runs in the child, between fork and exec: only calls that a signal handler may make.
[[noreturn]] void become_run(char* const* words, int log, pid_t parent) {
  ::setpgid(0, 0);  // Ctrl-C on a terminal reaches the parent alone, which decides
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int in = ::open("/dev/null", O_RDONLY);
  if (in >= 0 && ::dup2(in, STDIN_FILENO) >= 0 && ::dup2(log, STDOUT_FILENO) >= 0 && ::dup2(log, STDERR_FILENO) >= 0)
    ::execv("/proc/self/exe", words);
  ::_exit(127);
}

class RunQueue {
 public:
  RunQueue(const std::vector<ComparedRun>& runs, int at_a_time, const std::function<void(const ComparedRun&)>& finished)
      : runs_(runs), most_(static_cast<size_t>(at_a_time)), finished_(finished) {}
  ~RunQueue() {  // after an error
    send(SIGTERM);
    for (const auto& [pid, run] : running_) ::waitpid(pid, nullptr, 0);
  }
  RunQueue(const RunQueue&) = delete;
  RunQueue& operator=(const RunQueue&) = delete;

  UnfinishedRuns train() {
    while (true) {
      while (!ending_ && next_ < runs_.size() && running_.size() < most_) start(runs_[next_++]);
      if (running_.empty()) return outcome_;
      pollfd wait = {.fd = signals_.fd(), .events = POLLIN, .revents = 0};
      ::poll(&wait, 1, -1);
      for (const int signal : signals_.take()) take(signal);
      reap();
    }
  }

 private:
  void start(const ComparedRun& run) {
    const int log = ::open(run.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    require(log >= 0, path_failure(errno), run.log.string(), ": cannot be opened: ", system_message(errno));
    std::vector<std::string> words = run.words;
    words.insert(words.begin(), "mantissa");
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    const pid_t parent = ::getpid(), child = ::fork();
    const int error = errno;
    if (child == 0) become_run(pointers.data(), log, parent);
    ::close(log);
    require(child > 0, ExitCode::environment, "no process for ", run.name, ": ", system_message(error), " (ulimit -u)");
    ::setpgid(child, child);  // whoever is first
    running_[child] = &run;
  }

  void take(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGUSR2) return send(SIGUSR2);
    outcome_.killed = outcome_.killed || (signal == SIGINT && interrupted_);
    interrupted_ = interrupted_ || signal == SIGINT;
    if (outcome_.killed) return send(SIGKILL);
    outcome_.stopped = true;
    end_others();
  }

  void send(int signal) const {
    for (const auto& [pid, run] : running_) ::kill(-pid, signal);
  }

  void end_others() {
    if (!ending_) send(SIGTERM);
    ending_ = true;
  }

  void reap() {
    for (auto next = running_.begin(); next != running_.end();) {
      int status = 0;
      if (::waitpid(next->first, &status, WNOHANG) != next->first) {
        ++next;
        continue;
      }
      const ComparedRun& run = *next->second;
      next = running_.erase(next);
      take_ending(run, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
  }

  void take_ending(const ComparedRun& run, int code) {
    if (code == 0) return finished_(run);
    const bool cut = ending_ && code == 128 + SIGTERM;  // before it had anything to save
    if (code == static_cast<int>(ExitCode::stopped) || cut) {
      outcome_.stopped = outcome_.stopped || !ending_;  // by somebody else
    } else if (!outcome_.failure && !outcome_.killed) {
      outcome_.failure = {.name = run.name, .code = code, .log = run.log};
    }
    end_others();
  }

  const std::vector<ComparedRun>& runs_;
  size_t most_, next_ = 0;
  const std::function<void(const ComparedRun&)>& finished_;
  SignalQueue signals_;
  std::map<pid_t, const ComparedRun*> running_;
  UnfinishedRuns outcome_;
  bool ending_ = false, interrupted_ = false;
};

// Starts the runs in their order. finished() is called for each that ended well. The first failure, and a signal that asks for an end, have
// the others save and stop; SIGUSR2 is handed on; a second Ctrl-C kills. Runs that lose this process save and stop, too. Returns once all
// processes have ended. Throws Error as path_failure() says for a log that cannot be written, Error(environment) if a process cannot be
// started.
UnfinishedRuns train_runs(const std::vector<ComparedRun>& runs, int at_a_time, const std::function<void(const ComparedRun&)>& finished) {
  return RunQueue(runs, at_a_time, finished).train();
}

// Returns the command line of a run behind the name of the program.
std::vector<std::string> words_of(const ConfigSources& sources) {
  std::vector<std::string> words = {"train", sources.file};
  for (const std::string& file : sources.set_files) words.insert(words.end(), {"--set-file", file});
  for (const std::string& set : sources.sets) words.insert(words.end(), {"--set", set});
  return words;
}

constexpr int64_t kLargestRunFile = 64 << 20;  // bytes
constexpr const char* kElsewhere = "; choose another --output, or delete the folder";

// Throws Error(usage) unless the folder, if it is there, is of this run. Threads change no bit, paths may be seen from elsewhere, and the
// vocabulary may follow from the data.
void require_same_run(const PlannedRun& run, const fs::path& folder) {
  std::error_code none;
  const fs::path file = folder / "config.json";
  if (!fs::exists(folder, none)) return;
  require(fs::is_regular_file(file, none), ExitCode::usage, folder.string(),
          ": is no folder of a run of this comparison; choose another --output");
  const Json there = parse_json(File::open_input(file).content(kLargestRunFile), file.string()),
             wanted = parse_json(effective_config(run.loaded.config), "the configuration");
  const auto own = leaves_of(wanted), others = leaves_of(there);
  const auto shown = [](const std::map<std::string, const Json*>& leaves, const std::string& key) {
    const auto found = leaves.find(key);
    return found == leaves.end() ? "not there" : found->second->shown();
  };
  std::set<std::string> keys;
  for (const auto* const leaves : {&own, &others})
    for (const auto& [key, value] : *leaves) keys.insert(key);
  for (const std::string& key : keys) {
    const bool of_data = key == "model.vocab_size" && !run.loaded.config.model.vocab_size;
    if (of_data || key == "training.threads" || key == "logging.dir" || key == "checkpoint.dir") continue;
    const std::string here = shown(own, key), was = shown(others, key);
    require(here == was, ExitCode::usage, folder.string(), ": is of another configuration: ", printable(key), " is ", printable(was),
            " there and ", printable(here), " here", kElsewhere);
  }
}

// A finished run has no checkpoint that would say what it read, so a file beside its folder does.
fs::path inputs_file(const fs::path& run) { return run.string() + ".inputs.json"; }

void write_inputs(const fs::path& run, const RunInputs& inputs) {
  Json json = Json::Members();
  for (const auto& [input, hash] : inputs) json.add(input, hash);
  write_file_atomically(inputs_file(run), json.dump(1) + "\n");
}

// Throws Error(usage) unless the run read what runs read now.
void require_same_inputs(const fs::path& run, const RunInputs& now) {
  const fs::path file = inputs_file(run);
  std::error_code none;
  require(fs::is_regular_file(file, none), ExitCode::usage, run.string(), ": there is no ", file.filename().string(),
          " beside it, which would say what it read", kElsewhere);
  const Json written = parse_json(File::open_input(file).content(kLargestRunFile), file.string());
  RunInputs then;
  for (const auto& [input, hash] : written.members()) then[input] = hash.string();
  RunInputs all = now;
  all.insert(then.begin(), then.end());
  for (const auto& [input, hash] : all) {
    const auto shown = [&](const RunInputs& inputs) { return inputs.contains(input) ? inputs.at(input) : "nothing"; };
    require(shown(then) == shown(now), ExitCode::usage, run.string(), ": did not read what there is now: ", printable(input), " was ",
            printable(shown(then)), " and is ", shown(now), kElsewhere);
  }
}

// Returns the metrics of a run that has finished; none: it has not.
std::optional<RunMetrics> finished_metrics(const PlannedRun& run, const fs::path& folder) {
  std::error_code none;
  if (!fs::is_regular_file(folder / "metrics.jsonl", none)) return {};
  RunMetrics metrics = read_run_metrics(folder);
  const bool evaluated = !metrics.valid_loss.empty() && metrics.valid_loss.back().step == run.loaded.config.training.steps;
  return evaluated ? std::optional(std::move(metrics)) : std::nullopt;
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

// Trains all runs that have not finished. Returns the exit code with which to end; ok: all have.
ExitCode train_all(const CompareArguments& arguments, const ComparisonPlan& plan) {
  std::vector<ComparedRun> left;
  for (const PlannedRun& run : plan.runs()) {
    const fs::path folder = plan.folder() / run.name;
    require_same_run(run, folder);
    std::error_code none;
    const bool finished = finished_metrics(run, folder).has_value(),
               saved = fs::is_directory(folder / "checkpoints", none) &&
                       !checkpoint_candidates({.folder = folder / "checkpoints", .name = ""}).empty();
    if (finished || saved) require_same_inputs(folder, run.inputs);
    if (finished) {
      delete_checkpoints(arguments, folder);
      continue;
    }
    require_nobody_trains(run.loaded.config);
    if (!saved) {  // it is new, or was killed before its first save
      fs::remove_all(folder);
      write_inputs(folder, run.inputs);
    }
    left.push_back({.name = run.name, .log = plan.folder() / (run.name + ".log"), .words = words_of(run.sources)});
  }
  size_t done = plan.runs().size() - left.size();
  if (!left.empty() && done > 0) std::cerr << "compare: " << done << " of " << plan.runs().size() << " runs have finished before\n";
  const auto began = std::chrono::steady_clock::now();
  const UnfinishedRuns end = train_runs(left, arguments.jobs, [&](const ComparedRun& run) {
    const fs::path folder = plan.folder() / run.name;
    const RunMetrics metrics = read_run_metrics(folder);
    const double loss = metrics.valid_loss.empty() ? 0.0 : metrics.valid_loss.back().value;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::cerr << "compare: " << ++done << " of " << plan.runs().size() << " | " << printable(run.name) << " | loss " << loss << " | "
              << duration_text(seconds) << '\n';
    delete_checkpoints(arguments, folder);
  });
  if (end.killed) return static_cast<ExitCode>(128 + SIGINT);
  if (end.failure) {
    const auto& [name, code, log] = *end.failure;
    fail(static_cast<ExitCode>(code), name, ": training ended with exit code ", code, "; it printed ", log.string(),
         "; the same command goes on where the runs were", last_error(log));
  }
  if (!end.stopped) return ExitCode::ok;
  std::cerr << "compare: stopped | " << done << " of " << plan.runs().size() << " runs have finished; the same command continues\n";
  return ExitCode::stopped;
}

PrecisionPlan plan_of(const PlannedRun& run) {
  RunConfig config = run.loaded.config;
  set_vocabulary(config);
  return resolve_plan(config);
}

ExitCode compare(const CompareArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  const ComparisonPlan plan(arguments);
  make_folders(plan.folder());
  const FolderLock lock(plan.folder(), "mantissa compare");
  if (const ExitCode code = train_all(arguments, plan); code != ExitCode::ok) return code;
  const size_t count = plan.recipes().size();
  for (size_t r = 0; r < count; ++r)  // runs that were trained last may have read something else
    require_same_inputs(plan.folder() / plan.runs()[r].name, run_inputs(plan.runs()[r].loaded));
  Comparison comparison{.name = arguments.sources.file,
                        .steps = *plan.config().training.steps,
                        .at_a_time = arguments.jobs,
                        .threads = plan.threads(),
                        .recipes = {}};
  std::vector<RunMetrics> all;
  for (const PlannedRun& run : plan.runs()) all.push_back(read_run_metrics(plan.folder() / run.name));
  Gradients baseline;
  for (size_t r = 0; r < count; ++r) {
    std::vector<RunMetrics> runs;
    for (size_t i = r; i < all.size(); i += count) runs.push_back(all[i]);
    const PlannedRun first_step = plan.first_step(r);
    RecipeCost& cost = comparison.recipes.emplace_back(recipe_cost(plan.recipes()[r].name, plan_of(first_step), runs));
    Gradients gradients = first_gradients(first_step.loaded);
    if (r == 0) {
      baseline = std::move(gradients);
    } else {
      cost.cosines = gradient_cosines(gradients, baseline);
    }
  }
  compare_with_first(comparison.recipes);
  const Json json = comparison_json(comparison);
  write_file_atomically(plan.folder() / "compare.json", json.dump(1, Json::Order::keys) + "\n");
  write_file_atomically(plan.folder() / "report.html", report_page(all));
  if (arguments.json) {
    std::cout << json.dump(1, Json::Order::keys) << '\n';
  } else {
    std::cout << printable(comparison_table(comparison), "\n") << "files: " << printable((plan.folder() / "compare.json").string()) << ", "
              << printable((plan.folder() / "report.html").string()) << '\n';
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
