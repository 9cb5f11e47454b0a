#include "mantissa/data/documents.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

using VisitObject = std::function<void(const Json&, const std::string&)>;

constexpr std::string_view kBlanks = " \t\r\n", kByteOrderMark = "\xEF\xBB\xBF";

bool is_blank(std::string_view text) { return text.find_first_not_of(kBlanks) == std::string_view::npos; }

// Returns the file from its first character on that is no white space, at most `most` bytes. Reads little of a file that begins otherwise.
std::string beginning(const InputFile& file, int64_t most) {
  const auto part = [&file](int64_t begin, int64_t bytes) {
    std::string out(static_cast<size_t>(std::min(file.size() - begin, bytes)), '\0');
    file.read(begin, out.data(), std::ssize(out));
    return out;
  };
  for (int64_t from = 0, step = 64; from < file.size(); from += std::exchange(step, 4096)) {
    const size_t first = part(from, step).find_first_not_of(kBlanks);
    if (first != std::string::npos) return part(from + static_cast<int64_t>(first), most);
  }
  return "";
}

bool is_called_json(std::string path) {
  std::ranges::transform(path, path.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; });
  return path.ends_with(".json") || path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

// Returns whether the text begins with {"key": or [{"key":, with any white space between.
bool begins_with_member(std::string_view text) {
  const auto take = [&text](char c) {
    text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
    const bool there = text.starts_with(c);
    if (there) text.remove_prefix(1);
    return there;
  };
  take('[');
  if (!take('{') || !take('"')) return false;
  while (!text.empty() && text.front() != '"') text.remove_prefix(std::min<size_t>(text.front() == '\\' ? 2 : 1, text.size()));
  return take('"') && take(':');
}

// Cuts a list of JSON into its entries, as its bytes come, and reads each: the file may be larger than what is to be held.
class ListEntries {
 public:
  ListEntries(const std::string& path, const VisitObject& visit) : path_(path), visit_(visit) {}

  void add(std::string_view bytes) {
    for (const char c : bytes) {
      if (state_ == State::in_list)
        add_to_entry(c);
      else if (kBlanks.find(c) == std::string_view::npos)
        begin_or_fail(c);
      move(here_, c);
    }
  }
  void finish() const {
    if (state_ == State::behind) return;
    if (!is_blank(entry_)) parsed();  // which tells more of an entry that breaks off
    fail(ExitCode::data, path_, ": the list that the file begins with has no end");
  }

 private:
  enum class State { before, in_list, behind };
  struct Place {
    int64_t line = 1, column = 1;
  };

  void begin_or_fail(char c) {
    require(state_ == State::before && c == '[', ExitCode::data, path_, ", line ", here_.line, ", column ", here_.column,
            ": stands behind the end of the list that the file is");
    state_ = State::in_list;
    begins_ = {here_.line, here_.column + 1};
  }
  void add_to_entry(char c) {
    if (in_string_) {
      in_string_ = escaped_ || c != '"';
      escaped_ = !escaped_ && c == '\\';
    } else if (depth_ == 0 && (c == ',' || c == ']')) {
      return end_entry(c == ']');
    } else {
      in_string_ = c == '"';
      if (c == '{' || c == '[') ++depth_;
      if ((c == '}' || c == ']') && depth_ > 0) --depth_;
    }
    entry_ += c;
    require(entry_.size() <= InputFile::kLongestLine, ExitCode::data, path_, ", line ", begins_.line, ": an entry of more than ",
            InputFile::kLongestLine >> 20, " MiB");
  }
  void end_entry(bool last) {
    if (last) state_ = State::behind;
    if (!last || entries_ > 0 || !is_blank(entry_)) {
      ++entries_;
      const std::string_view before = std::string_view(entry_).substr(0, std::min(entry_.find_first_not_of(kBlanks), entry_.size()));
      visit_(parsed(), text(path_, ", entry ", entries_, " (line ", begins_.line + std::ranges::count(before, '\n'), ')'));
    }
    entry_.clear();
    begins_ = {here_.line, here_.column + 1};
  }
  Json parsed() const {
    require(!is_blank(entry_), ExitCode::data, path_, ", line ", here_.line, ", column ", here_.column, ": an entry is missing");
    ParsedJson parsed = parse_strict_json(entry_);
    if (parsed.problems.empty()) return std::move(parsed.root);
    const JsonProblem& first = parsed.problems.front();
    Place at = begins_;
    for (const char c : std::string_view(entry_).substr(0, first.offset)) move(at, c);
    fail(ExitCode::data, path_, ", line ", at.line, ", column ", at.column, ": ", first.message);
  }
  static void move(Place& place, char c) {
    if (c == '\n')
      place = {place.line + 1, 1};
    else if (!continues_character(c))
      ++place.column;
  }

  const std::string& path_;
  const VisitObject& visit_;
  State state_ = State::before;
  bool in_string_ = false, escaped_ = false;
  int64_t depth_ = 0, entries_ = 0;
  std::string entry_;
  Place here_, begins_;  // the places of the byte at hand, and of the entry
};

}  // namespace

bool claims_json(const InputFile& file) {
  constexpr int64_t kEnough = 1 << 16;
  if (is_called_json(file.path())) return true;
  const std::string text = beginning(file, kEnough);
  return begins_with_member(std::string_view(text).substr(text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0));
}

void for_each_object(const InputFile& file, const VisitObject& visit, const Progressed& progressed) {
  if (beginning(file, 1) == "[") {
    ListEntries entries(file.path(), visit);
    file.for_each_window([&](std::string_view bytes, int64_t) { entries.add(bytes); }, progressed);
    return entries.finish();
  }
  file.for_each_line([&](std::string_view line, int64_t number) {
    if (is_blank(line)) return;
    const std::string name = text(file.path(), ", line ", number);
    visit(parse_line(line, name), name);
    if (progressed) progressed();
  });
}

void for_each_object(std::string_view content, const std::string& name, const VisitObject& visit) {
  if (content.substr(std::min(content.find_first_not_of(kBlanks), content.size())).starts_with('[')) {
    ListEntries entries(name, visit);
    entries.add(content);
    return entries.finish();
  }
  int64_t number = 0;
  for (const std::string& line : split(content, '\n')) {
    ++number;
    const std::string place = text(name, ", line ", number);
    if (!is_blank(line)) visit(parse_line(line, place), place);
  }
}

void read_text(const InputFile& file, DocumentEncoder& encoder, const Progressed& progressed) {
  const auto origin = [&file](int64_t offset) { return TextOrigin{.name = file.path(), .code = ExitCode::data, .offset = offset}; };
  file.for_each_window([&](std::string_view window, int64_t offset) { encoder.add(window, origin(offset)); }, progressed);
  encoder.end_document(origin(file.size()));
  encoder.flush();
}

LineForm read_jsonl(const InputFile& file, const LineOptions& options, const LineSinks& sinks, const Progressed& progressed) {
  LineReader reader(options);
  const auto read = [&](const Json& object, const std::string& name) {
    const Example example = reader.read(object, name);
    if (reader.form() != LineForm::text) return sinks.example(example);
    require(sinks.texts != nullptr, ExitCode::usage, "data.tokenizer: ", name,
            " has \"text\", which needs a tokenizer (byte, char or a tokenizer.json)");
    const TextOrigin origin{.name = name, .code = ExitCode::data};
    sinks.texts->add(reader.text(), origin);
    sinks.texts->end_document(origin);
  };
  for_each_object(file, read, progressed);
  if (sinks.texts != nullptr) sinks.texts->flush();
  return reader.form().value_or(LineForm::text);
}

void for_each_text(const InputFile& file, const std::function<void(const std::string&, const TextOrigin&)>& visit,
                   const Progressed& progressed) {
  const auto read = [&](const Json& object, const std::string& name) {
    for (const std::string& one : texts_of(object, name)) visit(one, {.name = name, .code = ExitCode::data});
  };
  for_each_object(file, read, progressed);
}

}  // namespace mantissa
