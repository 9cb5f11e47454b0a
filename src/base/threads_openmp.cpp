#include <omp.h>

#include <algorithm>
#include <atomic>

#include "base/single_threaded_library.h"
#include "mantissa/base/parallel.h"

namespace mantissa {

void detail::parallel_chunks(int64_t count, int64_t chunk, ChunkBody body, void* context) {
  if (count <= 0) return;
  const int64_t pieces = (count + chunk - 1) / chunk;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), pieces));
  if (threads <= 1 || omp_in_parallel()) {
    const SingleThreadedLibrary guard;
    for (int64_t i = 0; i < pieces; ++i) body(context, i * chunk, std::min(count, (i + 1) * chunk));
    return;
  }
  // Pieces are handed out in order, so a slow core delays one piece and not half of them.
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const SingleThreadedLibrary guard;
    for (int64_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) body(context, i * chunk, std::min(count, (i + 1) * chunk));
  }
}

}  // namespace mantissa
