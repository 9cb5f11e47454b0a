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

// Gathers directly, unless the link has its own way: every rank sends its bytes to all peers in one step. It sends as much as a ring does,
// and unequal shares do not delay each other.
void post_gather(Collective& collective, const RankGroup& group, const Bytes& bytes, const std::vector<int64_t>& boundaries,
                 int64_t element_bytes = 1) {
  if (collective.gathers()) {
    for (int root = 0; root < group.size(); ++root) collective.gather(root, share(bytes, boundaries, root, element_bytes));
    return;
  }
  each_peer(group, [&](int peer) { collective.receive(peer, share(bytes, boundaries, peer, element_bytes)); });
  each_peer(group, [&](int peer) { collective.send(peer, share(bytes, boundaries, group.rank, element_bytes)); });
}

Bytes memory(const Tensor& tensor) {
  const Dtype dtype = tensor.dtype();
  require(dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::bf16, "sum over ranks: the tensor must be fp32, fp64 or bf16, got ",
          dtype);
  return tensor;
}

// Computes out = sum of operands in the order in which GradientAccumulator sums micro batches: at distance 1, then 2, then 4. Operands are
// overwritten; out may be one of them.
void tree_sum(const std::vector<Tensor>& operands, const Tensor& out) {
  const size_t count = operands.size();
  for (size_t distance = 1; distance < count; distance *= 2) {
    const bool last = 2 * distance >= count;
    for (size_t i = 0; i + distance < count; i += 2 * distance) {
      out.device().run(Add{.a = operands[i], .b = operands[i + distance], .out = last ? out : operands[i]});
    }
  }
}

// Sends every peer its share of `flat` and sums what arrives for the own share. `lent` is scratch to hold it, if defined.
void scatter(Collective& collective, const RankGroup& group, const Tensor& flat, const std::vector<int64_t>& boundaries,
             const Tensor& lent = {}) {
  const auto r = static_cast<size_t>(group.rank);
  const int64_t elements = boundaries[r + 1] - boundaries[r];
  const Tensor scratch =
      collective.keep(lent.defined() ? lent.view({lent.elements()}) : empty(flat.device(), flat.dtype(), {elements * (group.size() - 1)}));
  const Tensor mine = flat.slice(boundaries[r], boundaries[r + 1]);
  std::vector<Tensor> operands;
  for (int peer = 0, row = 0; peer < group.size(); ++peer) {
    operands.push_back(peer == group.rank ? mine : scratch.slice(row * elements, (row + 1) * elements));
    row += peer != group.rank;
  }
  each_peer(group, [&](int peer) { collective.receive(peer, memory(operands[static_cast<size_t>(peer)])); });
  each_peer(group, [&](int peer) { collective.send(peer, share(memory(flat), boundaries, peer, dtype_bytes(flat.dtype()))); });
  collective.finish();
  if (elements > 0) tree_sum(operands, mine);
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, MakeDeviceLink make_link) {
  if (transport->size() == 1) return;
  group_ = std::make_shared<RankGroup>();
  group_->rank = transport->rank();
  group_->ranks.resize(static_cast<size_t>(transport->size()));
  std::iota(group_->ranks.begin(), group_->ranks.end(), 0);
  group_->hash = hash_of(std::vector<int64_t>{transport->size()});
  group_->session = std::make_shared<Session>();
  group_->session->transport = std::move(transport);
  group_->session->make_link = std::move(make_link);
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
  std::vector<std::vector<int64_t>> cuts;
  Header header{.operation = Operation::all_gather};
  for (const Gather& part : parts) {
    cuts.push_back(boundaries("all_gather", part.counts, size(), part.bytes.size));
    header.count += cuts.back().back();
    header.counts = hash_of(std::vector<int64_t>{static_cast<int64_t>(header.counts), static_cast<int64_t>(hash_of(part.counts))});
  }
  if (!group_) return;
  Backend* const device = device_of("all_gather", parts, &Gather::bytes);
  Collective::run(*group_, {.header = header, .purpose = purpose, .device = device}, [&](Collective& collective) {
    auto cut = cuts.begin();
    for (const Gather& part : parts) post_gather(collective, *group_, part.bytes, *cut++);
  });
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
    post_gather(collective, *group_, bytes, cuts, dtype_bytes(tensor.dtype()));
  });
}

void Communicator::sum_scatter(const Tensor& tensor, std::span<const int64_t> counts, Purpose purpose, const Tensor& scratch) const {
  const auto cuts = boundaries("sum_scatter", counts, size(), tensor.elements());
  const Bytes bytes = memory(tensor);  // its dtype is checked in a group of one, too
  if (!group_) return;
  const int64_t needed = counts[static_cast<size_t>(rank())] * (size() - 1);
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
  } else {
    group->make_link();
  }
  return Communicator(std::move(group));
}

}  // namespace mantissa
