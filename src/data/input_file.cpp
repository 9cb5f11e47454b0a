#include "mantissa/data/input_file.h"

#include <algorithm>
#include <vector>

namespace mantissa {

void InputFile::for_each_window(const std::function<void(std::string_view, int64_t)>& visit, const Progressed& progressed) const {
  constexpr int64_t kWindow = 1 << 20;
  std::vector<char> window(static_cast<size_t>(std::min(size_, kWindow)));
  for (int64_t offset = 0; offset < size_; offset += kWindow) {
    const int64_t bytes = std::min(kWindow, size_ - offset);
    read(offset, window.data(), bytes);
    visit(std::string_view(window.data(), static_cast<size_t>(bytes)), offset);
    if (progressed) progressed();
  }
}

void InputFile::for_each_line(const std::function<void(std::string_view, int64_t)>& visit) const {
  std::string begun;  // a line that the windows so far have not ended
  int64_t number = 0;
  const auto split = [&](std::string_view window, int64_t) {
    for (size_t end = window.find('\n'); end != std::string_view::npos; end = window.find('\n')) {
      begun += window.substr(0, end);
      visit(begun, ++number);
      begun.clear();
      window.remove_prefix(end + 1);
    }
    begun += window;
    require(begun.size() <= kLongestLine, ExitCode::data, path(), ", line ", number + 1, ": has more than ", kLongestLine >> 20, " MiB");
  };
  for_each_window(split);
  if (!begun.empty()) visit(begun, number + 1);
}

}  // namespace mantissa
