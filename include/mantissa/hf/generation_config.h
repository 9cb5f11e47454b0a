// Reads what generation_config.json of a model, or an older config.json, says of sampling.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

struct SamplingDefaults {
  std::optional<double> temperature = {}, top_p = {};  // as far as the file states them, where do_sample is true
  std::optional<int64_t> top_k = {};
  std::vector<std::string> unused = {};  // keys that change the tokens in transformers but not here: "repetition_penalty = 1.1"
};

// Throws Error(data) that begins with `source` for a file that is no JSON object, and for a value that would be taken and is none of its
// key.
SamplingDefaults read_sampling_defaults(std::string_view content, const std::string& source);

}  // namespace mantissa
