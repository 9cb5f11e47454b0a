// Accepted: ids are below the size, those of a text do not depend on its parts, and everything that comes out is UTF-8.
#include <vector>

#include "mantissa/base/text.h"
#include "targets.h"
#include "text/bpe_tokenizer.h"

namespace mantissa::fuzz {
namespace {

constexpr std::string_view kText =
    "Hello, he'll say 1234\r\n\n \xC3\xA9 e\xCC\x81 \xE2\x96\x81<s> \xF0\x9F\x98\x80 hellohello  <|endoftext|>";

void keep_promises(const BpeTokenizer& tokenizer) {
  const std::vector<int32_t> ids = tokenizer.encode(kText, {}, SpecialTokenText::tokens);
  for (const int32_t id : ids) promise(id >= 0 && id < tokenizer.size(), "an id is below the size");
  promise(is_utf8(tokenizer.decode(ids)), "a text is UTF-8");
  std::vector<int32_t> in_parts;
  const auto take = [&in_parts](std::span<const int32_t> some) { in_parts.insert(in_parts.end(), some.begin(), some.end()); };
  StreamEncoder encoder(tokenizer, {.ids = take, .end_of_text = {}}, SpecialTokenText::tokens, 1);
  for (size_t at = 0; at < kText.size(); at += 3) encoder.add(kText.substr(at, 3), {});
  encoder.end_text({});
  encoder.flush();
  promise(in_parts == ids, "parts of a text have the ids of the whole");
}

}  // namespace

bool bpe_tokenizer(std::string_view input) {
  return accepted([&] { keep_promises(BpeTokenizer::from_json(input, "tokenizer.json")); });
}

}  // namespace mantissa::fuzz
