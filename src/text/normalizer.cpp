#include "mantissa/text/normalizer.h"

#include <algorithm>
#include <utility>

#include "mantissa/base/utf8.h"
#include "text/characters.h"

namespace mantissa {
namespace {

constexpr size_t kMostGrowth = 1024;  // growth of a text, so that a file of a few replacements does not take all memory

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
  append_utf8(lower_case(character), out);
}

// Returns where the first characters of a text end.
size_t end_of_characters(std::string_view text, std::ptrdiff_t count) {
  size_t end = 0;
  for (; count > 0 && end < text.size(); --count) next_character(text, end);
  return end;
}

// Returns how many bytes of the result of replaced() come from the first character, if so many of the text do. A replacement of several
// characters comes from the last of them, as tokenizers has it.
size_t of_first_after(PatternMatcher& matcher, std::string_view content, std::string_view text, size_t of_first) {
  size_t done = 0, out = 0;
  matcher.search(text);
  for (;;) {
    const PatternMatch match = matcher.next();
    if (match.kind == PatternMatch::Kind::none || match.begin >= of_first) return out + of_first - done;
    out += match.begin - done;
    if (match.end > of_first) return out;
    out += content.size();
    done = match.end;
  }
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

std::string replaced(PatternMatcher& matcher, std::string_view content, std::string_view text) {
  std::string out;
  size_t done = 0;
  matcher.search(text);
  while (done < text.size()) {
    const PatternMatch match = matcher.next();
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
  size_t of_first = 0;
  return apply(text, of_first);
}

std::string Normalizer::apply(std::string_view text, size_t& of_first) const {
  std::string out(text);
  for (const Step& step : steps_) {
    out = std::visit([&](const auto& one) { return applied(one, out, of_first); }, step);
    require(out.size() <= kMostGrowth * text.size() + kMostGrowth, ExitCode::data, "the normalizer makes more than ", kMostGrowth,
            " bytes of one");
  }
  return out;
}

std::string Normalizer::applied(const Compose& step, const std::string& text, size_t& of_first) {
  if (is_all_ascii(text)) return text;
  const NormalForm form = step.compatible ? NormalForm::compatible : NormalForm::composed;
  std::string out = in_normal_form(text, form);
  if (of_first > 0) {
    const std::string alone = in_normal_form(text.substr(0, of_first), form);
    of_first = end_of_characters(out, std::ranges::count_if(alone, begins_character));
  }
  return out;
}

std::string Normalizer::applied(const Lowercase&, const std::string& text, size_t& of_first) {
  const size_t first = std::exchange(of_first, 0);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    append_lowercase(next_character(text, at), out);
    if (at <= first) of_first = out.size();
  }
  return out;
}

std::string Normalizer::applied(const Prepend& step, const std::string& text, size_t& of_first) {
  if (of_first > 0) of_first += step.text.size();
  return text.empty() ? text : step.text + text;
}

std::string Normalizer::applied(const Replace& step, const std::string& text, size_t& of_first) {
  PatternMatcher matcher(step.pattern);
  if (of_first > 0) of_first = of_first_after(matcher, step.content, text, of_first);
  return replaced(matcher, step.content, text);
}

std::string Normalizer::applied(const Strip& step, const std::string& text, size_t& of_first) {
  size_t begin = 0, end = 0;  // bounds of the text without white space at its ends
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const size_t first = at;
    if (is_white_space(next_character(text, at))) continue;
    if (!std::exchange(found, true)) begin = first;
    end = at;
  }
  if (!found) return step.left || step.right ? "" : text;
  begin = step.left ? begin : 0;
  end = step.right ? end : text.size();
  of_first = std::min(end, std::max(begin, of_first)) - begin;
  return text.substr(begin, end - begin);
}

}  // namespace mantissa
