#include "mantissa/comm/communicator.h"

#include <algorithm>
#include <numeric>

#include "base/hash.h"
#include "comm/collective.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// Ranks sum whole cache lines of fp32, so boundaries do not depend on who adds.
constexpr int64_t kShareGrain = 16;

uint64_t hash_of(std::span<const int64_t> numbers) { return xxh64(std::as_bytes(numbers)).value; }

// Returns where the counts[r] of `count` elements of each rank begin, and the end; those of rank r follow those of rank r - 1.
std::vector<int64_t> boundaries(const char* call, std::span<const int64_t> counts, int ranks, int64_t count) {
  require(counts.size() == static_cast<size_t>(ranks), call, ": ", counts.size(), " counts for ", ranks, " ranks");
  std::vector<int64_t> out{0};
  for (const int64_t c : counts) {
    require(c >= 0, call, ": counts must not be negative, got ", c);
    out.push_back(out.back() + c);
  }
  require(out.back() == count, call, ": the counts sum to ", out.back(), ", but there are ", count, " elements");
  return out;
}

Bytes share(const Bytes& bytes, const std::vector<int64_t>& boundaries, int rank, int64_t element_bytes = 1) {
  const auto r = static_cast<size_t>(rank);
  return bytes.slice(boundaries[r] * element_bytes, boundaries[r + 1] * element_bytes);
}

// Returns the device of all bytes of a call, which is the same one.
template <class Operand>
Backend* device_of(const char* call, std::span<const Operand> parts, Bytes Operand::*bytes) {
  Backend* const device = parts.empty() ? nullptr : (parts.front().*bytes).device;
  for (const Operand& part : parts)
    require((part.*bytes).device == device, call, ": the bytes are not all in the memory of one device, or all on the host");
  return device;
}

// Calls body for every peer, the right neighbor first, so that ranks do not all begin with the same peer.
template <class Body>
void each_peer(const RankGroup& group, Body body) {
  for (int distance = 1; distance < group.size(); ++distance) body((group.rank + distance) % group.size());
}

// Bytes of which those of rank r + 1 follow those of rank r.
struct Shares {
  Bytes bytes;
  std::vector<int64_t> boundaries;
  int64_t element_bytes = 1;

  Bytes of(int rank) const { return share(bytes, boundaries, rank, element_bytes); }
};

// Every rank sends its shares, and on several hosts those that it received for its own, to all others of its host in one step. On one host
// that is as much as a ring sends, and unequal shares do not delay each other.
void gather_shares(Collective& collective, const RankGroup& group, std::span<const Shares> parts) {
  const HostLevels& levels = group.levels;
  const auto receive = [&](int peer, int root) {
    for (const Shares& part : parts) collective.receive(peer, part.of(root));
  };
  const auto send = [&](int peer, int root) {
    for (const Shares& part : parts) collective.send(peer, part.of(root));
  };
  if (levels.several()) {
    each_peer(group, [&](int peer) {
      if (levels.receives(group.rank, peer)) receive(peer, peer);
    });
    each_peer(group, [&](int peer) {
      if (levels.receives(peer, group.rank)) send(peer, group.rank);
    });
    collective.finish();  // behind it, ranks send on what they hold
  }
  const std::vector<int> own = levels.held(group.rank);
  each_peer(group, [&](int peer) {
    if (!levels.together(peer, group.rank)) return;
    for (const int root : levels.held(peer)) receive(peer, root);
  });
  each_peer(group, [&](int peer) {
    if (!levels.together(peer, group.rank)) return;
    for (const int root : own) send(peer, root);
  });
}

Bytes memory(const Tensor& tensor) {
  const Dtype dtype = tensor.dtype();
  require(dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::bf16, "sum over ranks: the tensor must be fp32, fp64 or bf16, got ",
          dtype);
  return tensor;
}

// Ranks first, first + stride, ... that sum among themselves. The one at place p of them, counted from 0, wants the sums of the shares of
// the ranks share(p, 0), share(p, 1), ... of the group.
struct Summing {
  int first, stride, ranks;
  int first_share, step, shares;

  int share(int place, int i) const { return first_share + place * stride + i * step; }
};

// The levels of a sum_scatter (host_levels.h): among the ranks of a block, then among those at one place of their blocks.
Summing within_block(const RankGroup& group) {
  const int block = group.levels.block();
  return {
      .first = group.rank / block * block, .stride = 1, .ranks = block, .first_share = 0, .step = block, .shares = group.size() / block};
}
Summing across_blocks(const RankGroup& group) {
  const int block = group.levels.block(), first = group.rank % block;
  return {.first = first, .stride = block, .ranks = group.size() / block, .first_share = first, .step = 0, .shares = 1};
}
int place_in(const Summing& among, const RankGroup& group) { return (group.rank - among.first) / among.stride; }

// Returns how many elements arrive at this rank.
int64_t arriving(const Summing& among, const RankGroup& group, const std::vector<int64_t>& boundaries) {
  int64_t wanted = 0;
  for (int i = 0; i < among.shares; ++i) {
    const auto of = static_cast<size_t>(among.share(place_in(among, group), i));
    wanted += boundaries[of + 1] - boundaries[of];
  }
  return wanted * (among.ranks - 1);
}
int64_t most_arriving(const RankGroup& group, const std::vector<int64_t>& boundaries) {
  return std::max(arriving(within_block(group), group, boundaries), arriving(across_blocks(group), group, boundaries));
}

// Sends each of the ranks the shares that it wants, and sums what arrives in scratch for the own ones.
void sum_among(Collective& collective, const RankGroup& group, const Summing& among, const Tensor& flat,
               const std::vector<int64_t>& boundaries, const Tensor& scratch) {
  const int place = place_in(among, group), others = among.ranks - 1;
  const auto share_of = [&](int at, int i) {
    const auto of = static_cast<size_t>(among.share(at, i));
    return flat.slice(boundaries[of], boundaries[of + 1]);
  };
  std::vector<TreeSum> sums;
  int64_t begin = 0;
  for (int i = 0; i < among.shares; ++i) {
    const Tensor own = share_of(place, i);
    const int64_t end = begin + own.elements() * others;
    sums.push_back({.own = own, .others = scratch.slice(begin, end).view({others, own.elements()}), .place = place});
    begin = end;
  }
  const auto each_other = [&](const auto& body) {
    for (int distance = 1; distance < among.ranks; ++distance) {
      const int at = (place + distance) % among.ranks;
      body(at, among.first + at * among.stride);
    }
  };
  each_other([&](int at, int peer) {
    const int row = at - (at > place ? 1 : 0);
    for (const TreeSum& sum : sums) {
      const int64_t count = sum.own.elements();
      collective.receive(peer, memory(sum.others.view({others * count}).slice(row * count, (row + 1) * count)));
    }
  });
  each_other([&](int at, int peer) {
    for (int i = 0; i < among.shares; ++i) collective.send(peer, memory(share_of(at, i)));
  });
  collective.finish();
  for (const TreeSum& sum : sums) {
    if (sum.own.elements() > 0) flat.device().run(sum);
  }
}

// Sums the own share over all ranks. `lent` is scratch for what arrives, if defined.
void scatter(Collective& collective, const RankGroup& group, const Tensor& flat, const std::vector<int64_t>& boundaries,
             const Tensor& lent = {}) {
  const Tensor scratch = collective.keep(lent.defined() ? lent.view({lent.elements()})
                                                        : empty(flat.device(), flat.dtype(), {most_arriving(group, boundaries)}));
  if (group.levels.block() > 1) sum_among(collective, group, within_block(group), flat, boundaries, scratch);
  sum_among(collective, group, across_blocks(group), flat, boundaries, scratch);
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, MakeDeviceLink make_link, std::vector<int> hosts) {
  require(hosts.empty() || std::ssize(hosts) == transport->size(), hosts.size(), " hosts for ", transport->size(), " ranks");
  if (transport->size() == 1) return;
  group_ = std::make_shared<RankGroup>();
  group_->rank = transport->rank();
  group_->ranks.resize(static_cast<size_t>(transport->size()));
  std::iota(group_->ranks.begin(), group_->ranks.end(), 0);
  group_->hash = hash_of(std::vector<int64_t>{transport->size()});
  group_->session = std::make_shared<Session>();
  group_->session->transport = std::move(transport);
  group_->session->make_link = std::move(make_link);
  group_->session->hosts = std::move(hosts);
  group_->make_link();
}

int Communicator::rank() const { return group_ ? group_->rank : 0; }
int Communicator::size() const { return group_ ? group_->size() : 1; }

Traffic Communicator::traffic() const {
  if (!group_) return {};
  const auto& sent = group_->session->sent;
  return {.gradients = sent[0], .parameters = sent[1], .activations = sent[2], .control = sent[3], .other = sent[4]};
}

std::vector<std::string> Communicator::latest_calls() const {
  std::vector<std::string> out;
  if (!group_) return out;
  const std::lock_guard lock(group_->session->mutex);
  for (const Header& header : group_->session->latest) out.push_back(describe(header));
  return out;
}

std::vector<std::string> Communicator::latest_kernels() const {
  if (!group_) return {};
  const std::lock_guard lock(group_->session->mutex);
  const auto log = group_->session->kernels.lock();
  return log ? log->latest() : std::vector<std::string>();
}

int64_t Communicator::calls() const { return group_ ? group_->session->calls.load() : 0; }

void Communicator::stop() const {
  if (!group_) return;
  group_->session->transport->stop();
  group_->session->end(std::make_exception_ptr(Error(ExitCode::peer_lost, text("rank ", rank(), " aborted its communication"))));
}

void Communicator::all_gather(const Bytes& bytes, std::span<const int64_t> counts, Purpose purpose) const {
  const Gather part{.bytes = bytes, .counts = counts};
  all_gather({&part, 1}, purpose);
}

void Communicator::all_gather(std::span<const Gather> parts, Purpose purpose) const {
  std::vector<Shares> shares;
  Header header{.operation = Operation::all_gather};
  for (const Gather& part : parts) {
    shares.push_back({.bytes = part.bytes, .boundaries = boundaries("all_gather", part.counts, size(), part.bytes.size)});
    header.count += part.bytes.size;
    header.counts = hash_of(std::vector<int64_t>{static_cast<int64_t>(header.counts), static_cast<int64_t>(hash_of(part.counts))});
  }
  if (!group_) return;
  Backend* const device = device_of("all_gather", parts, &Gather::bytes);
  Collective::run(*group_, {.header = header, .purpose = purpose, .device = device},
                  [&](Collective& collective) { gather_shares(collective, *group_, shares); });
}

void Communicator::all_to_all(std::span<const Exchange> parts, Purpose purpose) const {
  struct Cuts {
    std::vector<int64_t> in, out;
  };
  std::vector<Cuts> cuts;
  std::vector<int64_t> sent(static_cast<size_t>(size())), received(sent);  // bytes of all parts
  for (const Exchange& part : parts) {
    cuts.push_back({.in = boundaries("all_to_all: in", part.in_counts, size(), part.in.size),
                    .out = boundaries("all_to_all: out", part.out_counts, size(), part.out.size)});
    const int64_t kept = share(part.in, cuts.back().in, rank()).size, place = share(part.out, cuts.back().out, rank()).size;
    require(kept == place, "all_to_all: rank ", rank(), " sends itself ", kept, " bytes, but receives ", place, " from itself");
    std::ranges::transform(sent, part.in_counts, sent.begin(), std::plus{});
    std::ranges::transform(received, part.out_counts, received.begin(), std::plus{});
  }
  if (!group_) {  // a rank alone sends to itself
    for (const Exchange& part : parts) {
      if (part.in.device)
        part.in.device->run(Convert{.x = part.in.tensor(), .out = part.out.tensor()});
      else
        std::ranges::copy(part.in.host(), part.out.host().begin());
    }
    return;
  }
  Backend* const device = device_of("all_to_all", parts, &Exchange::in);
  require(device_of("all_to_all", parts, &Exchange::out) == device, "all_to_all: in and out are not in the memory of the same device");
  const Collective::Call call{
      .header = {.operation = Operation::all_to_all}, .purpose = purpose, .device = device, .sent = sent, .received = received};
  Collective::run(*group_, call, [&](Collective& collective) {
    for (size_t i = 0; i < parts.size(); ++i) {
      each_peer(*group_, [&](int peer) { collective.receive(peer, share(parts[i].out, cuts[i].out, peer)); });
      each_peer(*group_, [&](int peer) { collective.send(peer, share(parts[i].in, cuts[i].in, peer)); });
      collective.keep(share(parts[i].in, cuts[i].in, rank()), share(parts[i].out, cuts[i].out, rank()));
    }
  });
}

void Communicator::sum(const Tensor& tensor, Purpose purpose) const {
  const int64_t grains = ceil_div(tensor.elements(), kShareGrain);
  std::vector<int64_t> cuts;
  for (int r = 0; r <= size(); ++r) cuts.push_back(std::min(grains * r / size() * kShareGrain, tensor.elements()));
  const Bytes bytes = memory(tensor);
  if (!group_) return;
  const Header header{.count = tensor.elements(), .operation = Operation::sum, .dtype = tensor.dtype()};
  Collective::run(*group_, {.header = header, .purpose = purpose, .device = bytes.device}, [&](Collective& collective) {
    scatter(collective, *group_, tensor.view({tensor.elements()}), cuts);
    const Shares sums{.bytes = bytes, .boundaries = cuts, .element_bytes = dtype_bytes(tensor.dtype())};
    gather_shares(collective, *group_, {&sums, 1});
  });
}

int64_t Communicator::scratch_elements(std::span<const int64_t> counts) const {
  const int64_t count = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return group_ ? most_arriving(*group_, boundaries("sum_scatter", counts, size(), count)) : 0;
}

void Communicator::sum_scatter(const Tensor& tensor, std::span<const int64_t> counts, Purpose purpose, const Tensor& scratch) const {
  const auto cuts = boundaries("sum_scatter", counts, size(), tensor.elements());
  const Bytes bytes = memory(tensor);  // its dtype is checked in a group of one, too
  if (!group_) return;
  const int64_t needed = most_arriving(*group_, cuts);
  require(!scratch.defined() || (scratch.dtype() == tensor.dtype() && scratch.elements() >= needed), "sum_scatter: scratch is ",
          scratch.defined() ? scratch.elements() : 0, " elements of ", scratch.defined() ? scratch.dtype() : tensor.dtype(), ", but ",
          needed, " of ", tensor.dtype(), " are needed");
  const Header header{.count = tensor.elements(), .counts = hash_of(counts), .operation = Operation::sum_scatter, .dtype = tensor.dtype()};
  Collective::run(*group_, {.header = header, .purpose = purpose, .device = bytes.device},
                  [&](Collective& collective) { scatter(collective, *group_, tensor.view({tensor.elements()}), cuts, scratch); });
}

void Communicator::broadcast(const Bytes& bytes, int root, Purpose purpose) const {
  require(root >= 0 && root < size(), "broadcast: root must be below ", size(), ", got ", root);
  if (!group_) return;
  const Header header{.count = bytes.size, .root = static_cast<uint16_t>(root), .operation = Operation::broadcast};
  Collective::run(*group_, {.header = header, .purpose = purpose, .device = bytes.device}, [&](Collective& collective) {
    if (group_->rank != root) return collective.receive(root, bytes);
    each_peer(*group_, [&](int peer) { collective.send(peer, bytes); });
  });
}

void Communicator::barrier() const { all(std::byte{}); }

void Communicator::sum(std::span<int64_t> values) const {
  if (!group_) return;
  const Header header{.count = static_cast<int64_t>(values.size_bytes()), .operation = Operation::sum};
  Collective::run(*group_, {.header = header, .purpose = Purpose::control}, [&](Collective& collective) {
    std::vector<int64_t>& received = group_->received;  // one call at a time has it
    received.resize(values.size() * static_cast<size_t>(size() - 1));
    auto next = received.begin();
    each_peer(*group_, [&](int peer) {
      collective.receive(peer, Bytes(std::as_writable_bytes(std::span(next, values.size()))));
      next += std::ssize(values);
    });
    each_peer(*group_, [&](int peer) { collective.send(peer, Bytes(std::as_writable_bytes(values))); });
    collective.finish();
    for (size_t i = 0; i < received.size(); ++i) {
      int64_t& sum = values[i % values.size()];
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(received[i]));
    }
  });
}

Communicator Communicator::split(int color) const {
  const std::vector<int> colors = all(color);
  if (!group_) return {};
  auto group = std::make_shared<RankGroup>();
  std::vector<int64_t> identity{static_cast<int64_t>(group_->hash), group_->sequence};
  for (size_t r = 0; r < colors.size(); ++r) {
    if (colors[r] != color) continue;
    if (static_cast<int>(r) == group_->rank) group->rank = group->size();
    group->ranks.push_back(group_->ranks[r]);
    identity.push_back(group_->ranks[r]);
  }
  if (group->size() == 1) return {};
  group->hash = hash_of(identity);
  group->session = group_->session;
  if (group->size() == group_->size()) {
    group->link = group_->link;
    group->levels = group_->levels;
  } else {
    group->make_link();
  }
  return Communicator(std::move(group));
}

}  // namespace mantissa
