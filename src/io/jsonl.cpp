#include "mantissa/io/jsonl.h"

#include <nlohmann/json.hpp>

namespace mantissa {

JsonLines::JsonLines(const std::filesystem::path& path) : file_(path) { file_.cut_torn_line(); }

void JsonLines::write(const nlohmann::ordered_json& object) {
  file_.append(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace mantissa
