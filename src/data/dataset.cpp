#include "mantissa/data/dataset.h"

#include <glob.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "data/token_layout.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Returns "; FOLDER holds a, b, c": what the user might have meant.
std::string listing(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) return text("; there is no folder ", folder.string());
  std::sort(names.begin(), names.end());
  constexpr size_t kShown = 5;
  const std::string out =
      text("; ", folder.string(), " holds ", names.empty() ? "nothing" : joined(std::span(names).first(std::min(names.size(), kShown))));
  return names.size() > kShown ? out + text(" and ", names.size() - kShown, " more") : out;
}

// Returns the deepest part of the pattern's path that has no wildcard.
fs::path folder_of(const std::string& pattern) {
  fs::path folder = fs::path(pattern).parent_path();
  while (folder.string().find_first_of("*?[{") != std::string::npos) folder = folder.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found = {};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_BRACE, nullptr, &found);
  std::vector<std::string> paths;
  if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  require(status == 0 || status == GLOB_NOMATCH, ExitCode::environment, "data path \"", pattern, "\": the folder cannot be searched");
  return paths;
}

}  // namespace

std::vector<std::string> expand_paths(const std::string& pattern, const std::string& key) {
  require(!pattern.empty(), ExitCode::usage, "data path: is empty");
  if (file_exists(pattern)) return {pattern};
  if (file_exists(pattern + ".bin") && file_exists(pattern + ".idx")) return {pattern + ".bin"};
  std::error_code ignored;
  require(!fs::is_directory(pattern, ignored), ExitCode::usage, "data path \"", pattern, "\" is a folder; name its files, as in \"",
          (fs::path(pattern) / "*").string(), "\"", listing(pattern));
  std::vector<std::string> paths;
  for (const std::string& path : matches(pattern)) {
    if (!file_exists(path)) continue;
    const std::string bin = with_extension(path, ".bin");
    paths.push_back(path.ends_with(".idx") && file_exists(bin) ? bin : path);
  }
  require(!paths.empty(), ExitCode::usage, "data path \"", pattern, "\" matches no file", listing(folder_of(pattern)),
          key.empty() ? "" : text("; name yours with --set ", key, "=FILE"));
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  return paths;
}

TokenFiles::TokenFiles(std::vector<TokenFile> files) : files_(std::move(files)) {
  require(!files_.empty(), "a dataset has at least one file");
  int64_t end = 0;
  for (const TokenFile& file : files_) ends_.push_back(end += file.tokens());
}

bool TokenFiles::has_documents() const {
  return std::all_of(files_.begin(), files_.end(), [](const TokenFile& file) { return file.has_documents() || file.tokens() == 0; });
}

bool TokenFiles::has_mask() const {
  return std::any_of(files_.begin(), files_.end(), [](const TokenFile& file) { return file.has_mask(); });
}

bool TokenFiles::has_examples() const {
  return std::any_of(files_.begin(), files_.end(), [](const TokenFile& file) { return file.examples().examples > 0; });
}

void TokenFiles::read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks) const {
  require(begin >= 0 && count >= 0 && begin <= tokens() - count, "tokens ", begin, " + ", count, " of ", tokens());
  auto file = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  while (count > 0) {
    const int64_t piece = std::min(count, ends_[file] - begin);
    files_[file].read(begin - (ends_[file] - files_[file].tokens()), piece, out, marks);
    begin += piece;
    count -= piece;
    out += piece;
    if (marks != nullptr) marks += piece;
    ++file;
  }
}

TokenDataset::TokenDataset(const TokenFiles& files, int64_t begin, int64_t end) : files_(&files), begin_(begin), end_(end) {
  require(begin >= 0 && begin <= end && end <= files.tokens(), "tokens ", begin, " to ", end, " of ", files.tokens());
}

void TokenDataset::read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks) const {
  require(begin >= 0 && count >= 0 && begin <= tokens() - count, "tokens ", begin, " + ", count, " of ", tokens());
  files_->read(begin_ + begin, count, out, marks);
}

int64_t training_tokens(int64_t n, double valid_fraction) {
  return static_cast<int64_t>(std::floor(static_cast<double>(n) * (1.0 - valid_fraction)));
}

}  // namespace mantissa
