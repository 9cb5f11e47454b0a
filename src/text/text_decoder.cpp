#include "mantissa/text/text_decoder.h"

#include <algorithm>

#include "mantissa/base/utf8.h"
#include "mantissa/text/bpe_model.h"
#include "mantissa/text/normalizer.h"
#include "text/characters.h"

namespace mantissa {
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

// Number of bytes at the beginning that may be those of one character: at least 1.
struct CharacterStart {
  size_t length;
  bool whole;
};

CharacterStart character_start(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {.length = 1, .whole = true};
  if (lead < 0xC2 || lead > 0xF4) return {.length = 1, .whole = false};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // No overlong forms, no surrogates, nothing above U+10FFFF: the second byte tells.
  const uint8_t least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  size_t found = 1;
  while (found < std::min(length, bytes.size()) && byte(found) >= (found == 1 ? least : 0x80) && byte(found) <= (found == 1 ? most : 0xBF))
    ++found;
  return {.length = found, .whole = found == length};
}

bool flag_of(const JsonReader& json, const char* name) { return !json.value().contains(name) || json.at(name).as<bool>(); }

}  // namespace

std::string lossy_utf8(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const CharacterStart start = character_start(bytes.substr(at));
    out += start.whole ? bytes.substr(at, start.length) : kReplacementCharacter;
    at += start.length;
  }
  return out;
}

TextDecoder TextDecoder::from(const JsonReader& json) {
  TextDecoder out;
  if (!json.value().is_null()) out.add_steps(json);
  return out;
}

void TextDecoder::add_steps(const JsonReader& json) {
  const auto type = json.at("type").as<std::string>();
  json.require(steps_.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("decoders").entries()) add_steps(one);
  } else if (type == "ByteLevel") {
    steps_.emplace_back(ByteLevel{});
  } else if (type == "ByteFallback") {
    steps_.emplace_back(ByteFallback{});
  } else if (type == "Fuse") {
    steps_.emplace_back(Fuse{});
  } else if (type == "Metaspace") {
    const bool never = json.value().contains("prepend_scheme") && json.at("prepend_scheme").as<std::string>() == "never";
    const auto replacement = json.at("replacement").as<std::string>();
    json.at("replacement").require(!replacement.empty(), "must be a character");
    steps_.emplace_back(Metaspace{SplitPattern::literal(replacement), !never && flag_of(json, "add_prefix_space")});
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{split_pattern(json.at("pattern")), json.at("content").as<std::string>()});
  } else if (type == "Strip") {
    const Limits count{.min = 0, .max = 1 << 20};
    steps_.emplace_back(
        Strip{json.at("content").as<std::string>(), json.at("start").as<int64_t>(count), json.at("stop").as<int64_t>(count)});
    json.at("content").require(!json.at("content").value().string().empty(), "must be a character");
  } else {
    json.at("type").fail(text("the decoder ", shortened(type),
                              " is not supported (ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, Sequence are)"));
  }
}

std::string TextDecoder::decode(std::vector<std::string> tokens) const {
  if (steps_.empty()) return concatenated(tokens, " ");
  const size_t most = kMostDecoderGrowth * (concatenated(tokens).size() + 1);
  for (const Step& step : steps_) {
    std::visit([&](const auto& one) { apply(one, tokens); }, step);
    require(concatenated(tokens).size() <= most, ExitCode::data, "the decoder makes more than ", kMostDecoderGrowth, " bytes of one");
  }
  return concatenated(tokens);
}

bool TextDecoder::takes_for_byte(std::string_view token) const {
  return named_byte(token) >= 0 && std::ranges::any_of(steps_, [](const Step& step) { return std::holds_alternative<ByteFallback>(step); });
}

void TextDecoder::apply(const ByteLevel&, std::vector<std::string>& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += bytes_of_letters(token).value_or(token);
  tokens = {lossy_utf8(bytes)};
}

void TextDecoder::apply(const ByteFallback&, std::vector<std::string>& tokens) {
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

void TextDecoder::apply(const Fuse&, std::vector<std::string>& tokens) { tokens = {concatenated(tokens)}; }

// All that the first token has of the replacement goes, where encoding prepended one.
void TextDecoder::apply(const Metaspace& step, std::vector<std::string>& tokens) {
  PatternMatcher matcher(step.pattern);
  for (std::string& token : tokens) token = replaced(matcher, step.prepends && &token == &tokens.front() ? "" : " ", token);
}

void TextDecoder::apply(const Replace& step, std::vector<std::string>& tokens) {
  PatternMatcher matcher(step.pattern);
  for (std::string& token : tokens) token = replaced(matcher, step.content, token);
}

void TextDecoder::apply(const Strip& step, std::vector<std::string>& tokens) {
  for (std::string& token : tokens) {
    std::string_view rest = token;
    for (int64_t i = 0; i < step.start && rest.starts_with(step.content); ++i) rest.remove_prefix(step.content.size());
    for (int64_t i = 0; i < step.stop && rest.ends_with(step.content); ++i) rest.remove_suffix(step.content.size());
    token = std::string(rest);
  }
}

}  // namespace mantissa
