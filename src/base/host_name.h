// Returns the name of this machine, "unknown" if it has none.
#pragma once

#include <unistd.h>

#include <array>
#include <string>

namespace mantissa {

inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0' ? name.data() : "unknown";
}

}  // namespace mantissa
