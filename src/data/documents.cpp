#include "mantissa/data/documents.h"

#include <string_view>

#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

// Calls visit(line, its name in messages) for each line that is not blank.
void for_each_filled_line(const InputFile& file, const std::function<void(std::string_view, const std::string&)>& visit,
                          const Progressed& progressed) {
  file.for_each_line([&](std::string_view line, int64_t number) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    visit(line, text(file.path(), ", line ", number));
    if (progressed) progressed();
  });
}

}  // namespace

void read_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed) {
  const auto origin = [&file](int64_t offset) { return TextOrigin{.name = file.path(), .code = ExitCode::data, .offset = offset}; };
  file.for_each_window([&](std::string_view window, int64_t offset) { encoder.add(window, origin(offset)); }, progressed);
  encoder.end_document(origin(file.size()));
  encoder.flush();
}

LineForm read_jsonl(const InputFile& file, const LineOptions& options, const LineSinks& sinks, const Progressed& progressed) {
  LineReader reader(options);
  const auto read = [&](std::string_view line, const std::string& name) {
    const Example example = reader.read(line, name);
    if (reader.form() != LineForm::text) return sinks.example(example);
    require(sinks.texts != nullptr, ExitCode::usage, "data.tokenizer: ", name,
            " has \"text\", which needs a tokenizer (byte, char or a tokenizer.json)");
    const TextOrigin origin{.name = name, .code = ExitCode::data};
    sinks.texts->add(reader.text(), origin);
    sinks.texts->end_document(origin);
  };
  for_each_filled_line(file, read, progressed);
  if (sinks.texts != nullptr) sinks.texts->flush();
  return reader.form().value_or(LineForm::text);
}

void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed) {
  const auto read = [&](std::string_view line, const std::string& name) {
    for (const std::string& one : texts_of(line, name)) visit(one, {.name = name, .code = ExitCode::data});
  };
  for_each_filled_line(file, read, progressed);
}

}  // namespace mantissa
