// The limit of open files, which transports run into without a word.
#pragma once

#include "mantissa/job/launch.h"

namespace mantissa {

constexpr int kMostStrangers = 128;  // connections to rank 0 that have not proved themselves

// Raises the soft limit, which is there for programs that use select(), to what this rank needs. Throws Error(environment) with need and
// limit.
void require_descriptors(const Launch& launch);

}  // namespace mantissa
