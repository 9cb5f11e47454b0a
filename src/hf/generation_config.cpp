#include "mantissa/hf/generation_config.h"

#include <algorithm>
#include <array>

#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

// Other keys that change which tokens are drawn, with the value that changes nothing; null, [] and {} do so, too.
struct NeutralKey {
  const char* key;
  Json value;
  bool of_beams = false;  // it changes nothing where num_beams does not
};
const std::vector<NeutralKey>& neutral_keys() {
  static const std::vector<NeutralKey> keys = {{"repetition_penalty", 1.0},
                                               {"encoder_repetition_penalty", 1.0},
                                               {"presence_penalty", 0.0},
                                               {"frequency_penalty", 0.0},
                                               {"no_repeat_ngram_size", 0},
                                               {"encoder_no_repeat_ngram_size", 0},
                                               {"min_p", 0.0},
                                               {"typical_p", 1.0},
                                               {"epsilon_cutoff", 0.0},
                                               {"eta_cutoff", 0.0},
                                               {"num_beams", 1},
                                               {"length_penalty", 1.0, true},
                                               {"diversity_penalty", 0.0, true},
                                               {"exponential_decay_length_penalty", nullptr},
                                               {"force_words_ids", nullptr},
                                               {"penalty_alpha", nullptr},
                                               {"guidance_scale", 1.0},
                                               {"bad_words_ids", nullptr},
                                               {"suppress_tokens", Json(Json::Entries())},
                                               {"begin_suppress_tokens", Json(Json::Entries())},
                                               {"forced_bos_token_id", nullptr},
                                               {"forced_eos_token_id", nullptr},
                                               {"sequence_bias", nullptr},
                                               {"min_length", 0},
                                               {"min_new_tokens", 0}};
  return keys;
}

}  // namespace

SamplingDefaults read_sampling_defaults(std::string_view content, const std::string& source) {
  const Json config = parse_json(content, source);
  require(config.is_object(), ExitCode::data, source, ": must be a JSON object");
  const JsonReader reader(config, source);
  const auto stated = [&](const char* key) { return !config.get(key).is_null(); };
  SamplingDefaults out;
  const auto differs = [&](const char* key, const Json& neutral) {
    const Json& value = config.get(key);
    return stated(key) && value != neutral && value != Json(Json::Entries()) && value != Json(Json::Members());
  };
  const bool beams = differs("num_beams", 1);
  for (const NeutralKey& known : neutral_keys())
    if (differs(known.key, known.value) && (beams || !known.of_beams))
      out.unused.push_back(text(known.key, " = ", config.get(known.key).shown()));
  if (stated("do_sample") && reader.at("do_sample").as<bool>()) {
    if (stated("temperature")) out.temperature = reader.at("temperature").as<double>(limits::not_negative);
    if (stated("top_p")) out.top_p = reader.at("top_p").as<double>(Limits{.min = 0, .max = 1, .above_min = true});
    if (stated("top_k")) out.top_k = reader.at("top_k").as<int64_t>(limits::between(0, 1e9));
    return out;
  }
  const NeutralKey defaults[] = {{"temperature", 1.0}, {"top_p", 1.0}, {"top_k", 50}};  // transformers has these
  for (const NeutralKey& known : defaults)
    if (differs(known.key, known.value))
      out.unused.push_back(text(known.key, " = ", config.get(known.key).shown(), " beside do_sample that is not true"));
  return out;
}

}  // namespace mantissa
