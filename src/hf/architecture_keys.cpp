#include "hf/architecture_keys.h"

#include <algorithm>
#include <utility>

#include "mantissa/base/text.h"

namespace mantissa {

namespace {

constexpr size_t kShownBytes = 80;

std::string shown(const Json& value) {
  const std::string whole = value.dump();
  return whole.size() <= kShownBytes ? whole : whole.substr(0, kShownBytes) + " ...";
}

bool is_whole(const Json& value) { return std::holds_alternative<int64_t>(value.scalar()); }

// Returns the name of the kind, "an integer", unless the value is of this kind.
const char* unmet(const Json& value, FieldKind kind) {
  switch (kind) {
    case FieldKind::boolean: return value.is_boolean() ? nullptr : "true or false";
    case FieldKind::integer: return is_whole(value) ? nullptr : "an integer";
    case FieldKind::number: return value.is_number() ? nullptr : "a number";
    case FieldKind::list: return value.is_list() && std::ranges::all_of(value.entries(), is_whole) ? nullptr : "a list of integers";
    default: return value.is_string() ? nullptr : "a string";
  }
}

}  // namespace

ArchitectureKeys::ArchitectureKeys(const Json& object, std::string source, std::string prefix)
    : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
  const std::string name = prefix_.substr(0, prefix_.rfind('.'));  // name of the object
  require(object.is_object(), ExitCode::data, source_, ": ", name.empty() ? "must be" : name + " must be", " a JSON object");
}

bool ArchitectureKeys::has(const std::string& key) {
  known_.insert(key);
  return !object_.get(key).is_null();
}

bool ArchitectureKeys::is_null(const std::string& key) { return !has(key) && object_.contains(key); }

const Json& ArchitectureKeys::value(const std::string& key) { return object_.at(key); }

const Json* ArchitectureKeys::stated(const std::string& key, FieldKind kind) {
  if (!has(key)) return nullptr;
  if (const char* const wanted = unmet(value(key), kind)) wrong(key, wanted);
  return &value(key);
}

std::optional<int64_t> ArchitectureKeys::integer(const std::string& key) {
  const Json* const value = stated(key, FieldKind::integer);
  return value != nullptr ? std::optional(std::get<int64_t>(value->scalar())) : std::nullopt;
}

std::optional<double> ArchitectureKeys::number(const std::string& key) {
  const Json* const value = stated(key, FieldKind::number);
  return value != nullptr ? std::optional(value->number()) : std::nullopt;
}

std::string ArchitectureKeys::word(const std::string& key, const std::string& fallback) {
  const Json* const value = stated(key, FieldKind::text);
  return value != nullptr ? value->string() : fallback;
}

int64_t ArchitectureKeys::integer_or(const std::string& key, int64_t fallback) {
  require_not_null(key, FieldKind::integer);
  return integer(key).value_or(fallback);
}

void ArchitectureKeys::require_present(const std::string& key) {
  require(has(key), ExitCode::data, source_, ": ", name(key), " is missing");
}

void ArchitectureKeys::require_not_null(const std::string& key, FieldKind kind) {
  if (is_null(key)) wrong(key, unmet(nullptr, kind));
}

void ArchitectureKeys::only(const std::string& key, const std::vector<Json>& allowed) {
  if (!has(key) || std::ranges::find(allowed, value(key)) != allowed.end()) return;
  if (allowed.empty()) refuse(key, "mantissa knows it as null only");
  refuse(key, "mantissa computes only " + joined(allowed, " or ", [](const Json& one) { return one.dump(); }));
}

void ArchitectureKeys::require_all_known() const {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : object_.members()) {
    if (!known_.contains(key) && !value.is_null()) unknown.push_back(text(name(key), " = ", shown(value)));
  }
  constexpr size_t kShown = 10;
  const size_t more = unknown.size() > kShown ? unknown.size() - kShown : 0;
  unknown.resize(unknown.size() - more);
  require(unknown.empty(), ExitCode::usage, source_, ": keys that mantissa does not know, and that may change what the model computes:\n  ",
          joined(unknown, "\n  "), more > 0 ? text("\n  and ", more, " more") : "", "\nremove them if they change nothing");
}

void ArchitectureKeys::refuse(const std::string& key, const std::string& why) const {
  fail(ExitCode::usage, source_, ": ", name(key), " = ", shown(object_.at(key)), ": ", why);
}

void ArchitectureKeys::wrong(const std::string& key, const std::string& wanted) const {
  fail(ExitCode::data, source_, ": ", name(key), " must be ", wanted, ", got ", shown(object_.at(key)));
}

}  // namespace mantissa
