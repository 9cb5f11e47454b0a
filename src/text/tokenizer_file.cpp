#include "mantissa/text/tokenizer_file.h"

namespace mantissa {

Json tokenizer_file(const TokenizerParts& parts) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", parts.added_tokens},
          {"normalizer", nullptr},
          {"pre_tokenizer", parts.pre_tokenizer},
          {"post_processor", nullptr},
          {"decoder", parts.decoder},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", parts.vocab},
            {"merges", parts.merges}}}};
}

Json byte_level_part() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}; }

}  // namespace mantissa
