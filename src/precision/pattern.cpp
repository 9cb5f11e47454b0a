#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <new>

#include "mantissa/precision/rules.h"

namespace mantissa {
namespace {

constexpr size_t kLongestPattern = 4096, kMostAlternatives = 1024;
constexpr uint32_t kMostSteps = 1'000'000;  // for a regular expression on one path

// Multiplies out the alternatives of all braces from `from` on; `written` lacks what stands before it.
std::vector<PatternAlternative> expand_braces(const std::string& pattern, size_t from = 0) {
  const size_t open = pattern.find_first_of("{}", from);
  if (open == std::string::npos) return {{.written = pattern.substr(from), .glob = {}, .expression = {}, .choices = {}}};
  const size_t close = pattern.find_first_of("{}", open + 1);
  require(pattern[open] == '{' && close != std::string::npos && pattern[close] == '}', ExitCode::usage, "has braces that do not pair");
  const std::vector<PatternAlternative> tails = expand_braces(pattern, close + 1);
  std::vector<PatternAlternative> all;
  for (size_t begin = open + 1; begin <= close;) {
    const size_t end = std::min(pattern.find(',', begin), close);
    for (PatternAlternative tail : tails) {
      tail.written = pattern.substr(from, open - from) + pattern.substr(begin, end - begin) + tail.written;
      tail.choices.push_back(begin);
      all.push_back(std::move(tail));
    }
    require(all.size() <= kMostAlternatives, ExitCode::usage, "stands for more than ", kMostAlternatives, " patterns");
    begin = end + 1;
  }
  return all;
}

// layers.-1.x -> layers.7.x
std::string count_layer(const std::string& glob, int64_t layers) {
  constexpr std::string_view kPrefix = "layers.";
  if (!glob.starts_with(kPrefix)) return glob;
  const size_t end = std::min(glob.find('.', kPrefix.size()), glob.size());
  const std::string_view digits = std::string_view(glob).substr(kPrefix.size(), end - kPrefix.size());
  int64_t layer = 0;
  const auto [rest, error] = std::from_chars(digits.data(), digits.data() + digits.size(), layer);
  if (digits.empty() || rest != digits.data() + digits.size() || error == std::errc::invalid_argument) return glob;
  require(error == std::errc() && layer < layers && layer >= -layers, ExitCode::usage, "names layer ", digits, ", but the model has ",
          layers, " layers");
  return std::string(kPrefix) + std::to_string(layer < 0 ? layer + layers : layer) + glob.substr(end);
}

// Backtracks to the last * only, so the time is at most the product of the lengths.
bool glob_matches(std::string_view glob, std::string_view path) {
  size_t g = 0, p = 0, star = std::string_view::npos, resume = 0;
  while (p < path.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = p;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == path[p])) {
      ++g, ++p;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      p = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

std::string pcre2_message(int code) {
  PCRE2_UCHAR8 buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

std::shared_ptr<const void> compile(const std::string& expression) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                                         PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  require(code != nullptr, ExitCode::usage, "is no regular expression: ", pcre2_message(error), " at character ", at + 1, " after re:");
  return std::shared_ptr<const void>(code, [](pcre2_code* owned) { pcre2_code_free(owned); });
}

bool expression_matches(const void* expression, const std::string& path) {
  const auto* const code = static_cast<const pcre2_code*>(expression);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(pcre2_match_data_create_from_pattern(code, nullptr),
                                                                                 pcre2_match_data_free);
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(pcre2_match_context_create(nullptr),
                                                                                          pcre2_match_context_free);
  if (!data || !context) throw std::bad_alloc();
  pcre2_set_match_limit(context.get(), kMostSteps);
  const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(path.data()), path.size(), 0, 0, data.get(), context.get());
  require(found >= 0 || found == PCRE2_ERROR_NOMATCH, ExitCode::usage, "cannot be matched with ", path, ": ", pcre2_message(found));
  return found >= 0;
}

bool is_word(std::string_view segment) {
  return !segment.empty() &&
         std::all_of(segment.begin(), segment.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; });
}

// Returns what follows the last dot: "\." in a regular expression.
bool ends_literally(const std::string& pattern, std::string_view dot) {
  const size_t at = pattern.rfind(dot);
  return is_word(std::string_view(pattern).substr(at == std::string::npos ? 0 : at + dot.size()));
}

// Another branch could end otherwise.
bool has_branches(const std::string& expression) {
  for (size_t i = 0; i < expression.size(); ++i) {
    if (expression[i] == '\\') {
      ++i;
    } else if (expression[i] == '|') {
      return true;
    }
  }
  return false;
}

PatternAlternative expression_alternative(const std::string& pattern, const std::string& expression) {
  return {.written = pattern,
          .glob = {},
          .expression = compile(expression),
          .literal_end = ends_literally(expression, "\\.") && !has_branches(expression),
          .has_wildcards = !is_word(expression),
          .choices = {}};
}

void read_glob(PatternAlternative& alternative, int64_t layers) {
  alternative.glob = count_layer(alternative.written, layers);
  alternative.literal_end = ends_literally(alternative.written, ".");
  alternative.has_wildcards = alternative.written.find_first_of("*?") != std::string::npos;
}

}  // namespace

bool PatternAlternative::matches(const std::string& path) const {
  return expression ? expression_matches(expression.get(), path) : glob_matches(glob, path);
}

Pattern::Pattern(const std::string& pattern, int64_t layers) {
  constexpr std::string_view kExpression = "re:";
  require(!pattern.empty(), ExitCode::usage, "is missing");
  require(pattern.size() <= kLongestPattern, ExitCode::usage, "is longer than ", kLongestPattern, " characters");
  if (pattern.starts_with(kExpression)) {
    alternatives_.push_back(expression_alternative(pattern, pattern.substr(kExpression.size())));
    return;
  }
  alternatives_ = expand_braces(pattern);
  for (PatternAlternative& alternative : alternatives_) read_glob(alternative, layers);
}

bool Pattern::matches(const std::string& path) const {
  return std::any_of(alternatives_.begin(), alternatives_.end(),
                     [&](const PatternAlternative& alternative) { return alternative.matches(path); });
}

}  // namespace mantissa
