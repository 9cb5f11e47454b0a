#include <cstdint>
#include <cstdio>

#include "mantissa/base/parallel.h"
#include "mantissa/base/version.h"

int main() {
  int64_t squares[100] = {};
  mantissa::parallel_for(100, 7, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) squares[i] = i * i;
  });
  std::printf("%s: 99 squared is %d\n", mantissa::version().c_str(), static_cast<int>(squares[99]));
  return squares[99] == 99 * 99 ? 0 : 1;
}
