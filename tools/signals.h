// Handles signals that a scheduler, a person or a terminal sends to a run: SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask it to save and stop,
// SIGUSR2 to save and continue. A second SIGINT kills the process. A reader of its output that goes away does not stop it.
#pragma once

#include "mantissa/metrics/events.h"

namespace mantissa::tools {

// Call it before any other thread is started. The calling thread, and those that it starts, then block all signals sent to the process,
// because none of their handlers may run on a thread that multiplies (base/parallel.h). A thread of its own takes them; its handlers
// set a flag and nothing else, and signals without a handler keep their default action. Call it once in a process. Throws
// Error(environment).
void watch_signals();

// Returns whether somebody has asked to stop.
bool stop_requested();

// Returns what was asked for since the last call; stopping beats saving.
Request take_request();

// Returns whether the process was started to outlive its terminal (nohup).
bool ignores_hangup();

}  // namespace mantissa::tools
