#pragma once

#include <string>

#include "backend/cpu/packed_product.h"

namespace mantissa {

// unequal_places() of one product.
std::string unequal_places(const PackedProduct& product);

}  // namespace mantissa
