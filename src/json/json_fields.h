// Reads and writes JSON of programs: structs with fields() (fields.h), and other values by a reader.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "mantissa/json/fields.h"

namespace mantissa {

// Says what becomes of names that a struct does not have.
enum class UnknownNames { ignored, refused };

// A value, which must outlive this, and its place. Invalid content is Error(data) that says where and what: "runs/a/manifest.json:
// shards[0].bytes: must be 0 or more, got -1".
class JsonReader {
 public:
  JsonReader(const Json& value, std::string source, std::string path = "")
      : value_(&value), source_(std::move(source)), path_(std::move(path)) {}

  const Json& value() const { return *value_; }
  JsonReader at(const std::string& name) const;  // the member of an object that has it
  std::vector<JsonReader> entries() const;       // the entries of a list

  // Reads anything that may be a member of a struct with fields(), or such a struct, in which only members with limits::later may be
  // missing. A number may be null, which stands for NaN.
  template <class T>
  T as(const Limits& limits = {}, UnknownNames unknown = UnknownNames::ignored) const {
    T out{};
    read(detail::field_of(out, "", "", limits), unknown);
    return out;
  }
  void read(const Field& into, UnknownNames unknown = UnknownNames::ignored) const;

  template <class... Parts>
  void require(bool ok, const Parts&... parts) const {
    if (!ok) fail(text(parts...));
  }
  [[noreturn]] void fail(const std::string& problem) const;

 private:
  const Json* value_;
  std::string source_, path_;
};

namespace detail {
void read_json(std::string_view content, const std::string& source, const Field& into, UnknownNames unknown);

// Set one scalar of one field. set_scalar() returns false, and sets nothing, if it is no value of the field or beyond its limits;
// mismatch() says why: "must be positive, got -1".
bool set_scalar(const Field& field, const Json& value);
std::string mismatch(const Field& field, const Json& value);
}  // namespace detail

// Reads the text of strict JSON. Throws Error(data) that begins with `source`.
template <class T>
T from_json(std::string_view content, const std::string& source, UnknownNames unknown = UnknownNames::ignored) {
  T out{};
  detail::read_json(content, source, detail::field_of(out), unknown);
  return out;
}

// In config_writer.cpp. Writes compact JSON, members in the order of declaration. NaN and Inf, which JSON lacks, become null; bytes that
// are no UTF-8 become U+FFFD.
std::string json_text(const Field& field);
template <class T>
std::string json_text(const T& value) {
  return json_text(detail::field_of(const_cast<T&>(value)));  // fields() is not const, since it is for readers, too
}

}  // namespace mantissa
