#include "text/bpe_tokenizer.h"

#include <algorithm>

#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "text/characters.h"

namespace mantissa {
namespace {

size_t start_of_character_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (!begins_character(text[at])) --at;
  return at;
}

bool is_word_before(std::string_view text, size_t end) {
  if (end == 0) return false;
  size_t at = start_of_character_before(text, end);
  return is_word_character(next_character(text, at));
}

// Returns where the white space that ends here begins.
size_t start_of_space_before(std::string_view text, size_t from, size_t end) {
  while (end > from) {
    const size_t start = start_of_character_before(text, end);
    size_t at = start;
    if (!is_white_space(next_character(text, at))) break;
    end = start;
  }
  return end;
}

size_t end_of_space_after(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t next = at;
    if (!is_white_space(next_character(text, next))) break;
    at = next;
  }
  return at;
}

}  // namespace

void AddedTokenMatcher::add(const AddedToken& token, const std::string& occurrence) {
  if (occurrence.empty()) return;
  uint32_t node = 0;
  for (const char c : occurrence) {
    const auto byte = static_cast<uint8_t>(c);
    const auto found = std::ranges::find(nodes_[node].next, byte, &std::pair<uint8_t, uint32_t>::first);
    if (found != nodes_[node].next.end()) {
      node = found->second;
      continue;
    }
    const auto made = static_cast<uint32_t>(nodes_.size());
    nodes_[node].next.emplace_back(byte, made);
    nodes_.emplace_back();
    node = made;
  }
  nodes_[node].token = &token;
  first_[static_cast<uint8_t>(occurrence.front())] = true;
  longest_ = std::max(longest_, occurrence.size());
}

AddedTokenMatcher::Found AddedTokenMatcher::match_at(std::string_view text, size_t at) const {
  Found found;
  uint32_t node = 0;
  for (size_t end = at; end < text.size();) {
    const auto byte = static_cast<uint8_t>(text[end++]);
    const auto next = std::ranges::find(nodes_[node].next, byte, &std::pair<uint8_t, uint32_t>::first);
    if (next == nodes_[node].next.end()) break;
    node = next->second;
    if (nodes_[node].token != nullptr) found = {.begin = at, .end = end, .own_end = end, .token = nodes_[node].token};
  }
  return found;
}

AddedTokenMatcher::Found AddedTokenMatcher::find(std::string_view text, Start from, size_t limit, SpecialTokenText special) const {
  for (size_t at = from.token; at < limit; ++at) {
    if (!first_[static_cast<uint8_t>(text[at])]) continue;
    Found found = match_at(text, at);
    if (found.token == nullptr) continue;
    const AddedToken& token = *found.token;
    const bool is_text = token.special && special == SpecialTokenText::text;
    size_t behind = found.end;
    const bool within_word = token.single_word && (is_word_before(text, found.begin) ||
                                                   (behind < text.size() && is_word_character(next_character(text, behind))));
    if (is_text || within_word) {
      at = found.end - 1;
      continue;
    }
    if (token.lstrip) found.begin = start_of_space_before(text, from.text, found.begin);
    if (token.rstrip) found.end = end_of_space_after(text, std::max(found.end, from.space));
    return found;
  }
  return {};
}

AddedTokens AddedTokens::from(const JsonReader& json, const Normalizer& normalizer) {
  AddedTokens out;
  if (json.value().is_null()) return out;
  for (const JsonReader& entry : json.entries()) {
    auto token = entry.as<AddedToken>();
    if (!token.content.empty()) out.tokens_.push_back(std::move(token));  // tokenizers passes over empty ones
  }
  for (size_t i = 0; i < out.tokens_.size(); ++i) {
    const AddedToken& token = out.tokens_[i];
    json.require(out.by_id_.emplace(token.id, i).second, "two tokens have the id ", token.id);
    json.require(out.by_content_.emplace(token.content, i).second, "\"", shortened(token.content), "\" is listed twice");
    if (token.normalized)
      out.after_.add(token, normalizer.apply(token.content));
    else
      out.before_.add(token, token.content);
  }
  return out;
}

const AddedToken* AddedTokens::find(int32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = by_content_.find(content);
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}

bool AddedTokens::work_on_parts() const {
  return std::ranges::none_of(tokens_, [](const AddedToken& token) { return token.single_word || token.lstrip || token.rstrip; });
}

namespace {

constexpr size_t kMostDecoderGrowth = 1024;
constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

std::string concatenated(const std::vector<std::string>& tokens, std::string_view between = "") {
  std::string out;
  for (const std::string& token : tokens) {
    if (&token != &tokens.front()) out += between;
    out += token;
  }
  return out;
}

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// Returns the byte that "<0x0A>" names; -1: it names none.
int named_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  const int high = digit_of(token[3]), low = digit_of(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

// Appends the text that named bytes spell, or U+FFFD for each of them.
void add_named(std::string& bytes, std::vector<std::string>& tokens) {
  if (bytes.empty()) return;
  if (is_utf8(bytes))
    tokens.push_back(bytes);
  else
    tokens.insert(tokens.end(), bytes.size(), std::string(kReplacementCharacter));
  bytes.clear();
}

// Puts one text in the place of tokens that follow each other and name bytes.
void fall_back_to_bytes(std::vector<std::string>& tokens) {
  std::vector<std::string> out;
  std::string bytes;  // bytes named by the tokens just before, one each
  for (std::string& token : tokens) {
    const int byte = named_byte(token);
    if (byte >= 0) {
      bytes += static_cast<char>(byte);
      continue;
    }
    add_named(bytes, out);
    out.push_back(std::move(token));
  }
  add_named(bytes, out);
  tokens = std::move(out);
}

}  // namespace

std::string lossy_utf8(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[at + i]); };
    const uint8_t lead = byte(0);
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 || lead > 0xF4 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;  // 0: begins none
    // No overlong forms, no surrogates, nothing above U+10FFFF: the second byte tells.
    const uint8_t least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    size_t found = 1;
    while (found < std::min(length, bytes.size() - at) && byte(found) >= (found == 1 ? least : 0x80) &&
           byte(found) <= (found == 1 ? most : 0xBF))
      ++found;
    out += found == length ? bytes.substr(at, length) : kReplacementCharacter;
    at += found;
  }
  return out;
}

TextDecoder TextDecoder::from(const JsonReader& json) {
  TextDecoder out;
  if (!json.value().is_null()) out.add_steps(json);
  return out;
}

void TextDecoder::add_steps(const JsonReader& json) {
  using Tokens = std::vector<std::string>;
  const auto type = json.at("type").as<std::string>();
  json.require(steps_.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("decoders").entries()) add_steps(one);
  } else if (type == "ByteLevel") {
    steps_.emplace_back([](Tokens& tokens) {
      std::string bytes;
      for (const std::string& token : tokens) bytes += bytes_of_letters(token).value_or(token);
      tokens = {lossy_utf8(bytes)};
    });
  } else if (type == "ByteFallback") {
    steps_.emplace_back(fall_back_to_bytes);
    falls_back_to_bytes_ = true;
  } else if (type == "Fuse") {
    steps_.emplace_back([](Tokens& tokens) { tokens = {concatenated(tokens)}; });
  } else if (type == "Metaspace") {
    const bool never = json.value().contains("prepend_scheme") && json.at("prepend_scheme").as<std::string>() == "never";
    const auto replacement = json.at("replacement").as<std::string>();
    json.at("replacement").require(!replacement.empty(), "must be a character");
    const SplitPattern pattern = SplitPattern::literal(replacement);
    const bool prepends = !never && (!json.value().contains("add_prefix_space") || json.at("add_prefix_space").as<bool>());
    steps_.emplace_back([pattern, prepends](Tokens& tokens) {
      PatternMatcher matcher(pattern);
      // All that the first token has of the replacement goes, where encoding prepended one.
      for (std::string& token : tokens) token = replaced(matcher, prepends && &token == &tokens.front() ? "" : " ", token);
    });
  } else if (type == "Replace") {
    steps_.emplace_back([pattern = split_pattern(json.at("pattern")), content = json.at("content").as<std::string>()](Tokens& tokens) {
      PatternMatcher matcher(pattern);
      for (std::string& token : tokens) token = replaced(matcher, content, token);
    });
  } else if (type == "Strip") {
    const Limits count{.min = 0, .max = 1 << 20};
    const auto content = json.at("content").as<std::string>();
    const auto start = json.at("start").as<int64_t>(count), stop = json.at("stop").as<int64_t>(count);
    json.at("content").require(!content.empty(), "must be a character");
    steps_.emplace_back([content, start, stop](Tokens& tokens) {
      for (std::string& token : tokens) {
        std::string_view rest = token;
        for (int64_t i = 0; i < start && rest.starts_with(content); ++i) rest.remove_prefix(content.size());
        for (int64_t i = 0; i < stop && rest.ends_with(content); ++i) rest.remove_suffix(content.size());
        token = std::string(rest);
      }
    });
  } else {
    json.at("type").fail(text("the decoder ", shortened(type),
                              " is not supported (ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, Sequence are)"));
  }
}

std::string TextDecoder::decode(std::vector<std::string> tokens) const {
  if (steps_.empty()) return concatenated(tokens, " ");
  const size_t most = kMostDecoderGrowth * (concatenated(tokens).size() + 1);
  for (const Step& step : steps_) {
    step(tokens);
    require(concatenated(tokens).size() <= most, ExitCode::data, "the decoder makes more than ", kMostDecoderGrowth, " bytes out of one");
  }
  return concatenated(tokens);
}

bool TextDecoder::takes_for_byte(std::string_view token) const { return falls_back_to_bytes_ && named_byte(token) >= 0; }

namespace {

const Json kNull;

// Returns the member of an object, or null.
JsonReader member_or_null(const JsonReader& json, const std::string& name, const std::string& source) {
  return json.value().contains(name) ? json.at(name) : JsonReader(kNull, source, name);
}

// Reads ["</s>", 2], as Roberta and Bert have them.
int32_t id_of_pair(const JsonReader& json) {
  const std::vector<JsonReader> entries = json.entries();
  json.require(entries.size() == 2, "must be a token and its id");
  return static_cast<int32_t>(entries[1].as<int64_t>(Limits{.min = 0, .max = int64_t{1} << 26}));
}

}  // namespace

BpeTokenizer BpeTokenizer::from_json(std::string_view json, const std::string& source) {
  const Json root = parse_json(json, source);
  const JsonReader file(root, source);
  static constexpr std::array<std::string_view, 9> kParts = {"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                                             "pre_tokenizer", "post_processor", "decoder", "model"};
  for (const auto& [name, value] : root.members()) {  // one that came after this program may mean other ids, as may another version
    file.require(std::ranges::find(kParts, name) != kParts.end(), "the part \"", printable(shortened(name)), "\" is not supported (",
                 joined(kParts, ", "), " are)");
  }
  const Json& version = root.get("version");
  file.require(version.is_null() || version.string() == "1.0", "version ", version.shown(), " is not supported (\"1.0\" is)");
  BpeTokenizer out;
  out.normalizer_ = Normalizer::from(member_or_null(file, "normalizer", source));
  out.pretokenizer_ = Pretokenizer::from(member_or_null(file, "pre_tokenizer", source));
  out.model_ = BpeModel::from(file.at("model"), out.pretokenizer_.has_byte_level());
  out.added_ = AddedTokens::from(member_or_null(file, "added_tokens", source), out.normalizer_);
  int64_t next = out.model_.count();
  for (const AddedToken& token : out.added_.tokens()) {
    const std::optional<int32_t> known = out.model_.id_of(token.content);
    file.at("added_tokens")
        .require(!known || *known == token.id, "\"", shortened(token.content), "\" has the id ", token.id, ", and ", known.value_or(0),
                 " in model.vocab");
    file.at("added_tokens")
        .require(known || token.id == next, "\"", shortened(token.content), "\" has the id ", token.id,
                 ", but the package tokenizers numbers added tokens without gaps, and the next id is ", next,
                 "; fill the gap with tokens that no text has");
    next = std::max(next, int64_t{token.id} + 1);
  }
  out.decoder_ = TextDecoder::from(member_or_null(file, "decoder", source));
  out.read_post_processor(member_or_null(file, "post_processor", source));
  return out;
}

void BpeTokenizer::read_post_processor(const JsonReader& json) {
  if (json.value().is_null()) return;
  const auto type = json.at("type").as<std::string>();
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("processors").entries()) read_post_processor(one);
  } else if (type == "TemplateProcessing") {
    read_template(json);
  } else if (type == "RobertaProcessing" || type == "BertProcessing") {
    put_around(json, {id_of_pair(json.at("cls"))}, {id_of_pair(json.at("sep"))});
  } else if (type != "ByteLevel") {  // ByteLevel changes positions in the text, not ids
    json.at("type").fail(text("the post-processor ", shortened(type),
                              " is not supported (TemplateProcessing, ByteLevel, RobertaProcessing, BertProcessing, Sequence are)"));
  }
}

// Reads {"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [1]}}}.
void BpeTokenizer::read_template(const JsonReader& json) {
  std::vector<int32_t> before, after;
  bool after_sequence = false;
  for (const JsonReader& part : json.at("single").entries()) {
    if (part.value().contains("Sequence")) {
      const auto id = part.at("Sequence").at("id").as<std::string>();
      part.at("Sequence").at("id").require(id == "A", "must be A, the text, got ", shortened(id), " (a single text has no second one)");
      part.require(!after_sequence, "the text may appear only once");
      after_sequence = true;
      continue;
    }
    const auto token = part.at("SpecialToken").at("id").as<std::string>();
    for (const JsonReader& id : json.at("special_tokens").at(token).at("ids").entries())
      (after_sequence ? after : before).push_back(static_cast<int32_t>(id.as<int64_t>(Limits{.min = 0, .max = int64_t{1} << 26})));
  }
  json.at("single").require(after_sequence, "has no place for the text");
  put_around(json, std::move(before), std::move(after));
}

void BpeTokenizer::put_around(const JsonReader& json, std::vector<int32_t> before, std::vector<int32_t> after) {
  if (before.empty() && after.empty()) return;
  json.require(before_.empty() && after_.empty(), "a second post-processor that adds tokens is not supported");
  before_ = std::move(before);
  after_ = std::move(after);
}

int64_t BpeTokenizer::size() const {
  int64_t size = model_.size();
  for (const AddedToken& token : added_.tokens()) size = std::max(size, int64_t{token.id} + 1);
  for (const auto* const around : {&before_, &after_}) {
    for (const int32_t id : *around) size = std::max(size, int64_t{id} + 1);
  }
  return size;
}

std::optional<int32_t> BpeTokenizer::id_of(std::string_view token) const {
  const AddedToken* const added = added_.find(token);
  return added != nullptr ? std::optional(added->id) : model_.id_of(token);
}

bool BpeTokenizer::works_on_parts() const {
  return normalizer_.works_on_parts() && pretokenizer_.works_on_parts() && added_.work_on_parts();
}

std::vector<int32_t> BpeTokenizer::encode(std::string_view text, const TextOrigin& origin, SpecialTokenText special) const {
  std::vector<int32_t> out;
  StreamEncoder encoder(
      *this, {.ids = [&out](std::span<const int32_t> ids) { out.insert(out.end(), ids.begin(), ids.end()); }, .end_of_text = {}}, special);
  encoder.add(text, origin);
  encoder.end_text(origin);
  encoder.flush();
  return out;
}

// Returns the token as texts show it; "" for a special one, and for an id of none.
const std::string& BpeTokenizer::shown_token(int32_t id) const {
  static const std::string kNone;
  const AddedToken* const added = added_.find(id);
  if (added == nullptr) return model_.token(id);
  return added->special ? kNone : added->content;
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    if (const std::string& token = shown_token(id); !token.empty()) tokens.push_back(token);
  }
  return decoder_.decode(std::move(tokens));
}

bool BpeTokenizer::ends_in_bytes(std::span<const int32_t> ids) const {
  for (size_t i = ids.size(); i-- > 0;) {
    if (const std::string& token = shown_token(ids[i]); !token.empty()) return decoder_.takes_for_byte(token);
  }
  return false;
}

}  // namespace mantissa
