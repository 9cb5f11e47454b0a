#include "checkpoint/checkpoint_search.h"

#include <algorithm>
#include <set>

#include "checkpoint/checkpoint_directory.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Thrown for an intact candidate that is not what `latest` names: one without that hash may be the same folder.
class OtherVersion : public CheckpointDamage {
 public:
  using CheckpointDamage::CheckpointDamage;
};

LoadedCheckpoint load_candidate(const CheckpointCandidate& candidate, const std::function<void(CheckpointReader&)>& load,
                                const SearchTogether& together) {
  return with_second_try<CheckpointUnread>([&] {
    std::optional<CheckpointReader> reader;
    together.read([&] { reader.emplace(open_candidate(candidate)); });
    together.require_same(text("manifest of ", candidate.path.string()), reader->hash());
    load(*reader);
    return LoadedCheckpoint{.path = candidate.path, .step = reader->manifest().step, .hash = reader->hash()};
  });
}

// Returns none if all of them are damaged.
std::optional<LoadedCheckpoint> load_first(const fs::path& folder, const std::vector<CheckpointCandidate>& candidates,
                                           const std::function<void(CheckpointReader&)>& load, const SearchTogether& together) {
  std::set<fs::path> damaged;
  const CheckpointCandidate* better = nullptr;  // the first that was passed over
  int passed_over = 0;
  for (const CheckpointCandidate& candidate : candidates) {
    if (damaged.contains(candidate.path)) continue;
    try {
      LoadedCheckpoint loaded = load_candidate(candidate, load, together);
      loaded.passed_over = passed_over;
      if (better && better->path != loaded.path && better->step)
        log_warning(folder.string(), ": step ", loaded.step, " is loaded instead of step ", *better->step);
      return loaded;
    } catch (const CheckpointDamage& damage) {
      log_warning("checkpoint passed over: ", damage.what());
      if (!dynamic_cast<const OtherVersion*>(&damage)) damaged.insert(candidate.path);
      if (!better || !better->step) better = &candidate;
      ++passed_over;
    }
  }
  return std::nullopt;
}

// A run that goes on deletes old checkpoints: all that were listed may be gone once they are read, and others there.
constexpr int kListings = 5;

bool same_candidates(const std::vector<CheckpointCandidate>& a, const std::vector<CheckpointCandidate>& b) {
  return std::ranges::equal(a, b, [](const auto& one, const auto& other) { return one.path == other.path && one.hash == other.hash; });
}

void require_found(bool found, const fs::path& path) {
  require(found, ExitCode::usage, path.string(),
          ": no checkpoint here; name a run folder, a folder step-…, or a folder with config.json and model.safetensors");
}

}  // namespace

std::string steps_beside(const fs::path& path) {
  constexpr size_t kShown = 8;
  const fs::path folder = path.parent_path();
  std::vector<int64_t> steps = steps_in(folder.empty() ? fs::path(".") : folder);
  if (steps.empty()) return "";
  const size_t older = steps.size() - std::min(steps.size(), kShown);
  steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(older));
  return text("; there ", steps.size() == 1 ? "is " : "are ", older > 0 ? text(older, " older and ") : "",
              joined(steps, ", ", [](int64_t step) { return checkpoint_name(step); }));
}

bool is_pointer(const fs::path& path) {
  const std::string name = path.filename().string();
  std::error_code error;
  if ((name != kLatest && name != kBest) || !fs::is_regular_file(path, error)) return false;
  const auto pointer = read_pointer(path.parent_path().empty() ? "." : path.parent_path(), name.c_str());
  return pointer && pointer->problem.empty();
}

NamedCheckpoint find_checkpoint(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();  // without a slash at the end
  const std::string name = plain.filename().string();
  std::error_code error;
  if (const fs::path own = plain.parent_path() / "checkpoints" / name; !fs::exists(plain, error) && fs::exists(own, error))
    fail(ExitCode::usage, path.string(), ": there is no such file or folder; the checkpoint of that run is ", own.string());
  if (!fs::exists(plain, error))
    fail(ExitCode::usage, path.string(), ": there is no such ", checkpoint_step(name) || name == kBest ? "checkpoint" : "file or folder",
         checkpoint_step(name) ? steps_beside(plain) : "", name == kBest ? "; a run keeps its best one under checkpoint.keep_best" : "");
  if (fs::exists(plain / "manifest.json", error) || checkpoint_step(name)) return {.folder = plain.parent_path(), .name = name};
  const bool file = !fs::is_directory(plain, error);
  if (name == kBest && file) return {.folder = plain.parent_path(), .name = "", .best = true};
  require(!file || name == kLatest, ExitCode::usage, path.string(),
          ": is a file, and neither a checkpoint nor a model; name the folder of one, or a GGUF file");
  const fs::path folder = file ? plain.parent_path() : plain;
  return {.folder = fs::is_directory(folder / "checkpoints", error) ? folder / "checkpoints" : folder, .name = ""};
}

std::vector<CheckpointCandidate> checkpoint_candidates(const NamedCheckpoint& named) {
  const fs::path& folder = named.folder;
  if (!named.name.empty()) return {{.path = folder / named.name, .step = checkpoint_step(named.name)}};
  std::vector<CheckpointCandidate> candidates;
  const std::optional<CheckpointPointer> latest = read_pointer(folder, named.best ? kBest : kLatest);
  if (latest && !latest->problem.empty()) {
    candidates.push_back({.path = folder / (named.best ? kBest : kLatest), .problem = latest->problem});
  } else if (latest && named.best) {
    candidates.push_back({.path = folder / latest->name, .step = checkpoint_step(latest->name), .hash = latest->hash});
  } else if (latest) {
    const std::optional<int64_t> step = checkpoint_step(latest->name);
    candidates.push_back({.path = folder / latest->name, .step = step, .hash = latest->hash});
    candidates.push_back({.path = folder / latest->name, .step = step});
  }
  if (named.best) return candidates;
  const std::vector<int64_t> steps = steps_in(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    candidates.push_back({.path = folder / checkpoint_name(*step), .step = *step});
  return candidates;
}

CheckpointReader open_candidate(const CheckpointCandidate& candidate) {
  const std::string path = candidate.path.string();
  if (!candidate.problem.empty()) throw CheckpointDamage(candidate.problem);
  std::error_code error;
  const fs::file_type type = fs::status(candidate.path, error).type();
  if (type == fs::file_type::none) throw CheckpointUnread(text(path, ": cannot be accessed: ", error.message()));
  if (type != fs::file_type::directory) throw CheckpointDamage(text(path, ": there is no such checkpoint folder"));
  CheckpointReader reader(candidate.path);
  const int64_t step = reader.manifest().step;
  if (candidate.step && step != *candidate.step) throw CheckpointDamage(text(path, ": holds step ", step));
  if (!candidate.hash.empty() && candidate.hash.find(reader.hash()) == std::string::npos)
    throw OtherVersion(text(path, ": is not the version that was named (", candidate.hash, ")"));
  return reader;
}

CheckpointReader open_checkpoint(const fs::path& path) {
  const NamedCheckpoint named = find_checkpoint(path);
  std::vector<CheckpointCandidate> candidates = checkpoint_candidates(named);
  for (int listing = 1;; ++listing) {
    require_found(!candidates.empty(), path);
    try {
      return open_candidate(candidates.front());
    } catch (const CheckpointDamage&) {
      const std::vector<CheckpointCandidate> now = checkpoint_candidates(named);
      if (listing == kListings || same_candidates(now, candidates)) throw;
      candidates = now;
    }
  }
}

void SearchTogether::require_same(const std::string&, const std::string&) const {}

std::optional<LoadedCheckpoint> load_newest(const fs::path& folder, const std::function<void(CheckpointReader&)>& load,
                                            const SearchTogether& together) {
  const auto listed = [&] { return together.first_of(checkpoint_candidates({.folder = folder, .name = ""})); };
  std::vector<CheckpointCandidate> candidates = listed();
  std::optional<LoadedCheckpoint> loaded = load_first(folder, candidates, load, together);
  for (int listing = 1; !loaded && !candidates.empty() && listing < kListings; ++listing) {
    const std::vector<CheckpointCandidate> now = listed();
    if (same_candidates(now, candidates)) break;
    candidates = now;
    loaded = load_first(folder, candidates, load, together);
  }
  together.read([&] {
    require(
        loaded || candidates.empty(), ExitCode::data, folder.string(),
        ": holds checkpoints, but none of them is intact (the log says why): restore one, or start again under another logging.run_name");
  });
  return loaded;
}

namespace {

// A run may save a better one between a look at `best` and the load, and delete the one before.
LoadedCheckpoint load_best(const NamedCheckpoint& named, const std::function<void(CheckpointReader&)>& load,
                           const SearchTogether& together) {
  const auto named_now = [&] { return together.first_of(checkpoint_candidates(named)); };
  std::vector<CheckpointCandidate> candidates = named_now();
  for (int listing = 1;; ++listing) {
    together.read([&] { require_found(!candidates.empty(), named.folder / kBest); });
    try {
      return load_candidate(candidates.front(), load, together);
    } catch (const CheckpointDamage&) {
      const std::vector<CheckpointCandidate> now = named_now();
      if (listing == kListings || same_candidates(now, candidates)) throw;
      candidates = now;
    }
  }
}

}  // namespace

LoadedCheckpoint load_checkpoint(const fs::path& path, const std::function<void(CheckpointReader&)>& load, const SearchTogether& together) {
  NamedCheckpoint named;
  together.read([&] { named = find_checkpoint(path); });
  if (!named.name.empty()) return load_candidate(checkpoint_candidates(named).front(), load, together);
  if (named.best) return load_best(named, load, together);
  const auto loaded = load_newest(named.folder, load, together);
  together.read([&] { require_found(loaded.has_value(), path); });
  return *loaded;
}

std::vector<CheckpointStatus> list_checkpoints(const fs::path& folder) {
  std::error_code error;
  require(fs::is_directory(folder, error), ExitCode::usage, folder.string(), ": there is no such folder");
  const auto latest = read_pointer(folder), best = read_pointer(folder, kBest);
  std::vector<CheckpointStatus> out;
  for (const int64_t step : steps_in(folder)) {
    const std::string name = checkpoint_name(step);
    CheckpointStatus status{.path = folder / name,
                            .step = step,
                            .latest = latest && latest->name == name,
                            .best = best && best->name == name,
                            .hash = "",
                            .problem = ""};
    try {
      const CheckpointReader reader = open_candidate({.path = status.path,
                                                      .step = step,
                                                      .hash = status.latest ? latest->hash
                                                              : status.best ? best->hash
                                                                            : ""});
      status.samples = reader.manifest().samples;
      status.bytes = reader.bytes();
      status.hash = reader.hash();
      status.tensors = reader.manifest().tensors.size();
    } catch (const Error& problem) {
      status.problem = problem.what();
    }
    out.push_back(std::move(status));
  }
  return out;
}

}  // namespace mantissa
