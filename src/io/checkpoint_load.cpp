// Finding checkpoints: the names in the folder, `latest`, the newest good one.
#include <algorithm>
#include <cstdio>

#include "io/checkpoint_steps.h"
#include "mantissa/base/log.h"
#include "mantissa/io/checkpoint_directory.h"
#include "mantissa/io/hash.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr size_t kMinDigits = 8, kMaxDigits = 18;

enum class Attempt { loaded, damaged, another_version };

// Loads the one checkpoint, or writes a line to the log if it is damaged or not the version that `expected_hash` (empty: any) names.
Attempt try_load(const fs::path& path, int64_t step, const std::string& expected_hash, const std::function<void(CheckpointReader&)>& load) {
  try {
    std::error_code error;
    if (!fs::is_directory(path, error)) throw CheckpointDamage(text(path.string(), ": there is no such checkpoint folder"));
    CheckpointReader reader(path);
    if (reader.manifest().step != step) throw CheckpointDamage(text(path.string(), ": holds step ", reader.manifest().step));
    if (!expected_hash.empty() && reader.hash() != expected_hash) {
      log_warning("checkpoint passed over: ", path.string(), ": is not the version that `latest` names (", expected_hash, ")");
      return Attempt::another_version;
    }
    load(reader);
    return Attempt::loaded;
  } catch (const CheckpointDamage& damage) {
    log_warning("checkpoint passed over: ", damage.what());
    return Attempt::damaged;
  }
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < kMinDigits) digits.insert(0, kMinDigits - digits.size(), '0');
  return std::string(kPrefix) + digits;
}

std::optional<int64_t> checkpoint_step(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string digits = name.substr(kPrefix.size());
  if (digits.size() < kMinDigits || digits.size() > kMaxDigits) return std::nullopt;
  if (!std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return std::nullopt;
  const int64_t step = std::stoll(digits);
  return checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

std::vector<int64_t> steps_in(const fs::path& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  if (!fs::exists(folder, error) && !error) return steps;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (const auto step = checkpoint_step(entry->path().filename().string())) steps.push_back(*step);
  require(!error, ExitCode::environment, folder.string(), ": cannot be listed: ", error.message());
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<LatestPointer> read_latest(const fs::path& folder) {
  const fs::path path = folder / "latest";
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return std::nullopt;
  try {
    const std::string content = File::open(path).content(256);
    const size_t space = content.find(' ');
    if (space != std::string::npos && content.back() == '\n') {
      LatestPointer pointer{.name = content.substr(0, space), .hash = content.substr(space + 1, content.size() - space - 2)};
      if (checkpoint_step(pointer.name) && parse_hex64(pointer.hash)) return pointer;
    }
    log_warning(path.string(), ": is damaged; looking at the checkpoints themselves");
  } catch (const Error& problem) {
    log_warning(problem.what(), "; looking at the checkpoints themselves");
  }
  return std::nullopt;
}

std::optional<LoadedCheckpoint> load_newest(const fs::path& folder, const std::function<void(CheckpointReader&)>& load) {
  const std::vector<int64_t> steps = steps_in(folder);
  const auto latest = read_latest(folder);
  if (steps.empty() && !latest) return std::nullopt;
  LoadedCheckpoint result;
  const auto attempt = [&](int64_t step, const std::string& hash) {
    result.path = folder / checkpoint_name(step);
    result.step = step;
    const Attempt outcome = try_load(result.path, step, hash, load);
    result.passed_over += outcome == Attempt::loaded ? 0 : 1;
    return outcome;
  };
  std::optional<int64_t> tried;
  if (latest) {
    const Attempt outcome = attempt(*checkpoint_step(latest->name), latest->hash);
    if (outcome == Attempt::loaded) return result;
    if (outcome == Attempt::damaged) tried = result.step;
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    if (*step != tried && attempt(*step, "") == Attempt::loaded) return result;
  fail(ExitCode::data, folder.string(), ": holds checkpoints, but none of them is intact (", result.passed_over, " tried)");
}

NamedCheckpoint find_checkpoint(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();  // without a slash at the end
  const std::string name = plain.filename().string();
  std::error_code error;
  require(fs::exists(plain, error), ExitCode::usage, path.string(), ": there is no such checkpoint");
  if (fs::exists(plain / "manifest.json", error) || checkpoint_step(name)) return {.folder = plain.parent_path(), .name = name};
  const fs::path folder = name == "latest" && !fs::is_directory(plain, error) ? plain.parent_path() : plain;
  return {.folder = fs::is_directory(folder / "checkpoints", error) ? folder / "checkpoints" : folder, .name = ""};
}

fs::path resolve_checkpoint(const fs::path& path) {
  const auto [folder, name] = find_checkpoint(path);
  if (!name.empty()) return folder / name;
  std::error_code error;
  require(
      fs::exists(folder / "latest", error), ExitCode::usage, path.string(),
      ": is no checkpoint, no folder of checkpoints and no run folder: there is no manifest.json, no `latest` and no checkpoints/latest");
  const auto latest = read_latest(folder);
  require(latest.has_value(), ExitCode::data, (folder / "latest").string(), ": is damaged; name one of the step-* folders instead");
  return folder / latest->name;
}

std::vector<CheckpointStatus> list_checkpoints(const fs::path& folder) {
  std::error_code error;
  require(fs::is_directory(folder, error), ExitCode::usage, folder.string(), ": there is no such folder");
  const auto latest = read_latest(folder);
  std::vector<CheckpointStatus> out;
  for (const int64_t step : steps_in(folder)) {
    CheckpointStatus status{
        .path = folder / checkpoint_name(step), .step = step, .latest = latest && latest->name == checkpoint_name(step), .problem = ""};
    try {
      const CheckpointReader reader(status.path);
      status.samples = reader.manifest().samples;
      status.bytes = reader.bytes();
      status.tensors = reader.manifest().tensors.size();
      if (status.latest && latest->hash != reader.hash()) status.problem = "is not the version that `latest` names";
    } catch (const Error& problem) {
      status.problem = problem.what();
    }
    out.push_back(std::move(status));
  }
  return out;
}

}  // namespace mantissa
