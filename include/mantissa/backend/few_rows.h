// Generation multiplies each weight by one row or a few. Such a GEMM takes as long as reading the weight; packing it into tiles, which
// training does to keep bits equal, would take longer.
#pragma once

#include <utility>

namespace mantissa {

// While one lives on a thread, dense GEMMs of up to 16 rows on that thread may have other bits than the same rows among others. The CPU
// backend uses it where operands need no widening; experts are grouped and always run in tiles.
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
