// Token ids on the command line, for models whose tokenizer is not here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mantissa::tools {

// Parses "1,2,3" or "1 2 3". Throws Error(usage) that names the option and the text that is no id below vocab_size.
std::vector<int32_t> parse_token_ids(const std::string& option, const std::string& ids, int64_t vocab_size);

}  // namespace mantissa::tools
