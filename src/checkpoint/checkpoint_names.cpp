// Lists the names in a folder of checkpoints, and reads the file `latest`.
#include "mantissa/checkpoint/checkpoint_names.h"

#include <algorithm>

#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_search.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr size_t kMinDigits = 8, kMaxDigits = 18;

// Keeps names that cannot be examined: opening them reports the error.
bool may_be_folder(const fs::directory_entry& entry) {
  std::error_code unknown;
  return entry.is_directory(unknown) || (unknown && path_failure(unknown.value()) != ExitCode::usage);
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
    if (const auto step = checkpoint_step(entry->path().filename().string()); step && may_be_folder(*entry)) steps.push_back(*step);
  require(!error, path_failure(error.value()), folder.string(), ": cannot be listed: ", error.message());
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<LatestPointer> read_latest(const fs::path& folder) {
  const fs::path path = folder / "latest";
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return std::nullopt;
  try {
    const std::string content = with_second_try<ReadError>([&] { return File::open(path).content(256); });
    const size_t space = content.find(' ');
    if (space != std::string::npos && content.back() == '\n') {
      LatestPointer pointer{.name = content.substr(0, space), .hash = content.substr(space + 1, content.size() - space - 2)};
      if (checkpoint_step(pointer.name) && Hash64::parse(pointer.hash)) return pointer;
    }
    return LatestPointer{.problem = path.string() + ": is damaged"};
  } catch (const Error& problem) {
    return LatestPointer{.problem = problem.what()};
  }
}

}  // namespace mantissa
