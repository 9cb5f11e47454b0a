// Divides counts without losing the rest: n >= 0, d > 0.
#pragma once

#include <type_traits>

namespace mantissa {

template <class T>
constexpr T ceil_div(T n, std::type_identity_t<T> d) {
  return n / d + (n % d > 0 ? 1 : 0);
}

// Returns the least multiple of d that is not below n.
template <class T>
constexpr T round_up(T n, std::type_identity_t<T> d) {
  return ceil_div(n, d) * d;
}

}  // namespace mantissa
