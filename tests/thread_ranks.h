// Ranks as threads of the test.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "thread_transport.h"

namespace mantissa::test {

// A rank whose thread sleeps in every wait before it looks whether to go on, so that it is the last to leave a collective.
struct SlowRank {
  int rank = -1;
  std::chrono::milliseconds sleep{0};
};

// Where ranks are: hosts by rank, or none, which is one. left[r] counts the bytes of tensors that rank r has sent to other hosts.
struct RanksOnHosts {
  std::vector<int> hosts{};
  std::vector<int64_t> left{};
};

// Counts what a link sends to ranks on other hosts.
class CountedLink final : public DeviceLink {
 public:
  CountedLink(std::unique_ptr<DeviceLink> link, LinkRanks of, RanksOnHosts& where)
      : link_(std::move(link)), of_(std::move(of)), where_(where) {}
  void exchange(std::span<const DeviceMessage> messages) override {
    const auto world_rank = [&](int rank) { return static_cast<size_t>(of_.ranks[static_cast<size_t>(rank)]); };
    const size_t own = world_rank(of_.rank);
    for (const DeviceMessage& message : messages) {
      if (!message.receives && where_.hosts[own] != where_.hosts[world_rank(message.peer)]) where_.left[own] += message.bytes.size;
    }
    link_->exchange(messages);
  }
  void check() override { link_->check(); }
  void give_up() noexcept override { link_->give_up(); }

 private:
  std::unique_ptr<DeviceLink> link_;
  LinkRanks of_;
  RanksOnHosts& where_;
};

// Runs body as each of `ranks` ranks, between whose devices the maker makes links; without it, messages go through the host. One that
// throws ends the waits of the others with peer_lost, as the store of a job does. Returns what each threw, "" for nothing, behind its code:
// "70: ranks 0 and 1 make different calls".
inline std::vector<std::string> run_ranks(int ranks, const std::function<void(const Communicator&)>& body, const SlowRank& slow = {},
                                          const MakeDeviceLink& make_link = {}, RanksOnHosts* where = nullptr) {
  std::atomic<bool> lost{false};
  static thread_local int own_rank = -1;
  RanksOnHosts one;
  if (where == nullptr) where = &one;
  const auto mailbox = std::make_shared<ThreadTransport::Mailbox>();
  mailbox->hosts = where->hosts;
  mailbox->left_host.resize(static_cast<size_t>(ranks));
  where->left.assign(static_cast<size_t>(ranks), 0);
  MakeDeviceLink link = make_link;
  if (make_link && !where->hosts.empty())
    link = [&](const LinkRanks& of) { return std::make_unique<CountedLink>(make_link(of), of, *where); };
  auto transports = thread_transports(
      ranks,
      [&] {
        if (own_rank == slow.rank) std::this_thread::sleep_for(slow.sleep);
        require(!lost, ExitCode::peer_lost, "a peer was lost");
      },
      mailbox);
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < errors.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        own_rank = static_cast<int>(r);
        body(Communicator(std::move(transports[r]), link, where->hosts));
      } catch (const Error& error) {
        errors[r] = text(static_cast<int>(error.code()), ": ", error.what());
        lost = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < errors.size(); ++r) where->left[r] += mailbox->left_host[r];
  return errors;
}

}  // namespace mantissa::test
