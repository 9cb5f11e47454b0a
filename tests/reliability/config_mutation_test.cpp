// Fault 18: every key of a run configuration misspelled, of every wrong type and out of range. Each mutation is refused, names the key and
// its place, and leaves the default.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "mantissa/config/run_config.h"

namespace mantissa::config_mutation_test {

using nlohmann::json;
using test::error_of;
using ::testing::HasSubstr;

// The errors of the config that a run would read, with one member replaced.
std::string errors_of(const std::string& content) {
  RunConfig config;
  ConfigReport report;
  read_config({.file = "c.json", .text = content}, fields_of(config), report);
  if (report.ok()) return "";
  EXPECT_EQ(effective_config(config), effective_config(RunConfig{})) << content;
  const Error error = error_of([&] { report.throw_if_failed(); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  return error.what();
}

// {"optimizer": {"lr": VALUE}} for the key "optimizer.lr", the value as raw text on line 2, column 1.
std::string nested(const std::string& key, const std::string& name, const std::string& value) {
  std::string content, close;
  for (size_t begin = 0, end; (end = key.find('.', begin)) != std::string::npos; begin = end + 1) {
    content += "{\"" + key.substr(begin, end - begin) + "\": ";
    close += '}';
  }
  return content + "{\"" + name + "\":\n" + value + "}" + close;
}

struct Leaf {
  std::string key, name;
  Field field;
};

// Fields that hold a value; those of optional sections and of list entries have tests of their own.
std::vector<Leaf> leaves(const std::vector<Field>& fields, const std::string& prefix = "") {
  std::vector<Leaf> all;
  for (const Field& field : fields) {
    if (field.kind() == FieldKind::object && !field.type->nullable) {
      for (Leaf& leaf : leaves(field.members(), prefix + field.name + ".")) all.push_back(std::move(leaf));
    } else {
      all.push_back({prefix + field.name, field.name, field});
    }
  }
  return all;
}

// Every single edit of a name: drop, double, swap with the next.
std::vector<std::string> misspelled(const std::string& name) {
  std::vector<std::string> all;
  for (size_t i = 0; i < name.size(); ++i) {
    all.push_back(name.substr(0, i) + name.substr(i + 1));
    all.push_back(name.substr(0, i) + name[i] + name.substr(i));
    if (i + 1 < name.size()) {
      all.push_back(name);
      std::swap(all.back()[i], all.back()[i + 1]);
    }
  }
  std::erase_if(all, [&](const std::string& other) { return other == name || other.size() < 2; });
  return all;
}

bool accepts(const Field& field, const json& value) {
  switch (field.kind()) {
    case FieldKind::boolean: return value.is_boolean();
    case FieldKind::integer: return value.is_number_integer();
    case FieldKind::number: return value.is_number();
    case FieldKind::text: return value.is_string();
    case FieldKind::choice: return false;  // no value used here is a choice
    case FieldKind::object:
    case FieldKind::map: return value.is_object();
    case FieldKind::list: return value.is_array();
  }
  return false;
}

TEST(ConfigMutation, AMisspelledKeyIsNamedWithTheRightOne) {
  RunConfig config;
  size_t mutations = 0;
  for (const Leaf& leaf : leaves(fields_of(config))) {
    for (const std::string& wrong : misspelled(leaf.name)) {
      if (wrong == "recipe") continue;  // "recipes" without its last letter is the key beside it
      const std::string errors = errors_of(nested(leaf.key, wrong, "1"));
      EXPECT_THAT(errors, HasSubstr(wrong + ": unknown key"));
      EXPECT_THAT(errors, HasSubstr("did you mean '")) << leaf.key;
      EXPECT_THAT(errors, HasSubstr("(c.json:1:"));
      ++mutations;
    }
  }
  EXPECT_GT(mutations, 1500u);
}

TEST(ConfigMutation, AValueOfAnotherTypeIsRefusedWithItsPlace) {
  RunConfig config;
  for (const Leaf& leaf : leaves(fields_of(config))) {
    for (const char* const value : {"true", "7", "7.5", "\"seventeen\"", "[]", "{}", "null"}) {
      const json parsed = json::parse(value);
      if (accepts(leaf.field, parsed) || (leaf.field.type->nullable && parsed.is_null())) continue;
      const std::string errors = errors_of(nested(leaf.key, leaf.name, value));
      EXPECT_THAT(errors, HasSubstr(leaf.key + ": must be ")) << value;
      EXPECT_THAT(errors, HasSubstr(std::string("got ") + value + "   (c.json:2:1)")) << leaf.key;
    }
  }
}

TEST(ConfigMutation, ANumberOutOfRangeIsRefusedWithItsPlace) {
  RunConfig config;
  for (const Leaf& leaf : leaves(fields_of(config))) {
    const Limits& limits = leaf.field.limits;
    std::vector<std::string> values;
    if (std::isfinite(limits.min)) values.push_back(json(static_cast<int64_t>(limits.min) - (limits.above_min ? 0 : 1)).dump());
    if (std::isfinite(limits.max)) values.push_back(json(static_cast<int64_t>(limits.max) + (limits.below_max ? 0 : 1)).dump());
    if (leaf.field.kind() == FieldKind::integer && leaf.field.type->lowest < 0) values.push_back("9223372036854775808");
    for (const std::string& value : values) {
      EXPECT_THAT(errors_of(nested(leaf.key, leaf.name, value)), HasSubstr(leaf.key + ": must be ")) << value;
    }
  }
}

// The grammar is that of all keys.
TEST(ConfigMutation, WhatIsNoJsonIsRefusedWithItsPlace) {
  for (const char* const value : {"1e400", "NaN", "18446744073709551616", "1,", "", "'x'", "0x10", "\"\\x\"", "\"\xff\""})
    EXPECT_THAT(errors_of(nested("optimizer.lr", "lr", value)), HasSubstr("(c.json:2:")) << value;
  EXPECT_THAT(errors_of("{\"optimizer\": {},\n\"optimizer\": {}}"), HasSubstr("duplicate key \"optimizer\""));
}

}  // namespace mantissa::config_mutation_test
