#include "mantissa/base/json.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace mantissa {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;

// Receives the events of nlohmann's parser, which is not recursive, and builds the value. Returning false stops the parser; `error` says
// why.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  bool null() override { return put(json()); }
  bool boolean(bool value) override { return put(json(value)); }
  bool number_integer(number_integer_t value) override { return put(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return put(json(value)); }
  bool string(string_t& value) override { return put(json(std::move(value))); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (open_.back()->contains(name)) {
      error = "duplicate key \"" + name + "\"";
      return false;
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& reason) override {
    error = text("not valid JSON near byte ", position, " (", reason.what(), ")");
    return false;
  }

  json root;
  std::string error;

 private:
  json* place(json value) {
    if (open_.empty()) return &(root = std::move(value));
    json& parent = *open_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }
  bool put(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json value) {
    if (open_.size() == kMaxDepth) {
      error = text("nested more than ", kMaxDepth, " levels deep");
      return false;
    }
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<json*> open_;  // stable: only the innermost value grows
  std::string key_;
};

}  // namespace

nlohmann::json parse_strict_json(std::string_view content, const std::string& source, ExitCode code) {
  require(!content.starts_with("\xef\xbb\xbf"), code, source, ": starts with a byte order mark");
  StrictBuilder builder;
  const bool parsed = json::sax_parse(content.begin(), content.end(), &builder);
  require(parsed, code, source, ": ", builder.error);
  return std::move(builder.root);
}

}  // namespace mantissa
