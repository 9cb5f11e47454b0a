#include "json_changes.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

namespace mantissa::fuzz {
namespace {

using nlohmann::ordered_json;
using Draw = std::function<size_t(size_t)>;

// Values at the edges of what parsers tell apart.
ordered_json telling_value(const Draw& draw) {
  static const std::vector<ordered_json> values = {nullptr,
                                                   true,
                                                   0,
                                                   -1,
                                                   1,
                                                   0.5,
                                                   1e308,
                                                   2147483648,
                                                   9007199254740993,
                                                   INT64_MAX,
                                                   INT64_MIN,
                                                   UINT64_MAX,
                                                   "",
                                                   "0",
                                                   "../x",
                                                   ordered_json::array(),
                                                   ordered_json::object()};
  return values[draw(values.size())];
}

void collect(ordered_json& value, std::vector<ordered_json*>& out) {
  out.push_back(&value);
  if (!value.is_structured()) return;
  for (ordered_json& inner : value) collect(inner, out);
}

void change_scalar(ordered_json& value, const Draw& draw) {
  if (value.is_number_float()) {
    value = value.get<double>() * (draw(2) == 0 ? -2 : 0.5);
  } else if (value.is_number_unsigned()) {
    value = draw(2) == 0 ? value.get<uint64_t>() + 1 : value.get<uint64_t>() - 1;
  } else if (value.is_number_integer()) {
    value = static_cast<int64_t>(0 - static_cast<uint64_t>(value.get<int64_t>()));
  } else if (value.is_string()) {
    auto& text = value.get_ref<std::string&>();
    if (draw(2) == 0)
      text += text.substr(text.size() / 2) + "x";
    else
      text.resize(text.size() / 2);
  } else {
    value = telling_value(draw);
  }
}

// One of its members or entries is removed, copied or moved.
void change_parts(ordered_json& value, const ordered_json& other, const Draw& draw) {
  const size_t at = draw(value.size()), kind = draw(3);
  const auto part = std::next(value.begin(), static_cast<std::ptrdiff_t>(at));
  if (kind == 0) {
    value.erase(part);
  } else if (value.is_array()) {
    if (kind == 1)
      value.push_back(ordered_json(*part));
    else
      std::swap(value[at], value[draw(value.size())]);
  } else {
    const std::string key = other.is_string() ? other.get<std::string>() : part.key() + "x";
    ordered_json moved = *part;
    if (kind == 1) value.erase(part);
    value[key] = std::move(moved);
  }
}

void change(ordered_json& whole, const Draw& draw) {
  std::vector<ordered_json*> values;
  collect(whole, values);
  ordered_json& value = *values[draw(values.size())];
  const ordered_json other = *values[draw(values.size())];
  switch (draw(4)) {
    case 0: value = telling_value(draw); break;
    case 1: value = other; break;
    default: value.is_structured() && !value.empty() ? change_parts(value, other, draw) : change_scalar(value, draw);
  }
}

std::vector<size_t> beginnings(std::string_view input) {
  std::vector<size_t> out;
  const auto add = [&](size_t at) {
    if (at < input.size() && (input[at] == '{' || input[at] == '[')) out.push_back(at);
  };
  if (const size_t first = input.find_first_of("{["); first != std::string_view::npos) out.push_back(first);
  for (size_t at = 0; at < input.size() && out.size() < 64; ++at) {
    if (input[at] == '\n') add(at + 1);
    if (input[at] == '\0') add(at + 1), add(at + 9);
  }
  return out;
}

}  // namespace

std::optional<std::string> with_changed_json(std::string_view input, const Draw& draw) {
  const std::vector<size_t> all = beginnings(input);
  if (all.empty()) return {};
  const size_t begin = all[draw(all.size())];
  std::istringstream rest{std::string(input.substr(begin))};
  ordered_json json;
  try {
    rest >> json;
  } catch (const nlohmann::json::exception&) {
    return {};
  }
  const size_t size = rest.eof() ? input.size() - begin : static_cast<size_t>(rest.tellg());
  for (size_t i = 0, changes = 1 + draw(3); i < changes; ++i) change(json, draw);
  const std::string text = json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  std::string out(input.substr(0, begin));
  uint64_t length = 0;
  if (begin >= sizeof length) {
    std::memcpy(&length, out.data() + begin - sizeof length, sizeof length);
    const uint64_t mended = text.size();
    if (length == size) std::memcpy(out.data() + begin - sizeof length, &mended, sizeof mended);
  }
  out += text;
  return out += input.substr(begin + size);
}

}  // namespace mantissa::fuzz
