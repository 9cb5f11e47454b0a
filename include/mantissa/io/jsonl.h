// metrics.jsonl: one JSON object a line, in the file when write() returns, so it can be read while training runs and after a kill.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "mantissa/io/append_file.h"

namespace mantissa {

class JsonLines {
 public:
  // Continues an existing file; a torn last line is cut. Throws Error(environment) if it cannot be opened.
  explicit JsonLines(const std::filesystem::path& path);

  // Keys keep their order. NaN and Inf, which JSON lacks, become null; bytes that are not UTF-8 become U+FFFD.
  void write(const nlohmann::ordered_json& object);

  int64_t failures() const { return file_.failures(); }  // lines dropped, e.g. because the disk is full

 private:
  AppendFile file_;
};

}  // namespace mantissa
