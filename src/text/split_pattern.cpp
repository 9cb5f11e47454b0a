#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/split_pattern.h"

#include <pcre2.h>

#include <new>
#include <optional>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "text/characters.h"
#include "text/pattern_syntax.h"

namespace mantissa {
namespace {

constexpr size_t kLongestExpression = 16 << 10;  // bytes; those of published tokenizers have some hundred
constexpr uint32_t kMostMatchSteps = 50'000'000;
constexpr size_t kLeastJitStack = 32 << 10, kMostJitStack = 16 << 20;

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

std::string reason_of(int error) {
  PCRE2_UCHAR8 buffer[256] = {};
  pcre2_get_error_message(error, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

std::string in_quotes(const std::string& written) { return text('"', printable(shortened(written)), '"'); }

// Appends a class of PCRE2 that has these bytes, or, of none, one that matches nothing.
void append_bytes(const std::vector<uint8_t>& bytes, std::string& out) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const auto byte = [&](uint8_t value) { out += {'\\', 'x', kDigits[value / 16], kDigits[value % 16]}; };
  if (bytes.size() == 1) return byte(bytes.front());
  out += bytes.empty() ? R"([^\x00-\xff)" : "[";
  for (size_t i = 0; i < bytes.size(); ++i) {
    const size_t first = i;
    while (i + 1 < bytes.size() && bytes[i + 1] == bytes[i] + 1) ++i;
    byte(bytes[first]);
    if (i > first) out += '-', byte(bytes[i]);
  }
  out += ']';
}

// Returns the expression, or the text to find, as a message can quote it. Its length bounds what it takes: each of its bytes may stand for
// as much as a set of code points takes.
std::string accepted(std::string_view written) {
  std::string out(written);
  require(out.size() <= kLongestExpression, ExitCode::data, in_quotes(out), ": an expression of more than ", kLongestExpression,
          " bytes is not supported");
  return out;
}

}  // namespace

struct SplitPattern::Compiled {
  Compiled(const PatternParts& parts, const std::string& written) : classes(CharacterClasses::dividing(parts.sets())) {
    require(classes.has_value(), ExitCode::data, in_quotes(written),
            ": an expression that distinguishes more than 256 kinds of characters is not supported");
    std::vector<std::string> sets;
    for (const CodePoints& set : parts.sets()) append_bytes(classes->classes_of(set), sets.emplace_back());
    std::string expression;
    for (const PatternPart& part : parts.parts()) expression += part.set >= 0 ? sets[static_cast<size_t>(part.set)] : part.syntax;
    int error = 0;
    PCRE2_SIZE at = 0;
    code = pcre2_compile(units(expression), expression.size(), PCRE2_NEVER_UTF, &error, &at, nullptr);
    require(code != nullptr, ExitCode::data, in_quotes(written), " is not a valid expression: ", reason_of(error));
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);  // where there is no JIT, the same matches are found more slowly
  }
  ~Compiled() { pcre2_code_free(code); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

  std::optional<CharacterClasses> classes;
  pcre2_code* code = nullptr;
};

SplitPattern SplitPattern::expression(std::string_view written) {
  SplitPattern out{accepted(written)};
  require(is_utf8(written), ExitCode::data, in_quotes(out.written_), ": an expression that is not UTF-8 is not supported");
  out.compiled_ = std::make_shared<const Compiled>(pattern_parts(written), out.written_);
  uint32_t matches_nothing = 0;
  pcre2_pattern_info(out.compiled_->code, PCRE2_INFO_MATCHEMPTY, &matches_nothing);
  require(matches_nothing == 0, ExitCode::data, in_quotes(out.written_), ": an expression that matches the empty text is not supported");
  return out;
}

SplitPattern SplitPattern::literal(std::string_view text) {
  require(!text.empty(), ExitCode::data, "the text of a pattern must not be empty");
  SplitPattern out{accepted(text)};
  out.compiled_ = std::make_shared<const Compiled>(literal_parts(text), out.written_);
  return out;
}

size_t SplitPattern::characters_before() const {
  uint32_t most = 0;
  pcre2_pattern_info(compiled_->code, PCRE2_INFO_MAXLOOKBEHIND, &most);
  return most;
}

struct PatternMatcher::Search {
  explicit Search(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(kLeastJitStack, kMostJitStack, nullptr)) {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
    pcre2_set_match_limit(context, kMostMatchSteps);
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Search() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // Returns the byte at which character `target` begins; it must not be before `character`, which is at `byte`.
  size_t byte_of(size_t target) {
    for (; character < target; ++character) next_character(text, byte);
    return byte;
  }

  pcre2_match_data* data;
  pcre2_match_context* context;
  pcre2_jit_stack* stack;
  std::string_view text;
  std::string classes;             // classes of its characters
  size_t character = 0, byte = 0;  // at which the next match is looked for
};

PatternMatcher::PatternMatcher(const SplitPattern& pattern)
    : pattern_(&pattern), search_(std::make_unique<Search>(pattern.compiled_->code)) {}
PatternMatcher::~PatternMatcher() = default;
PatternMatcher::PatternMatcher(PatternMatcher&&) noexcept = default;

void PatternMatcher::search(std::string_view text) {
  search_->text = text;
  search_->character = search_->byte = 0;
  pattern_->compiled_->classes->classify(text, search_->classes);
}

PatternMatch PatternMatcher::next(bool text_goes_on) {
  const uint32_t options = text_goes_on ? PCRE2_PARTIAL_HARD : 0U;
  const int found = pcre2_match(pattern_->compiled_->code, units(search_->classes), search_->classes.size(), search_->character, options,
                                search_->data, search_->context);
  if (found == PCRE2_ERROR_NOMATCH) return {.kind = text_goes_on ? PatternMatch::Kind::undecided : PatternMatch::Kind::none};
  if (found == PCRE2_ERROR_PARTIAL) return {.kind = PatternMatch::Kind::undecided};
  if (found < 0) {  // not require(), which would quote the text of each match
    fail(ExitCode::data, "the expression ", in_quotes(pattern_->written_), " cannot be matched with \"",
         printable(shortened(std::string(search_->text.substr(search_->byte, 64)))), "\": ", reason_of(found));
  }
  const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(search_->data);
  const size_t begin = search_->byte_of(ends[0]);
  return {.kind = PatternMatch::Kind::match, .begin = begin, .end = search_->byte_of(ends[1])};
}

}  // namespace mantissa
