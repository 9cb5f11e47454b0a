// Signals that a scheduler or a person sends to a run: SIGTERM, SIGINT and SIGUSR1 ask it to save and stop, SIGUSR2 to save and go on. A
// second SIGINT kills the process. A reader of its output that goes away is no reason to stop.
#pragma once

#include "mantissa/train/events.h"

namespace mantissa::tools {

// The handler sets a flag and nothing else.
void watch_signals();

// Somebody has asked to stop.
bool stop_requested();

// What was asked for since the last call; stopping beats saving.
Request take_request();

}  // namespace mantissa::tools
