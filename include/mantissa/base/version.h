// Identifies the build: for --version, run records and the fingerprint in checkpoints.
#pragma once

#include <string>

namespace mantissa {

std::string version();       // "0.1.0"
std::string git_revision();  // 12 hex digits, "-dirty" after them if files differed from the commit; "unknown" outside a checkout

// Returns one line with everything fixed at build time that can change how numbers round (compiler, flags, threads, oneDNN headers) or
// which ids a text has (the version of Unicode). Equal text promises equal bits on the same CPU; the instruction set found at run time is
// not part of it.
std::string build_fingerprint();

// Returns several lines, as `mantissa --version` prints them.
std::string version_text();

}  // namespace mantissa
