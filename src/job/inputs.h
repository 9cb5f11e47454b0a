// What ranks compare at the start, and who is odd.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mantissa/job/store.h"

namespace mantissa {

// What one rank gave to compare().
struct Inputs {
  std::string host;
  std::map<std::string, std::string> items;
};

std::string inputs_text(const std::vector<NamedHash>& items);
Inputs read_inputs(const std::string& bytes);

// What is odd on which rank, in words; "" if all ranks gave the same.
std::string odd_items(const std::vector<Inputs>& ranks);

}  // namespace mantissa
