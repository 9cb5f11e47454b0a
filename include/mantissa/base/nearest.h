// "Did you mean": the name a person most likely meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

// Edits between two names: insert, delete, replace, swap of neighbours (optimal string alignment, the usual form of Damerau-Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b);

// The candidate nearest to the name: at most two edits away and fewer than its length, else one of which the name is a prefix (of at least
// three letters) or the reverse; "" if there is none. Ties go to the first.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// "; did you mean 'x'?" or "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace mantissa
