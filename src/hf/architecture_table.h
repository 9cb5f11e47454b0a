// The keys of a config.json in one table: the options of section "model" that they stand for, and the defaults of the configuration classes
// of transformers, the same in 4.57 and 5.23. Reader and writer walk it (architecture_config.cpp), and messages about an option name its
// key. Keys that no table can express are topics: two functions beside the table.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "hf/hugging_face.h"
#include "mantissa/base/error.h"
#include "mantissa/json/fields.h"
#include "mantissa/json/json.h"

namespace mantissa {

// Reads the keys of a config.json, and tracks which were read and what is wrong with them.

// null counts as absent unless stated otherwise. A value of another type is Error(data); one that asks for something unsupported is
// Error(usage).
class ArchitectureKeys {
 public:
  // The prefix is that of members of an object in the file: "rope_scaling.".
  ArchitectureKeys(const Json& object, std::string source, std::string prefix = "");

  bool has(const std::string& key);
  bool is_null(const std::string& key);                        // is there, as null
  const Json& value(const std::string& key);                   // value of a key for which has() is true
  const Json* stated(const std::string& key, FieldKind kind);  // nullptr: absent. A list is one of integers
  std::optional<int64_t> integer(const std::string& key);
  std::optional<double> number(const std::string& key);
  std::string word(const std::string& key, const std::string& fallback);
  int64_t integer_or(const std::string& key, int64_t fallback);  // null is of another type

  // Ignores keys that change nothing that the model computes.
  void ignore(const std::vector<std::string>& keys) { known_.insert(keys.begin(), keys.end()); }
  void require_present(const std::string& key);                   // Error(data) otherwise
  void require_not_null(const std::string& key, FieldKind kind);  // Error(data) otherwise
  // Requires that the key is absent or one of these.
  void only(const std::string& key, const std::vector<Json>& allowed);
  // Throws Error(usage) that lists the keys nobody asked for.
  void require_all_known() const;
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;
  [[noreturn]] void wrong(const std::string& key, const std::string& wanted) const;

  std::string name(const std::string& key) const { return prefix_ + key; }
  const std::string& source() const { return source_; }

 private:
  const Json& object_;
  std::string source_, prefix_;
  std::set<std::string> known_;
};

enum class KeyKind {
  needed,    // an option that the file must give
  value,     // an option; a file without the key has the default, null is of the wrong type
  nullable,  // like value, but null leaves the option as it is
  lenient,   // like value, but null counts as absent
  implied,   // an option that is so in every model of the architecture; there is no key
  must_be,   // the key may be absent or have this value; it is not written
  stated,    // like must_be, and it is written
  ignored,   // keys, separated by blanks, that change nothing that the model computes
  training,  // a key of training alone that is not taken; `option` says why. With the value nothing is said
  written,   // a key of this sort that other readers find with the option or the value
  topic
};

// Sets of architectures.
namespace architectures {
constexpr unsigned bit(Architecture architecture) { return 1U << static_cast<unsigned>(architecture); }
inline constexpr unsigned kLlama = bit(Architecture::llama), kQwen2 = bit(Architecture::qwen2), kQwen3Dense = bit(Architecture::qwen3),
                          kQwen3Moe = bit(Architecture::qwen3_moe), kMixtral = bit(Architecture::mixtral), kGpt2 = bit(Architecture::gpt2),
                          kGptOss = bit(Architecture::gpt_oss), kQwen3 = kQwen3Dense | kQwen3Moe, kQwen = kQwen2 | kQwen3,
                          kExperts = kQwen3Moe | kMixtral | kGptOss, kRms = kLlama | kQwen | kMixtral | kGptOss, kAll = kRms | kGpt2;
}  // namespace architectures

class ArchitectureReader;
using ReadTopic = void(ArchitectureReader& reader);
using WriteTopic = void(Architecture architecture, ModelConfig& model, Json& out);
using KeyValue = std::variant<std::monostate, bool, int64_t, double, const char*>;

struct ArchitectureKey {
  unsigned architectures;  // the architectures that have it
  KeyKind kind;
  const char* key = nullptr;                                   // in config.json
  const char* option = nullptr;                                // option of section "model": "moe.num_experts"
  KeyValue value = {};                                         // default of the class; none: that of ModelConfig
  std::array<std::pair<KeyValue, const char*>, 3> words = {};  // values for the choices of an option, where they differ
  ReadTopic* read = nullptr;
  WriteTopic* write = nullptr;
};
using ArchitectureTable = std::vector<ArchitectureKey>;
ArchitectureTable architecture_table(Architecture architecture);

// Returns the value as JSON; null: none.
template <class... Values>
Json json_of(const std::variant<std::monostate, Values...>& value) {
  return std::visit([](const auto& held) { return Json(held); }, value);
}

Field option_field(ModelConfig& model, const std::string& option);  // in a section that is there

// Fills a model with what a config.json says.
class ArchitectureReader {
 public:
  ArchitectureReader(ArchitectureKeys& file, Architecture of);

  ArchitectureKeys& keys;
  const Architecture architecture;
  ModelConfig model = {};
  std::vector<std::string> training_keys = {};  // as in ArchitectureConfig

  // `from`: the file or an object in it.
  void read(const ArchitectureTable& table, ArchitectureKeys& from);
  // Sets an option to what its key says, null: nothing. A value beyond the limits of the option is remembered instead.
  void set(const std::string& option, const std::string& key, const Json& value);
  int64_t layers() const;  // throws if the file's is beyond the limits, before anything is done for each
  void drop_experts();
  void say(const std::string& key, const std::string& what);  // about a key that is there, in training_keys
  // Throws Error(usage) with all that was remembered, or else what ModelConfig::validate() finds.
  void require_valid();

 private:
  void read_option(const ArchitectureKey& key, ArchitectureKeys& from);
  std::string message_of(const std::string& option, const std::string& why);
  void throw_problems() const;

  std::map<std::string, std::string> keys_of_options_ = {};
  std::map<std::string, std::string> problems_ = {};  // "num_hidden_layers: must be at least 1, got 0", and the key
};

ReadTopic read_rope, read_windows, read_number_of_experts, read_dense_layers, read_router_loss, read_gpt_oss_router, read_gpt2_width;
WriteTopic write_rope, write_windows, write_dense_layers;

}  // namespace mantissa
