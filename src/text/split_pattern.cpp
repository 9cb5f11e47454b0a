#define PCRE2_CODE_UNIT_WIDTH 8
#include "mantissa/text/split_pattern.h"

#include <pcre2.h>

#include <new>

#include "mantissa/base/error.h"
#include "mantissa/base/printable.h"
#include "text/characters.h"
#include "text/pattern_syntax.h"

namespace mantissa {
namespace {

constexpr uint32_t kMostMatchSteps = 50'000'000;
constexpr size_t kLeastJitStack = 32 << 10, kMostJitStack = 16 << 20;

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

std::string reason_of(int error) {
  PCRE2_UCHAR8 buffer[256] = {};
  pcre2_get_error_message(error, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

SplitPattern::SplitPattern(std::string written, const std::string& translated) : written_(std::move(written)) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code =
      pcre2_compile(units(translated), translated.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  require(code != nullptr, ExitCode::data, "\"", printable(shortened(written_)), "\" is no expression: ", reason_of(error));
  code_ = std::shared_ptr<const void>(code, [](pcre2_code* owned) { pcre2_code_free(owned); });
  uint32_t matches_nothing = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_nothing);
  require(matches_nothing == 0, ExitCode::data, "\"", printable(shortened(written_)),
          "\": an expression that matches nothing is not supported");
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);  // where there is no JIT, the same matches are found more slowly
}

SplitPattern SplitPattern::expression(std::string_view written) { return {std::string(written), pcre2_expression(written)}; }

SplitPattern SplitPattern::literal(std::string_view text) {
  require(!text.empty(), ExitCode::data, "an empty text splits nothing");
  return {std::string(text), pcre2_literal(text)};
}

size_t SplitPattern::characters_before() const {
  uint32_t most = 0;
  pcre2_pattern_info(static_cast<const pcre2_code*>(code_.get()), PCRE2_INFO_MAXLOOKBEHIND, &most);
  return most;
}

struct PatternMatcher::Memory {
  explicit Memory(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(kLeastJitStack, kMostJitStack, nullptr)) {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
    pcre2_set_match_limit(context, kMostMatchSteps);
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Memory() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  pcre2_match_data* data;
  pcre2_match_context* context;
  pcre2_jit_stack* stack;
};

PatternMatcher::PatternMatcher(const SplitPattern& pattern)
    : pattern_(&pattern), memory_(std::make_unique<Memory>(static_cast<const pcre2_code*>(pattern.code_.get()))) {}
PatternMatcher::~PatternMatcher() = default;
PatternMatcher::PatternMatcher(PatternMatcher&&) noexcept = default;

PatternMatch PatternMatcher::find(std::string_view text, size_t from, bool text_goes_on) const {
  const auto* const code = static_cast<const pcre2_code*>(pattern_->code_.get());
  const uint32_t options = PCRE2_NO_UTF_CHECK | (text_goes_on ? PCRE2_PARTIAL_HARD : 0U);
  const int found = pcre2_match(code, units(text), text.size(), from, options, memory_->data, memory_->context);
  if (found == PCRE2_ERROR_NOMATCH) return {.kind = text_goes_on ? PatternMatch::Kind::undecided : PatternMatch::Kind::none};
  if (found == PCRE2_ERROR_PARTIAL) return {.kind = PatternMatch::Kind::undecided};
  require(found > 0, ExitCode::data, "the expression \"", printable(shortened(pattern_->written_)), "\" cannot be matched with \"",
          printable(shortened(std::string(text.substr(from, 64)))), "\": ", reason_of(found));
  const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(memory_->data);
  return {.kind = PatternMatch::Kind::match, .begin = ends[0], .end = ends[1]};
}

}  // namespace mantissa
