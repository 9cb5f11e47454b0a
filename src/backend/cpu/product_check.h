// What the promises of equal bits ask of the library's matrix product on this CPU, and construction cannot give (packed_product.h): that
// the place of a row or column in a tile does not matter.
#pragma once

#include <span>
#include <string>

#include "backend/cpu/packed_product.h"

namespace mantissa {

enum class Alike { rows, columns };

// How many rows, or columns, of a matrix of so many columns have other bits than the first.
int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike);

// Multiplies tiles whose rows, and then those whose columns, are all alike, and compares the bits of the results; about a millisecond.
// Empty if they are all alike, else what differs.
std::string unequal_places(const PackedProduct& product);

}  // namespace mantissa
