// Read each format: the readers check headers and indices and locate the tokens; those of text are in text_layout.cpp. All throw
// Error(data) with the file's name.
#pragma once

#include <string>

#include "mantissa/data/token_file.h"

namespace mantissa {

// The width of ids that are kept in memory.
constexpr ElementType type_in_memory(int64_t vocab_size) { return vocab_size <= 65536 ? ElementType::u16 : ElementType::i32; }

TokenLayout llmc_layout(const InputFile& file);
TokenLayout llmq_layout(const InputFile& file);
TokenLayout nanogpt_layout(const InputFile& file, ElementType type);
TokenLayout megatron_layout(const InputFile& bin, const InputFile& idx);

// Tokenizes the whole text into memory, except that bytes of the byte tokenizer are read from the file. One document.
TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options);
// Reads one JSON object a line: a text, which is one document, or an example (example.h).
TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options);

// Recognizes llm.c or llmq by its magic number, else returns automatic. Throws Error(data) for llm.c's files that hold no tokens.
DataFormat format_by_magic(const InputFile& file);

// "data/train.bin" gives "data/train.idx"; a path that ends neither in .bin nor .idx gets the ending appended.
std::string with_extension(const std::string& path, const std::string& extension);
bool file_exists(const std::string& path);

}  // namespace mantissa
