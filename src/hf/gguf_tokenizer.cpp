#include "hf/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>

#include "hf/gguf_reader.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "text/bpe_model.h"
#include "text/bpe_tokenizer.h"
#include "text/bpe_trainer.h"

namespace mantissa {
namespace {

constexpr const char* kTokenizerJson = "tokenizer.json";

constexpr const char* kGpt2Split = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

const GgufSplit* split_by(const Json& expression) {
  const auto found = std::ranges::find_if(kGgufSplits, [&](const GgufSplit& one) {
    return !one.digits && expression == Json(one.expression != nullptr ? one.expression : kGpt2Split);
  });
  return found == kGgufSplits.end() ? nullptr : &*found;
}

const GgufSplit* digits_split() { return &*std::ranges::find(kGgufSplits, true, &GgufSplit::digits); }

// Returns the name for a pretokenizer: ByteLevel, alone or after one other step; null: llama.cpp has none.
const GgufSplit* split_of(const Json& pretokenizer) {
  const bool sequence = pretokenizer.get("type") == "Sequence";
  const Json::Entries steps = sequence ? pretokenizer.get("pretokenizers").entries() : Json::Entries{pretokenizer};
  if (steps.empty() || steps.size() > 2) return nullptr;
  const Json &last = steps.back(), &first = steps.front();
  if (last.get("type") != "ByteLevel" || last.get("add_prefix_space") != Json(false)) return nullptr;
  const bool splits = last.get("use_regex") != Json(false);
  if (steps.size() == 1) return splits ? split_by(kGpt2Split) : nullptr;
  if (first.get("type") == "Digits") return splits && first.get("individual_digits") == Json(true) ? digits_split() : nullptr;
  const bool inverted = first.get("invert") == Json(true);
  const bool keeps = first.get("behavior") == (inverted ? "Removed" : "Isolated");  // these expressions match all of a text
  return first.get("type") == "Split" && keeps && !splits ? split_by(first.get("pattern").get("Regex")) : nullptr;
}

// Returns what llama.cpp cannot read at all.
std::vector<std::string> unreadable_parts(const Json& root) {
  const Json &model = root.get("model"), &normalizer = root.get("normalizer");
  const auto part = [](const char* name, const std::string& what) { return text(kTokenizerJson, ": ", name, ": ", what); };
  std::vector<std::string> found;
  if (!model.get("type").is_null() && model.get("type") != "BPE")
    found.push_back(part("model.type", model.get("type").shown() + ": llama.cpp reads byte pairs (BPE) here"));
  if (model.get("merges").size() == 0) found.push_back(part("model.merges", "is empty, and llama.cpp wants some"));
  if (split_of(root.get("pre_tokenizer")) == nullptr)
    found.push_back(part("pre_tokenizer", root.get("pre_tokenizer").shown() + ": llama.cpp has no name for this way to cut texts"));
  if (!normalizer.is_null() && normalizer.get("type") != "NFC")
    found.push_back(part("normalizer", normalizer.shown() + ": llama.cpp normalizes nothing"));
  return found;
}

// Makes the tables of a tokenizer that llama.cpp can read.
class TokenizerTables {
 public:
  TokenizerTables(const ExportFiles& files, const std::string& file, const Json& root, int64_t vocab_size)
      : files_(files),
        tokenizer_(BpeTokenizer::from_json(file, kTokenizerJson)),
        root_(root),
        split_(*split_of(root.get("pre_tokenizer"))),
        tokens_(static_cast<size_t>(vocab_size)) {}

  GgufRemarks add(GgufKeys& keys) {
    find_tokens();
    keys.add_string(gguf::kTokenizerModel, "gpt2");
    keys.add_string(gguf::kTokenizerPre, split_.name);
    keys.add_strings(gguf::kTokens, tokens_);
    keys.add_i32s(gguf::kTokenTypes, types_);
    keys.add_strings(gguf::kMerges, merges());
    add_special_tokens(keys);
    if (const std::optional<FolderTemplate> chat = folder_template(files_.files)) keys.add_string(gguf::kChatTemplate, chat->text);
    compare_words();
    if (!root_.get("normalizer").is_null()) differs("normalizer", "NFC: llama.cpp normalizes nothing, so texts that are not in NFC differ");
    if (split_.close)
      remarks_.notes.push_back(text(kTokenizerJson, ": pre_tokenizer: llama.cpp takes other classes of characters outside of ASCII for ",
                                    split_.name, ", so that such texts may have other ids"));
    return std::move(remarks_);
  }

 private:
  void differs(const char* part, const std::string& what) { remarks_.differences.push_back(text(kTokenizerJson, ": ", part, ": ", what)); }

  void put(int64_t id, const std::string& token, GgufTokenType type) {
    require(id >= 0 && id < std::ssize(tokens_), ExitCode::usage, kTokenizerJson, ": the token ", Json(token).shown(), " has the id ", id,
            ", and model.vocab_size is ", tokens_.size(), ": a GGUF file has as many tokens as the model");
    tokens_[static_cast<size_t>(id)] = token;
    types_[static_cast<size_t>(id)] = static_cast<int32_t>(type);
  }

  // Ids without a token, up to the size of the model, get texts that are none: llama.cpp wants all to be different.
  void find_tokens() {
    types_.assign(tokens_.size(), static_cast<int32_t>(GgufTokenType::unused));
    for (const auto& [token, id] : root_.get("model").get("vocab").members())
      put(JsonReader(id, kTokenizerJson, "model.vocab").as<int64_t>(), token, GgufTokenType::normal);
    for (const Json& entry : root_.get("added_tokens").entries()) {
      const auto token = JsonReader(entry, kTokenizerJson, "added_tokens").as<AddedToken>();
      put(token.id, token.content, token.special ? GgufTokenType::control : GgufTokenType::user_defined);
      if (token.single_word || token.lstrip || token.rstrip)
        differs("added_tokens",
                text(Json(token.content).shown(), ": llama.cpp looks at nothing beside a token (single_word, lstrip, rstrip)"));
    }
    const std::set<std::string> known(tokens_.begin(), tokens_.end());
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (types_[id] != static_cast<int32_t>(GgufTokenType::unused)) continue;
      tokens_[id] = text("[PAD", id, ']');
      while (known.contains(tokens_[id])) tokens_[id] += ']';
    }
  }

  std::vector<std::string> merges() const {
    std::vector<std::string> out;
    for (const Json& merge : root_.get("model").get("merges").entries())
      out.push_back(merge.is_list() ? text(merge.at(0).string(), ' ', merge.at(1).string()) : merge.string());
    return out;
  }

  // llama.cpp ignores merges for pieces that are tokens, or does not, by the name of the split.
  void compare_words() {
    Json model = root_.get("model");
    const bool ignores = model.get("ignore_merges") == Json(true);
    if (ignores == split_.whole_words) return;
    model["ignore_merges"] = false;
    const BpeModel merging = BpeModel::from(JsonReader(model, kTokenizerJson, "model"), true);
    BpeModel::Cache cache;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const std::optional<std::string> bytes = bytes_of_letters(tokens_[id]);
      if (types_[id] != static_cast<int32_t>(GgufTokenType::normal) || !bytes) continue;
      std::vector<int32_t> ids;
      merging.encode(*bytes, cache, ids);
      if (ids == std::vector{static_cast<int32_t>(id)}) continue;
      return differs("model.ignore_merges", text("llama.cpp ", split_.whole_words ? "takes " : "does not take ", Json(tokens_[id]).shown(),
                                                 " as one token, which merges make several of"));
    }
  }

  std::optional<int64_t> token_named(const char* role) const {
    const auto file = std::ranges::find(files_.files, "tokenizer_config.json", &TokenizerFile::name);
    if (file == files_.files.end()) return {};
    const Json config = parse_json(file->bytes, file->name);
    const Json& token = config.get(role);
    if (token.is_null()) return {};
    const auto found = std::ranges::find(tokens_, token.is_object() ? token.get("content").string() : token.string());
    return found == tokens_.end() ? std::nullopt : std::optional<int64_t>(found - tokens_.begin());
  }

  std::vector<int64_t> end_tokens() const {
    std::vector<int64_t> ends;
    for (const TokenizerFile& file : files_.files)
      if (file.name == "generation_config.json") ends = read_special_tokens(file.bytes, file.name).end;
    if (ends.empty()) ends = files_.special.end;
    std::erase_if(ends, [&](int64_t id) { return id < 0 || id >= std::ssize(tokens_); });
    return ends;
  }

  // Without a first end token, llama.cpp ends texts at the token of id 11.
  void add_special_tokens(GgufKeys& keys) {
    const auto before = tokenizer_.before_text(), after = tokenizer_.after_text();
    const std::vector<int64_t> ends = end_tokens();
    constexpr std::array kEnds = {gguf::kEosToken, gguf::kEotToken, gguf::kEomToken};
    for (size_t i = 0; i < std::min(ends.size(), kEnds.size()); ++i) keys.add_u32(kEnds[i], ends[i]);
    if (ends.empty()) differs("end tokens", "none is known (eos_token_id of generation_config.json): llama.cpp ends texts at token 11");
    if (ends.size() > kEnds.size()) differs("end tokens", text("there are ", ends.size(), ", and llama.cpp knows the first three"));
    std::optional<int64_t> begin = token_named("bos_token");
    if (!before.empty()) begin = before[0];
    if (!begin && !files_.special.begin.empty()) begin = files_.special.begin[0];
    if (!begin && !ends.empty()) begin = ends[0];
    if (begin && *begin < std::ssize(tokens_)) keys.add_u32(gguf::kBosToken, *begin);
    if (!files_.special.pad.empty() && files_.special.pad[0] >= 0 && files_.special.pad[0] < std::ssize(tokens_))
      keys.add_u32(gguf::kPaddingToken, files_.special.pad[0]);
    keys.add_bool(gguf::kAddBos, !before.empty());
    keys.add_bool(gguf::kAddEos, !after.empty());
    if (before.size() > 1 || after.size() > 1 || (after.size() == 1 && (ends.empty() || after[0] != ends[0])))
      differs("post_processor", "llama.cpp puts one token before a text, and the first end token behind it");
  }

  const ExportFiles& files_;
  const BpeTokenizer tokenizer_;
  const Json& root_;
  const GgufSplit& split_;
  std::vector<std::string> tokens_;
  std::vector<int32_t> types_;
  GgufRemarks remarks_;
};

std::string left_out() { return text("the tokenizer is left out of the file, as llama.cpp cannot read it: ", kGgufWithoutTokenizer); }

}  // namespace

GgufRemarks add_gguf_tokenizer(const ExportFiles& files, int64_t vocab_size, GgufKeys& keys) {
  const auto file = std::ranges::find(files.files, kTokenizerJson, &TokenizerFile::name);
  GgufRemarks remarks;
  if (file == files.files.end()) {
    for (const TokenizerFile& other : files.files)
      if (other.name == "tokenizer.model" || other.name == "vocab.json")
        remarks.differences.push_back(text(other.name, ": is not read, and there is no ", kTokenizerJson));
    remarks.notes.push_back(remarks.differences.empty() ? text("tokenizer: the model has none: ", kGgufWithoutTokenizer) : left_out());
    keys.add_string(gguf::kTokenizerModel, kNoGgufVocabulary);
    remarks.has_tokenizer = false;
    return remarks;
  }
  const Json root = parse_json(file->bytes, file->name);
  remarks.differences = unreadable_parts(root);
  if (remarks.differences.empty()) return TokenizerTables(files, file->bytes, root, vocab_size).add(keys);
  remarks.notes.push_back(left_out());
  keys.add_string(gguf::kTokenizerModel, kNoGgufVocabulary);
  remarks.has_tokenizer = false;
  return remarks;
}

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
