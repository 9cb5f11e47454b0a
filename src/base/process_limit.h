// Explains why the system refuses a thread (limits.cpp).
#pragma once

#include <string>

namespace mantissa {

// Returns "; this user may have 63 processes and threads (ulimit -u) ...; ask for fewer threads ...", with what memory_limits() says.
std::string process_limit();

}  // namespace mantissa
