#include "mantissa/text/bpe_tokenizer.h"

#include <algorithm>
#include <array>

#include "mantissa/base/printable.h"
#include "mantissa/json/json.h"

namespace mantissa {
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

// A member or a version that came after this program may mean other ids.
void require_known_parts(const JsonReader& file) {
  static constexpr std::array<std::string_view, 9> kParts = {"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                                             "pre_tokenizer", "post_processor", "decoder", "model"};
  for (const auto& [name, value] : file.value().members()) {
    file.require(std::ranges::find(kParts, name) != kParts.end(), "the part \"", printable(shortened(name)), "\" is not supported (",
                 joined(kParts, ", "), " are)");
  }
  const Json& version = file.value().get("version");
  file.require(version.is_null() || version.string() == "1.0", "version ", version.shown(), " is not supported (\"1.0\" is)");
}

}  // namespace

BpeTokenizer BpeTokenizer::from_json(std::string_view json, const std::string& source) {
  const Json root = parse_json(json, source);
  const JsonReader file(root, source);
  require_known_parts(file);
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
                 ", but the package tokenizers numbers added tokens on, with ", next, " here; fill the gap with tokens that no text has");
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
      part.require(!after_sequence, "the text may be there once");
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
