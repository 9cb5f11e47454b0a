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

Mesh make_mesh(Communicator world, int tensor_size, int expert_size) {
  require(tensor_size >= 1 && world.size() % tensor_size == 0, ExitCode::usage, "parallel.tensor is ", tensor_size,
          ", which does not divide ", world.size(), " ranks");
  const int data_size = world.size() / tensor_size;
  require(expert_size >= 1 && data_size % expert_size == 0, ExitCode::usage, "parallel.expert is ", expert_size, ", which does not divide ",
          data_size, " data ranks");
  Communicator tensor = world.split(world.rank() / tensor_size), data = world.split(world.rank() % tensor_size);
  if (expert_size == 1) return {.world = std::move(world), .tensor = std::move(tensor), .data = data, .expert = {}, .expert_data = data};
  Communicator expert = data.split(data.rank() / expert_size), expert_data = data.split(data.rank() % expert_size);
  return {.world = std::move(world),
          .tensor = std::move(tensor),
          .data = std::move(data),
          .expert = std::move(expert),
          .expert_data = std::move(expert_data)};
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
