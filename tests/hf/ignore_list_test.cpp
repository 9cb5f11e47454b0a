// Warnings about a list of modules that servers read differently.
#include <gmock/gmock.h>

#include "hf/packing.h"
#include "mantissa/base/text.h"

namespace mantissa::ignore_list_test {

// A layer of values among others of codes, the last of experts.
std::vector<FileLinear> linears() {
  std::vector<FileLinear> out = {{.name = "lm_head", .codes = false}};
  for (const std::string layer : {"0", "1", "10"}) {
    for (const std::string part : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"})
      out.push_back({.name = "model.layers." + layer + "." + part, .codes = layer != "1"});
  }
  for (const std::string expert : {"0", "1"}) out.push_back({.name = "model.layers.11.mlp.experts." + expert + ".up_proj", .codes = true});
  return out;
}

struct List {
  std::vector<std::string> entries;
  std::vector<std::string> findings;  // after "f: ignore: "; "L10.mlp.up_proj" stands for a module of layer 10
  bool whole_names = true;
};

TEST(IgnoreList, EachReadingIsToldThatNamesWhatHoldsCodes) {
  const std::vector<std::string> layer1 = {"lm_head",
                                           "model.layers.1.self_attn.q_proj",
                                           "model.layers.1.self_attn.k_proj",
                                           "model.layers.1.self_attn.o_proj",
                                           "model.layers.1.mlp.gate_proj",
                                           "model.layers.1.mlp.up_proj"};
  const std::string whole = " also names, for a server that looks for whole names, what holds codes: ",
                    dots = " also names, for a server that looks for parts between dots, what holds codes: ",
                    begin = " also names, for a server that looks for beginnings of names, what holds codes: ",
                    part = " also names, for a server that looks for parts of names, what holds codes: ",
                    layer10 = "L10.self_attn.q_proj, L10.self_attn.k_proj, L10.self_attn.o_proj, L10.mlp.gate_proj, L10.mlp.up_proj",
                    experts = "L11.mlp.experts.0.up_proj, L11.mlp.experts.1.up_proj";
  const std::vector<List> lists = {
      // Whole names of what holds values are read alike.
      {layer1, {}},
      {layer1, {}, false},
      {{"re:model.layers.1.mlp", "re:.*layers\\.1\\..*", "*.layers.10.mlp*", "model.embed_tokens", "model.layers.11.mlp.gate"}, {}},
      {{"mlp.gate"}, {"\"mlp.gate\"" + part + "L0.mlp.gate_proj, L0.mlp.up_proj, L10.mlp.gate_proj, L10.mlp.up_proj"}},  // gate_up_proj
      {{"model.layers.1"}, {"\"model.layers.1\"" + begin + layer10 + ", " + experts}},
      {{"layers.1"}, {"\"layers.1\"" + part + layer10 + ", " + experts}},
      // Servers ask for what they fuse.
      {{"model.layers.0.self_attn.qkv_proj", "model.layers.11.mlp.experts"},
       {"\"L0.self_attn.qkv_proj\"" + whole + "L0.self_attn.q_proj, L0.self_attn.k_proj", "\"L11.mlp.experts\"" + whole + experts}},
      {{"layers.10"}, {"\"layers.10\"" + dots + layer10}},
      {{"o_proj"}, {"\"o_proj\"" + dots + "L0.self_attn.o_proj, L10.self_attn.o_proj"}},
      // A name that begins or ends within a word is not between dots.
      {{"attn.o_proj"}, {"\"attn.o_proj\"" + part + "L0.self_attn.o_proj, L10.self_attn.o_proj"}},
      {{"self_attn.o"}, {"\"self_attn.o\"" + part + "L0.self_attn.o_proj, L10.self_attn.o_proj"}},
      {{"language_model.lm_head"}, {"\"language_model.lm_head\" names nothing in the file"}},
      // Expressions of transformers are no whole names.
      {{"lm_head", "model\\.layers\\.1\\..*"},
       {"for a server that looks for whole names no entry names what holds no codes: L1.self_attn.q_proj, L1.self_attn.k_proj, "
        "L1.self_attn.o_proj, L1.mlp.gate_proj, L1.mlp.up_proj"},
       false}};
  std::vector<std::string> modules = {"model.embed_tokens", "model.layers.11.mlp.gate"};
  for (const FileLinear& linear : linears()) modules.push_back(linear.name);
  for (const auto& [entries, findings, whole_names] : lists) {
    std::vector<std::string> expected;
    for (const std::string& finding : findings) expected.push_back("f: ignore: " + joined(split(finding, 'L'), "model.layers."));
    EXPECT_EQ(ignore_list_findings({.where = "f: ignore", .entries = entries, .whole_names = whole_names}, linears(), modules), expected);
  }
}

}  // namespace mantissa::ignore_list_test
