// A link through host memory: what leaves is downloaded, what arrives is uploaded, and the transport moves it. It works wherever ranks do,
// also for several on one device.
#include <utility>

#include "comm/collective.h"

namespace mantissa {
namespace {

class StagedLink final : public DeviceLink {
 public:
  StagedLink(Session& session, LinkRanks group) : session_(session), group_(std::move(group)), tag_((group_.hash & 0x7fffff) << 24) {}

  void exchange(std::span<const DeviceMessage> messages) override {
    size_t size = 0;
    for (const DeviceMessage& message : messages) size += static_cast<size_t>(message.bytes.size);
    if (room_.size() < size) room_.resize(size);
    staged_.clear();
    std::span<std::byte> left = room_;
    for (const DeviceMessage& message : messages) {
      const auto count = static_cast<size_t>(message.bytes.size);
      staged_.push_back(left.first(count));
      left = left.subspan(count);
      if (!message.receives) message.bytes.device->download(message.bytes.tensor(), staged_.back().data());
    }
    Transport& transport = *session_.transport;
    for (size_t i = 0; i < messages.size(); ++i) {
      const int peer = group_.ranks[static_cast<size_t>(messages[i].peer)];
      messages[i].receives ? transport.receive(peer, tag_, staged_[i]) : transport.send(peer, tag_, staged_[i]);
    }
    session_.settle(true);
    transport.wait_all();
    session_.settled.clear();
    for (size_t i = 0; i < messages.size(); ++i) {
      const Bytes& bytes = messages[i].bytes;
      if (messages[i].receives) bytes.device->upload(staged_[i].data(), bytes.tensor());
    }
  }
  void check() override {}  // nothing is left under way
  void give_up() noexcept override {}

 private:
  Session& session_;
  LinkRanks group_;
  uint64_t tag_;
  std::vector<std::byte> room_;               // for all messages; stays for the next call
  std::vector<std::span<std::byte>> staged_;  // by message
};

}  // namespace

std::unique_ptr<DeviceLink> staged_link(Session& session, const LinkRanks& ranks) { return std::make_unique<StagedLink>(session, ranks); }

}  // namespace mantissa
