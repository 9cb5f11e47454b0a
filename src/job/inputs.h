// Compares the inputs of all ranks at the start and names those that mismatch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mantissa/job/store.h"

namespace mantissa {

// Holds what one rank gave to compare().
struct Inputs {
  std::string host;
  std::map<std::string, std::string> items;
};

std::string inputs_text(const std::vector<NamedHash>& items);
Inputs read_inputs(const std::string& bytes);

// Describes which items mismatch on which rank; "" if all ranks gave the same.
std::string mismatching_items(const std::vector<Inputs>& ranks);

}  // namespace mantissa
