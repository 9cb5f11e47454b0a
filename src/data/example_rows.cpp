#include "data/example_rows.h"

#include <algorithm>
#include <cstring>

namespace mantissa {

int64_t ExampleRows::place(int64_t tokens) {
  const auto gap = gaps_.lower_bound(tokens);
  const bool fresh = row_tokens_ == 0 || gap == gaps_.end();
  const int64_t offset = fresh ? layout_.tokens : gap->second;
  const int64_t space = !fresh ? gap->first : row_tokens_ == 0 ? tokens : row_tokens_;
  if (fresh) {
    layout_.tokens += space;
    layout_.memory.resize(static_cast<size_t>(layout_.tokens * element_bytes(layout_.type)));
    layout_.trained.resize(static_cast<size_t>(layout_.tokens));
  } else {
    gaps_.erase(gap);
  }
  if (space > tokens) gaps_.emplace(space - tokens, offset + tokens);
  return offset;
}

void ExampleRows::add(const Example& example) {
  const auto length = static_cast<int64_t>(example.ids.size());
  const int64_t kept = row_tokens_ == 0 ? length : std::min(length, row_tokens_);
  const int64_t offset = place(kept), width = element_bytes(layout_.type);
  layout_.document_starts.push_back(offset);
  std::byte* const bytes = layout_.memory.data() + offset * width;
  for (int64_t i = 0; i < kept; ++i) std::memcpy(bytes + i * width, &example.ids[static_cast<size_t>(i)], static_cast<size_t>(width));
  ExampleCounts& counts = layout_.examples;
  for (int64_t i = 1; i < length; ++i) {
    if (!example.trained[static_cast<size_t>(i)]) continue;
    i < kept ? ++counts.targets : ++counts.cut_targets;
    if (i < kept) layout_.trained[static_cast<size_t>(offset + i - 1)] = true;
  }
  ++counts.examples;
  layout_.repeated.add(example.repeated);
  if (kept < length) ++counts.cut_examples;
}

TokenLayout ExampleRows::take() {
  if (!gaps_.empty()) layout_.padding.resize(static_cast<size_t>(layout_.tokens));
  for (const auto& [tokens, offset] : gaps_) {
    layout_.document_starts.push_back(offset);
    std::fill_n(layout_.padding.begin() + offset, tokens, true);
  }
  std::ranges::sort(layout_.document_starts);
  return std::move(layout_);
}

}  // namespace mantissa
