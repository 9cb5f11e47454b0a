#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Copies the bytes of rows of `x` to rows of `out`.
void permute_rows(const Tensor& x, const Tensor& out, const Permute& k) {
  const int64_t bytes = out.dim(1) * dtype_bytes(out.dtype());
  const int32_t* assignments = k.assignments.device_data<int32_t>();
  parallel_for(out.dim(0), rows_per_piece(bytes / 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::byte* to = out.device_bytes() + r * bytes;
      if (assignments[r] < 0) {
        std::memset(to, 0, static_cast<size_t>(bytes));
      } else {
        std::memcpy(to, x.device_bytes() + assignments[r] / k.per_row * bytes, static_cast<size_t>(bytes));
      }
    }
  });
}

template <class T>
void unpermute(const Unpermute& k) {
  using S = Arithmetic<T>;
  const int64_t columns = k.out.dim(1), assignments = k.rows.dim(1);
  std::vector<S> sums(static_cast<size_t>(columns));
  for (int64_t n = 0; n < k.out.dim(0); ++n) {
    std::fill(sums.begin(), sums.end(), S{0});
    for (int64_t j = 0; j < assignments; ++j) {
      const int64_t row = k.rows.device_data<int32_t>()[n * assignments + j];
      if (row < 0) continue;
      const T* x = k.x.device_data<T>() + row * columns;
      for (size_t c = 0; c < sums.size(); ++c) sums[c] += load(x[c]);
    }
    T* out = k.out.device_data<T>() + n * columns;
    for (size_t c = 0; c < sums.size(); ++c) out[c] = store<T>(sums[c]);
  }
}

}  // namespace

void CpuReference::execute(const DispatchTable& k) {
  const int64_t groups = k.offsets.elements() - 1, total = k.experts.elements();
  check_optional_indices("dispatch_table", "experts", k.experts, groups);
  const int32_t* experts = k.experts.device_data<int32_t>();
  int32_t *offsets = k.offsets.device_data<int32_t>(), *rows = k.rows.device_data<int32_t>(),
          *assignments = k.assignments.device_data<int32_t>();
  std::vector<int32_t> kept(static_cast<size_t>(groups));
  for (int64_t i = 0; i < total; ++i) {  // rows: the place within the group
    if (experts[i] < 0) {
      rows[i] = -1;
      continue;
    }
    int32_t& count = kept[static_cast<size_t>(experts[i])];
    rows[i] = k.capacity > 0 && count == k.capacity ? -1 : count++;
  }
  offsets[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    offsets[g + 1] = offsets[g] + static_cast<int32_t>(round_up(int64_t{kept[static_cast<size_t>(g)]}, k.multiple));
  }
  std::fill_n(assignments, k.assignments.elements(), -1);
  for (int64_t i = 0; i < total; ++i) {
    if (rows[i] < 0) continue;
    rows[i] += offsets[experts[i]];
    assignments[rows[i]] = static_cast<int32_t>(i);
  }
}

void CpuReference::execute(const ArrivalTable& k) {
  const int64_t ranks = k.counts.dim(0), experts = k.counts.dim(1);
  const int32_t* counts = k.counts.device_data<int32_t>();
  int32_t *offsets = k.offsets.device_data<int32_t>(), *rows = k.rows.device_data<int32_t>(),
          *assignments = k.assignments.device_data<int32_t>();
  int32_t* const sources = k.source_offsets.defined() ? k.source_offsets.device_data<int32_t>() : nullptr;
  const ArrivalRules rules(k);
  std::vector<int64_t> first(static_cast<size_t>(ranks * experts));  // as they arrive
  int64_t arrived = 0, rounded = 0, row = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    rules.counts.check(static_cast<int64_t>(i), counts[i]);
    first[i] = std::exchange(arrived, arrived + counts[i]);
    rounded += round_up(int64_t{counts[i]}, k.multiple);
  }
  rules.arrivals.check(0, arrived);
  rules.room.check(0, rounded);
  std::fill_n(assignments, k.assignments.elements(), -1);
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e] = static_cast<int32_t>(row);
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t count = counts[r * experts + e], arrival = first[static_cast<size_t>(r * experts + e)];
      if (sources) sources[e * ranks + r] = static_cast<int32_t>(row);
      for (int64_t i = 0; i < count; ++i) {
        rows[arrival + i] = static_cast<int32_t>(row + i);
        assignments[row + i] = static_cast<int32_t>(arrival + i);
      }
      row += round_up(count, k.multiple);
    }
  }
  offsets[experts] = static_cast<int32_t>(row);
  if (sources) sources[experts * ranks] = static_cast<int32_t>(row);
}

void CpuReference::execute(const SumCounts& k) {
  const int64_t columns = k.out.elements();
  const int32_t* counts = k.counts.device_data<int32_t>();
  double* out = k.out.device_data<double>();
  for (int64_t c = 0; c < columns; ++c) {
    int64_t sum = 0;
    for (int64_t i = c; i < k.counts.elements(); i += columns) sum += counts[i];
    out[c] = static_cast<double>(sum);
  }
}

void CpuReference::execute(const Permute& k) {
  check_optional_indices("permute", "assignments", k.assignments, shape_of(k.x)[0] * k.per_row);
  if (const auto* x = std::get_if<Tensor>(&k.x)) return permute_rows(*x, std::get<Tensor>(k.out), k);
  const auto &from = std::get<QuantizedTensor>(k.x), &to = std::get<QuantizedTensor>(k.out);
  permute_rows(from.codes, to.codes, k);
  permute_rows(from.scales, to.scales, k);
}

void CpuReference::execute(const Unpermute& k) {
  check_optional_indices("unpermute", "rows", k.rows, k.x.dim(0));
  with_values(k.x.dtype(), [&]<class T>() { unpermute<T>(k); });
}

}  // namespace mantissa
