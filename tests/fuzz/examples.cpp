// Accepted: every token of an example is in the vocabulary and has its mask; in rows, no prediction that counts leaves its example.
#include <vector>

#include "data/example.h"
#include "data/token_file.h"
#include "targets.h"

namespace mantissa::fuzz {
namespace {

constexpr int64_t kVocabulary = 300;

// Bytes, and one id for all tokens that have a name.
TextEncoder encoder() {
  return {.name = "fuzz",
          .encode =
              [](std::string_view text, const TextOrigin&, SpecialTokenText) {
                std::vector<int32_t> ids;
                for (const char byte : text) ids.push_back(static_cast<uint8_t>(byte));
                return ids;
              },
          .id_of = [](std::string_view) { return std::optional(256); }};
}

void read_lines(std::string_view content, const LineOptions& options) {
  LineReader reader(options);
  for (size_t end; !content.empty(); content.remove_prefix(std::min(end + 1, content.size()))) {
    end = std::min(content.find('\n'), content.size());
    const Example example = reader.read(parse_line(content.substr(0, end), "fuzz, line"), "fuzz, line");
    promise(example.ids.size() == example.trained.size(), "each token has its mask");
    for (const int32_t id : example.ids) promise(id >= 0 && id < kVocabulary, "an id is below the vocabulary");
  }
}

void read_rows(const std::string& path, const TokenFileOptions& options) {
  const TokenFile file(path, options);
  if (file.examples().examples == 0) return;
  std::vector<int32_t> ids(static_cast<size_t>(file.tokens()));
  std::vector<uint8_t> marks(ids.size());
  file.read(0, file.tokens(), ids.data(), marks.data());
  promise(options.row_tokens == 0 || file.tokens() % options.row_tokens == 0, "rows are whole");
  int64_t targets = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool counts = (marks[i] & untrained) == 0;
    promise(!counts || !(marks[i] & ends_document), "a prediction stays in its example");
    const bool begins = options.row_tokens > 0 && static_cast<int64_t>(i) % options.row_tokens == 0;
    promise(!begins || (marks[i] & starts_document), "no example is in two rows");
    targets += counts ? 1 : 0;
  }
  promise(targets == file.examples().targets, "targets are counted");
}

}  // namespace

bool examples(std::string_view input) {
  static const Tokenizer bytes = Tokenizer::bytes();
  const size_t choice = take_byte(input);
  constexpr std::array templates = choices(ChatTemplate{});
  const ChatTemplate which = templates[choice % templates.size()].value;
  const std::optional<int32_t> appended = choice & 0x40 ? std::optional(299) : std::nullopt;
  const bool read = accepted([&] {
    read_lines(input, {.encoder = encoder(), .vocab_size = kVocabulary, .appended = appended, .chat_template = which, .chat_date = {}});
  });
  const MemoryFile file(input);
  accepted([&] {
    read_rows(file.path(), {.format = DataFormat::jsonl,
                            .tokenizer = &bytes,
                            .vocab_size = kVocabulary,
                            .eod_id = appended,
                            .append_eod = appended.has_value(),
                            .row_tokens = choice & 0x80 ? 7 : 0});
  });
  return read;
}

}  // namespace mantissa::fuzz
