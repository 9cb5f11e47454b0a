// Where the main thread is, for reports about a process that does not go on.
#pragma once

namespace mantissa::tools {

// The calling thread is the one whose stack print_main_stack() writes. It takes a signal for that, even if it blocked it before, and needs
// an AlternateStack.
void watch_main_stack();

// From another thread: has the main thread write its stack to standard error. False if it does not within a second: it is stopped.
bool print_main_stack();

}  // namespace mantissa::tools
