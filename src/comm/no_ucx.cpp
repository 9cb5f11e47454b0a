#include "mantissa/base/error.h"
#include "mantissa/comm/transport.h"

namespace mantissa {

std::unique_ptr<Transport> ucx_transport(int, const AddressExchange&, Transport::Interrupt) {
  fail(ExitCode::environment, "several ranks need UCX, which this build lacks: install libucx-dev, configure and build again");
}

std::string ucx_text() { return "this build has none: ranks are refused"; }

void restore_hangup() {}

}  // namespace mantissa
