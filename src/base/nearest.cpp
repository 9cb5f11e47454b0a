#include "mantissa/base/nearest.h"

#include <algorithm>
#include <utility>

namespace mantissa {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before_last = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
  }
  return row[b.size()];
}

namespace {

constexpr size_t kShortestPrefix = 3;

// Returns the shortest name that begins with this one: "mxfp4" means mxfp4_qat rather than mxfp8.
std::string completed(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  if (name.size() < kShortestPrefix) return best;
  for (const std::string& candidate : candidates) {
    if (candidate.starts_with(name) && (best.empty() || candidate.size() < best.size())) best = candidate;
  }
  return best;
}

// Returns the first name that this one begins with.
std::string beginning(std::string_view name, const std::vector<std::string>& candidates) {
  for (const std::string& candidate : candidates) {
    if (candidate.size() >= kShortestPrefix && name.starts_with(candidate)) return candidate;
  }
  return "";
}

}  // namespace

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 256;  // the cost is the product of the lengths, and the name comes from a file
  if (name.size() > kLongest) return "";
  std::string best = completed(name, candidates);
  if (!best.empty()) return best;
  size_t least = 3;
  for (const std::string& candidate : candidates) {
    const size_t longer = std::max(name.size(), candidate.size()), shorter = std::min(name.size(), candidate.size());
    if (longer - shorter >= least) continue;  // as many edits at least
    const size_t distance = edit_distance(name, candidate);
    if (distance < least && distance < std::min(name.size(), candidate.size())) {
      least = distance;
      best = candidate;
    }
  }
  return best.empty() ? beginning(name, candidates) : best;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string nearest = nearest_name(name, candidates);
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

}  // namespace mantissa
