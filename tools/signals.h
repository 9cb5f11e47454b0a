// Signals that a scheduler, a person or a terminal sends to a run: SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask it to save and stop, SIGUSR2 to
// save and go on. A second SIGINT kills the process. A reader of its output that goes away is no reason to stop.
#pragma once

#include "mantissa/metrics/events.h"

namespace mantissa::tools {

// Before any other thread is started. From now on the calling thread, and those that it starts, block all signals that are sent to the
// process: none of their handlers may run on a thread that multiplies (base/alternate_stack.h). A thread of its own takes them; its
// handlers set a flag and nothing else, and signals without a handler do what they always do. Once in a process. Throws Error(environment).
void watch_signals();

// Somebody has asked to stop.
bool stop_requested();

// What was asked for since the last call; stopping beats saving.
Request take_request();

// The process was started to outlive its terminal (nohup).
bool ignores_hangup();

}  // namespace mantissa::tools
