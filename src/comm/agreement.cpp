#include "mantissa/comm/agreement.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "mantissa/base/hash.h"

namespace mantissa {
namespace {

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

std::vector<std::string> all_gather_strings(const Communicator& world, const std::string& own) {
  const std::vector<int64_t> sizes = world.all(static_cast<int64_t>(own.size()));
  std::string all = room_for(sizes);
  std::ranges::copy(own, all.begin() + std::accumulate(sizes.begin(), sizes.begin() + world.rank(), int64_t{0}));
  world.all_gather(std::as_writable_bytes(std::span(all)), sizes, Purpose::control);
  return cut(all, sizes);
}

std::vector<std::string> gather_strings(const Communicator& world, const std::string& own) {
  std::vector<int64_t> from = world.all(static_cast<int64_t>(own.size())), to(from.size());
  to.front() = static_cast<int64_t>(own.size());
  if (world.rank() != 0) std::ranges::fill(from, 0);
  std::string all = room_for(from);
  world.all_to_all(std::as_bytes(std::span(own)), to, std::as_writable_bytes(std::span(all)), from, Purpose::control);
  return world.rank() == 0 ? cut(all, from) : std::vector<std::string>{own};
}

std::string broadcast_string(const Communicator& world, const std::string& own) {
  std::string text = own;
  text.resize(static_cast<size_t>(world.all(static_cast<int64_t>(own.size())).front()));
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

void require_same(const Communicator& world, const std::string& what, const std::string& own) {
  if (world.size() == 1) return;
  const std::vector<Hash64> all = world.all(xxh64(own));
  const auto times = [&](Hash64 hash) { return std::ranges::count(all, hash); };
  const Hash64 majority = std::ranges::max(all, {}, times);
  const auto mismatch = std::ranges::find_if(all, [&](Hash64 hash) { return hash != majority; });
  if (mismatch == all.end()) return;
  fail_alike(world, ExitCode::usage,
             text("the ranks were started with different inputs: ", what, " of rank ", mismatch - all.begin(), " is ", *mismatch,
                  ", of most ranks ", majority));
}

}  // namespace mantissa
