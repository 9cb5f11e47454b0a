// Shows a run to a person: lines on standard output, and a progress line on standard error if that is a terminal and neither NO_COLOR nor
// CI is set. Commands that read large files draw the latter, too. A reader that went away (a closed pipe, a full disk) or does not read
// does not stop the run; the lines that it does not get are counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "mantissa/base/log.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"

namespace mantissa::tools {

// Returns true if standard error is a terminal on which a line may be drawn over and over.
bool draws_progress();
// "[######..................] 25%"
std::string progress_bar(double share);
std::string drawn_over(const std::string& line);  // on a terminal, what takes the place of an earlier one; "" erases that

class Console {
 public:
  explicit Console(ConsoleMode mode);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  enum class Tone { normal, alarm };  // alarm: red on a terminal
  void line(const std::string& text, Tone tone = Tone::normal);
  // Redrawn at most ten times a second. progress_to(): that so many steps are done, where the latest event is of an earlier one.
  void progress(const StepEvent& event);
  void progress_to(int64_t step);
  void clear_progress();
  // Waits a little for a reader that is behind.
  void finish() { lines_.finish(); }
  int64_t dropped_lines() const { return lines_.dropped_lines(); }

 private:
  void draw(const StepEvent& event);

  bool silent_, progress_, color_;
  bool drawn_ = false;
  UnblockedOutput lines_, bar_;
  std::optional<StepEvent> latest_;
  std::chrono::steady_clock::time_point latest_at_{};
  std::chrono::steady_clock::time_point last_draw_{};
};

}  // namespace mantissa::tools
