// Reads the documents of text files and JSONL.
#pragma once

#include <functional>
#include <string>

#include "mantissa/base/progressed.h"
#include "mantissa/data/example.h"
#include "mantissa/data/input_file.h"
#include "mantissa/data/tokenizer.h"

namespace mantissa {

// Where the lines of JSONL go: texts to an encoder, which LineOptions have, too; each example as it is read.
struct LineSinks {
  DocumentEncoder* texts;
  std::function<void(const Example&)> example;
};

// Read a file whole: a text is one document, and so is each line of JSONL that is not blank, of which no more than one is held. Throw
// Error(data) that begins with the file and the line, and what the encoder throws. read_jsonl() returns the form of the lines; text if
// there is none.
void read_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed = {});
LineForm read_jsonl(const InputFile& file, const LineOptions& options, const LineSinks& sinks, const Progressed& progressed = {});

// Whether a file that begins so is JSONL: its first line that is not blank is an object with a key that example.h lists.
bool begins_jsonl(std::string_view text);

// Visits the texts of JSONL, also those of examples: visit(text, where it stands). Throws Error(usage) for a line of tokens.
void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed = {});

}  // namespace mantissa
