// What a person sees of a run: lines on standard output, and a progress line on standard error if that is a terminal and neither NO_COLOR
// nor CI is set. A reader that went away (a closed pipe, a full disk) or does not read does not stop the run; the lines that he does not
// get are counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "mantissa/base/unblocked_output.h"
#include "mantissa/train/config.h"
#include "mantissa/train/events.h"

namespace mantissa::tools {

class Console {
 public:
  explicit Console(ConsoleMode mode);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  enum class Tone { normal, alarm };  // alarm: red on a terminal
  void line(const std::string& text, Tone tone = Tone::normal);
  // Redrawn at most ten times a second.
  void progress(const StepEvent& event);
  void clear_progress();
  // Waits a little for a reader that is behind.
  void finish() { lines_.finish(); }
  int64_t dropped_lines() const { return lines_.dropped_lines(); }

 private:
  bool silent_, progress_, colour_;
  bool drawn_ = false;
  UnblockedOutput lines_, bar_;
  std::chrono::steady_clock::time_point last_draw_{};
};

}  // namespace mantissa::tools
