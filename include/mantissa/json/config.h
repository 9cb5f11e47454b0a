// Configuration: a struct with fields() (fields.h) read from files that people write and from the command line, with the origin of each
// value, and written back; its schema. Implemented in config_reader.cpp and config_writer.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "mantissa/json/fields.h"

namespace mantissa {

// A config file and what the command line adds. Order: defaults < file < set_files (objects merge, all else replaces) < sets.
struct ConfigSources {
  std::string file;
  std::optional<std::string> text = {};        // the content of `file` when it does not come from the disk (a config kept in a checkpoint)
  std::vector<std::string> set_files = {};     // further JSON files, merged in order
  std::vector<std::string> sets = {};          // "optimizer.lr=3e-4", "data.train.0.path=a.txt": the value is JSON, else a string
  std::function<void(Json& file)> adapt = {};  // changes values of `file`, which is an object, before the others apply
};

// Tells where a value stands.
struct ConfigPlace {
  std::string origin = {};      // "configs/a.json:14:11", "--set optimizer.lr=-1", "default", "derived"
  std::string key_origin = {};  // place of its key, where that differs
  std::string directory = {};   // folder of a relative input path; "": the working directory
  std::string argument = {};    // the value as given to --set, else ""
  int64_t order = 0;            // messages are sorted by it
};

namespace detail {
class SourceTree;
}

// Records where each value came from and what is wrong with it. Keys are dotted: "data.train.0.path". Places stay offsets until they are
// asked for, and only errors that will be printed are kept, so that both cost less than the sources themselves.
class ConfigReport {
 public:
  static constexpr size_t kMostMessages = 50;
  // A message that is expensive to make; it is made only if it will be kept.
  using Message = std::function<std::string()>;

  ConfigReport();  // copies share the sources

  // The message is followed by the place of the key, or by that of the object that lacks it.
  void error(const std::string& key, const std::string& message);
  void error(const std::string& key, const Message& message);
  void key_error(const std::string& key, const std::string& message);  // about the key itself, not its value
  void source_error(const std::string& message, int64_t order = 0);    // about a file or an argument as a whole
  void more_source_errors(size_t count) { errors_ += count; }          // they are counted only
  bool failed(const std::string& key) const;                           // an error about this key, one above or one below it
  bool ok() const { return errors_ == 0; }
  size_t errors() const { return errors_; }
  bool given(const std::string& key) const;  // by a file or the command line, null included
  // Returns whether the object is there only because --set gave members of it, as "model" is after --set model.rope_theta=1.
  bool made_of_members(const std::string& key) const;
  std::string origin(const std::string& key) const;
  ConfigPlace place(const std::string& key) const;  // that of the key, else of the nearest object above that was given
  void set_place(const std::string& key, ConfigPlace place);
  void derive(const std::string& key);  // from now on the origin is "derived"
  void throw_if_failed() const;         // Error(usage) with the first messages in the order of their places, and how many more there are

  // The reader calls these with the value that it reads.
  detail::SourceTree& sources() { return *sources_; }
  void error(const std::string& key, const Json& at, const Message& message);
  void key_error(const std::string& key, const Json& at, const Message& message);
  void failed_below(const Json& at);

 private:
  struct Nearest {  // one of them, or none
    const ConfigPlace* stated = nullptr;
    const Json* node = nullptr;
  };
  Nearest nearest(const std::string& key) const;
  int64_t order(const std::string& key) const;
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

// Maps names that people bring from other programs to the key that does the same here, or to a sentence that says what there is instead.
using ForeignNames = std::map<std::string, std::string>;

// Reads the sources into the fields. Errors are reported, and the field keeps its default. Returns false if a file could not be read or
// parsed; then checks across values are pointless.
bool read_config(const ConfigSources& sources, const std::vector<Field>& fields, ConfigReport& report, const ForeignNames& foreign = {});

// Reads what the sources give for one section, over what its fields hold, after read_config() found no error in it.
void read_section(const std::string& section, const std::vector<Field>& fields, ConfigReport& report);

// Makes the value of every field with limits.input_path absolute. An empty path is an error.
void resolve_input_paths(const std::vector<Field>& fields, ConfigReport& report);

// Returns `path` as an absolute path, relative to the directory of the place of `key`.
std::string absolute_input_path(const std::string& path, const std::string& key, const ConfigReport& report);

// Returns JSON of all values in the order of declaration, with a line end; with a report, each value is followed by a comment that names
// its origin.
std::string effective_config(const std::vector<Field>& fields, const ConfigReport* report = nullptr);

// Returns a JSON schema, draft 2020-12. Changes the struct behind the fields: pass those of a scratch object.
std::string config_schema(const std::vector<Field>& fields, const std::string& title);

template <class T>
std::string effective_config(T config, const ConfigReport* report = nullptr) {
  return effective_config(fields_of(config), report);
}

// Reads what effective_config() wrote. `name` stands for the text in messages. Throws Error(code).
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
