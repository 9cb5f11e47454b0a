#include "data/documents.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "data/token_file.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

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
      if (state_ == State::in_list) {
        add_to_entry(c);
      } else if (kBlanks.find(c) == std::string_view::npos) {
        require(state_ == State::before && c == '[', ExitCode::data, path_, ", line ", here_.line, ", column ", here_.column,
                ": there is text after the end of the list");
        state_ = State::in_list;
        begins_ = {here_.line, here_.column + 1};
      }
      move(here_, c);
    }
  }
  void finish() const {
    if (state_ == State::behind) return;
    if (!is_blank(entry_)) parsed();  // throws a more precise error for an incomplete entry
    fail(ExitCode::data, path_, ": the list that the file begins with is not closed");
  }

 private:
  enum class State { before, in_list, behind };
  struct Place {
    int64_t line = 1, column = 1;
  };

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
    require(entry_.size() <= InputFile::kLongestLine, ExitCode::data, path_, ", line ", begins_.line, ": an entry has more than ",
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
  std::string path = file.path();
  std::ranges::transform(path, path.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; });
  if (path.ends_with(".json") || path.ends_with(".jsonl") || path.ends_with(".ndjson")) return true;
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

namespace {

// Packs examples whole into rows, each of which becomes a sample.
class ExampleRows {
 public:
  // row_tokens 0: examples follow each other, and none is cut.
  ExampleRows(int64_t vocab_size, int64_t row_tokens) : row_tokens_(row_tokens) { layout_.type = type_in_memory(vocab_size); }

  // An example goes where it leaves the smallest gap, else into a new row. The end of one that is longer than a row is cut off.
  void add(const Example& example);

  // The rest of a row is a document of its own, of untrained tokens 0 that are padding.
  TokenLayout take();

 private:
  int64_t place(int64_t tokens);

  int64_t row_tokens_;
  TokenLayout layout_;
  std::multimap<int64_t, int64_t> gaps_;  // where a row goes on that is not full, by how much is left of it
};

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

// Text and JSONL are tokenized when opened and kept in memory, two or four bytes a token; text of the byte tokenizer stays in its file.

// Holds tokens in memory, two bytes each where the vocabulary allows it.
class TokenMemory {
 public:
  TokenMemory(const TokenFileOptions& options, int64_t expected_tokens)
      : options_(options),
        encoder_(*options.tokenizer,
                 {.ids = [this](std::span<const int32_t> ids) { std::ranges::for_each(ids, [this](int32_t id) { push(id); }); },
                  .end_of_document = [this] { finish_document(); }}) {
    layout_.type = type_in_memory(options.vocab_size);
    layout_.memory.reserve(static_cast<size_t>(expected_tokens * element_bytes(layout_.type)));
  }
  TokenMemory(const TokenMemory&) = delete;
  TokenMemory& operator=(const TokenMemory&) = delete;

  DocumentEncoder& encoder() { return encoder_; }

  TokenLayout take() {
    layout_.repeated = encoder_.repeated();
    return std::move(layout_);
  }

 private:
  void push(int32_t id) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&id);  // little endian: the low bytes come first
    layout_.memory.insert(layout_.memory.end(), bytes, bytes + element_bytes(layout_.type));
    ++layout_.tokens;
    last_ = id;
  }

  void finish_document() {
    if (layout_.tokens == document_start_) return;  // an empty text is no document
    if (options_.append_eod && last_ != options_.eod_id) push(*options_.eod_id);
    layout_.document_starts.push_back(document_start_);
    document_start_ = layout_.tokens;
  }

  const TokenFileOptions& options_;
  TokenLayout layout_;
  int64_t document_start_ = 0;
  int32_t last_ = -1;  // the last of the ids
  DocumentEncoder encoder_;
};

}  // namespace

TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options) {
  if (options.tokenizer->kind() == TokenizerKind::byte && !options.append_eod) {
    TokenLayout layout{.type = ElementType::u8, .tokens = file.size()};
    if (layout.tokens > 0) layout.document_starts = {0};
    return layout;
  }
  TokenMemory memory(options, options.tokenizer->kind() == TokenizerKind::bpe ? 0 : file.size() + 1);
  read_text(file, memory.encoder(), options.progressed);
  return memory.take();
}

TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options) {
  std::optional<TokenMemory> texts;
  if (options.tokenizer != nullptr) texts.emplace(options, 0);
  ExampleRows rows(options.vocab_size, options.row_tokens);
  const LineForm form = read_jsonl(
      file,
      {.encoder = options.tokenizer == nullptr ? std::nullopt : std::optional(encoder_of(*options.tokenizer)),
       .vocab_size = options.vocab_size,
       .appended = options.append_eod ? options.eod_id : std::nullopt,
       .chat_template = options.chat_template,
       .chat_date = options.chat_date},
      {.texts = texts ? &texts->encoder() : nullptr, .example = [&rows](const Example& one) { rows.add(one); }}, options.progressed);
  TokenLayout layout = form == LineForm::text && texts ? texts->take() : rows.take();
  layout.form = form;
  return layout;
}

}  // namespace mantissa
