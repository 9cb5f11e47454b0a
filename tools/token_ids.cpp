#include "tools/token_ids.h"

#include <charconv>

#include "mantissa/base/error.h"
#include "mantissa/base/printable.h"

namespace mantissa::tools {

std::vector<int32_t> parse_token_ids(const std::string& option, const std::string& ids, int64_t vocab_size) {
  std::vector<int32_t> out;
  const char* at = ids.data();
  const char* const end = at + ids.size();
  const auto between = [](char c) { return c == ' ' || c == ','; };
  while (true) {
    while (at < end && between(*at)) ++at;
    if (at == end) break;
    const char* word = at;
    while (at < end && !between(*at)) ++at;
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(word, at, id);
    const std::string shown = printable(shortened(std::string_view(word, static_cast<size_t>(at - word))));
    require(error == std::errc() && stop == at && id >= 0, ExitCode::usage, option, ": \"", shown, "\" is no token id");
    require(id < vocab_size, ExitCode::usage, option, ": the token ", id, " is outside the vocabulary of ", vocab_size);
    out.push_back(id);
  }
  require(!out.empty(), ExitCode::usage, option, ": there are no token ids in \"", printable(ids), "\"");
  return out;
}

}  // namespace mantissa::tools
