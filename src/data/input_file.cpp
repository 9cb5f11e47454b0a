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

}  // namespace mantissa
