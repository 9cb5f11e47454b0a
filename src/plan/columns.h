// Tables of text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace mantissa {

using Cells = std::vector<std::string>;
constexpr size_t kGap = 2;  // between columns

inline std::vector<size_t> widths_of(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  return widths;
}

// The last column, of numbers, stands to the right.
inline std::string aligned(const std::vector<Cells>& rows) {
  const std::vector<size_t> widths = widths_of(rows);
  std::string out;
  for (const Cells& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) out += row[i] + std::string(widths[i] - row[i].size() + kGap, ' ');
    out += std::string(widths.back() - row.back().size(), ' ') + row.back() + '\n';
  }
  return out;
}

}  // namespace mantissa
