#include "mantissa/precision/rules.h"

#include <algorithm>
#include <set>

#include "mantissa/base/nearest.h"

namespace mantissa {
namespace {

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> segments;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    segments.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return segments;
}

int64_t count_layers(const std::vector<RuledModule>& modules) {
  int64_t layers = 0;
  for (const RuledModule& module : modules) {
    const std::vector<std::string> segments = split(module.path);
    if (segments.size() > 2 && segments[0] == "layers") layers = std::max(layers, int64_t{std::stoll(segments[1])} + 1);
  }
  return layers;
}

bool eligible(const Pattern& pattern, const RuledModule& module) {
  if (module.kind == ModuleKind::output || !pattern.matches(module.path)) return false;
  return module.kind == ModuleKind::linear || pattern.has_literal_end();
}

// The pattern with each segment that the model has not put right, if that would match.
std::optional<std::string> corrected(const std::string& match, const std::vector<RuledModule>& modules, int64_t layers) {
  std::set<std::string> words;
  for (const RuledModule& module : modules) {
    for (const std::string& segment : split(module.path)) words.insert(segment);
  }
  std::string pattern;
  for (const std::string& segment : split(match)) {
    const bool known = segment.find_first_of("*?{},-") != std::string::npos || words.count(segment) == 1;
    const std::string nearest = known ? "" : nearest_name(segment, {words.begin(), words.end()});
    pattern += (pattern.empty() ? "" : ".") + (nearest.empty() ? segment : nearest);
  }
  const Pattern compiled(pattern, layers);
  const bool right = std::any_of(modules.begin(), modules.end(), [&](const RuledModule& module) { return eligible(compiled, module); });
  return right ? std::optional(pattern) : std::nullopt;
}

// The pattern as a person would write the path it means.
std::string as_path(const std::string& match) {
  std::string path = match.starts_with("re:") ? match.substr(3) : match;
  for (const std::string& what : {std::string("\\d+"), std::string("[0-9]+"), std::string(".*"), std::string(".+")}) {
    for (size_t at = 0; match.starts_with("re:") && (at = path.find(what)) != std::string::npos;) path.replace(at, what.size(), "*");
  }
  std::erase(path, '\\');
  return path;
}

// The corrected pattern, else the three nearest modules.
std::string nearest_to(const std::string& match, const std::vector<RuledModule>& modules, int64_t layers) {
  if (!match.starts_with("re:")) {
    if (const auto pattern = corrected(match, modules, layers)) return "; nearest: \"" + *pattern + "\"";
  }
  constexpr size_t kLongest = 256, kShown = 3;
  const std::string wanted = as_path(match).substr(0, kLongest);
  std::set<std::pair<size_t, std::string>> ranked;
  for (const RuledModule& module : modules) {
    const std::string path = any_layer(module.path);
    if (module.kind != ModuleKind::output) ranked.insert({edit_distance(wanted, path), path});
  }
  std::string names;
  size_t shown = 0;
  for (const auto& [distance, path] : ranked) {
    if (shown++ == kShown) break;
    names += (names.empty() ? "; nearest modules: " : ", ") + path;
  }
  return names;
}

class Assignment {
 public:
  Assignment(const std::vector<RuleConfig>& rules, const std::vector<RuledModule>& modules, ConfigReport& report)
      : rules_(rules), modules_(modules), report_(report), layers_(count_layers(modules)), chosen_(modules.size()) {}

  std::vector<std::optional<size_t>> take() {
    for (size_t rule = 0; rule < rules_.size(); ++rule) {
      try {
        apply(rule, Pattern(rules_[rule].match, layers_));
      } catch (const Error& error) {
        problem(rule, error.what());
      }
    }
    return std::move(chosen_);
  }

 private:
  void apply(size_t rule, const Pattern& pattern) {
    std::set<size_t> before;  // the rules that took a module of this one
    size_t taken = 0, passed_over = 0;
    for (size_t i = 0; i < modules_.size(); ++i) {
      if (!eligible(pattern, modules_[i])) {
        passed_over += modules_[i].kind != ModuleKind::output && pattern.matches(modules_[i].path);
      } else if (chosen_[i]) {
        before.insert(*chosen_[i]);
      } else {
        chosen_[i] = rule;
        ++taken;
      }
    }
    const bool matched = taken > 0 || !before.empty();
    if (pattern.matches("output") && (pattern.lists_modules() || (!matched && passed_over == 0))) {
      problem(rule, "names the output projection, which no rule matches: precision.fp8_output_proj decides about it");
    } else if (!matched) {
      no_match(rule, passed_over > 0);
    } else if (taken == 0) {
      unreachable(rule, before);
    }
  }

  void no_match(size_t rule, bool passed_over) {
    const std::string& match = rules_[rule].match;
    if (passed_over) {
      problem(rule,
              "matches no linear; embeddings, norms and the router take a rule whose last segment is written out, as in "
              "\"layers.*.attn_norm\"");
    } else {
      problem(rule, "matches no module" + nearest_to(match, modules_, layers_));
    }
  }

  void unreachable(size_t rule, const std::set<size_t>& before) {
    std::string names;
    for (const size_t earlier : before) {
      names += text(names.empty() ? "" : ", ", "precision.rules.", earlier, " \"", rules_[earlier].match, '"');
    }
    problem(rule, "can never be reached: all its modules are taken by " + names + " before it");
  }

  void problem(size_t rule, const std::string& what) {
    const std::string& match = rules_[rule].match;
    report_.error(text("precision.rules.", rule, ".match"), match.empty() ? what : "\"" + match + "\" " + what);
  }

  const std::vector<RuleConfig>& rules_;
  const std::vector<RuledModule>& modules_;
  ConfigReport& report_;
  int64_t layers_;
  std::vector<std::optional<size_t>> chosen_;
};

}  // namespace

std::vector<std::optional<size_t>> assign_rules(const std::vector<RuleConfig>& rules, const std::vector<RuledModule>& modules,
                                                ConfigReport& report) {
  return Assignment(rules, modules, report).take();
}

std::string any_layer(const std::string& path) {
  std::vector<std::string> segments = split(path);
  if (segments.size() > 2 && segments[0] == "layers") segments[1] = "*";
  std::string joined;
  for (const std::string& segment : segments) joined += (joined.empty() ? "" : ".") + segment;
  return joined;
}

std::string joined_path(const std::vector<std::string>& paths) {
  if (paths.size() == 1) return paths.front();
  std::string layers;
  for (size_t i = 0; i < paths.size();) {
    const int64_t first = std::stoll(split(paths[i])[1]);
    int64_t last = first;
    while (++i < paths.size() && std::stoll(split(paths[i])[1]) == last + 1) ++last;
    layers += (layers.empty() ? "" : ",") + std::to_string(first) + (last > first ? ".." + std::to_string(last) : "");
  }
  std::string path = any_layer(paths.front());
  return path.replace(path.find('*'), 1, "{" + layers + "}");
}

}  // namespace mantissa
