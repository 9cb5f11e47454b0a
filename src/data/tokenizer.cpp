#include "data/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/hash.h"
#include "data/documents.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "text/bpe_trainer.h"

namespace mantissa {
namespace {

constexpr char32_t kReplacement = 0xFFFD;
constexpr size_t kCharacterCodes = 0x110000;

// The content of tokenizer.json, also in a checkpoint.
struct TokenizerFile {
  std::vector<uint32_t> characters;  // code points by id
  TokenizerKind type = TokenizerKind::byte;

  void fields(auto& v) {
    v("characters", characters, Limits{.min = 0, .max = kCharacterCodes - 1, .later = true});  // bytes need no list
    v("type", type);
  }
};

// Calls visit(character, position of its last byte) for each character. Throws Error(origin.code) where the bytes are not UTF-8.
class CharacterReader {
 public:
  explicit CharacterReader(const TextOrigin& origin) : origin_(origin) {}

  template <class Visit>
  void read(std::string_view bytes, int64_t offset, Visit&& visit) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      const auto status = decoder_.feed(static_cast<uint8_t>(bytes[i]));
      const int64_t position = offset + static_cast<int64_t>(i);
      require(status != Utf8Decoder::Status::invalid, origin_.code, origin_.name, ": not UTF-8 at byte ", position,
              "; the char tokenizer needs UTF-8 (the byte tokenizer takes any bytes)");
      if (status == Utf8Decoder::Status::character) visit(decoder_.character(), position);
    }
  }

  void finish() const { require(decoder_.between_characters(), origin_.code, origin_.name, ": ends inside a UTF-8 character"); }

 private:
  const TextOrigin& origin_;
  Utf8Decoder decoder_;
};

}  // namespace

bool begins_with(std::span<const int32_t> ids, std::span<const int32_t> others) {
  return !others.empty() && ids.size() >= others.size() && std::ranges::equal(ids.first(others.size()), others);
}

bool ends_with(std::span<const int32_t> ids, std::span<const int32_t> others) {
  return !others.empty() && ids.size() >= others.size() && std::ranges::equal(ids.last(others.size()), others);
}

Tokenizer Tokenizer::bytes() { return Tokenizer(TokenizerKind::byte); }

Tokenizer Tokenizer::characters(std::vector<char32_t> ascending) {
  require(!ascending.empty(), ExitCode::data, "char tokenizer: no characters");
  for (size_t id = 0; id < ascending.size(); ++id) {
    require(is_unicode_scalar(ascending[id]) && (id == 0 || ascending[id - 1] < ascending[id]), ExitCode::data, "char tokenizer: entry ",
            id, " (code ", static_cast<uint32_t>(ascending[id]), ") is not a Unicode character or not in ascending order");
  }
  Tokenizer tokenizer(TokenizerKind::character);
  tokenizer.id_of_.assign(ascending.back() + 1, -1);
  for (size_t id = 0; id < ascending.size(); ++id) tokenizer.id_of_[ascending[id]] = static_cast<int32_t>(id);
  tokenizer.characters_ = std::move(ascending);
  return tokenizer;
}

Tokenizer Tokenizer::characters_of(std::span<const InputFile> files, const Progressed& progressed) {
  std::vector<bool> seen(kCharacterCodes);
  for (const InputFile& file : files) {
    const TextOrigin origin{.name = file.path(), .code = ExitCode::data, .offset = 0};
    CharacterReader reader(origin);
    const auto see = [&](std::string_view bytes, int64_t offset) {
      reader.read(bytes, offset, [&seen](char32_t character, int64_t) { seen[character] = true; });
    };
    file.for_each_window(see, progressed);
    reader.finish();
  }
  std::vector<char32_t> ascending;
  for (char32_t character = 0; character < kCharacterCodes; ++character) {
    if (seen[character]) ascending.push_back(character);
  }
  return characters(std::move(ascending));
}

struct Tokenizer::Bpe {
  BpeFiles files;
  BpeTokenizer tokenizer;
  std::optional<int32_t> end_token;
};

Tokenizer Tokenizer::bpe(BpeFiles files, const std::string& name) {
  BpeTokenizer read = BpeTokenizer::from_json(files.tokenizer, name);
  std::optional<int32_t> end;
  if (files.config.empty()) {
    end = read.id_of(kDefaultEndToken);
  } else {
    const Json root = parse_json(files.config, "tokenizer_config.json of " + name);
    const Json& token = root.get("eos_token");  // a token, or an object with its content
    const std::string& content = token.is_object() ? token.get("content").string() : token.string();
    if (!content.empty()) end = read.id_of(content);
  }
  Tokenizer tokenizer(TokenizerKind::bpe);
  tokenizer.bpe_ = std::make_shared<const Bpe>(Bpe{.files = std::move(files), .tokenizer = std::move(read), .end_token = end});
  return tokenizer;
}

Tokenizer Tokenizer::from_path(const std::string& path) {
  std::error_code unknown;
  const bool folder = std::filesystem::is_directory(path, unknown);
  const std::filesystem::path file = folder ? std::filesystem::path(path) / "tokenizer.json" : std::filesystem::path(path);
  require(std::filesystem::is_regular_file(file, unknown), ExitCode::usage, "data.tokenizer: there is no file ", file.string(),
          "; give byte, char, or the path of a tokenizer.json or of a folder that has one");
  constexpr int64_t kLargest = 128 << 20;
  const std::filesystem::path config = file.parent_path() / "tokenizer_config.json";
  return bpe({.tokenizer = File::open_input(file).content(kLargest),
              .config = std::filesystem::is_regular_file(config, unknown) ? File::open_input(config).content(kLargest) : ""},
             file.string());
}

int64_t Tokenizer::size() const {
  if (bpe_) return bpe_->tokenizer.size();
  return kind_ == TokenizerKind::byte ? 256 : static_cast<int64_t>(characters_.size());
}

const BpeFiles* Tokenizer::files() const { return bpe_ ? &bpe_->files : nullptr; }

std::optional<int32_t> Tokenizer::end_token() const { return bpe_ ? bpe_->end_token : std::nullopt; }

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const { return bpe_ ? bpe_->tokenizer.id_of(token) : std::nullopt; }

std::span<const int32_t> Tokenizer::before_text() const { return bpe_ ? bpe_->tokenizer.before_text() : std::span<const int32_t>(); }

std::span<const int32_t> Tokenizer::after_text() const { return bpe_ ? bpe_->tokenizer.after_text() : std::span<const int32_t>(); }

std::vector<int32_t> Tokenizer::encode_prompt(std::string_view text, const TextOrigin& origin) const {
  const std::span<const int32_t> before = before_text();
  std::vector<int32_t> ids(before.begin(), before.end());
  const std::vector<int32_t> of_text = encode(text, origin);
  ids.insert(ids.end(), of_text.begin(), of_text.end());
  return ids;
}

bool Tokenizer::begins_twice(std::span<const int32_t> prompt) const {
  const std::span<const int32_t> before = before_text();
  return prompt.size() >= before.size() && begins_with(prompt.subspan(before.size()), before);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const TextOrigin& origin, SpecialTokenText special) const {
  if (bpe_) return bpe_->tokenizer.encode(text, origin, special);
  std::vector<int32_t> ids;
  ids.reserve(text.size());
  if (kind_ == TokenizerKind::byte) {
    for (const char byte : text) ids.push_back(static_cast<uint8_t>(byte));
    return ids;
  }
  CharacterReader reader(origin);
  reader.read(text, origin.offset, [&](char32_t character, int64_t position) {
    const int32_t id = character < id_of_.size() ? id_of_[character] : -1;
    if (id < 0) {  // not require(), which would describe the characters for each that is known
      fail(origin.code, origin.name, ": the character ", describe_character(character), " ending at byte ", position, " is not among the ",
           size(), " characters of the training data: ", describe_characters(characters_));
    }
    ids.push_back(id);
  });
  reader.finish();
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  if (bpe_) return bpe_->tokenizer.decode(ids);
  std::string text;
  for (const int32_t id : ids) {
    if (id < 0 || id >= size()) {
      append_utf8(kReplacement, text);
    } else if (kind_ == TokenizerKind::byte) {
      text.push_back(static_cast<char>(static_cast<uint8_t>(id)));
    } else {
      append_utf8(characters_[static_cast<size_t>(id)], text);
    }
  }
  return text;
}

bool Tokenizer::ends_in_bytes(std::span<const int32_t> ids) const { return bpe_ && bpe_->tokenizer.ends_in_bytes(ids); }

std::string Tokenizer::to_json() const {
  if (kind_ == TokenizerKind::byte) return R"({"type":"byte"})";
  if (bpe_) return text(R"({"type":"bpe","xxh64":")", xxh64(bpe_->files.tokenizer).text(), R"("})");
  return json_text(TokenizerFile{.characters = {characters_.begin(), characters_.end()}, .type = kind_});
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& name) {
  const Json root = parse_json(json, name);
  const Json* const type = root.find("type");  // first: other programs, too, write files of this name
  const std::optional<TokenizerKind> kind = type != nullptr ? choice_of<TokenizerKind>(type->string()) : std::nullopt;
  require(kind && *kind != TokenizerKind::bpe, ExitCode::data, name,
          R"(: not a tokenizer written by mantissa ({"type": "byte"} or {"type": "char", "characters": [...]}))");
  const auto file = JsonReader(root, name).as<TokenizerFile>();
  if (file.type == TokenizerKind::byte) return bytes();
  require(!file.characters.empty(), ExitCode::data, name, ": characters: must hold at least one code point");
  return characters({file.characters.begin(), file.characters.end()});
}

Tokenizer Tokenizer::from_nanogpt_meta(std::string_view json, const std::string& name) {
  const Json root = parse_json(json, name);
  const JsonReader itos = JsonReader(root, name).at("itos");
  const Json& by_id = itos.value();
  itos.require(by_id.is_object(), "must be an object");
  std::vector<char32_t> ascending;
  for (size_t id = 0; id < by_id.size(); ++id) {
    const Json* const entry = by_id.find(std::to_string(id));
    itos.require(entry != nullptr && entry->is_string(), "has ", by_id.size(), " entries but no character for ", id);
    std::vector<char32_t> found;
    const TextOrigin origin{.name = name, .code = ExitCode::data, .offset = 0};
    CharacterReader reader(origin);
    reader.read(entry->string(), 0, [&](char32_t character, int64_t) { found.push_back(character); });
    reader.finish();
    require(found.size() == 1, ExitCode::data, name, ": \"", printable(shortened(entry->string())), "\" is not one character");
    ascending.push_back(found.front());
  }
  return characters(std::move(ascending));
}

std::string TokenStream::add(int32_t id) {
  constexpr std::string_view kReplaced = "\xEF\xBF\xBD";
  ids_.push_back(id);
  if (tokenizer_->kind() != TokenizerKind::bpe) return rest();
  return tokenizer_->ends_in_bytes(ids_) || tokenizer_->decode(ids_).ends_with(kReplaced) ? "" : rest();
}

std::string TokenStream::rest() {
  const std::span<const int32_t> ids(ids_);
  const std::string before = tokenizer_->decode(ids.first(read_)), all = tokenizer_->decode(ids);
  if (before.starts_with(all)) return "";  // the continuation still depends on the tokens before
  // Tokens that change a text which has been returned, as bytes behind those that a prompt ends with do, are a text of their own.
  std::string added = all.starts_with(before) ? all.substr(before.size()) : tokenizer_->decode(ids.subspan(read_));
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(read_));
  read_ = ids_.size();
  return added;
}

std::string continuation(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt, std::span<const int32_t> ids) {
  TokenStream stream(tokenizer, prompt);
  std::string text;
  for (const int32_t id : ids) text += stream.add(id);
  return text + stream.rest();
}

DocumentEncoder::DocumentEncoder(const Tokenizer& tokenizer, Sink sink) : tokenizer_(&tokenizer), sink_(std::move(sink)) {
  if (!tokenizer.bpe_) return;
  const auto ids = [this](std::span<const int32_t> some) { add_ids(some); };
  const auto end = [this] { finish_document(); };
  stream_ = std::make_unique<StreamEncoder>(tokenizer.bpe_->tokenizer, StreamEncoder::Sink{.ids = ids, .end_of_text = end},
                                            SpecialTokenText::tokens);
}

DocumentEncoder::~DocumentEncoder() = default;

void DocumentEncoder::add_ids(std::span<const int32_t> ids) {
  const std::span<const int32_t> before = tokenizer_->before_text(), after = tokenizer_->after_text();
  if (!std::exchange(within_, true) && !before.empty()) sink_.ids(before);
  const auto first = ids.first(std::min(ids.size(), before.size() - first_.size())), last = ids.last(std::min(ids.size(), after.size()));
  first_.insert(first_.end(), first.begin(), first.end());
  last_.insert(last_.end(), last.begin(), last.end());
  if (last_.size() > after.size()) last_.erase(last_.begin(), last_.end() - std::ssize(after));
  sink_.ids(ids);
}

void DocumentEncoder::finish_document() {
  const std::span<const int32_t> before = tokenizer_->before_text(), after = tokenizer_->after_text();
  if (within_ && !after.empty()) sink_.ids(after);  // an empty document stays empty
  repeated_.add({.begins = begins_with(first_, before) ? 1 : 0, .ends = ends_with(last_, after) ? 1 : 0});
  sink_.end_of_document();
  within_ = false;
  first_.clear(), last_.clear();
}

void DocumentEncoder::add(std::string_view part, const TextOrigin& origin) {
  if (stream_) return stream_->add(part, origin);
  const auto cut_off = static_cast<int64_t>(carried_.size());
  carried_ += part;
  const size_t whole = tokenizer_->kind() == TokenizerKind::byte ? carried_.size() : whole_characters(carried_);
  sink_.ids(tokenizer_->encode(std::string_view(carried_).substr(0, whole),
                               {.name = origin.name, .code = origin.code, .offset = origin.offset - cut_off}));
  carried_.erase(0, whole);
}

void DocumentEncoder::end_document(const TextOrigin& origin) {
  if (stream_) return stream_->end_text(origin);
  if (!carried_.empty()) {
    const std::string rest = std::exchange(carried_, "");
    const int64_t offset = origin.offset - static_cast<int64_t>(rest.size());
    sink_.ids(tokenizer_->encode(rest, {.name = origin.name, .code = origin.code, .offset = offset}));
  }
  sink_.end_of_document();
}

void DocumentEncoder::flush() {
  if (stream_) stream_->flush();
}

namespace {

void add(std::optional<int32_t> id, std::vector<int32_t>& ids) {
  if (id && std::ranges::find(ids, *id) == ids.end()) ids.push_back(*id);
}

}  // namespace

std::vector<int32_t> learned_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> ids = taught_end_tokens(config, tokenizer);
  if (tokenizer) add(tokenizer->end_token(), ids);
  return ids;
}

std::vector<int32_t> taught_end_tokens(const DataConfig& config, const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> ids;
  if (config.append_eod && config.eod_id) add(static_cast<int32_t>(*config.eod_id), ids);
  if (tokenizer && config.chat_template) add(tokenizer->id_of(end_of_answer(*config.chat_template)), ids);
  if (config.append_eod && !config.eod_id && tokenizer) add(tokenizer->end_token(), ids);
  return ids;
}

}  // namespace mantissa
