#include <filesystem>

#include "mantissa/json/config.h"

namespace mantissa {
namespace {

void resolve(const Field& field, const std::string& key, ConfigReport& report) {
  if (field.kind() == FieldKind::list) {
    for (size_t i = 0; i < field.size(); ++i) resolve(field.element(i), key + "." + std::to_string(i), report);
    return;
  }
  if (field.kind() == FieldKind::map) {
    for (const Field& entry : field.members()) resolve(entry, key + "." + entry.name, report);
    return;
  }
  const Scalar value = field.get();
  if (std::holds_alternative<std::monostate>(value)) return;
  if (field.kind() == FieldKind::object) {
    for (const Field& member : field.members()) resolve(member, key.empty() ? member.name : key + "." + member.name, report);
  } else if (field.limits.input_path && !report.failed(key)) {
    const auto& path = std::get<std::string>(value);
    if (path.empty()) {
      report.error(key, report.given(key) ? "must name a file, got an empty string" : "is missing: the file to read");
    } else {
      field.set(absolute_input_path(path, key, report));
    }
  }
}

}  // namespace

std::string absolute_input_path(const std::string& path, const std::string& key, const ConfigReport& report) {
  const std::filesystem::path directory = report.place(key).directory;
  return std::filesystem::absolute(directory / path).lexically_normal().string();
}

void resolve_input_paths(const std::vector<Field>& fields, ConfigReport& report) {
  for (const Field& field : fields) resolve(field, field.name, report);
}

}  // namespace mantissa
