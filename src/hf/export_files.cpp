#include "hf/export_files.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>

#include "hf/gguf_reader.h"
#include "hf/hf_weights.h"
#include "json/json_fields.h"
#include "mantissa/json/json.h"
#include "text/bpe_model.h"
#include "text/bpe_trainer.h"
#include "text/jinja.h"

namespace mantissa {
namespace {

// Other keys that change which tokens are drawn, with the value that changes nothing; null, [] and {} do so, too.
struct NeutralKey {
  const char* key;
  Json value;
  bool of_beams = false;  // it changes nothing where num_beams does not
};
const std::vector<NeutralKey>& neutral_keys() {
  static const std::vector<NeutralKey> keys = {{"repetition_penalty", 1.0},
                                               {"encoder_repetition_penalty", 1.0},
                                               {"presence_penalty", 0.0},
                                               {"frequency_penalty", 0.0},
                                               {"no_repeat_ngram_size", 0},
                                               {"encoder_no_repeat_ngram_size", 0},
                                               {"min_p", 0.0},
                                               {"typical_p", 1.0},
                                               {"epsilon_cutoff", 0.0},
                                               {"eta_cutoff", 0.0},
                                               {"num_beams", 1},
                                               {"length_penalty", 1.0, true},
                                               {"diversity_penalty", 0.0, true},
                                               {"exponential_decay_length_penalty", nullptr},
                                               {"force_words_ids", nullptr},
                                               {"penalty_alpha", nullptr},
                                               {"guidance_scale", 1.0},
                                               {"bad_words_ids", nullptr},
                                               {"suppress_tokens", Json(Json::Entries())},
                                               {"begin_suppress_tokens", Json(Json::Entries())},
                                               {"forced_bos_token_id", nullptr},
                                               {"forced_eos_token_id", nullptr},
                                               {"sequence_bias", nullptr},
                                               {"min_length", 0},
                                               {"min_new_tokens", 0}};
  return keys;
}

}  // namespace

SamplingDefaults read_sampling_defaults(std::string_view content, const std::string& source) {
  const Json config = parse_json(content, source);
  require(config.is_object(), ExitCode::data, source, ": must be a JSON object");
  const JsonReader reader(config, source);
  const auto stated = [&](const char* key) { return !config.get(key).is_null(); };
  SamplingDefaults out;
  const auto differs = [&](const char* key, const Json& neutral) {
    const Json& value = config.get(key);
    return stated(key) && value != neutral && value != Json(Json::Entries()) && value != Json(Json::Members());
  };
  const bool beams = differs("num_beams", 1);
  for (const NeutralKey& known : neutral_keys())
    if (differs(known.key, known.value) && (beams || !known.of_beams))
      out.unused.push_back(text(known.key, " = ", config.get(known.key).shown()));
  if (stated("do_sample") && reader.at("do_sample").as<bool>()) {
    if (stated("temperature")) out.temperature = reader.at("temperature").as<double>(limits::not_negative);
    if (stated("top_p")) out.top_p = reader.at("top_p").as<double>(Limits{.min = 0, .max = 1, .above_min = true});
    if (stated("top_k")) out.top_k = reader.at("top_k").as<int64_t>(limits::between(0, 1e9));
    return out;
  }
  const NeutralKey defaults[] = {{"temperature", 1.0}, {"top_p", 1.0}, {"top_k", 50}};  // transformers has these
  for (const NeutralKey& known : defaults)
    if (differs(known.key, known.value))
      out.unused.push_back(text(known.key, " = ", config.get(known.key).shown(), " beside do_sample that is not true"));
  return out;
}

namespace {

constexpr const char* kTemplateFile = "chat_template.jinja";
constexpr const char* kOlderFile = "chat_template.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kTemplateKey = "chat_template";

struct Conversation {
  std::vector<ChatMessage> messages;
  bool asks;  // for an answer
};

// Two conversations: the first shows a default system message and the end of a conversation, the second a given one, an earlier answer and
// how an answer is asked for.
std::array<Conversation, 2> conversations() {
  const ChatMessage hi{.role = ChatRole::user, .content = "Hi"}, hello{.role = ChatRole::assistant, .content = "Hello."};
  return {Conversation{.messages = {hi, hello}, .asks = false},
          Conversation{.messages = {{.role = ChatRole::system, .content = "Be brief."},
                                    hi,
                                    hello,
                                    {.role = ChatRole::user, .content = "What is 2 + 2?"}},
                       .asks = true}};
}

Json json_of(const std::vector<ChatMessage>& messages) {
  Json::Entries out;
  for (const ChatMessage& message : messages) out.push_back({{"role", choice_name(message.role)}, {"content", message.content}});
  return out;
}

const TokenizerFile* file_named(const std::vector<TokenizerFile>& files, const char* name) {
  const auto found = std::ranges::find(files, name, &TokenizerFile::name);
  return found == files.end() ? nullptr : &*found;
}

Json json_in(const std::vector<TokenizerFile>& files, const char* name) {
  const TokenizerFile* const file = file_named(files, name);
  return file != nullptr ? parse_json_or_null(file->bytes) : Json();
}

std::string rendered(const Conversation& conversation, const FolderTemplate& by, const Json& tokenizer_config, ChatTemplate which,
                     const std::optional<std::string>& date) {
  Json variables = Json::Members();
  variables["messages"] = json_of(conversation.messages);
  variables["add_generation_prompt"] = conversation.asks;
  variables["tools"] = variables["documents"] = Json();
  if (date) variables["date_string"] = *date;
  for (const auto& [name, value] : tokenizer_config.members()) {  // texts of special tokens, by the roles that they have
    const Json& token = value.is_object() ? value.get("content") : value;
    if (name.ends_with("_token") && token.is_string()) variables[name] = token;
  }
  const std::string today = date.value_or(which == ChatTemplate::llama3 ? kLlama3Date : "");
  return render_jinja(by.text, {.variables = variables, .strftime_now = [today](const std::string&) { return today; }});
}

}  // namespace

std::optional<FolderTemplate> folder_template(const std::vector<TokenizerFile>& files) {
  if (const TokenizerFile* const own = file_named(files, kTemplateFile)) return FolderTemplate{.file = kTemplateFile, .text = own->bytes};
  for (const char* const name : {kTokenizerConfig, kOlderFile}) {
    const Json config = json_in(files, name);
    const Json& value = config.get(kTemplateKey);  // one, or a list of them with names
    if (value.is_string()) return FolderTemplate{.file = name, .text = value.string()};
    for (const Json& one : value.entries())
      if (one.get("name") == Json("default") && one.get("template").is_string())
        return FolderTemplate{.file = name, .text = one.get("template").string()};
  }
  return std::nullopt;
}

std::vector<TokenizerFile> files_beside_tokenizer(const std::filesystem::path& tokenizer) {
  std::error_code unknown;
  const std::filesystem::path folder = std::filesystem::is_directory(tokenizer, unknown) ? tokenizer : tokenizer.parent_path();
  std::vector<TokenizerFile> files;
  if (is_gguf_file(tokenizer)) {
    GgufModelFiles model(tokenizer);
    for (const char* const name : {kTemplateFile, kTokenizerConfig})
      if (std::optional<std::string> content = model.file(name)) files.push_back({.name = name, .bytes = std::move(*content)});
    return files;
  }
  for (const char* const name : {kTemplateFile, kTokenizerConfig, kOlderFile})
    if (std::filesystem::is_regular_file(folder / name, unknown)) files.push_back({.name = name, .bytes = hf_file(folder, name)});
  return files;
}

std::string chat_template_difference(const std::vector<TokenizerFile>& files, ChatTemplate which, const std::optional<std::string>& date) {
  const std::optional<FolderTemplate> own = folder_template(files);
  if (!own) return "";
  const Json config = json_in(files, kTokenizerConfig);
  for (const Conversation& conversation : conversations()) {
    const auto pieces =
        conversation.asks ? render_chat_prompt(which, conversation.messages, date) : render_chat(which, conversation.messages, date);
    const std::string messages = json_of(conversation.messages).dump(-1, Json::Order::keys), here = joined(pieces, "", &ChatPiece::text);
    std::string there;
    try {
      there = rendered(conversation, *own, config, which, date);
    } catch (const Error& error) {
      return text("its ", own->file, " does not render ", messages, " here, so it may differ from data.chat_template ", choice_name(which),
                  ": ", error.what());
    }
    if (there == here) continue;
    const auto [first, other] = std::ranges::mismatch(there, here);
    const auto at = static_cast<size_t>(first - there.begin());
    const auto around = [at](const std::string& whole) {  // the place, in quotation marks
      size_t begin = at > kShownCharacters / 2 ? at - kShownCharacters / 2 : 0;
      while (begin > 0 && begin < whole.size() && continues_character(whole[begin])) --begin;
      return Json((begin > 0 ? "..." : "") + shortened(std::string_view(whole).substr(begin), 2 * kShownCharacters)).dump();
    };
    return text("its ", own->file, " renders ", messages, conversation.asks ? " and the begin of an answer" : "", " as ", around(there),
                ", data.chat_template ", choice_name(which), " as ", around(here));
  }
  return "";
}

std::string take_chat_template(const DataConfig& data, std::vector<TokenizerFile>& files) {
  if (!data.chat_template) return "";
  const std::string name = choice_name(*data.chat_template),
                    difference = chat_template_difference(files, *data.chat_template, data.chat_date);
  const std::optional<FolderTemplate> before = folder_template(files);
  if (before && difference.empty()) return "";
  std::erase_if(files, [](const TokenizerFile& file) { return file.name == kTemplateFile || file.name == kOlderFile; });
  for (TokenizerFile& file : files) {
    if (file.name != kTokenizerConfig) continue;
    Json config = parse_json_or_null(file.bytes);
    if (config.is_object() && config.members().erase(kTemplateKey) > 0) file.bytes = config.dump(2, Json::Order::keys) + "\n";
  }
  files.push_back({.name = kTemplateFile, .bytes = chat_template_text(*data.chat_template, data.chat_date)});
  return text("chat template ", name,
              before ? text(", which was trained, in the place of the model's: ", difference) : ", which was trained");
}

namespace {

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

}  // namespace

ExportFiles export_files(const DataConfig& data, const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer) {
  ExportFiles out;
  for (const TokenizerFile& file : files) {
    if (file.name != "config.json") {
      out.files.push_back(file);
      continue;
    }
    constexpr const char* kFirstConfig = "config.json of the model that training started from";
    out.special = read_special_tokens(file.bytes, kFirstConfig);
    out.router_loss = read_router_loss_keys(file.bytes, kFirstConfig);
  }
  if (const std::optional<Tokenizer> own = own_tokenizer(files, tokenizer))
    std::ranges::move(files_of(*own), std::back_inserter(out.files));
  std::vector<int64_t>& ends = out.special.end;
  if (ends.empty()) std::ranges::copy(learned_end_tokens(data, tokenizer), std::back_inserter(ends));
  const std::vector<int32_t> taught = taught_end_tokens(data, tokenizer);
  const auto add_taught = [&](std::vector<int64_t>& ids) {
    for (const int32_t id : taught)
      if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  };
  add_taught(ends);
  for (TokenizerFile& file : out.files) {
    if (file.name != "generation_config.json") continue;
    const std::vector<int64_t> named = read_special_tokens(file.bytes, file.name).end;
    std::vector<int64_t> all = named.empty() ? ends : named;
    add_taught(all);
    if (taught.empty() || all == named) continue;
    Json config = parse_json(file.bytes, file.name);
    config["eos_token_id"] = all;
    file.bytes = config.dump(2, Json::Order::keys) + "\n";
  }
  out.chat_template = take_chat_template(data, out.files);
  return out;
}

bool has_other_tokenizer(const std::vector<TokenizerFile>& files, const Tokenizer& tokenizer) {
  if (std::ranges::none_of(files, is_of_tokenizer)) return false;
  const auto found = std::ranges::find(files, "tokenizer.json", &TokenizerFile::name);
  if (found == files.end()) return true;
  if (tokenizer.files() != nullptr && tokenizer.files()->tokenizer == found->bytes) return false;
  const Json theirs = parse_json_or_null(found->bytes), own = tokenizer_json(tokenizer);
  const auto differs = [&](const char* name) { return theirs.get(name) != own.get(name); };
  const auto model_differs = [&](const char* name) { return theirs.get("model").get(name) != own.get("model").get(name); };
  // These decide which id a piece of text has, of a tokenizer that mantissa made the first four alone.
  if (differs("normalizer") || differs("pre_tokenizer") || model_differs("vocab") || model_differs("merges")) return true;
  return tokenizer.files() != nullptr &&
         (differs("added_tokens") || model_differs("ignore_merges") || model_differs("byte_fallback") || model_differs("unk_token"));
}

namespace {

// Returns a part of a tokenizer.json without what changes no id: offsets, what stands for its default, and steps that do nothing else.
Json without_offsets(const Json& part) {
  if (part.is_list()) {
    Json out = Json::Entries();
    for (const Json& entry : part.entries()) out.entries().push_back(without_offsets(entry));
    return out;
  }
  if (!part.is_object()) return part;
  Json out = Json::Members();
  for (const auto& [name, value] : part.members())
    if (name != "trim_offsets" && !value.is_null() && value != Json(false)) out[name] = without_offsets(value);
  return out;
}

// Returns what stands around a text: no step ByteLevel, which changes offsets alone, and not the form for pairs.
Json around_text(const Json& processor) {
  const bool sequence = processor.get("type") == "Sequence";
  const Json::Entries steps = sequence ? processor.get("processors").entries() : Json::Entries{processor};
  Json out = Json::Entries();
  for (const Json& step : steps) {
    if (step.is_null() || step.get("type") == "ByteLevel") continue;
    Json kept = without_offsets(step);
    kept.members().erase("pair");
    out.entries().push_back(std::move(kept));
  }
  return out;
}

// Returns whether merges make a token of every piece that is one, so that it is the same to ignore them there.
bool merges_make_all_tokens(const Json& root) {
  Json model = root.get("model");
  model["ignore_merges"] = false;
  const BpeModel merging = BpeModel::from(JsonReader(model, "tokenizer.json", "model"), true);
  BpeModel::Cache cache;
  std::set<std::string> added;  // texts are cut at these before
  for (const Json& token : root.get("added_tokens").entries()) added.insert(token.get("content").string());
  return std::ranges::all_of(model.get("vocab").members(), [&](const auto& entry) {
    const std::optional<std::string> bytes = added.contains(entry.first) ? std::nullopt : bytes_of_letters(entry.first);
    std::vector<int32_t> ids;
    if (bytes) merging.encode(*bytes, cache, ids);
    return !bytes || (ids.size() == 1 && Json(ids.front()) == entry.second);
  });
}

// Returns what decides about ids, in one form: programs write merges as strings or as pairs, and added tokens also into the vocabulary.
Json ids_of_tokenizer(const Json& root) {
  const Json& model = root.get("model");
  Json vocab = Json::Members(), merges = Json::Entries(), added = Json::Members(), options = Json::Members();
  for (const auto& [token, id] : model.get("vocab").members()) vocab[token] = id;
  for (const Json& token : root.get("added_tokens").entries()) {
    const std::string& content = token.get("content").string();
    vocab[content] = token.get("id");
    for (const char* const flag : {"special", "single_word", "lstrip", "rstrip"}) added[content][flag] = token.get(flag) == Json(true);
  }
  for (const Json& merge : model.get("merges").entries())
    merges.entries().push_back(merge.is_list() && merge.size() == 2 ? Json(merge.at(0).string() + ' ' + merge.at(1).string()) : merge);
  for (const char* const name :
       {"type", "ignore_merges", "byte_fallback", "fuse_unk", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = model.get(name);
    if (!value.is_null() && value != Json(false) && value != Json("") && value != Json("BPE")) options[name] = value;
  }
  return {{"model.vocab", std::move(vocab)},
          {"model.merges", std::move(merges)},
          {"model", std::move(options)},
          {"added_tokens", std::move(added)},
          {"normalizer", without_offsets(root.get("normalizer"))},
          {"pre_tokenizer", without_offsets(root.get("pre_tokenizer"))},
          {"post_processor", around_text(root.get("post_processor"))}};
}

}  // namespace

std::optional<std::string> tokenizer_difference(const std::string& found, const std::string& expected, const std::string& where) {
  if (found == expected) return {};
  const Json root = parse_json(found, where);
  Json here = ids_of_tokenizer(root), there = ids_of_tokenizer(parse_json(expected, "tokenizer.json of the model"));
  if (here["model"].get("ignore_merges") != there["model"].get("ignore_merges") && merges_make_all_tokens(root))
    for (Json* const one : {&here, &there}) (*one)["model"].members().erase("ignore_merges");
  const Json& vocab = here.get("model.vocab");
  for (const auto& [token, id] : there.get("model.vocab").members()) {
    const Json* const given = vocab.find(token);
    if (given == nullptr) return text("tokenizer.json: lacks the token ", Json(token).shown());
    if (*given != id) return text("tokenizer.json: ", Json(token).shown(), " has the id ", given->shown(), ", not ", id.shown());
  }
  for (const auto& [name, part] : there.members())
    if (here.get(name) != part) return text("tokenizer.json: ", name, " differs");
  return {};
}

std::optional<Tokenizer> own_tokenizer(const std::vector<TokenizerFile>& files, const std::optional<Tokenizer>& tokenizer) {
  return std::ranges::any_of(files, is_of_tokenizer) ? std::nullopt : tokenizer;
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
