// Spreads work over cores: one lasting pool of threads (threads.cpp). Libraries with threads of their own (oneDNN) run with one thread
// inside it.
#pragma once

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace mantissa {

// Threads used by parallel_for; at least 1. set_num_threads(0) restores the default: the cores this process may run on, or what
// set_default_threads() was given, for a process that shares them with others; there 0 means the cores again.
int num_threads();
void set_num_threads(int threads);
void set_default_threads(int threads);

// Starts the threads that parallel_for will use and makes sure of the stack that its bodies need (limits.h). Opening a backend calls it, so
// that a limit of the system is met there and not in the middle of a run. Throws Error(environment) that names limit, value and need, as
// parallel_for does where it needs more threads.
void start_threads();

// Says what becomes of subnormal operands and results. Some CPUs take over a hundred cycles for one, so GEMMs and row kernels flush them to
// zero; codecs, the optimizer and sums over ranks honor them.
enum class Subnormals { honored, flushed };

namespace detail {
using ChunkBody = void (*)(void* context, int64_t begin, int64_t end);
void parallel_chunks(int64_t count, int64_t chunk, Subnormals subnormals, ChunkBody body, void* context);
}  // namespace detail

// Calls body(begin, end) over [0, count) in pieces of exactly `chunk` items (the last may be short). Pieces depend on count and chunk only,
// never on the number of threads, so per-piece partial results are reproducible. Every body, a single inline one included, runs with
// OpenMP at one thread, libraries called inside taking their single-threaded path, and with subnormals honored unless it asks otherwise,
// whatever the caller has set. If a body throws, pieces that have not begun are left out, and the first exception is rethrown here once
// every thread has left the loop. Inside a body a further parallel_for runs on the calling thread alone.
template <class Body>
void parallel_for(int64_t count, int64_t chunk, Subnormals subnormals, Body&& body) {
  detail::parallel_chunks(
      count, chunk, subnormals,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}
template <class Body>
void parallel_for(int64_t count, int64_t chunk, Body&& body) {
  parallel_for(count, chunk, Subnormals::honored, std::forward<Body>(body));
}

// While it lives, the loops of its thread run on that thread alone: work beside a run takes no threads from it.
class SingleThreadedLoops {
 public:
  SingleThreadedLoops();
  ~SingleThreadedLoops();
  SingleThreadedLoops(const SingleThreadedLoops&) = delete;
  SingleThreadedLoops& operator=(const SingleThreadedLoops&) = delete;
};

// Calls body and lets libraries use num_threads() threads of their own, to measure a library by itself. Not inside parallel_for.
void with_library_threads(const std::function<void()>& body);

// Returns all signals except those that a thread brings on itself, by a fault or a write, and those of job control, whose default action
// needs no handler.
sigset_t sent_signals();

// Gives signal handlers a stack of their own on a thread that multiplies. oneDNN's fp32 kernels keep data in the stack pointer (`mov rsp,
// ARG_WS`), so the kernel would write the frame of a handler into the heap.

// Belongs to the thread that constructs it, which also destroys it. It serves handlers that were installed with SA_ONSTACK; all others must
// not run on such a thread: those that parallel_for() starts block their signals, and tools/signals.h does for the caller.
class AlternateStack {
 public:
  AlternateStack();
  ~AlternateStack();
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

 private:
  static constexpr size_t kBytes = size_t{256} << 10;  // UCX's handler of crashes asks for 144 KiB

  alignas(64) std::byte memory_[kBytes];
  stack_t previous_{};
};

}  // namespace mantissa
