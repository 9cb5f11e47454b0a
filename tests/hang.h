// The limit of waits in tests. It ends what hangs: a machine that is slow, or busy with other work, is no failure. Where a test is about a
// limit of the product, its own numbers stand there.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace mantissa::test {

inline constexpr double kHangSeconds = 300;
inline constexpr std::chrono::duration<double> kHang{kHangSeconds};

// Waits until it is so; returns false if that takes longer than kHang.
inline bool eventually(const std::function<bool()>& is_so) {
  const auto end = std::chrono::steady_clock::now() + kHang;
  while (std::chrono::steady_clock::now() < end) {
    if (is_so()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace mantissa::test
