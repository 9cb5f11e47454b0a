// A text cut into pieces that follow each other.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

struct TextPieces {
  std::string text;
  std::vector<size_t> ends;  // of the pieces, in bytes, ascending; none is empty

  size_t count() const { return ends.size(); }
  std::string_view piece(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::string_view(text).substr(begin, ends[i] - begin);
  }
  void add(std::string_view piece) {
    text += piece;
    end_piece();
  }
  // Makes a piece of what was appended to the text since the last one.
  void end_piece() {
    if (text.size() > (ends.empty() ? 0 : ends.back())) ends.push_back(text.size());
  }
};

}  // namespace mantissa
