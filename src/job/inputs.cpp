#include "job/inputs.h"

#include <algorithm>

#include "job/frames.h"
#include "mantissa/base/host_name.h"

namespace mantissa {
namespace {

constexpr size_t kMostMismatches = 8;  // named by one message

// Returns the value of most ranks; of the lowest rank if several are as frequent.
std::string majority_value(const std::vector<Inputs>& ranks, const std::string& name) {
  std::map<std::string, size_t> counts;
  size_t most = 0;
  for (const Inputs& rank : ranks) most = std::max(most, ++counts[rank.items.contains(name) ? rank.items.at(name) : "none"]);
  for (const Inputs& rank : ranks) {
    const std::string value = rank.items.contains(name) ? rank.items.at(name) : "none";
    if (counts[value] == most) return value;
  }
  return "";
}

}  // namespace

std::string inputs_text(const std::vector<NamedHash>& items) {
  Fields fields;
  fields.text(host_name()).number(static_cast<uint32_t>(items.size()));
  for (const NamedHash& item : items) fields.text(item.name).text(item.value);
  return fields.bytes();
}

Inputs read_inputs(const std::string& bytes) {
  Frame frame(Message::set, bytes);
  Inputs out{.host = frame.text(), .items = {}};
  for (auto left = frame.number<uint32_t>(); left > 0; --left) {
    const std::string name = frame.text();
    out.items[name] = frame.text();
  }
  return out;
}

std::string mismatching_items(const std::vector<Inputs>& ranks) {
  std::map<std::string, std::string> majority;
  for (const Inputs& rank : ranks) {
    for (const auto& [name, value] : rank.items) majority.try_emplace(name, "");
  }
  for (auto& [name, value] : majority) value = majority_value(ranks, name);
  std::string out;
  size_t found = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : majority) {
      const auto own = ranks[rank].items.find(name);
      const std::string& has = own == ranks[rank].items.end() ? "none" : own->second;
      if (has == value || ++found > kMostMismatches) continue;
      out += text(out.empty() ? "" : "; ", name, " of rank ", rank, " (", ranks[rank].host, ") is ", has, ", of most ranks ", value);
    }
  }
  return found > kMostMismatches ? text(out, "; and ", found - kMostMismatches, " more") : out;
}

}  // namespace mantissa
