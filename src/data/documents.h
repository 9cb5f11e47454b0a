// Reads the documents of text files and JSONL.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/file.h"
#include "data/example.h"
#include "data/tokenizer.h"

namespace mantissa {

// Reads a data file that the user named, at any position.
class InputFile {
 public:
  static constexpr size_t kLongestLine = size_t{64} << 20;

  // Throws Error(usage) if there is no such regular file, Error(environment) if it cannot be opened.
  explicit InputFile(const std::string& path) : file_(File::open_input(path)), size_(file_.size()) {}

  const std::string& path() const { return file_.path().native(); }
  int64_t size() const { return size_; }  // bytes when it was opened

  // Reads exactly `bytes` bytes from `offset`. Throws Error(data) if the file ends before, Error(environment) if the read fails.
  void read(int64_t offset, void* out, int64_t bytes) const {
    file_.read_at(offset, {static_cast<std::byte*>(out), static_cast<size_t>(bytes)});
  }

  // Visits the whole file in order, in windows of at most 1 MiB: visit(bytes, offset of the first), and progressed() after each.
  void for_each_window(const std::function<void(std::string_view, int64_t)>& visit, const Progressed& progressed = {}) const;

  // Visits the lines of the file in order, without their ends: visit(line, number from 1). Holds one line. Throws Error(data) for one of
  // more than kLongestLine.
  void for_each_line(const std::function<void(std::string_view, int64_t)>& visit) const;

 private:
  File file_;
  int64_t size_ = 0;
};

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
