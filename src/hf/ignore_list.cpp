#include "mantissa/hf/ignore_list.h"

#include <algorithm>
#include <array>

#include "mantissa/base/text.h"
#include "mantissa/hf/packing.h"

namespace mantissa {
namespace {

bool is_expression(const std::string& entry) { return entry.starts_with("re:") || entry.find_first_of("*?") != std::string::npos; }

// Returns the names under which a server may ask for a linear.
std::vector<std::string> server_names(const std::string& linear) {
  if (const size_t experts = linear.find(kOfExperts); experts != std::string::npos)
    return {linear, linear.substr(0, experts + kOfExperts.size() - 1)};
  const size_t dot = linear.rfind('.') + 1;
  const std::string parent = linear.substr(0, dot), last = linear.substr(dot);
  if (last == "q_proj" || last == "k_proj" || last == "v_proj") return {linear, parent + "qkv_proj"};
  if (last == "gate_proj" || last == "up_proj") return {linear, parent + "gate_up_proj"};
  return {linear};
}

bool is_between_dots(const std::string& entry, const std::string& name) {
  for (size_t at = name.find(entry); at != std::string::npos; at = name.find(entry, at + 1)) {
    const size_t end = at + entry.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return true;
  }
  return false;
}

bool is_whole(const std::string& entry, const std::string& name) { return name == entry; }
bool is_beginning(const std::string& entry, const std::string& name) { return name.starts_with(entry); }
bool is_part(const std::string& entry, const std::string& name) { return name.find(entry) != std::string::npos; }

struct Reading {
  bool (*matches)(const std::string& entry, const std::string& name);
  const char* what;
};
// Readings, the strictest first: each takes at least what those before it take, except beginnings, which are no parts between dots.
constexpr std::array kReadings = {Reading{is_whole, "whole names"}, Reading{is_between_dots, "parts between dots"},
                                  Reading{is_beginning, "beginnings of names"}, Reading{is_part, "parts of names"}};

bool takes(const Reading& reading, const std::string& entry, const std::string& linear) {
  return std::ranges::any_of(server_names(linear), [&](const std::string& name) { return reading.matches(entry, name); });
}

// Returns linears that are codes, which the entry names in one reading and in none before it.
std::vector<std::string> codes_named(const std::string& entry, size_t reading, const std::vector<FileLinear>& linears) {
  std::vector<std::string> found;
  for (const FileLinear& linear : linears) {
    const auto named = [&](size_t i) { return takes(kReadings[i], entry, linear.name); };
    bool before = false;
    for (size_t i = 0; i < reading; ++i) before = before || named(i);
    if (linear.codes && !before && named(reading)) found.push_back(linear.name);
  }
  return found;
}

}  // namespace

std::vector<std::string> ignore_list_findings(const IgnoreList& list, const std::vector<FileLinear>& linears,
                                              const std::vector<std::string>& modules) {
  std::vector<std::string> findings;
  std::vector<std::string> plain;
  std::ranges::copy_if(list.entries, std::back_inserter(plain), [](const std::string& entry) { return !is_expression(entry); });
  for (const std::string& entry : plain) {
    for (size_t i = 0; i < kReadings.size(); ++i) {
      const std::vector<std::string> found = codes_named(entry, i, linears);
      if (found.empty()) continue;
      findings.push_back(text(list.where, ": \"", entry, "\" also names, for a server that looks for ", kReadings[i].what,
                              ", what holds codes: ", joined(found)));
    }
    const bool known = std::ranges::any_of(modules, [&](const std::string& module) { return takes(kReadings.back(), entry, module); });
    if (!known) findings.push_back(text(list.where, ": \"", entry, "\" names nothing in the file"));
  }
  if (list.whole_names) return findings;
  std::vector<std::string> missed;
  for (const FileLinear& linear : linears) {
    const bool named = std::ranges::any_of(plain, [&](const std::string& entry) { return takes(kReadings.front(), entry, linear.name); });
    if (!linear.codes && !named) missed.push_back(linear.name);
  }
  if (!missed.empty())
    findings.push_back(text(list.where, ": for a server that looks for whole names no entry names what holds no codes: ", joined(missed)));
  return findings;
}

}  // namespace mantissa
