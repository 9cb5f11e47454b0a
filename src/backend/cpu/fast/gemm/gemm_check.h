// Checks what the promises of equal bits require of the library's GEMM on this CPU, and construction cannot ensure (packed_gemm.h): that
// neither the position of a row or column in a tile matters nor which of the two depths multiplies.
#pragma once

#include <span>
#include <string>

#include "backend/cpu/fast/gemm/packed_gemm.h"

namespace mantissa {

enum class Alike { rows, columns };

// Counts the rows, or columns, of a matrix of so many columns that have other bits than the first.
int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike);

// Multiplies tiles whose rows, and then those whose columns, are all alike, and compares the bits of the results; takes two to three
// milliseconds. Returns what differs; "" if nothing does.
std::string unequal_places(const PackedGemm& gemm);

// Multiplies the same operands with each, zeros behind them in the deeper one, and compares the bits. Returns "" if they are equal.
std::string unequal_depths(const PackedGemms& gemms);

}  // namespace mantissa
