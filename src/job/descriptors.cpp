#include "job/descriptors.h"

#include <sys/resource.h>

#include <utility>

namespace mantissa {
namespace {

constexpr int kOwn = 64;  // files of the run, and what UCX opens before it has found a peer

}  // namespace

void require_descriptors(const Launch& launch) {
  const auto need = static_cast<rlim_t>(launch.world + kOwn + (launch.rank == 0 ? kMostUnauthenticated : 0));
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need) return;
  const rlim_t found = std::exchange(limit.rlim_cur, need);
  require(limit.rlim_max >= need && ::setrlimit(RLIMIT_NOFILE, &limit) == 0, ExitCode::environment, "rank ", launch.rank, " of ",
          launch.world, " needs ", need, " open files, and the limit is ", limit.rlim_max >= need ? found : limit.rlim_max,
          " (ulimit -Hn)");
}

}  // namespace mantissa
