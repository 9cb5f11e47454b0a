#include "text/pretokenizer.h"

#include <algorithm>

#include "text/characters.h"
#include "text/normalizer.h"

namespace mantissa {
namespace {

// GPT-2's, which ByteLevel stands for.
constexpr std::string_view kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A run of text that is a match or lies between two.
struct TextRun {
  size_t begin, end;
  bool matched;
};

MatchedText matched_text(const JsonReader& json) {
  const auto name = json.as<std::string>();
  const std::optional<MatchedText> found = choice_of<MatchedText>(name);
  json.require(found.has_value(), "the behavior ", shortened(name), " is not supported");
  return *found;
}

// Returns runs merged as `matched` says; tokenizers merges from the end where matches go with what follows.
std::vector<TextRun> merged(std::vector<TextRun> runs, MatchedText matched) {
  if (matched == MatchedText::isolated) return runs;
  if (matched == MatchedText::removed) {
    std::erase_if(runs, [](const TextRun& run) { return run.matched; });
    return runs;
  }
  const bool backwards = matched == MatchedText::merged_with_next;
  if (backwards) std::ranges::reverse(runs);
  std::vector<TextRun> out;
  std::optional<bool> previous;
  for (const TextRun& run : runs) {
    const bool joins = matched == MatchedText::contiguous ? previous == run.matched : run.matched && previous == false;
    if (joins) {
      out.back().begin = std::min(out.back().begin, run.begin);
      out.back().end = std::max(out.back().end, run.end);
    } else {
      out.push_back(run);
    }
    previous = run.matched;
  }
  if (backwards) std::ranges::reverse(out);
  return out;
}

void add_runs(std::string_view text, const std::vector<TextRun>& runs, size_t of_first, TextPieces& out) {
  for (const TextRun& run : runs)
    out.add(text.substr(run.begin, run.end - run.begin), std::min(run.end, std::max(run.begin, of_first)) - run.begin);
}

std::vector<TextRun> runs_of_matches(PatternMatcher& matcher, std::string_view text, bool inverted) {
  std::vector<TextRun> runs;
  size_t done = 0;
  matcher.search(text);
  while (done < text.size()) {
    const PatternMatch match = matcher.next();
    if (match.kind == PatternMatch::Kind::none) break;
    if (match.begin > done) runs.push_back({done, match.begin, inverted});
    runs.push_back({match.begin, match.end, !inverted});
    done = match.end;
  }
  if (done < text.size()) runs.push_back({done, text.size(), inverted});
  return runs;
}

// Splits at matches: each character that has the property is one.
template <class Has>
std::vector<TextRun> runs_of_characters(std::string_view text, Has&& has) {
  std::vector<TextRun> runs;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const bool matched = has(next_character(text, at));
    if (!matched && !runs.empty() && !runs.back().matched)
      runs.back().end = at;
    else
      runs.push_back({begin, at, matched});
  }
  return runs;
}

void replace_spaces(std::string_view text, const std::string& replacement, std::string& out) {
  for (const char c : text) {
    if (c == ' ')
      out += replacement;
    else
      out += c;
  }
}

}  // namespace

Pretokenizer Pretokenizer::from(const JsonReader& json) {
  Pretokenizer out;
  if (!json.value().is_null()) out.add_steps(json);
  return out;
}

void Pretokenizer::add_steps(const JsonReader& json) {
  const auto type = json.at("type").as<std::string>();
  json.require(!byte_level_, "a pretokenizer after ByteLevel is not supported");
  json.require(steps_.size() < kMostTokenizerSteps, "has more than ", kMostTokenizerSteps, " steps");
  if (type == "Sequence") {
    for (const JsonReader& one : json.at("pretokenizers").entries()) add_steps(one);
  } else if (type == "ByteLevel") {
    const bool splits = !json.value().contains("use_regex") || json.at("use_regex").as<bool>();
    if (json.at("add_prefix_space").as<bool>()) steps_.emplace_back(PrefixSpace{});
    if (splits) steps_.emplace_back(Split{SplitPattern::expression(kGpt2Pattern), MatchedText::isolated, false});
    byte_level_ = true;
  } else if (type == "Split") {
    steps_.emplace_back(Split{split_pattern(json.at("pattern")), matched_text(json.at("behavior")),
                              json.value().contains("invert") && json.at("invert").as<bool>()});
  } else if (type == "Digits") {
    const bool each = json.value().contains("individual_digits") && json.at("individual_digits").as<bool>();
    steps_.emplace_back(SplitByProperty{Property::numeric, each ? MatchedText::isolated : MatchedText::contiguous});
  } else if (type == "Punctuation") {
    const bool given = json.value().contains("behavior");
    steps_.emplace_back(SplitByProperty{Property::punctuation, given ? matched_text(json.at("behavior")) : MatchedText::isolated});
  } else if (type == "Metaspace") {
    using Prepends = Metaspace::Prepends;
    const Json& value = json.value();
    const std::string scheme = value.contains("prepend_scheme") ? json.at("prepend_scheme").as<std::string>() : "always";
    json.require(scheme == "always" || scheme == "first" || scheme == "never", "prepend_scheme ", shortened(scheme), " is not supported");
    const bool adds = !value.contains("add_prefix_space") || json.at("add_prefix_space").as<bool>();
    Metaspace step{.replacement = json.at("replacement").as<std::string>(),
                   .prepends = scheme == "never" || !adds ? Prepends::never
                               : scheme == "first"        ? Prepends::first
                                                          : Prepends::always,
                   .splits = !value.contains("split") || json.at("split").as<bool>()};
    json.at("replacement").require(!step.replacement.empty(), "must not be empty");
    steps_.emplace_back(std::move(step));
  } else {
    json.at("type").fail(
        text("the pretokenizer ", shortened(type), " is not supported (ByteLevel, Split, Digits, Punctuation, Metaspace, Sequence are)"));
  }
}

bool Pretokenizer::works_on_parts() const {
  if (steps_.empty()) return false;
  const auto* const split = std::get_if<Split>(&steps_.front());
  const auto on_pieces = [](const Step& step) { return !std::holds_alternative<Metaspace>(step); };
  return split != nullptr && (split->matched == MatchedText::isolated || split->matched == MatchedText::removed) &&
         split->pattern.characters_before() == 0 && std::ranges::all_of(steps_, on_pieces);
}

bool Pretokenizer::asks_for_first() const {
  return std::ranges::any_of(steps_, [](const Step& step) {
    const auto* const metaspace = std::get_if<Metaspace>(&step);
    return metaspace != nullptr && metaspace->prepends == Metaspace::Prepends::first;
  });
}

Pretokenizer::Cutter::Cutter(const Pretokenizer& pretokenizer) : own_(&pretokenizer) {
  for (const Step& step : own_->steps_) {
    auto& matcher = matchers_.emplace_back();
    if (const auto* const split = std::get_if<Split>(&step)) matcher.emplace(split->pattern);
  }
}

size_t Pretokenizer::Cutter::cut(std::string_view text, size_t of_first, bool text_goes_on, TextPieces& out) {
  if (!text_goes_on) {
    apply(0, text, of_first, out);
    return text.size();
  }
  const auto& split = std::get<Split>(own_->steps_.front());
  const bool keeps_matches = split.matched == MatchedText::isolated || split.inverted;
  const bool keeps_others = split.matched == MatchedText::isolated || !split.inverted;
  TextPieces certain;  // pieces that the first step makes, up to the last match that is certain
  size_t done = 0;
  matchers_.front()->search(text);
  for (;;) {
    const PatternMatch match = matchers_.front()->next(true);
    if (match.kind != PatternMatch::Kind::match) break;
    if (keeps_others) certain.add(text.substr(done, match.begin - done));
    if (keeps_matches) certain.add(text.substr(match.begin, match.end - match.begin));
    done = match.end;
  }
  for (size_t i = 0; i < certain.count(); ++i) apply(1, certain.piece(i), 0, out);
  return done;
}

// Appends what the steps from this one on make of a piece.
void Pretokenizer::Cutter::apply(size_t step, std::string_view piece, size_t of_first, TextPieces& out) {
  if (piece.empty()) return;
  if (step == own_->steps_.size()) return out.add(piece);
  const auto applied = [&](TextPieces& pieces) {
    std::visit([&](const auto& what) { cut_piece(what, {.matcher = &matchers_[step], .of_first = of_first}, piece, pieces); },
               own_->steps_[step]);
  };
  if (step + 1 == own_->steps_.size()) return applied(out);
  TextPieces pieces;
  applied(pieces);
  for (size_t i = 0; i < pieces.count(); ++i) apply(step + 1, pieces.piece(i), pieces.of_first_in(i), out);
}

void Pretokenizer::Cutter::cut_piece(const Split& split, const Where& where, std::string_view piece, TextPieces& out) {
  add_runs(piece, merged(runs_of_matches(**where.matcher, piece, split.inverted), split.matched), where.of_first, out);
}

void Pretokenizer::Cutter::cut_piece(const SplitByProperty& split, const Where& where, std::string_view piece, TextPieces& out) {
  const bool numeric = split.property == Property::numeric;
  auto runs = numeric ? runs_of_characters(piece, is_numeric) : runs_of_characters(piece, is_punctuation);
  add_runs(piece, merged(std::move(runs), split.matched), where.of_first, out);
}

void Pretokenizer::Cutter::cut_piece(const PrefixSpace&, const Where&, std::string_view piece, TextPieces& out) {
  out.add(piece.starts_with(' ') ? std::string(piece) : ' ' + std::string(piece));
}

void Pretokenizer::Cutter::cut_piece(const Metaspace& metaspace, const Where& where, std::string_view piece, TextPieces& out) {
  using Prepends = Metaspace::Prepends;
  std::string text;
  replace_spaces(piece.substr(0, where.of_first), metaspace.replacement, text);
  size_t of_first = text.size();
  replace_spaces(piece.substr(where.of_first), metaspace.replacement, text);
  const bool prepends = metaspace.prepends == Prepends::always || (metaspace.prepends == Prepends::first && of_first > 0);
  if (prepends && !text.starts_with(metaspace.replacement)) {
    text.insert(0, metaspace.replacement);
    if (of_first > 0) of_first += metaspace.replacement.size();
  }
  if (!metaspace.splits) return out.add(text, of_first);
  std::vector<TextRun> runs;  // pieces that each begin with the replacement, but for the first
  for (size_t done = 0; done < text.size();) {
    const size_t found = std::min(text.find(metaspace.replacement, done), text.size());
    if (found > done) runs.push_back({done, found, false});
    if (found == text.size()) break;
    done = found + metaspace.replacement.size();
    runs.push_back({found, done, true});
  }
  add_runs(text, merged(std::move(runs), MatchedText::merged_with_next), of_first, out);
}

}  // namespace mantissa
