// What servers that read a list of modules differently make of it.
#include "mantissa/hf/ignore_list.h"

#include <gmock/gmock.h>

namespace mantissa::ignore_list_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

std::vector<std::string> findings(const std::vector<std::string>& entries, bool whole_names = true) {
  std::vector<std::string> modules = {"model.embed_tokens", "model.layers.11.mlp.gate"};
  for (const FileLinear& linear : linears()) modules.push_back(linear.name);
  return ignore_list_findings({.where = "f: ignore", .entries = entries, .whole_names = whole_names}, linears(), modules);
}

const std::vector<std::string> kLayer1 = {"lm_head",
                                          "model.layers.1.self_attn.q_proj",
                                          "model.layers.1.self_attn.k_proj",
                                          "model.layers.1.self_attn.o_proj",
                                          "model.layers.1.mlp.gate_proj",
                                          "model.layers.1.mlp.up_proj"};

TEST(IgnoreList, WholeNamesOfWhatHoldsValuesAreReadAlike) {
  EXPECT_THAT(findings(kLayer1), IsEmpty());
  EXPECT_THAT(findings(kLayer1, false), IsEmpty());
  EXPECT_THAT(
      findings({"re:model.layers.1.mlp", "re:.*layers\\.1\\..*", "*.layers.10.mlp*", "model.embed_tokens", "model.layers.11.mlp.gate"}),
      IsEmpty());
}

TEST(IgnoreList, APartOfANameMayBeThatOfAnother) {
  EXPECT_THAT(findings({"mlp.gate"}),
              ElementsAre("f: ignore: \"mlp.gate\" also names, for a server that looks for parts of names, what holds codes: "
                          "model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj, model.layers.10.mlp.gate_proj, "
                          "model.layers.10.mlp.up_proj"))
      << "up_proj by gate_up_proj";
}

TEST(IgnoreList, ALayerMayBeTheBeginningOfAnother) {
  EXPECT_THAT(findings({"model.layers.1"}),
              ElementsAre("f: ignore: \"model.layers.1\" also names, for a server that looks for beginnings of names, what holds codes: "
                          "model.layers.10.self_attn.q_proj, model.layers.10.self_attn.k_proj, model.layers.10.self_attn.o_proj, "
                          "model.layers.10.mlp.gate_proj, model.layers.10.mlp.up_proj, model.layers.11.mlp.experts.0.up_proj, "
                          "model.layers.11.mlp.experts.1.up_proj"));
  EXPECT_THAT(findings({"layers.1"}),
              ElementsAre(::testing::HasSubstr("\"layers.1\" also names, for a server that looks for parts of names")));
}

TEST(IgnoreList, ServersAskForWhatTheyFuse) {
  const std::string whole = " also names, for a server that looks for whole names, what holds codes: ";
  EXPECT_THAT(findings({"model.layers.0.self_attn.qkv_proj", "model.layers.11.mlp.experts"}),
              ElementsAre("f: ignore: \"model.layers.0.self_attn.qkv_proj\"" + whole +
                              "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj",
                          "f: ignore: \"model.layers.11.mlp.experts\"" + whole +
                              "model.layers.11.mlp.experts.0.up_proj, model.layers.11.mlp.experts.1.up_proj"));
}

TEST(IgnoreList, WhatIsBetweenDotsIsAReadingOfItsOwn) {
  EXPECT_THAT(findings({"layers.10"}),
              ElementsAre(::testing::HasSubstr("that looks for parts between dots, what holds codes: model.layers.10.")));
  EXPECT_THAT(findings({"o_proj"}),
              ElementsAre("f: ignore: \"o_proj\" also names, for a server that looks for parts between dots, what holds codes: "
                          "model.layers.0.self_attn.o_proj, model.layers.10.self_attn.o_proj"));
}

TEST(IgnoreList, APartThatBeginsWithinAWordIsNotBetweenDots) {
  for (const char* entry : {"attn.o_proj", "self_attn.o"})
    EXPECT_THAT(findings({entry}), ElementsAre(::testing::HasSubstr("that looks for parts of names, what holds codes: model.layers.0.")))
        << entry;
}

TEST(IgnoreList, AnEntryMayNameNothing) {
  EXPECT_THAT(findings({"language_model.lm_head"}), ElementsAre("f: ignore: \"language_model.lm_head\" names nothing in the file"));
}

TEST(IgnoreList, ExpressionsOfTransformersAreNoWholeNames) {
  EXPECT_THAT(findings({"lm_head", "model\\.layers\\.1\\..*"}, false),
              ElementsAre("f: ignore: for a server that looks for whole names no entry names what holds no codes: "
                          "model.layers.1.self_attn.q_proj, model.layers.1.self_attn.k_proj, model.layers.1.self_attn.o_proj, "
                          "model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj"));
}

}  // namespace mantissa::ignore_list_test
