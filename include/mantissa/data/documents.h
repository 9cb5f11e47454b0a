// Reads the documents of text files and JSONL.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "mantissa/base/progressed.h"
#include "mantissa/data/example.h"
#include "mantissa/data/input_file.h"
#include "mantissa/data/tokenizer.h"

namespace mantissa {

// Receivers of the objects of JSONL: texts go to an encoder, which LineOptions have, too; each example is passed on as it is read.
struct LineSinks {
  DocumentEncoder* texts;
  std::function<void(const Example&)> example;
};

// Read a file whole: a text is one document, and so is each object of JSONL, of which no more than one is held. Throw Error(data) that
// begins with the file and the line, and what the encoder throws. read_jsonl() returns the form of the objects; text if there is none.
void read_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed = {});
LineForm read_jsonl(const InputFile& file, const LineOptions& options, const LineSinks& sinks, const Progressed& progressed = {});

// Visits the objects of JSONL in order: visit(object, where it stands, as messages begin). They are its lines that are not blank, or the
// entries of the one list that the file is, over any lines ("FILE, line 3", "FILE, entry 2 (line 3)"). Throws Error(data) with line and
// column where the file is no JSON, also at a byte order mark.
void for_each_object(const InputFile& file, const std::function<void(const Json&, const std::string&)>& visit,
                     const Progressed& progressed = {});
// Visits the objects of a text, which is called `name` in messages.
void for_each_object(std::string_view content, const std::string& name, const std::function<void(const Json&, const std::string&)>& visit);

// Returns whether a file can only be meant as JSON: it is called so (.json, .jsonl, .ndjson), or begins with a member of an object, perhaps
// of one in a list, perhaps behind a byte order mark.
bool claims_json(const InputFile& file);

// Visits the texts of JSONL, also those of examples: visit(text, where it stands). Throws Error(usage) for an object of tokens.
void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed = {});

}  // namespace mantissa
