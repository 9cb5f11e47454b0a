#include "console.h"

#include <unistd.h>

#include <cstdlib>

namespace mantissa::tools {
namespace {

bool plain_wanted() { return std::getenv("NO_COLOR") != nullptr || std::getenv("CI") != nullptr; }

std::string bar(const StepEvent& event) {
  constexpr int64_t kWidth = 24;
  const int64_t filled = kWidth * event.step / event.steps;
  return "[" + std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(kWidth - filled), '.') + "] " +
         std::to_string(100 * event.step / event.steps) + "% " + std::to_string(event.step) + "/" + std::to_string(event.steps) +
         " | eta " + duration_text(event.remaining_seconds);
}

}  // namespace

Console::Console(ConsoleMode mode)
    : silent_(mode == ConsoleMode::off),
      progress_(mode == ConsoleMode::progress || (mode == ConsoleMode::automatic && isatty(STDERR_FILENO) == 1 && !plain_wanted())),
      colour_(isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr),
      lines_(STDOUT_FILENO),
      bar_(STDERR_FILENO) {}

Console::~Console() { clear_progress(); }

void Console::line(const std::string& text, Tone tone) {
  if (silent_) return;
  clear_progress();
  const bool red = colour_ && tone == Tone::alarm;
  lines_.write(red ? "\x1b[31m" + text + "\x1b[0m\n" : text + "\n");
}

void Console::progress(const StepEvent& event) {
  const auto now = std::chrono::steady_clock::now();
  if (silent_ || !progress_ || (drawn_ && now - last_draw_ < std::chrono::milliseconds(100))) return;
  last_draw_ = now;
  drawn_ = true;
  bar_.flush();
  if (!bar_.waiting()) bar_.write("\r\x1b[K" + bar(event) + "\r");
}

void Console::clear_progress() {
  if (!drawn_) return;
  bar_.write("\r\x1b[K");
  drawn_ = false;
}

}  // namespace mantissa::tools
