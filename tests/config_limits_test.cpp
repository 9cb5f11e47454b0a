// Limits of the memory that a configuration of any content may cost, and of what it may print. Memory is what is alive at once, counted at
// operator new.
#include <gmock/gmock.h>
#include <malloc.h>

#include <cstdlib>
#include <new>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "checkpoint/checkpoint_manifest.h"
#include "files.h"
#include "json/json_fields.h"
#include "mantissa/json/config.h"
#include "mantissa/json/json.h"

namespace {
size_t alive = 0, peak = 0, allocations = 0;
}

void* operator new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  alive += malloc_usable_size(memory);
  peak = std::max(peak, alive);
  ++allocations;
  return memory;
}
void operator delete(void* memory) noexcept {
  alive -= malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace mantissa {
namespace {

using test::error_of;
using test::repeated;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

template <class Action>
size_t most_alive_in(Action&& action) {
  const size_t before = peak = alive;
  action();
  return peak - before;
}

std::string list_of(const std::string& entry, size_t count) { return "[" + repeated(entry + ",", count - 1) + entry + "]"; }

std::string object_of(size_t members, const std::string& value = "0") {
  std::string all = "{";
  for (size_t i = 0; i < members; ++i) all += (i == 0 ? "\"k" : ",\"k") + std::to_string(i) + "\":" + value;
  return all + "}";
}

// Objects in objects, 30 levels of them.
std::string nested(const std::string& name, std::string content) {
  for (int i = 0; i < 30; ++i) content = "{\"" + name + "\":" + content + "}";
  return content;
}

// Configurations whose text is short and whose values are many, or whose keys are long and deep.
std::vector<std::string> dense_shapes() {
  constexpr size_t kBytes = 100'000;
  const std::string members = nested("", "0");
  std::vector<std::string> shapes = {nested(std::string(4'000, 'k'), list_of("1", kBytes / 2)), object_of(kBytes / 9),
                                     object_of(kBytes / 12, "[0]")};
  for (const std::string entry : {"0", "[]", "{}", "[0]", "[[]]", "\"\"", "{\"\":0}", "{\"\":{}}", "{\"\":\"\"}"})
    shapes.push_back(list_of(entry, kBytes / (entry.size() + 1)));
  shapes.push_back(list_of(members, kBytes / members.size()));
  shapes.push_back("[\"" + std::string(kBytes, 'x') + "\"]");
  return shapes;
}

size_t bound(const std::string& content) { return 48 * content.size() + (1 << 16); }

TEST(JsonMemory, IsProportionalToTheTextWhateverItHolds) {
  for (const std::string& content : dense_shapes()) {
    EXPECT_LE(most_alive_in([&] { parse_json(content, "m.json"); }), bound(content)) << content.substr(0, 40);
    EXPECT_LE(most_alive_in([&] { parse_commented_json(content); }), bound(content)) << content.substr(0, 40);
  }
}

// A vector that grew has up to twice the room it needs, and an empty container needs none.
TEST(JsonMemory, AListKeepsOnlyTheRoomOfItsValues) {
  constexpr size_t kValues = (1 << 15) + 1, kSlack = 1 << 12;
  EXPECT_EQ(sizeof(Json), 24u);
  size_t before = alive;
  const Json list = parse_json(list_of("0", kValues), "m.json");
  EXPECT_LE(alive - before, kValues * sizeof(Json) + kSlack);
  for (const std::string entry : {"0", "[]", "{}"}) {
    before = alive;
    const ParsedJson located = parse_commented_json(list_of(entry, kValues));
    EXPECT_LE(alive - before, kValues * sizeof(Json) + kSlack) << entry;
  }
}

TEST(JsonMemory, OfAManifestWithARightHashIsProportionalToo) {
  for (const std::string& part : dense_shapes()) {
    std::string content = "{\"tensors\": " + part + "}\n";
    content += xxh64(content).text() + "\n";
    EXPECT_LE(most_alive_in([&] { error_of([&] { parse_manifest(content, "manifest.json"); }); }), bound(content)) << part.substr(0, 40);
  }
}

struct Numbers {
  std::vector<uint32_t> numbers;
  void fields(auto& v) { v("numbers", numbers, limits::between(0, 1e6)); }
};

// Places are put into words for messages only: 150,000 entries cost their values and no texts. A list that grows has its values up to three
// times.
TEST(JsonMemory, OfALongListIsThatOfItsValues) {
  constexpr size_t kNumbers = 150'000;
  const std::string content = "{\"numbers\": " + list_of("123456", kNumbers) + "}";
  const size_t values = kNumbers * (3 * sizeof(Json) + sizeof(uint32_t));
  EXPECT_LE(most_alive_in([&] { from_json<Numbers>(content, "t.json"); }), values);
  const Json root = parse_json(content, "t.json");
  const size_t before = allocations;
  EXPECT_EQ(JsonReader(root, "t.json").as<Numbers>().numbers.size(), kNumbers);
  EXPECT_LE(allocations - before, 100u);
}

struct Entry {
  std::string name = "x";
  int64_t count = 1;
  void fields(auto& v) {
    v("name", name, "a name");
    v("count", count, "a count", limits::positive);
  }
};

struct Sample {
  std::string name;
  std::vector<Entry> entries;
  std::vector<std::string> words;
  std::map<std::string, Entry> named;
  void fields(auto& v) {
    v("name", name, "a name");
    v("entries", entries, "several");
    v("words", words, "texts");
    v("named", named, "entries by name");
  }
};

struct Read {
  Sample config;
  ConfigReport report;
  std::string errors() const {
    return error_of([&] { report.throw_if_failed(); }).what();
  }
};

Read read(const std::string& content, std::vector<std::string> sets = {}) {
  Read result;
  read_config(ConfigSources{.file = "c.json", .text = content, .sets = std::move(sets)}, fields_of(result.config), result.report);
  return result;
}

TEST(ConfigMemory, IsProportionalToTheSourcesAtKnownAndUnknownKeys) {
  for (const std::string& part : dense_shapes()) {
    for (const std::string key : {"entries", "words", "named", "name", "other"}) {
      const std::string content = "{\"" + key + "\": " + part + "}";
      EXPECT_LE(most_alive_in([&] { read(content); }), bound(content)) << content.substr(0, 60);
      EXPECT_LE(most_alive_in([&] { read("{}", {key + "=" + part}); }), bound(content)) << content.substr(0, 60);
    }
  }
}

TEST(ConfigMemory, OriginsOfAnEffectiveConfigAreMadeOneByOne) {
  const std::string content = "{\"words\": " + list_of("\"a\"", 100'000) + "}";
  const Read r = read(content);
  ASSERT_TRUE(r.report.ok());
  std::string written;
  EXPECT_LE(most_alive_in([&] { written = effective_config(r.config, &r.report); }), bound(content));
  EXPECT_THAT(written, HasSubstr("// c.json:1:400008\n"));
}

size_t lines_of(const std::string& text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1; }

TEST(ConfigMessages, FortyThousandUnknownKeysGiveTheFirstFiftyAndTheNumberOfTheRest) {
  std::string content = "{";
  for (int i = 39'999; i >= 0; --i) content += text("\"k", i, "\": 0", i > 0 ? ",\n" : "}");  // against the order of names
  const std::string errors = read(content).errors();
  EXPECT_THAT(errors, ::testing::StartsWith("40000 errors in the configuration:\n  k39999: unknown key   (c.json:1:2)\n"));
  EXPECT_THAT(errors, EndsWith("\n  k39950: unknown key   (c.json:50:1)\n  ... and 39,950 more"));
  EXPECT_EQ(lines_of(errors), 52u);
}

TEST(ConfigMessages, FiftyErrorsArePrintedWhole) {
  EXPECT_THAT(read(object_of(50)).errors(), Not(HasSubstr("more")));
  EXPECT_THAT(read(object_of(51)).errors(), EndsWith("\n  ... and 1 more"));
}

TEST(ConfigMessages, ProblemsOfAFileAreCountedToo) {
  const std::string errors = read("{\"a\": 0" + repeated(", \"a\": 0", 2'000) + "}").errors();
  EXPECT_THAT(errors, HasSubstr("2000 errors"));
  EXPECT_THAT(errors, EndsWith("... and 1,950 more"));
  EXPECT_EQ(lines_of(errors), 52u);
}

TEST(ConfigMessages, ElementsOfAListAreErrorsEachAndTheirListFails) {
  const Read r = read("{\"entries\": " + list_of("0", 100'000) + ", \"name\": \"n\"}");
  EXPECT_EQ(r.report.errors(), 100'000u);
  EXPECT_TRUE(r.report.failed("entries"));
  EXPECT_TRUE(r.report.failed("entries.99999"));
  EXPECT_TRUE(r.report.failed("entries.99999.name"));
  EXPECT_FALSE(r.report.failed("name"));
  EXPECT_FALSE(r.report.failed("words"));
  EXPECT_THAT(r.errors(), HasSubstr("\n  entries.49: must be an object, got 0   (c.json:1:112)\n  ... and 99,950 more"));
}

TEST(ConfigMessages, OnlyThoseThatAreKeptAreMade) {
  ConfigReport report;
  size_t made = 0;
  for (int i = 0; i < 1'000; ++i) {
    report.error(text("key", i), [&] {
      ++made;
      return std::string("wrong");
    });
  }
  EXPECT_EQ(made, 50u);
  EXPECT_EQ(report.errors(), 1'000u);
  EXPECT_TRUE(report.failed("key999"));
}

TEST(ConfigMessages, ValuesAreCutAtSixtyCharacters) {
  const std::string umlauts = repeated("ü", 1'000);
  EXPECT_EQ(read("{\"entries\": \"" + umlauts + "\"}").errors(),
            "entries: must be a list, got \"" + repeated("ü", 59) + "...   (c.json:1:13)");
  EXPECT_EQ(read("{\"name\": " + list_of("{\"b\":[1,\"x\"]}", 1'000) + "}").errors(),
            "name: must be a string, got [{\"b\":[1,\"x\"]},{\"b\":[1,\"x\"]},{\"b\":[1,\"x\"]},{\"b\":[1,\"x\"]},{\"b...   (c.json:1:10)");
  EXPECT_EQ(read("{\"name\": " + object_of(1'000) + "}").errors().substr(0, 58),
            "name: must be a string, got {\"k0\":0,\"k1\":0,\"k10\":0,\"k100\":");
  EXPECT_EQ(read("{}", {"entries=" + umlauts}).errors(),
            "entries: must be a list, got \"" + repeated("ü", 59) + "...   (--set entries=" + repeated("ü", 60) + "...)");
}

TEST(ConfigMessages, NamesAreCutAtSixtyCharacters) {
  const std::string name(1'000, 'n');
  EXPECT_EQ(read("{\"" + name + "\": 0}").errors(), name.substr(0, 60) + "...: unknown key   (c.json:1:2)");
  EXPECT_EQ(read("{\"" + name + "\": 0, \"" + name + "\": 0}").errors(),
            name.substr(0, 60) + "...: duplicate key \"" + name.substr(0, 59) + "...   (c.json:1:1009)");
  EXPECT_LT(read("{\"" + repeated("n.", 100'000) + "\": 0}").errors().size(), 300u);
  EXPECT_LT(read("{}", {name + "=0"}).errors().size(), 250u);
  EXPECT_LT(read("{}", {name}).errors().size(), 200u);
  EXPECT_LT(read("{\"words\": []}", {"words." + name + "=0"}).errors().size(), 350u);
}

TEST(ConfigMessages, ALongOriginIsCutInTheEffectiveConfig) {
  const Read r = read("{}", {"name=" + std::string(1'000, 'x')});
  ASSERT_TRUE(r.report.ok());
  EXPECT_EQ(r.report.origin("name"), "--set name=" + std::string(60, 'x') + "...");
  EXPECT_EQ(r.config.name.size(), 1'000u);
}

TEST(ConfigMessages, AnyMessageIsCutAtAThousandCharacters) {
  ConfigReport report;
  report.error("name", std::string(100'000, 'p'));
  EXPECT_LT(std::string(error_of([&] { report.throw_if_failed(); }).what()).size(), 1'100u);
}

TEST(ConfigMessages, NamedEntriesAreLimitedInNumberAndLength) {
  EXPECT_TRUE(read("{\"named\": " + object_of(1'000, "{}") + "}").report.ok());
  EXPECT_EQ(read("{\"named\": " + object_of(1'001, "{}") + "}").errors(),
            "named: has 1001 entries, at most 1000 are accepted   (c.json:1:11)");
  EXPECT_TRUE(read("{\"named\": {\"" + std::string(128, 'n') + "\": {}}}").report.ok());
  EXPECT_THAT(read("{\"named\": {\"" + std::string(129, 'n') + "\": {}}}").errors(),
              HasSubstr("...: a name has at most 128 characters   (c.json:1:12)"));
}

TEST(ConfigSet, AKeyOfAnyDepthIsRefusedOrRead) {
  EXPECT_THAT(read("{}", {repeated("a.", 60'000) + "a=1"}).errors(), HasSubstr("more than 32 levels deep"));
  EXPECT_THAT(read("{}", {repeated("a.", 31) + "a=1"}).errors(), HasSubstr("a: unknown key"));
}

}  // namespace
}  // namespace mantissa
