#include "mantissa/comm/transport.h"

#include "mantissa/base/error.h"

namespace mantissa {
namespace {

constexpr int kSpins = 100;  // about 10 us over UCX; a wait that sleeps is woken after 4 to 5 us, and spinning takes a core from kernels

}  // namespace

void Transport::heed_interrupt() const {
  require(!stopped_, ExitCode::peer_lost, "rank ", rank(), " gave up its communication");
  if (interrupt_) interrupt_();
}

void Transport::wait(Request request) {
  for (int round = 0; !done(request); ++round) {
    heed_interrupt();
    if (round >= kSpins) sleep();
  }
}

void Transport::wait_all() {
  for (Request request = 0; request < begun(); ++request) wait(request);
  forget();
}

}  // namespace mantissa
