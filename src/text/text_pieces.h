// A text cut into pieces that follow each other.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

struct TextPieces {
  std::string text;
  std::vector<size_t> ends;  // ends of the pieces in bytes, ascending; none is empty
  std::vector<size_t>
      of_first;  // by piece: how many of its bytes, at its beginning, come from the first character of the text; later pieces: none

  size_t count() const { return ends.size(); }
  std::string_view piece(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::string_view(text).substr(begin, ends[i] - begin);
  }
  size_t of_first_in(size_t i) const { return i < of_first.size() ? of_first[i] : 0; }
  void clear() { text.clear(), ends.clear(), of_first.clear(); }
  void add(std::string_view piece, size_t bytes_of_first = 0) {
    if (piece.empty()) return;
    if (bytes_of_first > 0) {
      of_first.resize(ends.size());
      of_first.push_back(bytes_of_first);
    }
    text += piece;
    ends.push_back(text.size());
  }
};

}  // namespace mantissa
