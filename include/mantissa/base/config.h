// Configuration. A config struct declares each field once, with name, meaning and limits; that list reads JSON, checks types and ranges,
// writes the effective config, names the origin of each value and generates the schema. The default is the member's initialiser.
//
//   struct AdamWConfig {
//     double beta1 = 0.9, weight_decay = 0.1;
//     template <class V> void fields(V& v) {
//       v("beta1", beta1, "first moment decay", limits::fraction);
//       v("weight_decay", weight_decay, "decoupled weight decay", limits::not_negative);
//     }
//   };
//
// Members may be bool, integers, double, std::string, an enum with choices(), another config struct, std::optional of these (null in JSON)
// and std::vector of these; std::map<std::string, T> is an object whose names the file chooses. Numbers are double, so that 0.1 in a file
// is written back as 0.1. A struct with `static constexpr const char* kShortForm = "enabled";` may be written as the value of that member
// alone.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

// What a field accepts beyond its type.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;   // min itself is excluded
  bool below_max = false;   // max itself is excluded
  bool input_path = false;  // a path that is read: relative to the file that names it; on the command line, to the working directory
};

namespace limits {
inline constexpr Limits none{};
inline constexpr Limits positive{.min = 0, .above_min = true};
inline constexpr Limits not_negative{.min = 0};
inline constexpr Limits fraction{.min = 0, .max = 1, .below_max = true};                          // [0, 1)
inline constexpr Limits open_fraction{.min = 0, .max = 1, .above_min = true, .below_max = true};  // (0, 1)
inline constexpr Limits ratio{.min = 0, .max = 1};                                                // [0, 1]
inline constexpr Limits input_path{.input_path = true};
constexpr Limits at_least(double min) { return {.min = min}; }
constexpr Limits between(double min, double max) { return {.min = min, .max = max}; }
}  // namespace limits

// The names of an enum in JSON: constexpr auto choices(Norm) { return std::array{Choice{"rms", Norm::rms}, Choice{"layer", Norm::layer}}; }
template <class E>
struct Choice {
  const char* name;
  E value;
};
template <class E>
Choice(const char*, E) -> Choice<E>;

template <class E>
const char* choice_name(E value) {
  for (const auto& choice : choices(value)) {
    if (choice.value == value) return choice.name;
  }
  fail(ExitCode::internal, "enum value ", static_cast<int64_t>(value), " has no name");
}

// One value of a field without its type: null, bool, integer, number, text (also the name of a choice).
using Scalar = std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string>;

enum class FieldKind { boolean, integer, number, text, choice, object, list, map };

// Erased access to one member of a config struct. Valid as long as the struct (for elements: as long as the list keeps its size).
struct Field {
  std::string name, description;
  Limits limits;
  FieldKind kind = FieldKind::text;
  bool nullable = false;
  std::vector<std::string> choices;  // choice
  int64_t lowest = 0;                // integer: range of the member's type
  uint64_t highest = 0;
  std::string short_form;                        // object: the member that a plain value stands for, or ""
  std::function<Scalar()> get;                   // all but list and map; an object is null or true
  std::function<void(const Scalar&)> set;        // takes what get returns; true creates an absent optional object
  std::function<std::vector<Field>()> members;   // object, map
  std::function<Field(const std::string&)> add;  // map: the entry of that name, made if absent
  std::function<size_t()> size;                  // list
  std::function<void(size_t)> resize;
  std::function<Field(size_t)> element;
};

// The visitor that turns fields() into data.
class FieldList {
 public:
  template <class T>
  void operator()(const char* name, T& member, const char* description, Limits limits = {});
  std::vector<Field> take() { return std::move(fields_); }

 private:
  std::vector<Field> fields_;
};

template <class T>
std::vector<Field> fields_of(T& config) {
  FieldList list;
  config.fields(list);
  return list.take();
}

// A config file and what the command line adds. Order: defaults < file < set_files (objects merge, all else replaces) < sets.
struct ConfigSources {
  std::string file;
  std::optional<std::string> text = {};     // the content of `file` when it does not come from the disk (a config kept in a checkpoint)
  std::vector<std::string> set_files = {};  // further JSON files, merged in order
  std::vector<std::string> sets = {};       // "optimizer.lr=3e-4", "data.train.0.path=a.txt": the value is JSON, else a string
};

// Where a value stands.
struct ConfigPlace {
  std::string origin = {};      // "configs/a.json:14:11", "--set optimizer.lr=-1", "default", "derived"
  std::string key_origin = {};  // the same for its key, where that differs
  std::string directory = {};   // what a relative input path is relative to; "": the working directory
  std::string argument = {};    // the value as given to --set, else ""
  int64_t order = 0;            // messages are sorted by it
};

struct JsonNode;
namespace detail {
class SourceTree;
}

// Where each value came from and what is wrong with it. Keys are dotted: "data.train.0.path". Places stay offsets until they are asked for,
// and of the errors only those that will be printed are kept, so that both cost less than the sources themselves.
class ConfigReport {
 public:
  static constexpr size_t kMostMessages = 50;
  // A message that is dear to make; asked for only if it would be kept.
  using Message = std::function<std::string()>;

  ConfigReport();  // copies share the sources

  // The message is followed by the place of the key, or by that of the object it is missing from.
  void error(const std::string& key, const std::string& message);
  void error(const std::string& key, const Message& message);
  void key_error(const std::string& key, const std::string& message);  // about the key itself, not its value
  void source_error(const std::string& message, int64_t order = 0);    // about a file or an argument as a whole
  void more_source_errors(size_t count) { errors_ += count; }          // they are counted only
  bool failed(const std::string& key) const;                           // an error about this key, one above or one below it
  bool ok() const { return errors_ == 0; }
  size_t errors() const { return errors_; }
  bool given(const std::string& key) const;  // by a file or the command line, null included
  std::string origin(const std::string& key) const;
  ConfigPlace place(const std::string& key) const;  // of the key, else of the nearest object above that was given
  void set_place(const std::string& key, ConfigPlace place);
  void derive(const std::string& key);  // from now on the origin is "derived"
  void throw_if_failed() const;         // Error(usage) with the first messages in the order of their places, and how many more there are

  // For the reader, which stands at the value that it names.
  detail::SourceTree& sources() { return *sources_; }
  void error(const std::string& key, const JsonNode& at, const Message& message);
  void key_error(const std::string& key, const JsonNode& at, const Message& message);
  void failed_below(const JsonNode& at);

 private:
  struct Nearest {  // one of them, or none
    const ConfigPlace* stated = nullptr;
    const JsonNode* node = nullptr;
  };
  Nearest nearest(const std::string& key) const;
  int64_t order(const std::string& key) const;
  ConfigPlace place_of(const JsonNode& node) const;
  void mark_failed(const std::string& key);
  void add(int64_t order, const Message& text);

  std::shared_ptr<detail::SourceTree> sources_;
  std::map<std::string, ConfigPlace> stated_;  // by set_place
  std::set<std::string> derived_;
  std::set<std::string> failed_unstated_;         // keys that no source holds
  std::vector<bool> failed_at_, failed_below_;    // by the position of the key
  std::multimap<int64_t, std::string> messages_;  // by order; the last ones leave when there are more than are shown
  size_t errors_ = 0;
};

// Names that people bring from other programs, with the key that does the same here.
using ForeignNames = std::map<std::string, std::string>;

// Reads the sources into the fields. What is wrong goes to the report and leaves the default. False if a file could not be read or parsed:
// then what the values mean together need not be asked.
bool read_config(const ConfigSources& sources, const std::vector<Field>& fields, ConfigReport& report, const ForeignNames& foreign = {});

// Makes the value of every field with limits.input_path absolute. An empty path is an error.
void resolve_input_paths(const std::vector<Field>& fields, ConfigReport& report);

// `path` as an absolute path, relative to the directory of the place of `key`.
std::string absolute_input_path(const std::string& path, const std::string& key, const ConfigReport& report);

// JSON of all values in the order of declaration, with a line end; with a report, each value is followed by a comment that names its
// origin.
std::string effective_config(const std::vector<Field>& fields, const ConfigReport* report = nullptr);

// JSON schema, draft 2020-12. Changes the struct behind the fields: pass those of a scratch object.
std::string config_schema(const std::vector<Field>& fields, const std::string& title);

template <class T>
std::string effective_config(T config, const ConfigReport* report = nullptr) {
  return effective_config(fields_of(config), report);
}

// The way back from effective_config(). `name` stands for the text in messages. Throws Error(code).
template <class T>
T config_from_json(const std::string& text, const std::string& name, ExitCode code) {
  T config;
  ConfigReport report;
  read_config(ConfigSources{.file = name, .text = text}, fields_of(config), report);
  try {
    report.throw_if_failed();
  } catch (const Error& error) {
    fail(code, error.what());
  }
  return config;
}

}  // namespace mantissa

#include "mantissa/base/config_fields.h"
