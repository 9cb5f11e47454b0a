// Finds the name a person most likely meant, for "did you mean".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

// Returns the number of edits between two names: insert, delete, replace, swap of neighbors (optimal string alignment, the usual form of
// Damerau-Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b);

// Returns the candidate nearest to the name: at most two edits away and fewer than its length, else one of which the name is a prefix (of
// at least three letters) or the reverse; "" if there is none. Ties go to the first.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// Returns "; did you mean 'x'?" or "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace mantissa
