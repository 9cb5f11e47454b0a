// What the promises of equal bits ask of the library's matrix product on this CPU, and construction cannot give (packed_product.h): that
// the place of a row or column in a tile does not matter. Then a token's bits do not depend on the tokens around it, nor on the rank that
// computes it.
#pragma once

#include <string>

namespace mantissa {

// Multiplies tiles whose rows, or columns, are all alike, in fp32 and, where products run in it, in bf16, and compares the bits of the
// results; a few milliseconds. Empty if they are all alike, else what differs: "fp32, rows: 40 of 64 differ".
std::string unequal_places();

// Throws Error(environment) that names what differs on this CPU, `why` it matters and the way out, unless unequal_places() is empty.
void require_equal_places(const std::string& why);

}  // namespace mantissa
