// The normal forms C and KC of Unicode (UAX #15), as tokenizers has them: those of Unicode 9, to which later characters mean nothing.
#pragma once

#include <string>
#include <string_view>

namespace mantissa {

enum class NormalForm { composed, compatible };  // NFC, NFKC

// Returns a text, which is UTF-8, in its normal form. Characters that the tables lack stay as they are.
std::string in_normal_form(std::string_view text, NormalForm form);

}  // namespace mantissa
