#include <algorithm>

#include "hf/gguf_reader.h"
#include "hf/gguf_tokenizer.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "text/bpe_trainer.h"

namespace mantissa {
namespace {

Json pretokenizer_of(const GgufSplit& how) {
  Json bytes = byte_level_part();
  bytes["use_regex"] = how.expression == nullptr;
  Json::Entries steps;
  if (how.digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  if (how.expression != nullptr)
    steps.push_back({{"type", "Split"}, {"pattern", {{"Regex", how.expression}}}, {"behavior", "Isolated"}, {"invert", false}});
  if (steps.empty()) return bytes;
  steps.push_back(std::move(bytes));
  return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

class GgufTokenizer {
 public:
  explicit GgufTokenizer(const GgufHeader& header) : header_(header), how_(split()) {
    const auto tokens = header.strings(gguf::kTokens);
    if (!tokens) missing(gguf::kTokens);
    tokens_ = *tokens;
    types_ = header.integers(gguf::kTokenTypes).value_or(std::vector<int64_t>(tokens_.size(), kNormal));
    if (types_.size() != tokens_.size())
      header.wrong(gguf::kTokenTypes, text("has ", types_.size(), " entries, but there are ", tokens_.size(), " tokens"));
  }

  std::string tokenizer_json() const {
    Json vocab = Json::Members();
    Json::Entries added;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (types_[id] == static_cast<int64_t>(GgufTokenType::unused)) continue;
      const std::string token(tokens_[id]);
      if (vocab.contains(token)) header_.wrong(gguf::kTokens, text("\"", printable(shortened(token)), "\" is there twice"));
      vocab.add(token, id);
      const bool special = types_[id] == static_cast<int64_t>(GgufTokenType::control);
      if (!special && types_[id] != static_cast<int64_t>(GgufTokenType::user_defined)) continue;
      added.push_back({{"id", id},
                       {"content", token},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", special}});
    }
    const auto merges = header_.strings(gguf::kMerges);
    if (!merges) missing(gguf::kMerges);
    Json::Entries pairs;
    for (const std::string_view merge : *merges) pairs.emplace_back(std::string(merge));
    Json file = tokenizer_file({.vocab = std::move(vocab),
                                .merges = std::move(pairs),
                                .added_tokens = std::move(added),
                                .pre_tokenizer = pretokenizer_of(how_),
                                .decoder = byte_level_part()});
    if (gguf_difference_noted(header_, "tokenizer.json: normalizer:").value_or(how_.nfc)) file["normalizer"] = {{"type", "NFC"}};
    if (how_.whole_words) file["model"].add("ignore_merges", true);
    file["post_processor"] = post_processor();
    return file.dump(1, Json::Order::keys) + "\n";
  }

  std::string tokenizer_config() const {
    Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
    static constexpr std::pair<const char*, const char*> kRoles[] = {{"bos_token", gguf::kBosToken},
                                                                     {"eos_token", gguf::kEosToken},
                                                                     {"unk_token", gguf::kUnknownToken},
                                                                     {"pad_token", gguf::kPaddingToken}};
    for (const auto& [role, key] : kRoles)
      if (header_.find(key) != nullptr) config.add(role, token_of(key));
    return config.dump(1, Json::Order::keys) + "\n";
  }

 private:
  static constexpr auto kNormal = static_cast<int64_t>(GgufTokenType::normal);

  [[noreturn]] void missing(const char* key) const { fail(ExitCode::data, header_.source(), ": has no key \"", key, '"'); }

  const GgufSplit& split() const {
    const auto refuse = [&](const char* key, const auto&... what) {
      fail(ExitCode::usage, header_.source(), ": its tokenizer cannot be used: key \"", key, "\" ", what...);
    };
    const auto model = header_.string(gguf::kTokenizerModel), pre = header_.string(gguf::kTokenizerPre);
    if (!model) refuse(gguf::kTokenizerModel, "is missing");
    if (*model != "gpt2")
      refuse(gguf::kTokenizerModel, "is \"", printable(shortened(*model)), "\"; mantissa reads \"gpt2\", which is BPE of bytes");
    if (!pre) refuse(gguf::kTokenizerPre, "is missing, so nothing says where texts are cut");
    const auto found = std::ranges::find(kGgufSplits, *pre, [](const GgufSplit& one) { return std::string_view(one.name); });
    if (found == kGgufSplits.end())
      refuse(gguf::kTokenizerPre, "is \"", printable(shortened(*pre)), "\"; mantissa knows ", joined(kGgufSplits, ", ", &GgufSplit::name));
    return *found;
  }

  std::string token_of(const char* key) const {
    const std::optional<int64_t> id = header_.integer(key);
    if (!id) missing(key);
    if (*id < 0 || std::cmp_greater_equal(*id, tokens_.size()))
      header_.wrong(key, text("is ", *id, ", but there are ", tokens_.size(), " tokens"));
    return std::string(tokens_[static_cast<size_t>(*id)]);
  }

  Json post_processor() const {
    const bool begins = header_.boolean(gguf::kAddBos).value_or(how_.begins), ends = header_.boolean(gguf::kAddEos).value_or(false);
    if (!begins && !ends) return {};
    const Json sequence = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, second = {{"Sequence", {{"id", "B"}, {"type_id", 1}}}};
    Json::Entries single;
    Json special = Json::Members();
    const auto add = [&](const char* key) {
      const std::string token = token_of(key);
      single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
      special[token] = {{"id", token}, {"ids", Json::Entries{*header_.integer(key)}}, {"tokens", Json::Entries{token}}};
    };
    if (begins) add(gguf::kBosToken);
    single.push_back(sequence);
    if (ends) add(gguf::kEosToken);
    return {{"type", "TemplateProcessing"},
            {"single", single},
            {"pair", Json::Entries{sequence, second}},
            {"special_tokens", std::move(special)}};
  }

  const GgufHeader& header_;
  const GgufSplit& how_;
  std::vector<std::string_view> tokens_;
  std::vector<int64_t> types_;
};

}  // namespace

bool has_gguf_tokenizer(const GgufHeader& header) {
  return header.string(gguf::kTokenizerModel).value_or(kNoGgufVocabulary) != kNoGgufVocabulary;
}

std::map<std::string, std::string> gguf_tokenizer(const GgufHeader& header) {
  const GgufTokenizer tokenizer(header);
  return {{"tokenizer.json", tokenizer.tokenizer_json()}, {"tokenizer_config.json", tokenizer.tokenizer_config()}};
}

Tokenizer tokenizer_at(const std::string& path) {
  if (!is_gguf_file(path)) return Tokenizer::from_path(path);
  std::map<std::string, std::string> files = gguf_tokenizer(GgufFile(path).header());
  return Tokenizer::bpe({.tokenizer = std::move(files["tokenizer.json"]), .config = std::move(files["tokenizer_config.json"])},
                        path + ": its tokenizer");
}

std::vector<std::string> gguf_pretokenizers() {
  std::vector<std::string> names;
  for (const GgufSplit& one : kGgufSplits) names.emplace_back(one.name);
  return names;
}

std::vector<int64_t> gguf_end_tokens(const GgufHeader& header) {
  std::vector<int64_t> ends;
  for (const char* const key : {gguf::kEosToken, gguf::kEotToken, gguf::kEomToken}) {
    const std::optional<int64_t> id = header.integer(key);
    if (id && std::ranges::find(ends, *id) == ends.end()) ends.push_back(*id);
  }
  return ends;
}

}  // namespace mantissa
