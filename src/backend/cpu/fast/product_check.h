// What the promises of equal bits ask of the library's matrix product on this CPU, and construction cannot give (packed_product.h): that
// neither the place of a row or column in a tile matters nor which of the two depths multiplies.
#pragma once

#include <span>
#include <string>

#include "backend/cpu/fast/packed_product.h"

namespace mantissa {

enum class Alike { rows, columns };

// How many rows, or columns, of a matrix of so many columns have other bits than the first.
int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike);

// Multiplies tiles whose rows, and then those whose columns, are all alike, and compares the bits of the results; two to three
// milliseconds. Empty if they are all alike, else what differs.
std::string unequal_places(const PackedProduct& product);

// Multiplies the same operands with each, zeros behind them in the deeper one, and compares the bits. Empty if they are alike.
std::string unequal_depths(const PackedProducts& products);

}  // namespace mantissa
