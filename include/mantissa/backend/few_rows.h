// Generation multiplies each weight by a row or a few. Such a product takes as long as reading the weight, and laying it out as tiles, as
// products of training do for the sake of their bits, would take longer.
#pragma once

#include <utility>

namespace mantissa {

// While one lives on a thread, dense products of up to 16 rows that this thread asks for need not have the bits that these rows have among
// others. The CPU backend makes use of it where operands need no widening; experts are grouped, and are tiles always.
class FewRows {
 public:
  FewRows() : before_(std::exchange(allowed_here, true)) {}
  ~FewRows() { allowed_here = before_; }
  FewRows(const FewRows&) = delete;
  FewRows& operator=(const FewRows&) = delete;

  static bool allowed() { return allowed_here; }

 private:
  inline static constinit thread_local bool allowed_here = false;
  bool before_;
};

}  // namespace mantissa
