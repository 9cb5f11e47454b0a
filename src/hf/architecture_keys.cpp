#include "hf/architecture_keys.h"

#include <algorithm>
#include <utility>

#include "mantissa/base/text.h"

namespace mantissa {

using nlohmann::json;

namespace {

constexpr size_t kShownBytes = 80;

bool is_whole(const json& value) {
  return value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
}

std::string shown(const json& value) {
  const std::string whole = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return whole.size() <= kShownBytes ? whole : whole.substr(0, kShownBytes) + " ...";
}

}  // namespace

ArchitectureKeys::ArchitectureKeys(const json& object, std::string source, std::string prefix)
    : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
  const std::string name = prefix_.substr(0, prefix_.rfind('.'));  // prefix "rope_scaling." is of members
  require(object.is_object(), ExitCode::data, source_, ": ", name.empty() ? "must be" : name + " must be", " a JSON object");
}

bool ArchitectureKeys::has(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found != object_.end() && !found->is_null();
}

bool ArchitectureKeys::is_null(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found != object_.end() && found->is_null();
}

const json& ArchitectureKeys::value(const std::string& name) { return object_.at(name); }

std::optional<int64_t> ArchitectureKeys::integer(const std::string& name) {
  if (!has(name)) return {};
  if (!is_whole(value(name))) wrong(name, "an integer");
  return value(name).get<int64_t>();
}

void ArchitectureKeys::require_present(const std::string& name) {
  require(has(name), ExitCode::data, source_, ": ", prefix_, name, " is missing");
}

int64_t ArchitectureKeys::needed_integer(const std::string& name) {
  require_present(name);
  return *integer(name);
}

std::optional<double> ArchitectureKeys::number(const std::string& name) {
  if (!has(name)) return {};
  if (!value(name).is_number()) wrong(name, "a number");
  return value(name).get<double>();
}

double ArchitectureKeys::needed_number(const std::string& name) {
  require_present(name);
  return *number(name);
}

int64_t ArchitectureKeys::integer_or(const std::string& name, int64_t fallback) {
  if (is_null(name)) wrong(name, "an integer");
  return integer(name).value_or(fallback);
}

double ArchitectureKeys::number_or(const std::string& name, double fallback) {
  if (is_null(name)) wrong(name, "a number");
  return number(name).value_or(fallback);
}

bool ArchitectureKeys::flag(const std::string& name, bool fallback) {
  if (is_null(name)) wrong(name, "true or false");
  if (!has(name)) return fallback;
  if (!value(name).is_boolean()) wrong(name, "true or false");
  return value(name).get<bool>();
}

std::string ArchitectureKeys::word(const std::string& name, const std::string& fallback) {
  if (!has(name)) return fallback;
  if (!value(name).is_string()) wrong(name, "a string");
  return value(name).get<std::string>();
}

std::vector<int64_t> ArchitectureKeys::integers(const std::string& name) {
  std::vector<int64_t> out;
  if (!has(name)) return out;
  if (!value(name).is_array()) wrong(name, "a list of integers");
  for (const json& entry : value(name)) {
    if (!is_whole(entry)) wrong(name, "a list of integers");
    out.push_back(entry.get<int64_t>());
  }
  return out;
}

void ArchitectureKeys::ignore(std::initializer_list<const char*> names) { known_.insert(names.begin(), names.end()); }

void ArchitectureKeys::only(const std::string& name, const std::vector<json>& allowed) {
  if (!has(name) || std::ranges::find(allowed, value(name)) != allowed.end()) return;
  if (allowed.empty()) refuse(name, "mantissa knows it as null only");
  refuse(name, "mantissa computes only " + joined(allowed, " or ", [](const json& one) { return one.dump(); }));
}

void ArchitectureKeys::require_all_known() const {
  std::vector<std::string> unknown;
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name) && !value.is_null()) unknown.push_back(text(prefix_, name, " = ", shown(value)));
  }
  constexpr size_t kShown = 10;
  const size_t more = unknown.size() > kShown ? unknown.size() - kShown : 0;
  unknown.resize(unknown.size() - more);
  require(unknown.empty(), ExitCode::usage, source_, ": keys that mantissa does not know, and that may change what the model computes:\n  ",
          joined(unknown, "\n  "), more > 0 ? text("\n  and ", more, " more") : "", "\nremove them if they change nothing");
}

void ArchitectureKeys::refuse(const std::string& name, const std::string& why) const {
  fail(ExitCode::usage, source_, ": ", prefix_, name, " = ", shown(object_.at(name)), ": ", why);
}

void ArchitectureKeys::wrong(const std::string& name, const std::string& wanted) const {
  fail(ExitCode::data, source_, ": ", prefix_, name, " must be ", wanted, ", got ", shown(object_.at(name)));
}

}  // namespace mantissa
