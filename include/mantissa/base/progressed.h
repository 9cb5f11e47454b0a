// Callback of work that may take minutes, called repeatedly so that the watchdog does not take it for stuck. Empty: nobody watches.
#pragma once

#include <functional>

namespace mantissa {

using Progressed = std::function<void()>;

}  // namespace mantissa
