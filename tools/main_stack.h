// Reports where the main thread is in a process that makes no progress.
#pragma once

namespace mantissa::tools {

// Makes the calling thread the one whose stack print_main_stack() writes. It takes a signal for that, even if it blocked it before, and
// needs an AlternateStack.
void watch_main_stack();

// Writes the stack of the main thread, with the names of functions, to standard error, from another thread. Returns false if the main
// thread does not answer within a second because it is stopped.
bool print_main_stack();

}  // namespace mantissa::tools
