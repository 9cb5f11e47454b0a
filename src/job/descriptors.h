// Raises the limit of open files, which transports would otherwise hit without a message.
#pragma once

#include "mantissa/job/launch.h"

namespace mantissa {

constexpr int kMostUnauthenticated = 128;  // connections to rank 0 that have not proved themselves

// Raises the soft limit, which protects programs that use select(), to what this rank needs. Throws Error(environment) with need and limit.
void require_descriptors(const Launch& launch);

}  // namespace mantissa
