#include "mantissa/comm/transport.h"

#include <algorithm>

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

void Transport::keep(std::span<const std::byte> from, std::span<std::byte> to) { std::ranges::copy(from, to.begin()); }

}  // namespace mantissa
