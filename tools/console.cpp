#include "tools/console.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace mantissa::tools {

using Clock = std::chrono::steady_clock;

bool draws_progress() { return isatty(STDERR_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr && std::getenv("CI") == nullptr; }

std::string progress_bar(double share) {
  constexpr double kWidth = 24;
  const double done = std::clamp(share, 0.0, 1.0);
  const auto filled = static_cast<size_t>(kWidth * done);
  return "[" + std::string(filled, '#') + std::string(static_cast<size_t>(kWidth) - filled, '.') + "] " +
         std::to_string(static_cast<int>(100 * done + 1e-9)) + "%";
}

std::string drawn_over(const std::string& line) { return "\r\x1b[K" + line + "\r"; }

Console::Console(ConsoleMode mode)
    : silent_(mode == ConsoleMode::off),
      progress_(mode == ConsoleMode::progress || (mode == ConsoleMode::automatic && draws_progress())),
      color_(isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr),
      lines_(STDOUT_FILENO),
      bar_(STDERR_FILENO) {}

Console::~Console() { clear_progress(); }

void Console::line(const std::string& text, Tone tone) {
  if (silent_) return;
  clear_progress();
  const bool red = color_ && tone == Tone::alarm;
  lines_.write(red ? "\x1b[31m" + text + "\x1b[0m\n" : text + "\n");
}

void Console::progress(const StepEvent& event) {
  latest_ = event;
  latest_at_ = Clock::now();
  draw(event);
}

void Console::progress_to(int64_t step) {
  if (!latest_ || step <= latest_->step) return;
  StepEvent now = *latest_;
  now.step = step;
  now.remaining_seconds = std::max(0.0, now.remaining_seconds - std::chrono::duration<double>(Clock::now() - latest_at_).count());
  draw(now);
}

void Console::draw(const StepEvent& event) {
  const auto now = Clock::now();
  if (silent_ || !progress_ || (drawn_ && now - last_draw_ < std::chrono::milliseconds(100))) return;
  last_draw_ = now;
  drawn_ = true;
  bar_.flush();
  if (bar_.waiting()) return;
  bar_.write(drawn_over(text(progress_bar(static_cast<double>(event.step) / static_cast<double>(event.steps)), ' ', event.step, '/',
                             event.steps, " | eta ", duration_text(event.remaining_seconds))));
}

void Console::clear_progress() {
  if (!drawn_) return;
  bar_.write(drawn_over(""));
  drawn_ = false;
}

}  // namespace mantissa::tools
