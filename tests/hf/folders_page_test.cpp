// docs/folders.md names the keys that are read of files of a folder, and no others. Words in the sources of the readers are tried as keys.
#include <gmock/gmock.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "architecture_configs.h"
#include "hf/architecture_table.h"
#include "hf/export.h"
#include "hf/export_files.h"
#include "hf/export_weights.h"
#include "hf/packing.h"
#include "text/bpe_tokenizer.h"

namespace mantissa::folders_page_test {

using nlohmann::json;
using test::config_of;
using test::error_of;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Words = std::set<std::string>;

std::string source(const std::string& path) { return test::read_file(text(MANTISSA_SOURCE_DIR, "/", path)); }

std::vector<std::string> matches(const std::string& in, const char* expression) {
  const std::regex pattern(expression);
  std::vector<std::string> out;
  for (std::sregex_iterator at(in.begin(), in.end(), pattern), end; at != end; ++at) out.push_back(at->str(1));
  return out;
}

struct Row {
  std::vector<std::string> keys;
  std::string of, here;
};

// The rows of the table under a heading.
std::vector<Row> rows(const std::string& heading) {
  const std::string page = source("docs/folders.md");
  const size_t begin = page.find("\n" + heading + "\n");
  EXPECT_NE(begin, std::string::npos) << heading;
  std::istringstream lines(page.substr(begin + 1, page.find("\n#", begin + 1) - begin));
  std::vector<Row> out;
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> cells = split(line, '|');
    if (!line.starts_with("| `")) continue;
    for (std::string& cell : cells) cell = std::regex_replace(cell, std::regex("^ +| +$"), "");
    out.push_back({.keys = matches(cells[1], "`([^`]+)`"), .of = cells[2], .here = cells[3]});
  }
  EXPECT_FALSE(out.empty()) << heading;
  return out;
}

// "a, b", "all" or "all but a, b".
std::vector<std::string> chosen(const std::string& of, const std::vector<std::string>& all) {
  const bool but = of.starts_with("all but ");
  const std::vector<std::string> named = matches(but ? of.substr(8) : of, "([^, ][^,]*)");
  std::vector<std::string> out;
  std::ranges::copy_if(all, std::back_inserter(out),
                       [&](const std::string& one) { return of == "all" || (std::ranges::find(named, one) == named.end()) == but; });
  EXPECT_FALSE(out.empty()) << of;
  return out;
}

// Keys have the remarks of the page, each in each of them.
using Said = std::map<std::string, std::map<std::string, std::string>>;
Said said_under(const std::vector<std::string>& headings, const std::vector<std::string>& all) {
  Said out;
  for (const std::string& heading : headings)
    for (const Row& row : rows(heading))
      for (const std::string& of : chosen(row.of, all))
        for (const std::string& key : row.keys)
          EXPECT_TRUE(out[of].emplace(key, row.here).second) << of << ": " << key << " is there twice";
  return out;
}

// Words in texts of sources, which may be keys, and those of the page.
Words words_in(const std::vector<std::string>& paths, const Said& said) {
  Words out;
  for (const std::string& path : paths)
    for (const std::string& quoted : matches(source(path), "\"([^\"\n]*)\""))
      for (const std::string& word : matches(quoted, "([A-Za-z_][A-Za-z0-9_.]*)")) out.insert(word);
  for (const auto& [of, keys] : said)
    for (const auto& [key, here] : keys) out.insert(key);
  return out;
}

Words keys_of(const std::map<std::string, std::string>& said) {
  Words out;
  for (const auto& [key, here] : said) out.insert(key);
  return out;
}

// Holds those words that a reader does not refuse as unknown.
Words known(const Words& words, const std::function<void(const std::string&)>& read) {
  Words out;
  for (const std::string& word : words) {
    try {
      read(word);
      out.insert(word);
    } catch (const Error& error) {
      if (std::string_view(error.what()).find("keys that mantissa does not know") == std::string_view::npos) out.insert(word);
    }
  }
  return out;
}

void expect_said(const ArchitectureKey& key, const std::map<std::string, std::string>& said) {
  switch (key.kind) {
    case KeyKind::needed:
    case KeyKind::value:
    case KeyKind::nullable:
    case KeyKind::lenient: EXPECT_THAT(said.at(key.key), HasSubstr(text("`model.", key.option, "`"))) << key.key; break;
    case KeyKind::must_be:
    case KeyKind::stated: EXPECT_EQ(said.at(key.key), text("must be `", json_of(key.value).dump(), "`")) << key.key; break;
    case KeyKind::training: EXPECT_THAT(said.at(key.key), StartsWith("not applied")) << key.key; break;
    case KeyKind::ignored:
      for (const std::string& one : split(key.key, ' '))
        EXPECT_THAT(said.at(one), AnyOf(StartsWith("ignored"), StartsWith("kept"), StartsWith("says how"))) << one;
      break;
    default: break;
  }
}

TEST(FoldersPage, HasTheKeysOfAllArchitectures) {
  const std::vector<std::string> types(test::kArchitectureTypes.begin(), test::kArchitectureTypes.end());
  const Said said = said_under({"### Architecture, types, tokens", "### Sizes and options", "### Keys that must have one value",
                                "### Keys of training", "### Ignored keys"},
                               types);
  const Words words = words_in({"src/hf/architecture_table.cpp", "src/hf/architecture_config.cpp"}, said);
  for (const std::string& type : types) {
    SCOPED_TRACE(type);
    EXPECT_EQ(keys_of(said.at(type)), known(words, [&](const std::string& key) { test::read(config_of(type, {{key, "x"}})); }));
    for (const ArchitectureKey& key : architecture_table(test::read(config_of(type)).architecture)) expect_said(key, said.at(type));
  }
}

TEST(FoldersPage, HasTheMembersOfRopeScaling) {
  const std::map<std::string, json> of_types = {
      {"default", json::object()},
      {"llama3", json::parse(R"({"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})")},
      {"yarn", json::parse(R"({"factor": 2.0})")}};
  const Said said = said_under({"### rope_scaling and rope_parameters"}, {"default", "llama3", "yarn"});
  const Words words = words_in({"src/hf/architecture_table.cpp"}, said);
  for (const auto& [type, members] : of_types) {
    json scaling = members;
    scaling["rope_type"] = type;
    const auto read = [&](const std::string& key) {
      test::read(config_of("llama", {{"rope_scaling", test::changed(scaling, {{key, "x"}})}}));
    };
    EXPECT_EQ(keys_of(said.at(type)), known(words, read)) << type;
  }
}

TEST(FoldersPage, HasTheKeysOfQuantizationConfigs) {
  const json operand = json::parse(R"({"type": "float", "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": false})"),
             group = {{"targets", {"Linear"}}, {"weights", operand}, {"input_activations", test::changed(operand, {{"dynamic", true}})}},
             groups = {{"quant_method", "compressed-tensors"}, {"config_groups", {{"g", group}}}};
  const std::map<std::string, std::pair<json, const char*>> places = {
      {"compressed-tensors", {groups, ""}},
      {"a group", {groups, "/config_groups/g"}},
      {"weights", {groups, "/config_groups/g/weights"}},
      {"input_activations", {groups, "/config_groups/g/input_activations"}},
      {"mxfp8", {json::parse(R"({"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]})"), ""}},
      {"mxfp4", {json::parse(R"({"quant_method": "mxfp4"})"), ""}},
      {"fp8", {json::parse(R"({"quant_method": "fp8", "weight_block_size": [128, 128]})"), ""}},
      {"modelopt", {json::parse(R"({"quant_method": "modelopt", "quant_algo": "MXFP8"})"), ""}}};
  std::vector<std::string> names;
  for (const auto& [name, place] : places) names.push_back(name);
  const Said said = said_under({"### quantization_config"}, names);
  const Words words = words_in({"src/hf/packed_config.cpp"}, said);
  for (const auto& [name, place] : places) {
    const auto& [config, at] = place;
    EXPECT_NO_THROW(PackedConfig(config.dump(), "config.json")) << name;
    const auto read = [&](const std::string& key) {
      json other = config;
      other[json::json_pointer(at)][key] = "x";
      PackedConfig(other.dump(), "config.json");
    };
    EXPECT_EQ(keys_of(said.at(name)), known(words, read)) << name;
  }
  const auto side_file = [&](const std::string& key) {
    PackedConfig::of_modelopt(json({{"quantization", {{"quant_algo", "MXFP8"}}}, {key, "x"}}).dump(), kModeloptSideFile);
  };
  EXPECT_EQ(known(words, side_file), Words({"producer", "quantization"}));
}

TEST(FoldersPage, HasTheKeysOfGenerationConfig) {
  Said said;
  for (const Row& row : rows("## generation_config.json"))
    for (const std::string& key : row.keys) said[""][key] = row.of;
  Words read;
  for (const std::string& key : words_in({"src/hf/export_files.cpp", "src/hf/architecture_config.cpp"}, said)) {
    const std::string file = test::changed({{"num_beams", 2}}, {{key, "x"}}).dump();
    try {
      read_special_tokens(file, "generation_config.json");
      const std::vector<std::string> told = read_sampling_defaults(file, "generation_config.json").unused;
      if (std::ranges::any_of(told, [&](const std::string& one) { return one.starts_with(key + " = \"x\""); })) read.insert(key);
    } catch (const Error&) {
      read.insert(key);
    }
  }
  EXPECT_EQ(keys_of(said[""]), read);
}

TEST(FoldersPage, HasTheMembersOfTokenizerJson) {
  std::vector<std::string> members;
  for (const Row& row : rows("### tokenizer.json")) members.insert(members.end(), row.keys.begin(), row.keys.end());
  EXPECT_THAT(error_of([] { BpeTokenizer::from_json(R"({"other": 1})", "tokenizer.json"); }).what(),
              HasSubstr(text(" (", joined(members), " are)")));
}

TEST(FoldersPage, HasTheMembersOfMantissaJson) {
  const test::TemporaryFolder folder;
  const Quantization how{.format = Format::nvfp4, .range = {.least = 1, .most = 200}, .tensor_exponent = -8};  // all that is written
  write_export_proof(folder.path(), ProvenCheckpoint{.step = 1, .manifest = "a"}, ExportOptions{}, {}, true, {},
                     {ProvenTensor{.name = "a", .module = "b", .dtype = "F32", .shape = {1}, .how = how}}, {"model.head_dim: "});
  const json file = json::parse(test::read_file(folder / "mantissa.json"));
  const Said said = said_under({"## mantissa.json"}, {"the file", "a tensor"});
  const auto members = [](const json& object) {
    Words out;
    for (const auto& [key, value] : object.items()) out.insert(key);
    return out;
  };
  EXPECT_EQ(keys_of(said.at("the file")), members(file));
  EXPECT_EQ(keys_of(said.at("a tensor")), members(file["tensors"][0]));
  for (const char* const section : {"checkpoint", "options"})
    for (const std::string& key : members(file[section]))
      EXPECT_THAT(matches(said.at("the file").at(section), "`([^`]+)`"), Contains(key)) << section;
}

}  // namespace mantissa::folders_page_test
