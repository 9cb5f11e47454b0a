#include "mantissa/hf/export_files.h"

#include <algorithm>
#include <iterator>

#include "mantissa/base/file.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/json/json.h"
#include "mantissa/text/bpe_model.h"
#include "mantissa/text/bpe_trainer.h"
#include "mantissa/text/tokenizer_file.h"

namespace mantissa {
namespace {

constexpr const char* kFirstConfig = "config.json of the model that training started from";

Json tokenizer_json(const Tokenizer& tokenizer) {
  if (tokenizer.files() != nullptr) return parse_json(tokenizer.files()->tokenizer, "tokenizer.json");
  const bool bytes = tokenizer.kind() == TokenizerKind::byte;
  Json vocab = Json::Members();
  for (int32_t id = 0; id < static_cast<int32_t>(tokenizer.size()); ++id) {
    const auto byte = static_cast<char>(id);
    vocab.add(bytes ? letters_of_bytes({&byte, 1}) : tokenizer.decode({&id, 1}), id);
  }
  return tokenizer_file(
      {.vocab = vocab, .pre_tokenizer = bytes ? byte_level_part() : Json(), .decoder = bytes ? byte_level_part() : Json{{"type", "Fuse"}}});
}

bool is_of_tokenizer(const TokenizerFile& file) { return file.name != "config.json" && file.name != "generation_config.json"; }

// Returns the parts of a tokenizer.json that decide which id a piece of text has.
Json vocabulary(const Json& tokenizer) {
  const Json& model = tokenizer.get("model");
  return Json::Entries{tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"), model.get("vocab"), model.get("merges")};
}

}  // namespace

void write_export_file(const std::filesystem::path& folder, const std::string& name, std::string_view content) {
  File file = File::create(folder / name);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.sync();
  file.close();
}

SpecialTokens special_tokens(const std::vector<TokenizerFile>& files) {
  for (const TokenizerFile& file : files) {
    if (file.name == "config.json") return read_special_tokens(file.bytes, kFirstConfig);
  }
  return {};
}

RouterLossKeys router_loss_keys(const std::vector<TokenizerFile>& files) {
  for (const TokenizerFile& file : files) {
    if (file.name == "config.json") return read_router_loss_keys(file.bytes, kFirstConfig);
  }
  return {};
}

void add_end_token(int64_t id, SpecialTokens& tokens) {
  if (std::ranges::find(tokens.end, id) == tokens.end.end()) tokens.end.push_back(id);
}

void add_end_tokens(const std::vector<int32_t>& learned, const SpecialTokens& of_config, TokenizerFile& file) {
  SpecialTokens tokens = read_special_tokens(file.bytes, file.name);
  const std::vector<int64_t> named = tokens.end;
  if (named.empty()) tokens.end = of_config.end;
  for (const int32_t id : learned) add_end_token(id, tokens);
  if (learned.empty() || tokens.end == named) return;
  Json config = parse_json(file.bytes, file.name);
  config["eos_token_id"] = tokens.end;
  file.bytes = config.dump(2, Json::Order::keys) + "\n";
}

bool has_other_tokenizer(const std::vector<TokenizerFile>& files, const Tokenizer& tokenizer) {
  if (std::ranges::none_of(files, is_of_tokenizer)) return false;
  const auto found = std::ranges::find(files, "tokenizer.json", &TokenizerFile::name);
  if (found == files.end()) return true;
  if (tokenizer.files() != nullptr && tokenizer.files()->tokenizer == found->bytes) return false;
  const Json theirs = parse_json_or_null(found->bytes), own = tokenizer_json(tokenizer);
  const auto same_option = [&](const char* name) { return theirs.get("model").get(name) == own.get("model").get(name); };
  const bool same_rest =
      tokenizer.files() == nullptr || (theirs.get("added_tokens") == own.get("added_tokens") && same_option("ignore_merges") &&
                                       same_option("byte_fallback") && same_option("unk_token"));
  return vocabulary(theirs) != vocabulary(own) || !same_rest;
}

std::optional<Tokenizer> own_tokenizer(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer) {
  return std::ranges::any_of(files, is_of_tokenizer) ? std::nullopt : tokenizer;
}

std::vector<TokenizerFile> model_files(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer) {
  std::vector<TokenizerFile> out;
  std::ranges::copy_if(files, std::back_inserter(out), [](const TokenizerFile& file) { return file.name != "config.json"; });
  const std::optional<Tokenizer> own = own_tokenizer(files, tokenizer);
  if (own) std::ranges::copy(files_of(*own), std::back_inserter(out));
  return out;
}

std::vector<TokenizerFile> files_of(const Tokenizer& tokenizer) {
  const BpeFiles* const given = tokenizer.files();
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  if (tokenizer.end_token()) config.add("eos_token", kDefaultEndToken);  // so there is one without a file that names it
  const std::string own_config = config.dump(1, Json::Order::keys) + "\n";
  return {{.name = "tokenizer.json", .bytes = given ? given->tokenizer : tokenizer_json(tokenizer).dump(1, Json::Order::keys) + "\n"},
          {.name = "tokenizer_config.json", .bytes = given && !given->config.empty() ? given->config : own_config}};
}

}  // namespace mantissa
