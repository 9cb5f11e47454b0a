// Reads amounts as people write them on the command line: "4e12", "4T", "3.2G", "64Gi".
#pragma once

#include <string>

namespace mantissa::tools {

// Reads a positive number with at most one unit behind it: k, M, G, T, P, E for powers of 1000, Ki, Mi, Gi, Ti, Pi, Ei for powers of 1024.
// Throws Error(usage) that names the option for anything else, and for more than 1e30.
double quantity(const std::string& option, const std::string& word);

}  // namespace mantissa::tools
