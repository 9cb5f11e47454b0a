// Rules for the indices of a kernel, and the error for one that breaks its rule: on a CPU before the kernel writes, on a device when
// somebody waits for it.
#pragma once

#include <cstdint>

#include "mantissa/backend/backend.h"
#include "mantissa/base/error.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

struct IndexRule {
  enum class Form : uint8_t {  // wording of the error
    below,                     // ids[3] is 9, not in [0, 9)
    within,                    // segment_starts[3] is 4, not in [0, 3]; or: not 0
    target,                    // targets[3] is 9, not below the vocabulary size 9
    total                      // 11 rows arrive, but rows has 10
  };

  ExitCode code;                 // code of the error
  const char *kernel, *operand;  // literals of the host: those of device code lie in its memory, so only the host makes rules
  int64_t first, end;            // allowed are [first, end)
  Form form = Form::below;

  // Allows numbers from 0 on, below a limit.
  static IndexRule below(ExitCode code, const char* kernel, const char* operand, int64_t limit) {
    return {code, kernel, operand, 0, limit};
  }
  // Like below(), but allows -1 as well: none.
  static IndexRule optional(const char* kernel, const char* operand, int64_t limit) {
    return {ExitCode::internal, kernel, operand, -1, limit};
  }
  // Allows negative targets, which are ignored.
  static IndexRule targets(const char* kernel, int64_t vocab) {
    return {ExitCode::data, kernel, "targets", INT64_MIN, vocab, Form::target};
  }
  // Makes a rule that differs from index to index: within() gives the bounds.
  static IndexRule each(const char* kernel, const char* operand) { return {ExitCode::internal, kernel, operand, 0, 1, Form::within}; }
  // Allows one number, a total: `operand` says what is counted, and what has as many as it should be.
  static IndexRule total(const char* kernel, const char* operand, int64_t all) {
    return {ExitCode::internal, kernel, operand, all, all + 1, Form::total};
  }

  MANTISSA_HOST_DEVICE IndexRule within(int64_t least, int64_t most) const { return {code, kernel, operand, least, most + 1, form}; }
  // The rule for an offset of groups of so many rows: from 0 on, never descending.
  MANTISSA_HOST_DEVICE IndexRule offset(const int32_t* offsets, int64_t group, int64_t rows) const {
    return group == 0 ? within(0, 0) : within(offsets[group - 1], rows);
  }
  MANTISSA_HOST_DEVICE bool allows(int64_t value) const { return value >= first && value < end; }
  void check(int64_t index, int64_t value) const {
    if (!allows(value)) refuse(index, value);
  }
  [[noreturn]] void refuse(int64_t index, int64_t value) const;  // throws Error(code)
};

// Check index tensors by value, which only a backend whose memory the host can read may do. Kernels call them before their first write.
// Throw the error of the first index that breaks the rule.
void check_indices(const Tensor& indices, const IndexRule& rule);
// Requires 0 <= start <= i for position i of every sequence of `length`. Checks nothing if undefined.
void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length);

// Returns the rule for the assignments of Permute, or for the ids of a table.
inline IndexRule rule_of(const Permute& k) {
  if (k.part.rows > 0) return IndexRule::below(ExitCode::data, "embedding", "ids", k.part.rows);
  return IndexRule::optional("permute", "assignments", shape_of(k.x)[0] * k.per_row);
}

// Rules of ArrivalTable: for every count, for the sum of all, and for their sum when each is rounded up to the multiple.
struct ArrivalRules {
  IndexRule counts, arrivals, room;

  explicit ArrivalRules(const ArrivalTable& k)
      : counts(IndexRule::each("arrival_table", "counts").within(0, k.rows.elements())),
        arrivals(IndexRule::total("arrival_table", "rows arrive, but rows", k.rows.elements())),
        room(IndexRule::total("arrival_table", "rows with padding, but assignments", k.assignments.elements())) {}
};

}  // namespace mantissa
