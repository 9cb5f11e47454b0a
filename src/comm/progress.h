// Tracks what the main thread of a rank is doing, and for how long it may be without progress. The main thread writes without a lock; the
// thread of the store reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace mantissa {

double monotonic_now();  // seconds

// Detects whether the caller itself was stopped for a while, with the rest of the job or alone (SIGSTOP, the freezer of a cgroup). That it
// heard nothing from others meanwhile says nothing about them.
class Stops {
 public:
  explicit Stops(double tolerated_s) : tolerated_s_(tolerated_s) {}
  // Returns since when the caller has been running without a stop. Must be called more often than the tolerated time.
  double running_since(double now) {
    if (now > latest_ + tolerated_s_) since_ = now;
    latest_ = now;
    return since_;
  }

 private:
  double tolerated_s_, latest_ = monotonic_now(), since_ = 0;
};

class Progress {
 public:
  // Marks a new phase, or progress in the same one. `section` is a literal: "step", "save"; "step" is one optimizer step, whose time is
  // measured.
  void set_phase(int64_t step, const char* section);
  // Marks the collective that begins now: its number in the program order that all ranks share, and a hash of what all of them must agree
  // on (operation, dtype, ...), or 0 for none. Two ranks with two hashes at one number end the job with code 70.
  void collective(uint32_t sequence, uint32_t operation) {
    collective_.store(uint64_t{operation} << 32 | sequence, std::memory_order_relaxed);
  }

  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  const char* section() const { return section_.load(std::memory_order_acquire); }
  double since() const { return since_.load(std::memory_order_relaxed); }  // monotonic_now() of the latest progress
  int measured_steps() const { return measured_.load(std::memory_order_relaxed); }
  double mean_step_seconds() const { return mean_.load(std::memory_order_relaxed); }  // over the last steps, about 20
  uint32_t sequence() const { return static_cast<uint32_t>(collective_.load(std::memory_order_relaxed)); }
  uint32_t operation() const { return static_cast<uint32_t>(collective_.load(std::memory_order_relaxed) >> 32); }

 private:
  std::atomic<int64_t> step_{0};
  std::atomic<const char*> section_{"start"};  // written last: who reads it first finds a time that is not older
  std::atomic<double> since_{monotonic_now()}, mean_{0.0};
  std::atomic<int> measured_{0};
  std::atomic<uint64_t> collective_{0};  // both in one word: a pair that never was would end a job
};

struct WatchdogTimeouts {
  std::optional<double> step_timeout_s = {};  // parallel.step_timeout_s; none: max(30, 5 x mean), 600 until 5 steps are measured
  double section_timeout_s = 420;             // parallel.section_timeout_s: for everything that is not a step
};

// Returns "no progress for 30 s (parallel.step_timeout_s), at step 7 (step)" after a timeout, else "". The time starts over after a stop.
std::string watchdog_timeout(const Progress& progress, const WatchdogTimeouts& timeouts, double now, double running_since = 0);

}  // namespace mantissa
