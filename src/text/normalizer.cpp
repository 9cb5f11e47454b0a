#include "mantissa/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "mantissa/base/utf8.h"
#include "text/characters.h"

namespace mantissa {
namespace {

constexpr size_t kMostGrowth = 1024;  // of a text, so that a file of a few replacements does not take all memory

bool is_all_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Rust's char::to_lowercase: the full mapping, of which U+0130 is the only one of two characters.
void append_lowercase(char32_t character, std::string& out) {
  constexpr char32_t kDottedI = 0x130, kDotAbove = 0x307;
  if (character == kDottedI) {
    out += 'i';
    return append_utf8(kDotAbove, out);
  }
  append_utf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character))), out);
}

// Runs an action whose Error lacks the place of what it is about.
template <class Action>
auto at_place(const JsonReader& json, Action&& action) {
  try {
    return action();
  } catch (const Error& error) {
    json.fail(error.what());
  }
}

}  // namespace

SplitPattern split_pattern(const JsonReader& json) {
  const bool regex = json.value().contains("Regex");
  json.require(regex || json.value().contains("String"), R"(must be {"String": ...} or {"Regex": ...}, got )", json.value().shown());
  const JsonReader member = json.at(regex ? "Regex" : "String");
  const auto content = member.as<std::string>();
  return at_place(member, [&] { return regex ? SplitPattern::expression(content) : SplitPattern::literal(content); });
}

std::string replaced(const PatternMatcher& matcher, std::string_view content, std::string_view text) {
  std::string out;
  size_t done = 0;
  while (done < text.size()) {
    const PatternMatch match = matcher.find(text, done, false);
    if (match.kind == PatternMatch::Kind::none) break;
    out += text.substr(done, match.begin - done);
    out += content;
    done = match.end;
  }
  out += text.substr(done);
  return out;
}

Normalizer Normalizer::from(const JsonReader& json) {
  Normalizer out;
  if (!json.value().is_null()) add_steps(json, out.steps_);
  return out;
}

void Normalizer::add_steps(const JsonReader& json, std::vector<Step>& steps) {
  const auto type = json.at("type").as<std::string>();
  json.require(steps.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("normalizers").entries()) add_steps(one, steps);
  } else if (type == "NFC" || type == "NFKC") {
    steps.emplace_back(Compose{.compatible = type == "NFKC"});
  } else if (type == "Lowercase") {
    steps.emplace_back(Lowercase{});
  } else if (type == "Prepend") {
    steps.emplace_back(Prepend{json.at("prepend").as<std::string>()});
  } else if (type == "Replace") {
    steps.emplace_back(Replace{split_pattern(json.at("pattern")), json.at("content").as<std::string>()});
  } else if (type == "Strip") {
    steps.emplace_back(Strip{.left = json.at("strip_left").as<bool>(), .right = json.at("strip_right").as<bool>()});
  } else {
    json.at("type").fail(
        text("the normalizer ", shortened(type), " is not supported (NFC, NFKC, Prepend, Replace, Lowercase, Strip, Sequence are)"));
  }
}

bool Normalizer::works_on_parts() const {
  return std::ranges::all_of(
      steps_, [](const Step& step) { return std::holds_alternative<Compose>(step) || std::holds_alternative<Lowercase>(step); });
}

std::string Normalizer::apply(std::string_view text) const {
  std::string out(text);
  for (const Step& step : steps_) {
    out = std::visit([&](const auto& one) { return applied(one, out); }, step);
    require(out.size() <= kMostGrowth * text.size() + kMostGrowth, ExitCode::data, "the normalizer makes more than ", kMostGrowth,
            " bytes of one");
  }
  return out;
}

std::string Normalizer::applied(const Compose& step, const std::string& text) {
  if (is_all_ascii(text)) return text;
  const auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE | (step.compatible ? UTF8PROC_COMPAT : UTF8PROC_STABLE));
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &composed, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(composed, std::free);
  if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  require(length >= 0, ExitCode::data, "a text cannot be normalized: ", utf8proc_errmsg(length));
  return {reinterpret_cast<const char*>(composed), static_cast<size_t>(length)};
}

std::string Normalizer::applied(const Lowercase&, const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) append_lowercase(next_character(text, at), out);
  return out;
}

std::string Normalizer::applied(const Prepend& step, const std::string& text) { return text.empty() ? text : step.text + text; }

std::string Normalizer::applied(const Replace& step, const std::string& text) {
  return replaced(PatternMatcher(step.pattern), step.content, text);
}

std::string Normalizer::applied(const Strip& step, const std::string& text) {
  size_t begin = 0, end = 0;  // of what is no white space
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const size_t first = at;
    if (is_white_space(next_character(text, at))) continue;
    if (!std::exchange(found, true)) begin = first;
    end = at;
  }
  if (!found) return step.left || step.right ? "" : text;
  return text.substr(step.left ? begin : 0, (step.right ? end : text.size()) - (step.left ? begin : 0));
}

}  // namespace mantissa
