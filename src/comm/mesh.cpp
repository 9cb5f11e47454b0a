#include "comm/mesh.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <span>

#include "base/hash.h"
#include "base/limits.h"

namespace mantissa {
namespace {

struct Outcome {
  int32_t code = 0;  // 0: fine, else ExitCode
  int32_t length = 0;
};

// Cuts `all` into strings of these sizes.
std::vector<std::string> cut(const std::string& all, std::span<const int64_t> sizes) {
  std::vector<std::string> strings;
  size_t begin = 0;
  for (const int64_t size : sizes) {
    strings.push_back(all.substr(begin, static_cast<size_t>(size)));
    begin += static_cast<size_t>(size);
  }
  return strings;
}

std::string room_for(std::span<const int64_t> sizes) {
  return std::string(static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})), '\0');
}

}  // namespace

ModelRanks Mesh::ranks() const {
  return {.tensor = tensor.size(),
          .expert = expert.size(),
          .tensor_rank = tensor.rank(),
          .expert_rank = expert.rank(),
          .sequence_parallel = sequence_parallel};
}

Mesh make_mesh(Communicator world, const ModelRanks& ranks) {
  require(ranks.tensor >= 1 && world.size() % ranks.tensor == 0, ExitCode::usage, "parallel.tensor is ", ranks.tensor,
          ", which does not divide ", world.size(), " ranks");
  const int data_size = world.size() / ranks.tensor;
  require(ranks.expert >= 1 && data_size % ranks.expert == 0, ExitCode::usage, "parallel.expert is ", ranks.expert,
          ", which does not divide ", data_size, " data ranks");
  Mesh mesh{.world = std::move(world), .sequence_parallel = ranks.sequence_parallel};
  mesh.tensor = mesh.world.split(mesh.world.rank() / ranks.tensor);
  mesh.data = mesh.expert_data = mesh.world.split(mesh.world.rank() % ranks.tensor);
  if (ranks.expert == 1) return mesh;
  mesh.expert = mesh.data.split(mesh.data.rank() / ranks.expert);
  mesh.expert_data = mesh.data.split(mesh.data.rank() % ranks.expert);
  return mesh;
}

void await_all(const Communicator& world) {
  try {
    world.barrier();
  } catch (const Error& error) {
    if (error.code() != ExitCode::peer_lost) throw;
  }
}

void agree(const Communicator& world, const std::function<void()>& body) {
  if (world.size() == 1) return body();
  ExitCode code = ExitCode::ok;
  std::string message;
  try {
    body();
  } catch (const Error& error) {
    if (error.code() == ExitCode::peer_lost) throw;
    code = error.code(), message = error.what();
  } catch (const std::bad_alloc&) {
    code = ExitCode::environment, message = "out of memory" + memory_limits();
  } catch (const std::exception& error) {
    code = ExitCode::internal, message = error.what();
  }
  const auto outcomes = world.all(Outcome{.code = static_cast<int32_t>(code), .length = static_cast<int32_t>(message.size())});
  for (int r = 0; r < world.size(); ++r) {
    const Outcome& outcome = outcomes[static_cast<size_t>(r)];
    if (outcome.code == 0) continue;
    std::string first = message;
    first.resize(static_cast<size_t>(outcome.length));
    world.broadcast(std::as_writable_bytes(std::span(first)), r, Purpose::control);
    await_all(world);
    fail(static_cast<ExitCode>(outcome.code), r == world.rank() ? "" : text("rank ", r, ": "), first);
  }
}

std::vector<std::string> all_gather_strings(const Communicator& world, const std::string& value) {
  const std::vector<int64_t> sizes = world.all(static_cast<int64_t>(value.size()));
  std::string all = room_for(sizes);
  std::ranges::copy(value, all.begin() + std::accumulate(sizes.begin(), sizes.begin() + world.rank(), int64_t{0}));
  world.all_gather(std::as_writable_bytes(std::span(all)), sizes, Purpose::control);
  return cut(all, sizes);
}

std::vector<std::string> gather_strings(const Communicator& world, const std::string& value) {
  std::vector<int64_t> received = world.all(static_cast<int64_t>(value.size())), sent(received.size());
  sent.front() = static_cast<int64_t>(value.size());
  if (world.rank() != 0) std::ranges::fill(received, 0);
  std::string all = room_for(received);
  world.all_to_all(std::as_bytes(std::span(value)), sent, std::as_writable_bytes(std::span(all)), received, Purpose::control);
  return world.rank() == 0 ? cut(all, received) : std::vector<std::string>{value};
}

std::string broadcast_string(const Communicator& world, const std::string& value) {
  std::string text = value;
  text.resize(static_cast<size_t>(world.all(static_cast<int64_t>(value.size())).front()));
  world.broadcast(std::as_writable_bytes(std::span(text)), 0, Purpose::control);
  return text;
}

void require_size(const Communicator& group, const char* key, int64_t size) {
  require(group.size() == size, ExitCode::usage, key, ": ", size, ", but this runs on ", count_text(group.size(), "rank"));
}

void fail_alike(const Communicator& world, ExitCode code, const std::string& message) {
  await_all(world);
  fail(code, message);
}

void require_same(const Communicator& world, const std::string& what, const std::string& value) {
  if (world.size() == 1) return;
  const std::vector<Hash64> all = world.all(xxh64(value));
  const auto times = [&](Hash64 hash) { return std::ranges::count(all, hash); };
  const Hash64 majority = std::ranges::max(all, {}, times);
  const auto mismatch = std::ranges::find_if(all, [&](Hash64 hash) { return hash != majority; });
  if (mismatch == all.end()) return;
  fail_alike(world, ExitCode::usage,
             text("the ranks were started with different inputs: ", what, " of rank ", mismatch - all.begin(), " is ", *mismatch,
                  ", of most ranks ", majority));
}

}  // namespace mantissa
