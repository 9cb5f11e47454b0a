// Reads the documents of text files and JSONL.
#pragma once

#include "mantissa/base/progressed.h"
#include "mantissa/data/input_file.h"
#include "mantissa/data/tokenizer.h"

namespace mantissa {

// Encode a file whole: a text is one document, and so is the key "text" of each line of JSONL that is not blank. Throw Error(data) that
// begins with the file and the line, and what the encoder throws.
void encode_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed = {});
void encode_jsonl(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed = {});

// Visits the texts of JSONL: visit(text, where it stands).
void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed = {});

}  // namespace mantissa
