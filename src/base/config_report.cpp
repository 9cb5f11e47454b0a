#include <algorithm>

#include "config_merge.h"
#include "mantissa/base/config.h"

namespace mantissa {
namespace {

const ConfigPlace kDefault{.origin = "default", .key_origin = "", .directory = "", .argument = "", .order = 0};

bool is_below(const std::string& key, const std::string& above) {
  return above.empty() || key == above || (key.starts_with(above) && key[above.size()] == '.');
}

std::string above(const std::string& key) { return key.substr(0, key.find('.') == std::string::npos ? 0 : key.rfind('.')); }

}  // namespace

void ConfigReport::error(const std::string& key, const std::string& message) {
  const ConfigPlace& at = place(key);
  messages_.push_back({at.order, key, text(detail::printable(key), key.empty() ? "" : ": ", message, "   (", at.origin, ")")});
}

void ConfigReport::key_error(const std::string& key, const std::string& message) {
  const ConfigPlace& at = place(key);
  messages_.push_back(
      {at.order, key, text(detail::printable(key), ": ", message, "   (", at.key_origin.empty() ? at.origin : at.key_origin, ")")});
}

void ConfigReport::source_error(const std::string& message, int64_t order) { messages_.push_back({order, "", message}); }

bool ConfigReport::failed(const std::string& key) const {
  return std::any_of(messages_.begin(), messages_.end(), [&](const Message& message) {
    return !message.key.empty() && (is_below(message.key, key) || is_below(key, message.key));
  });
}

bool ConfigReport::given(const std::string& key) const {
  const auto found = places_.find(key);
  return found != places_.end() && found->second.origin != "derived";
}

std::string ConfigReport::origin(const std::string& key) const {
  const auto found = places_.find(key);
  return found == places_.end() ? kDefault.origin : found->second.origin;
}

const ConfigPlace& ConfigReport::place(const std::string& key) const {
  for (std::string at = key;; at = above(at)) {
    const auto found = places_.find(at);
    if (found != places_.end() && found->second.origin != "derived") return found->second;
    if (at.empty()) return kDefault;
  }
}

void ConfigReport::set_place(const std::string& key, ConfigPlace place) { places_[key] = std::move(place); }

void ConfigReport::forget(const std::string& key) {
  std::erase_if(places_, [&](const auto& entry) { return is_below(entry.first, key); });
}

void ConfigReport::derive(const std::string& key) { places_[key].origin = "derived"; }

void ConfigReport::throw_if_failed() const {
  if (messages_.empty()) return;
  std::vector<Message> sorted = messages_;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Message& a, const Message& b) { return a.order < b.order; });
  if (sorted.size() == 1) fail(ExitCode::usage, sorted.front().text);
  std::string all = text(sorted.size(), " errors in the configuration:");
  for (const Message& message : sorted) all += "\n  " + message.text;
  fail(ExitCode::usage, all);
}

}  // namespace mantissa
