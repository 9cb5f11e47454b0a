// Encodes and decodes what a script sends, for comparisons with other tokenizers:   tokenize_frames TOKENIZER WINDOW < FRAMES A frame on
// the standard input is a byte, its kind, the length of its content as u32, little endian, and that many bytes: 'e' a text to encode, which
// comes in parts of WINDOW bytes (0: whole), 'd' ids as i32 to decode. The standard output has a u32 length for each, and the ids as i32,
// or the text.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace mantissa {
namespace {

bool read_exactly(void* out, size_t bytes) {
  std::cin.read(static_cast<char*>(out), static_cast<std::streamsize>(bytes));
  return static_cast<size_t>(std::cin.gcount()) == bytes;
}

void write_frame(const void* bytes, size_t count) {
  const auto length = static_cast<uint32_t>(count);
  std::cout.write(reinterpret_cast<const char*>(&length), sizeof length);
  std::cout.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
}

std::vector<int32_t> encoded(const BpeTokenizer& tokenizer, const std::string& text, size_t window) {
  if (window == 0) return tokenizer.encode(text, {}, SpecialTokenText::tokens);
  std::vector<int32_t> out;
  const auto take = [&out](std::span<const int32_t> ids) { out.insert(out.end(), ids.begin(), ids.end()); };
  StreamEncoder encoder(tokenizer, {.ids = take, .end_of_text = {}}, SpecialTokenText::tokens, window);
  for (size_t at = 0; at < text.size(); at += window) encoder.add(std::string_view(text).substr(at, window), {});
  encoder.end_text({});
  encoder.flush();
  return out;
}

void answer(const BpeTokenizer& tokenizer, char kind, const std::string& content, size_t window) {
  if (kind == 'e') {
    const std::vector<int32_t> ids = encoded(tokenizer, content, window);
    return write_frame(ids.data(), ids.size() * sizeof(int32_t));
  }
  std::vector<int32_t> ids(content.size() / sizeof(int32_t));
  std::memcpy(ids.data(), content.data(), ids.size() * sizeof(int32_t));
  const std::string text = tokenizer.decode(ids);
  write_frame(text.data(), text.size());
}

int run(const std::string& path, size_t window) {
  const Tokenizer tokenizer = Tokenizer::from_path(path);
  const BpeTokenizer bpe = BpeTokenizer::from_json(tokenizer.files()->tokenizer, path);
  char kind = 0;
  uint32_t length = 0;
  while (read_exactly(&kind, 1) && read_exactly(&length, sizeof length)) {
    std::string content(length, '\0');
    require(read_exactly(content.data(), length), "a frame is cut off");
    answer(bpe, kind, content, window);
  }
  return 0;
}

}  // namespace
}  // namespace mantissa

int main(int count, char** arguments) {
  try {
    mantissa::require(count == 3, "usage: tokenize_frames TOKENIZER WINDOW < FRAMES");
    return mantissa::run(arguments[1], std::stoul(arguments[2]));
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
