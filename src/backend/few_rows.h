// Generation multiplies each weight by one row or a few. Such a GEMM takes as long as reading the weight; packing it into tiles, which
// training does to keep bits equal, would take longer.
#pragma once

#include <cstdint>
#include <utility>

namespace mantissa {

inline constexpr int64_t kFewRows = 16;  // more are faster in tiles

// While one lives on a thread, GEMMs of up to `most` rows on that thread, or of up to so many in each group, may have other bits than the
// same rows among more. The bits of a row do not depend on the others up to that number.
class FewRows {
 public:
  explicit FewRows(int64_t most = kFewRows) : before_(std::exchange(allowed_here, most)) {}
  ~FewRows() { allowed_here = before_; }
  FewRows(const FewRows&) = delete;
  FewRows& operator=(const FewRows&) = delete;

  static bool allowed(int64_t rows) { return rows <= allowed_here; }

 private:
  inline static constinit thread_local int64_t allowed_here = 0;
  int64_t before_;
};

}  // namespace mantissa
