#include "tools/token_ids.h"

#include <charconv>

#include "mantissa/base/error.h"
#include "mantissa/base/printable.h"

namespace mantissa::tools {
namespace {

int32_t parse_id(const std::string& option, const std::string& word, int64_t vocab_size) {
  int32_t id = 0;
  const char* const end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, id);
  require(error == std::errc() && stop == end && id >= 0, ExitCode::usage, option, ": \"", printable(shortened(word)), "\" is no token id");
  require(id < vocab_size, ExitCode::usage, option, ": the token ", id, " is outside the vocabulary of ", vocab_size);
  return id;
}

}  // namespace

std::vector<int32_t> parse_token_ids(const std::string& option, const std::string& ids, int64_t vocab_size) {
  std::vector<int32_t> out;
  for (const std::string& part : split(ids, ',')) {
    const size_t before = out.size();
    for (const std::string& word : split(part, ' '))
      if (!word.empty()) out.push_back(parse_id(option, word, vocab_size));
    const bool none = ids.find_first_not_of(" ,") == std::string::npos;
    require(out.size() > before, ExitCode::usage, option, ": ", none ? "there are no token ids" : "a token id is missing", " in \"",
            printable(shortened(ids)), "\"");
  }
  return out;
}

}  // namespace mantissa::tools
