#include "mantissa/comm/mesh.h"

#include <new>
#include <utility>

#include "mantissa/base/limits.h"

namespace mantissa {
namespace {

struct Outcome {
  int32_t code = 0;  // 0: fine, else ExitCode
  int32_t length = 0;
};

// Returns code and message of what body throws.
std::pair<ExitCode, std::string> outcome_of(const std::function<void()>& body) {
  try {
    body();
    return {ExitCode::ok, ""};
  } catch (const Error& error) {
    if (error.code() == ExitCode::peer_lost) throw;
    return {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::environment, "out of memory" + memory_limits()};
  } catch (const std::exception& error) {
    return {ExitCode::internal, error.what()};
  }
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
  const auto [code, message] = outcome_of(body);
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

}  // namespace mantissa
