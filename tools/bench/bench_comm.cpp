// Measures collectives from 8 bytes to 64 MiB, each slice beside one in which every rank copies as many bytes within its own memory. All
// ranks run it; a slice takes as long as on the slowest rank, and rank 0 reports.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "comm/mesh.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/version.h"
#include "mantissa/json/json.h"
#include "tools/bench/bench_harness.h"

namespace mantissa::tools {
namespace {

constexpr int kRankSlices = 9;
constexpr double kUntilAsleep = 100e-6;  // a wait spins for about 10 us before it sleeps
constexpr double kRankSliceSeconds = 0.02;
constexpr int64_t kLargest = int64_t{64} << 20;

// Returns the seconds of one call on the slowest rank, after all have arrived.
double slowest(const Communicator& world, int calls, const std::function<void()>& run) {
  world.barrier();
  const double begin = monotonic_seconds();
  for (int i = 0; i < calls; ++i) run();
  const std::vector<double> seconds = world.all((monotonic_seconds() - begin) / calls);
  return *std::max_element(seconds.begin(), seconds.end());
}

// Returns how many calls fill a slice, the same on all ranks.
int calls_of(const Communicator& world, const std::function<void()>& run) {
  run();
  return static_cast<int>(std::clamp(kRankSliceSeconds / slowest(world, 2, run), 1.0, 1e5));
}

class CommBench {
 public:
  CommBench(const Communicator& world, Backend& device, const BenchOptions& options)
      : world_(world),
        options_(options),
        bytes_(static_cast<size_t>(kLargest)),
        copy_(bytes_.size() + 4 * static_cast<size_t>(world.size())) {
    sums_ = zeros(device, Dtype::f32, {kLargest / 4});
    agree(world, [this] {
      if (world_.rank() == 0) json_.open(options_.json);
    });
  }

  void run() {
    if (world_.rank() == 0)
      std::printf("mantissa %s, %d ranks; seconds of one call, of the slowest rank [p10 .. p90]\n", version().c_str(), world_.size());
    wake_up();
    for (int64_t size = 8; size <= kLargest; size = std::min(size * 8, size == kLargest ? 2 * kLargest : kLargest)) {
      std::vector<int64_t> counts;  // shares of whole 4 bytes: 8 bytes over more than two ranks leave some empty
      for (int r = 0; r < world_.size(); ++r) counts.push_back((size / 4 * (r + 1) / world_.size() - size / 4 * r / world_.size()) * 4);
      const std::span<std::byte> in(bytes_.data(), static_cast<size_t>(size));
      measure("all_gather", size, [&] { world_.all_gather(in, counts, Purpose::other); });
      const std::vector<int64_t> swapped(counts.size(), counts[static_cast<size_t>(world_.rank())]);
      // As many as a rank's share may be a little more than all: shares differ by 4 bytes.
      const std::span<std::byte> back = std::span(copy_).first(static_cast<size_t>(swapped[0]) * counts.size());
      measure("all_to_all", size, [&] { world_.all_to_all(in, counts, back, swapped, Purpose::other); });
      const Tensor tensor = sums_.slice(0, size / 4);
      measure("tree_sum", size, [&] { world_.sum(tensor, Purpose::other); });
      measure("broadcast", size, [&] { world_.broadcast(in, 0, Purpose::other); });
    }
    if (world_.rank() > 0 || exchanges_.size() < 2) return;
    // The link rate of the cost model: bytes that a rank sends a second, while it receives as many, in the largest exchanges.
    const double sent = static_cast<double>(kLargest) * (world_.size() - 1) / world_.size();
    std::printf("link %.3g bytes/s of each rank, for mantissa explain --link\n", sent / *std::ranges::max_element(exchanges_));
  }

 private:
  void measure(const std::string& name, int64_t size, const std::function<void()>& collective) {
    if (("comm." + name).find(options_.filter) == std::string::npos) return;
    const auto copy = [&] { std::memcpy(copy_.data(), bytes_.data(), static_cast<size_t>(size)); };
    const int calls = calls_of(world_, collective), copies = calls_of(world_, copy);
    std::vector<double> seconds, ratios;
    for (int slice = 0; slice < kRankSlices; ++slice) {
      const double copied = slowest(world_, copies, copy);
      seconds.push_back(slowest(world_, calls, collective));
      ratios.push_back(copied / seconds.back());
    }
    report(name, size, spread_of(seconds), spread_of(ratios));
    if (size == kLargest && (name == "all_gather" || name == "all_to_all")) exchanges_.push_back(spread_of(seconds).median);
  }

  // Measures 8 bytes one way, to ranks that sleep while the sender computes: half of a round trip.
  void wake_up() {
    if (std::string("comm.wake_up").find(options_.filter) == std::string::npos) return;
    std::vector<double> seconds;
    const std::span<std::byte> bytes(bytes_.data(), 8);
    for (int i = 0; i < 1000; ++i) {
      const double begin = monotonic_seconds();
      for (const int sender : {0, 1}) {
        const double asleep = monotonic_seconds() + kUntilAsleep;  // then those that wait for this rank sleep
        while (world_.rank() == sender && monotonic_seconds() < asleep) continue;
        world_.broadcast(bytes, sender, Purpose::other);
      }
      seconds.push_back((monotonic_seconds() - begin) / 2 - kUntilAsleep);
    }
    report("wake_up", 8, spread_of(seconds), {});
  }

  void report(const std::string& name, int64_t size, const Spread& seconds, const Spread& ratio) {
    if (world_.rank() != 0) return;
    std::printf("%-16s %9lld bytes %12.1f us [%.1f .. %.1f]  %7.2f GB/s", ("comm." + name).c_str(), static_cast<long long>(size),
                seconds.median * 1e6, seconds.p10 * 1e6, seconds.p90 * 1e6, static_cast<double>(size) / seconds.median * 1e-9);
    if (ratio.median > 0.0) std::printf("  %.3f of copy [%.3f .. %.3f]", ratio.median, ratio.p10, ratio.p90);
    std::printf("\n");
    std::fflush(stdout);
    if (!json_.is_open()) return;
    Json line{{"bench", "comm." + name}, {"bytes", size}, {"ranks", world_.size()}};
    line.add("us", percentiles(seconds, 1e6));
    if (ratio.median > 0.0) line.add("ratio_copy", percentiles(ratio, 1.0));
    json_.append(line.dump(-1, Json::Order::keys));
  }

  const Communicator& world_;
  BenchOptions options_;
  std::vector<std::byte> bytes_, copy_;
  Tensor sums_;
  std::vector<double> exchanges_;  // seconds of the largest
  JsonLines json_;
};

}  // namespace

void bench_comm(const Communicator& world, Backend& device, const BenchOptions& options) {
  require(world.size() > 1, ExitCode::usage,
          "bench comm: needs several ranks: start it with mantissa launch --nproc-per-node 2 -- bench comm");
  CommBench(world, device, options).run();
}

}  // namespace mantissa::tools
