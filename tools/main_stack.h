// Where the main thread is, for reports about a process that does not go on.
#pragma once

namespace mantissa::tools {

// The calling thread is the one whose stack print_main_stack() writes. It takes a signal for that, even if it blocked it before, and needs
// an AlternateStack.
void watch_main_stack();

// From another thread: writes the stack of the main thread, with the names of functions, to standard error. False if it does not answer
// within a second: it is stopped.
bool print_main_stack();

}  // namespace mantissa::tools
