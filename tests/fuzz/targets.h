// Parsers under arbitrary bytes. A target hands its input to a parser and checks more than "no crash, no leak, no timeout": a refusal has a
// reason, and what is accepted keeps the promises of the header. A broken promise is a std::logic_error. Returns true if the input was
// accepted.
//
// tests/fuzz/libfuzzer.cpp makes a libFuzzer program of each; tests/fuzz/fuzz_test.cpp runs them over tests/fuzz/corpus/NAME/ and over
// changes of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "mantissa/base/error.h"

namespace mantissa::fuzz {

using Target = bool (*)(std::string_view input);

bool safetensors_header(std::string_view input);  // two bytes: the size of the buffer; then the JSON
bool safetensors_file(std::string_view input);
bool safetensors_index(std::string_view input);
bool manifest(std::string_view input);  // without the last line, which is its hash
bool json_core(std::string_view input);
bool run_config(std::string_view input);
bool token_file(std::string_view input);  // a byte: the format; a byte: the length of .idx; .idx; .bin
bool tokenizer(std::string_view input);   // a byte: whose; then the JSON
bool bpe_tokenizer(std::string_view input);
bool examples(std::string_view input);       // a byte: the chat template, whether an end token is appended, how rows are packed; then JSONL
bool chat_template(std::string_view input);  // the language of chat_template.jinja
bool hugging_face_config(std::string_view input);
bool quantization_config(std::string_view input);  // the object of that name in config.json
bool gguf_file(std::string_view input);
bool mlx_folder(std::string_view input);    // config.json of a folder for mlx-lm; a zero; model.safetensors
bool store_frames(std::string_view input);  // bytes that an authenticated rank sends

struct Named {
  const char* name;
  Target target;
};
inline constexpr Named kTargets[] = {{"safetensors_header", safetensors_header},
                                     {"safetensors_file", safetensors_file},
                                     {"safetensors_index", safetensors_index},
                                     {"manifest", manifest},
                                     {"json_core", json_core},
                                     {"run_config", run_config},
                                     {"token_file", token_file},
                                     {"tokenizer", tokenizer},
                                     {"bpe_tokenizer", bpe_tokenizer},
                                     {"examples", examples},
                                     {"chat_template", chat_template},
                                     {"hugging_face_config", hugging_face_config},
                                     {"quantization_config", quantization_config},
                                     {"gguf_file", gguf_file},
                                     {"mlx_folder", mlx_folder},
                                     {"store_frames", store_frames}};

inline void promise(bool kept, const char* what) {
  if (!kept) throw std::logic_error(what);
}

// The outcome of a parser: false if it refused the input, which only an Error for faults of the input may do, with a reason in it.
template <class Parse>
bool accepted(Parse&& parse) {
  try {
    parse();
    return true;
  } catch (const Error& error) {
    promise(error.code() == ExitCode::data || error.code() == ExitCode::usage, error.what());
    promise(std::string_view(error.what()).size() > 8, "a reason");
    promise(std::string_view(error.what()).size() < 16384, "a message as long as the input");
    return false;
  }
}

// A number from the front of the input, which becomes shorter.
inline size_t take_byte(std::string_view& input) {
  if (input.empty()) return 0;
  const auto value = static_cast<unsigned char>(input.front());
  input.remove_prefix(1);
  return value;
}

// A file of this content in memory, by a path that any reader can open.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view content);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

// One scratch folder for the process, in memory: a million trials must not wear out a disk.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string file(const char* name, std::string_view content) const;  // writes it; returns its path
  std::filesystem::path path;
};

}  // namespace mantissa::fuzz
