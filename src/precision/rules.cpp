#define PCRE2_CODE_UNIT_WIDTH 8
#include "mantissa/precision/rules.h"

#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <new>
#include <set>

#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr size_t kLongestPattern = 4096, kMostAlternatives = 1024;
constexpr uint32_t kMostSteps = 1'000'000;  // for a regular expression on one path

// Multiplies out the alternatives of all braces from `from` on; `written` lacks what stands before it.
std::vector<PatternAlternative> expand_braces(const std::string& pattern, size_t from = 0) {
  const size_t open = pattern.find_first_of("{}", from);
  if (open == std::string::npos) return {{.written = pattern.substr(from), .glob = {}, .expression = {}, .choices = {}}};
  const size_t close = pattern.find_first_of("{}", open + 1);
  require(pattern[open] == '{' && close != std::string::npos && pattern[close] == '}', ExitCode::usage, "has unbalanced braces");
  const std::vector<PatternAlternative> tails = expand_braces(pattern, close + 1);
  std::vector<PatternAlternative> all;
  for (size_t begin = open + 1; begin <= close;) {
    const size_t end = std::min(pattern.find(',', begin), close);
    for (PatternAlternative tail : tails) {
      tail.written = pattern.substr(from, open - from) + pattern.substr(begin, end - begin) + tail.written;
      tail.choices.push_back(begin);
      all.push_back(std::move(tail));
    }
    require(all.size() <= kMostAlternatives, ExitCode::usage, "expands to more than ", kMostAlternatives, " patterns");
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
  require(code != nullptr, ExitCode::usage, "is not a valid regular expression: ", pcre2_message(error), " at character ", at + 1,
          " after re:");
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

}  // namespace

bool PatternAlternative::matches(const std::string& path) const {
  return expression ? expression_matches(expression.get(), path) : glob_matches(glob, path);
}

Pattern::Pattern(const std::string& pattern, int64_t layers) {
  constexpr std::string_view kExpression = "re:";
  require(!pattern.empty(), ExitCode::usage, "is missing");
  require(pattern.size() <= kLongestPattern, ExitCode::usage, "is longer than ", kLongestPattern, " characters");
  if (pattern.starts_with(kExpression)) {
    const std::string expression = pattern.substr(kExpression.size());
    alternatives_.push_back({.written = pattern,
                             .glob = {},
                             .expression = compile(expression),
                             .literal_end = ends_literally(expression, "\\.") && !has_branches(expression),
                             .has_wildcards = !is_word(expression),
                             .choices = {}});
    return;
  }
  alternatives_ = expand_braces(pattern);
  for (PatternAlternative& alternative : alternatives_) {
    alternative.glob = count_layer(alternative.written, layers);
    alternative.literal_end = ends_literally(alternative.written, ".");
    alternative.has_wildcards = alternative.written.find_first_of("*?") != std::string::npos;
  }
}

bool Pattern::matches(const std::string& path) const {
  return std::any_of(alternatives_.begin(), alternatives_.end(),
                     [&](const PatternAlternative& alternative) { return alternative.matches(path); });
}

namespace {

int64_t count_layers(const std::vector<RuledModule>& modules) {
  int64_t layers = 0;
  for (const RuledModule& module : modules) {
    const std::vector<std::string> segments = split(module.path, '.');
    if (segments.size() > 2 && segments[0] == "layers") layers = std::max(layers, int64_t{std::stoll(segments[1])} + 1);
  }
  return layers;
}

// Says which of the modules that a pattern matches a rule applies to.
enum class Reach { quantizable, every };

bool eligible(const PatternAlternative& alternative, const RuledModule& module, Reach reach) {
  if (reach == Reach::every) return alternative.matches(module.path);
  if (module.kind == ModuleKind::output || !alternative.matches(module.path)) return false;
  return module.kind == ModuleKind::linear || alternative.literal_end;
}

bool eligible(const Pattern& pattern, const RuledModule& module, Reach reach) {
  const auto& all = pattern.alternatives();
  return std::any_of(all.begin(), all.end(), [&](const PatternAlternative& alternative) { return eligible(alternative, module, reach); });
}

// Returns the pattern with each misspelled segment corrected from the model, if that would match.
std::optional<std::string> corrected(const std::string& match, const std::vector<RuledModule>& modules, int64_t layers, Reach reach) {
  std::set<std::string> words;
  for (const RuledModule& module : modules) {
    for (const std::string& segment : split(module.path, '.')) words.insert(segment);
  }
  const std::string pattern = joined(split(match, '.'), ".", [&](const std::string& segment) {
    const bool known = segment.find_first_of("*?{},-") != std::string::npos || words.count(segment) == 1;
    const std::string nearest = known ? "" : nearest_name(segment, {words.begin(), words.end()});
    return nearest.empty() ? segment : nearest;
  });
  const Pattern compiled(pattern, layers);
  const bool right =
      std::any_of(modules.begin(), modules.end(), [&](const RuledModule& module) { return eligible(compiled, module, reach); });
  return right ? std::optional(pattern) : std::nullopt;
}

// Returns the pattern as a person would write the path it means.
std::string as_path(const std::string& match) {
  std::string path = match.starts_with("re:") ? match.substr(3) : match;
  for (const std::string& what : {std::string("\\d+"), std::string("[0-9]+"), std::string(".*"), std::string(".+")}) {
    for (size_t at = 0; match.starts_with("re:") && (at = path.find(what)) != std::string::npos;) path.replace(at, what.size(), "*");
  }
  std::erase(path, '\\');
  return path;
}

// Suggests the corrected pattern, else the three nearest modules.
std::string nearest_to(const std::string& match, const std::vector<RuledModule>& modules, int64_t layers, Reach reach) {
  if (!match.starts_with("re:")) {
    if (const auto pattern = corrected(match, modules, layers, reach)) return "; nearest: \"" + *pattern + "\"";
  }
  constexpr size_t kLongest = 256, kShown = 3;
  const std::string wanted = as_path(match).substr(0, kLongest);
  std::set<std::pair<size_t, std::string>> ranked;  // paths of modules that rules match, the nearest first
  for (const RuledModule& module : modules) {
    const std::string path = any_layer(module.path);
    if (reach == Reach::every || module.kind != ModuleKind::output) ranked.insert({edit_distance(wanted, path), path});
  }
  std::vector<std::string> names;
  for (const auto& [distance, path] : ranked) {
    if (names.size() < kShown) names.push_back(path);
  }
  return names.empty() ? "" : "; nearest modules: " + joined(names);
}

class Assignment {
 public:
  Assignment(const std::vector<std::string>& patterns, const std::vector<RuledModule>& modules, const std::string& list, Reach reach,
             ConfigReport& report)
      : patterns_(patterns),
        modules_(modules),
        list_(list),
        reach_(reach),
        report_(report),
        layers_(count_layers(modules)),
        chosen_(modules.size()) {}

  std::vector<std::optional<size_t>> take() {
    for (size_t rule = 0; rule < patterns_.size(); ++rule) {
      try {
        apply(rule, Pattern(patterns_[rule], layers_));
      } catch (const Error& error) {
        problem(rule, [&] { return std::string(error.what()); });
      }
    }
    return std::move(chosen_);
  }

 private:
  void apply(size_t rule, const Pattern& pattern) {
    bool names_output = false;
    std::vector<const PatternAlternative*> idle;  // they match nothing
    std::set<size_t> useful;                      // words in braces
    for (const PatternAlternative& alternative : pattern.alternatives()) {
      const bool matched =
          std::any_of(modules_.begin(), modules_.end(), [&](const RuledModule& module) { return eligible(alternative, module, reach_); });
      names_output = names_output || this->names_output(alternative, matched);
      if (matched) useful.insert(alternative.choices.begin(), alternative.choices.end());
      if (!matched) idle.push_back(&alternative);
    }
    if (names_output) {
      problem(rule, [] { return "names the output projection, to which rules do not apply: use precision.fp8_output_proj"; });
    } else if (idle.size() == pattern.alternatives().size()) {
      const auto passed = std::find_if(idle.begin(), idle.end(), [&](const auto* alternative) { return passes_over(*alternative); });
      problem(rule, [&] {
        return passed != idle.end() ? "matches no linear" + how_to_reach(**passed)
                                    : "matches no module" + nearest_to(patterns_[rule], modules_, layers_, reach_);
      });
    } else {
      report_idle(rule, idle, useful);
    }
    take_modules(rule, pattern);
  }

  // Wildcards may match it: "*" does not mean it.
  bool names_output(const PatternAlternative& alternative, bool matched) const {
    if (reach_ == Reach::every || !alternative.matches("output")) return false;
    if (!alternative.has_wildcards) return true;
    if (alternative.expression) {
      return !std::all_of(modules_.begin(), modules_.end(), [&](const RuledModule& module) { return alternative.matches(module.path); });
    }
    return !matched && !passes_over(alternative);
  }

  // It matches modules that only a literal end reaches.
  bool passes_over(const PatternAlternative& alternative) const {
    return std::any_of(modules_.begin(), modules_.end(),
                       [&](const RuledModule& module) { return module.kind != ModuleKind::output && alternative.matches(module.path); });
  }

  // Every word in braces must be of use together with some choice of the others. Each is reported once.
  void report_idle(size_t rule, const std::vector<const PatternAlternative*>& idle, std::set<size_t> useful) {
    for (const PatternAlternative* alternative : idle) {
      const auto& choices = alternative->choices;
      if (std::all_of(choices.begin(), choices.end(), [&](size_t choice) { return useful.count(choice) == 1; })) continue;
      useful.insert(choices.begin(), choices.end());
      problem(rule, [&] {
        const std::string as = " as \"" + shortened(alternative->written) + "\"";
        if (passes_over(*alternative)) return "matches no linear" + as + how_to_reach(*alternative);
        return "matches no module" + as + nearest_to(alternative->written, modules_, layers_, reach_);
      });
    }
  }

  static std::string how_to_reach(const PatternAlternative& alternative) {
    return text("; to match embeddings, norms or the router, write out the last segment", alternative.expression ? ", without |" : "",
                ", as in \"layers.*.attn_norm\"");
  }

  void take_modules(size_t rule, const Pattern& pattern) {
    std::set<size_t> before;  // the rules that took a module of this one
    size_t taken = 0;
    for (size_t i = 0; i < modules_.size(); ++i) {
      if (!eligible(pattern, modules_[i], reach_)) continue;
      if (chosen_[i]) {
        before.insert(*chosen_[i]);
      } else {
        chosen_[i] = rule;
        ++taken;
      }
    }
    if (taken > 0 || before.empty()) return;
    problem(rule, [&] {
      const std::string names =
          joined(before, ", ", [&](size_t earlier) { return text(list_, '.', earlier, " \"", shortened(patterns_[earlier]), '"'); });
      return "can never be reached: all its modules are taken by " + names + " before it";
    });
  }

  void problem(size_t rule, const ConfigReport::Message& what) {
    const std::string& match = patterns_[rule];
    report_.error(text(list_, '.', rule, ".match"), [&] { return match.empty() ? what() : "\"" + shortened(match) + "\" " + what(); });
  }

  const std::vector<std::string>& patterns_;
  const std::vector<RuledModule>& modules_;
  const std::string list_;
  const Reach reach_;
  ConfigReport& report_;
  int64_t layers_;
  std::vector<std::optional<size_t>> chosen_;
};

}  // namespace

std::vector<std::optional<size_t>> assign_rules(const std::vector<RuleConfig>& rules, const std::vector<RuledModule>& modules,
                                                ConfigReport& report) {
  std::vector<std::string> patterns;
  for (const RuleConfig& rule : rules) patterns.push_back(rule.match);
  return Assignment(patterns, modules, "precision.rules", Reach::quantizable, report).take();
}

std::vector<std::optional<size_t>> assign_patterns(const std::vector<std::string>& patterns, const std::vector<RuledModule>& modules,
                                                   const std::string& list, ConfigReport& report) {
  return Assignment(patterns, modules, list, Reach::every, report).take();
}

std::string any_layer(const std::string& path) {
  std::vector<std::string> segments = split(path, '.');
  if (segments.size() > 2 && segments[0] == "layers") segments[1] = "*";
  return joined(segments, ".");
}

std::string joined_path(const std::vector<std::string>& paths) {
  if (paths.size() == 1) return paths.front();
  std::vector<std::string> layers;
  for (size_t i = 0; i < paths.size();) {
    const int64_t first = std::stoll(split(paths[i], '.')[1]);
    int64_t last = first;
    while (++i < paths.size() && std::stoll(split(paths[i], '.')[1]) == last + 1) ++last;
    layers.push_back(last > first ? text(first, "..", last) : text(first));
  }
  std::string path = any_layer(paths.front());
  return path.replace(path.find('*'), 1, "{" + joined(layers, ",") + "}");
}

}  // namespace mantissa
