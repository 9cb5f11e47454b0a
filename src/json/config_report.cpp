#include <algorithm>

#include "config_merge.h"
#include "mantissa/base/printable.h"
#include "mantissa/json/config.h"
#include "source_tree.h"

namespace mantissa {
namespace {

constexpr size_t kLongestMessage = 1000;  // paths and lists of names are not values

bool is_below(const std::string& key, const std::string& above) { return key.starts_with(above + "."); }

std::string above(const std::string& key) { return key.substr(0, key.find('.') == std::string::npos ? 0 : key.rfind('.')); }

void mark(std::vector<bool>& marks, uint32_t position) {
  if (position >= marks.size()) marks.resize(std::max<size_t>(position + 1, 2 * marks.size()));
  marks[position] = true;
}

bool marked(const std::vector<bool>& marks, uint32_t position) { return position < marks.size() && marks[position]; }

const std::string& key_origin(const ConfigPlace& place) { return place.key_origin.empty() ? place.origin : place.key_origin; }

std::string reported(const std::string& key, const std::string& message, const std::string& origin) {
  return text(printable(detail::shown_key(key)), key.empty() ? "" : ": ", shortened(message, kLongestMessage), "   (", origin, ")");
}

std::string grouped(size_t number) {  // 39,950
  std::string digits = std::to_string(number);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

}  // namespace

ConfigReport::ConfigReport() : sources_(std::make_shared<detail::SourceTree>()) {}

void ConfigReport::error(const std::string& key, const std::string& message) {
  error(key, [&] { return message; });
}

void ConfigReport::error(const std::string& key, const Message& message) {
  mark_failed(key);
  add(order(key), [&] { return reported(key, message(), place(key).origin); });
}

void ConfigReport::key_error(const std::string& key, const std::string& message) {
  mark_failed(key);
  add(order(key), [&] { return reported(key, message, key_origin(place(key))); });
}

void ConfigReport::error(const std::string& key, const Json& at, const Message& message) {
  mark(failed_at_, at.key);
  add(sources_->order(at), [&] { return reported(key, message(), place_of(at).origin); });
}

void ConfigReport::key_error(const std::string& key, const Json& at, const Message& message) {
  mark(failed_at_, at.key);
  add(sources_->order(at), [&] { return reported(key, message(), key_origin(place_of(at))); });
}

void ConfigReport::failed_below(const Json& at) { mark(failed_below_, at.key); }

void ConfigReport::source_error(const std::string& message, int64_t order) {
  add(order, [&] { return shortened(message, kLongestMessage); });
}

// Keeps errors of equal order in the order in which they were found.
void ConfigReport::add(int64_t order, const Message& message) {
  ++errors_;
  const bool full = messages_.size() == kMostMessages;
  if (full && order >= messages_.rbegin()->first) return;
  if (full) messages_.erase(std::prev(messages_.end()));
  messages_.emplace(order, message());
}

void ConfigReport::mark_failed(const std::string& key) {
  const Json* const node = sources_->find(key);
  if (node != nullptr) {
    mark(failed_at_, node->key);
  } else {
    failed_unstated_.insert(key);
  }
  for (std::string at = key; !at.empty();) {
    at = above(at);
    if (const Json* const object = sources_->find(at)) mark(failed_below_, object->key);
  }
}

bool ConfigReport::failed(const std::string& key) const {
  const Json* const node = sources_->find(key);
  if (node != nullptr && marked(failed_below_, node->key)) return true;
  for (std::string at = key; !at.empty(); at = above(at)) {
    const Json* const object = sources_->find(at);
    if ((object != nullptr && marked(failed_at_, object->key)) || failed_unstated_.contains(at)) return true;
  }
  const auto below = failed_unstated_.lower_bound(key + ".");
  return below != failed_unstated_.end() && is_below(*below, key);
}

bool ConfigReport::given(const std::string& key) const {
  return !derived_.contains(key) && (stated_.contains(key) || sources_->find(key) != nullptr);
}

// An object that was made of members has no place of its own; one that a source holds stands behind its key.
bool ConfigReport::made_of_members(const std::string& key) const {
  const Json* const node = sources_->find(key);
  return node != nullptr && node->is_object() && node->key == node->place;
}

std::string ConfigReport::origin(const std::string& key) const {
  if (derived_.contains(key)) return "derived";
  return given(key) ? place(key).origin : "default";
}

ConfigReport::Nearest ConfigReport::nearest(const std::string& key) const {
  for (std::string at = key;; at = above(at)) {
    if (!derived_.contains(at)) {
      const auto stated = stated_.find(at);
      if (stated != stated_.end()) return {.stated = &stated->second};
      if (const Json* const node = sources_->find(at)) return {.node = node};
    }
    if (at.empty()) return {};
  }
}

ConfigPlace ConfigReport::place(const std::string& key) const {
  const auto [stated, node] = nearest(key);
  if (stated != nullptr) return *stated;
  return node != nullptr ? place_of(*node) : ConfigPlace{.origin = "default"};
}

int64_t ConfigReport::order(const std::string& key) const {
  const auto [stated, node] = nearest(key);
  if (stated != nullptr) return stated->order;
  return node != nullptr ? sources_->order(*node) : 0;
}

ConfigPlace ConfigReport::place_of(const Json& node) const { return sources_->place(node); }

void ConfigReport::set_place(const std::string& key, ConfigPlace place) {
  derived_.erase(key);
  stated_[key] = std::move(place);
}

void ConfigReport::derive(const std::string& key) { derived_.insert(key); }

void ConfigReport::throw_if_failed() const {
  if (ok()) return;
  if (errors_ == 1) fail(ExitCode::usage, messages_.begin()->second);
  std::string all = text(errors_, " errors in the configuration:");
  for (const auto& [order, message] : messages_) all += "\n  " + message;
  if (errors_ > messages_.size()) all += "\n  ... and " + grouped(errors_ - messages_.size()) + " more";
  fail(ExitCode::usage, all);
}

}  // namespace mantissa
