// A text goes through three buffers: of the text as it is, in which added tokens are found; of normalized text, in which those are found
// that are looked for there; and of text that is cut into pieces. Each passes on what no continuation of the text changes and keeps the
// rest. The model encodes pieces once there is a window of them, several at a time.
#include <algorithm>
#include <utility>

#include "base/parallel.h"
#include "mantissa/base/text.h"
#include "text/bpe_tokenizer.h"
#include "text/characters.h"
#include "text/pretokenizer.h"

namespace mantissa {
namespace {

constexpr int64_t kFewestBytes = 4096;  // worth a thread

// Returns the last place before which the text may be normalized by itself: before a character of ASCII, with which nothing composes.
size_t last_cut(std::string_view text, size_t from, size_t limit) {
  size_t at = std::min(limit, text.size() - 1);
  while (at > from && static_cast<uint8_t>(text[at]) >= 0x80) --at;
  return at;
}

}  // namespace

struct StreamEncoder::State {
  // Text not yet passed on. It is scanned once it fills the window, or is twice what the last scan kept, so that text that cannot be cut is
  // not read again with each part.
  class UndecidedText {
   public:
    explicit UndecidedText(size_t window) : window_(window), enough_(window) {}

    void add(std::string_view part) { text_ += part; }
    bool is_enough() const { return text_.size() >= enough_; }
    std::string_view text() const { return text_; }
    void drop(size_t bytes) {
      text_.erase(0, bytes);
      enough_ = std::max(window_, 2 * text_.size());
    }

   private:
    std::string text_;
    size_t window_, enough_;
  };

  // Pieces that one thread encodes, and what it remembers of others.
  struct EncodedPieces {
    std::vector<int32_t> ids;
    std::vector<size_t> ends;  // by piece
    BpeModel::Cache cache;

    void encode(const BpeModel& model, const TextPieces& pieces, size_t begin, size_t end) {
      ids.clear(), ends.clear();
      for (size_t i = begin; i < end; ++i) {
        model.encode(pieces.piece(i), cache, ids);
        ends.push_back(ids.size());
      }
    }
    size_t begin_of(size_t piece) const { return piece == 0 ? 0 : ends[piece - 1]; }
  };

  State(const BpeTokenizer& of, Sink to, SpecialTokenText how, size_t window_bytes)
      : tokenizer(of),
        sink(std::move(to)),
        special(how),
        window(window_bytes),
        in_parts(of.works_on_parts()),
        asks_for_first(of.pretokenizer_.asks_for_first()),
        raw(window_bytes),
        normalized(window_bytes),
        unsplit(window_bytes),
        cutter(of.pretokenizer_) {}

  // A token, or the end of a text, behind so many pieces.
  struct Mark {
    size_t pieces;
    int32_t token;  // kEndOfText: the text ends here
  };
  static constexpr int32_t kEndOfText = -1;

  template <class Between>
  void advance(UndecidedText& from, const AddedTokenMatcher& tokens, bool goes_on, const Between& between, const UndecidedText& to,
               void (State::*advance_to)(bool));
  void advance_raw(bool text_goes_on);
  void advance_normalized(bool goes_on);
  void advance_unsplit(bool goes_on);
  void add_token(int32_t id) { marks.push_back({pieces.count(), id}); }
  void encode_pieces();
  void deliver_pieces(size_t begin, size_t end) const;

  const BpeTokenizer& tokenizer;
  Sink sink;
  SpecialTokenText special;
  size_t window;
  bool in_parts, asks_for_first;
  Utf8Decoder utf8;
  UndecidedText raw, normalized, unsplit;
  Pretokenizer::Cutter cutter;
  size_t of_first = 0, of_first_unsplit = 0;  // bytes that `normalized` and `unsplit` begin with and that come from the first character
  TextPieces pieces;
  std::vector<Mark> marks;
  std::vector<EncodedPieces> encoded;  // a thread each
  size_t pieces_each = 1;              // pieces of each thread but the last
};

StreamEncoder::StreamEncoder(const BpeTokenizer& tokenizer, Sink sink, SpecialTokenText special, size_t window)
    : state_(std::make_unique<State>(tokenizer, std::move(sink), special, window)) {}
StreamEncoder::~StreamEncoder() = default;

void StreamEncoder::add(std::string_view part, const TextOrigin& origin) {
  for (size_t i = 0; i < part.size(); ++i) {
    require(state_->utf8.feed(static_cast<uint8_t>(part[i])) != Utf8Decoder::Status::invalid, origin.code, origin.name,
            ": not UTF-8 at byte ", origin.offset + static_cast<int64_t>(i),
            "; this tokenizer needs UTF-8 (the byte tokenizer takes any bytes)");
  }
  state_->raw.add(part);
  if (state_->in_parts && state_->raw.is_enough()) state_->advance_raw(true);
  if (state_->pieces.text.size() >= state_->window) state_->encode_pieces();
}

void StreamEncoder::end_text(const TextOrigin& origin) {
  require(state_->utf8.between_characters(), origin.code, origin.name, ": ends inside a UTF-8 character");
  state_->advance_raw(false);
  state_->add_token(State::kEndOfText);
  if (state_->pieces.text.size() >= state_->window) state_->encode_pieces();
}

void StreamEncoder::flush() { state_->encode_pieces(); }

// Passes the text of one buffer to between(), as far as its continuation changes nothing, and adds each added token in it once the next
// buffer is passed on whole. As in tokenizers, a token within white space that another token took along is found, too, and the text goes on
// behind it: even in the rest of that white space.
template <class Between>
void StreamEncoder::State::advance(UndecidedText& from, const AddedTokenMatcher& tokens, bool goes_on, const Between& between,
                                   const UndecidedText& to, void (State::*advance_to)(bool)) {
  const std::string_view text = from.text();
  const size_t limit = goes_on ? tokens.decided(text.substr(0, whole_characters(text))) : text.size();
  AddedTokenMatcher::Start at;
  while (at.token < limit) {
    const AddedTokenMatcher::Found next = tokens.find(text, at, limit, special);
    const size_t end = next.token != nullptr ? next.begin : goes_on ? last_cut(text, at.text, limit) : text.size();
    if (end > at.text) between(text.substr(at.text, end - at.text));
    if (next.token == nullptr) {
      at.text = end;
      break;
    }
    (this->*advance_to)(false);
    add_token(next.token->id);
    at = {.text = next.end, .token = next.own_end, .space = std::max(at.space, next.end)};
  }
  from.drop(at.text);
  if (!goes_on || to.is_enough()) (this->*advance_to)(goes_on);
}

void StreamEncoder::State::advance_raw(bool goes_on) {
  const auto normalize = [this](std::string_view between) {
    of_first = 0;
    if (asks_for_first && between.data() == raw.text().data()) next_character(between, of_first);
    normalized.add(tokenizer.normalizer_.apply(between, of_first));
  };
  advance(raw, tokenizer.added_.before_normalization(), goes_on, normalize, normalized, &State::advance_normalized);
}

void StreamEncoder::State::advance_normalized(bool goes_on) {
  const auto split = [this](std::string_view between) {
    const auto begin = static_cast<size_t>(between.data() - normalized.text().data()), end = begin + between.size();
    unsplit.add(between);
    of_first_unsplit = std::min(end, std::max(begin, of_first)) - begin;
  };
  advance(normalized, tokenizer.added_.after_normalization(), goes_on, split, unsplit, &State::advance_unsplit);
}

void StreamEncoder::State::advance_unsplit(bool goes_on) {
  const std::string_view text = unsplit.text();
  unsplit.drop(cutter.cut(text, std::exchange(of_first_unsplit, 0), goes_on, pieces));
}

void StreamEncoder::State::encode_pieces() {
  const auto count = static_cast<int64_t>(pieces.count());
  const int64_t parts = std::clamp<int64_t>(std::ssize(pieces.text) / kFewestBytes, 1, num_threads());
  const int64_t each = std::max<int64_t>(1, (count + parts - 1) / parts);
  pieces_each = static_cast<size_t>(each);
  encoded.resize(std::max(encoded.size(), static_cast<size_t>((count + each - 1) / each)));
  parallel_for(count, each, [&](int64_t begin, int64_t end) {
    encoded[static_cast<size_t>(begin / each)].encode(tokenizer.model_, pieces, static_cast<size_t>(begin), static_cast<size_t>(end));
  });
  size_t done = 0;
  for (const Mark& mark : marks) {
    deliver_pieces(std::exchange(done, mark.pieces), mark.pieces);
    if (mark.token != kEndOfText)
      sink.ids({&mark.token, 1});
    else if (sink.end_of_text)
      sink.end_of_text();
  }
  deliver_pieces(done, pieces.count());
  pieces.clear(), marks.clear();
}

void StreamEncoder::State::deliver_pieces(size_t begin, size_t end) const {
  while (begin < end) {
    const EncodedPieces& part = encoded[begin / pieces_each];
    const size_t first = begin % pieces_each, last = std::min(first + (end - begin), part.ends.size());
    const size_t from = part.begin_of(first);
    if (part.begin_of(last) > from) sink.ids(std::span(part.ids).subspan(from, part.begin_of(last) - from));
    begin += last - first;
  }
}

}  // namespace mantissa
