#include "mantissa/text/jinja.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "text/jinja_syntax.h"
#include "text/jinja_values.h"

namespace mantissa {
namespace {

constexpr int kDeepest = 200;  // calls and what is nested in them
constexpr size_t kMostOutput = size_t{4} << 20;

using Value = JinjaValue;
using Arguments = JinjaArguments;
using Kind = JinjaKind;

enum class Flow { on, leave, next };

Value text_value(std::string text) {
  Value value;
  value.content = std::move(text);
  return value;
}

Value object_value(JinjaMembers members) {
  Value value;
  value.content = std::make_shared<JinjaMembers>(std::move(members));
  return value;
}

class Rendering {
 public:
  explicit Rendering(const JinjaInput& input) {
    scopes_.resize(2);  // given variables, and those that the template sets
    for (const auto& [name, value] : input.variables.members()) scopes_[0][name] = jinja_value(value);
    add_functions(input);
  }

  std::string run(const JinjaNode& whole) {
    execute(whole);
    return std::move(out_);
  }

 private:
  using Scope = std::map<std::string, Value, std::less<>>;

  struct Deeper {
    Deeper(Rendering& of, int line) : rendering(of) {
      if (++rendering.depth_ > kDeepest) fail_at(line, "more than ", kDeepest, " levels deep");
    }
    ~Deeper() { --rendering.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    Rendering& rendering;
  };

  void add_functions(const JinjaInput& input) {
    Scope& given = scopes_[0];
    given["raise_exception"] = jinja_function([](const Arguments& with) -> Value {
      fail(ExitCode::data, "the template refuses it: ", with.values.empty() ? "" : printed(with.values[0]));
    });
    given["namespace"] = given["dict"] = jinja_function([](const Arguments& with) { return object_value(with.named); });
    given["range"] = jinja_function([this](const Arguments& with) { return range(with); });
    if (!input.strftime_now) return;
    given["strftime_now"] = jinja_function(
        [now = input.strftime_now](const Arguments& with) { return text_value(now(with.values.empty() ? "" : printed(with.values[0]))); });
  }

  Value range(const Arguments& with) {
    std::vector<int64_t> bounds;
    for (const Value& value : with.values) {
      const auto* const bound = value.get<int64_t>();
      require(bound != nullptr, ExitCode::data, "range needs integers");
      bounds.push_back(*bound);
    }
    require(!bounds.empty() && bounds.size() <= 3, ExitCode::data, "range needs one to three integers");
    const int64_t first = bounds.size() > 1 ? bounds[0] : 0, last = bounds.size() > 1 ? bounds[1] : bounds[0],
                  step = bounds.size() > 2 ? bounds[2] : 1;
    constexpr int64_t kMost = 100'000;
    const bool near = std::ranges::all_of(bounds, [](int64_t bound) { return bound >= -kMost && bound <= kMost; });
    require(near && step != 0, ExitCode::data, "range goes to ", kMost, " at most, by a step that is not 0");
    JinjaEntries out;
    for (int64_t i = first; step > 0 ? i < last : i > last; i += step) out.emplace_back().content = i;
    work_.add(sizeof(Value) * out.size());
    return jinja_list(std::move(out));
  }

  // Adds the line to the errors of body().
  template <class Body>
  auto at_line(const JinjaNode& node, const Body& body) {
    work_.add(1);
    try {
      return body();
    } catch (const Error& error) {
      const std::string what = error.what();
      if (what.starts_with("line ")) throw;
      fail_at(node.line, what);
    }
  }

  // Statements.

  void print(const std::string& text) {
    work_.add(text.size());
    out_ += text;
    require(out_.size() <= kMostOutput, ExitCode::data, "the template writes more than ", kMostOutput, " bytes");
  }

  Flow execute(const JinjaNode& node) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Kind::text: return at_line(node, [&] { return print(node.name), Flow::on; });
      case Kind::output: return at_line(node, [&] { return print(printed(evaluate(node.part(0)))), Flow::on; });
      case Kind::sequence: return sequence(node);
      case Kind::branch: return branch(node);
      case Kind::loop: return at_line(node, [&] { return loop(node); });
      case Kind::assign: return at_line(node, [&] { return assign(node, evaluate(node.part(0))), Flow::on; });
      case Kind::capture: return assign(node, text_value(captured(node.part(0)))), Flow::on;
      case Kind::macro: return define(node), Flow::on;
      case Kind::leave: return Flow::leave;
      default: return Flow::next;
    }
  }

  Flow sequence(const JinjaNode& node) {
    for (const JinjaNode& part : node.parts)
      if (const Flow flow = execute(part); flow != Flow::on) return flow;
    return Flow::on;
  }

  Flow branch(const JinjaNode& node) {
    size_t i = 0;
    for (; i + 1 < node.parts.size(); i += 2)
      if (is_true(evaluate(node.part(i)))) return execute(node.part(i + 1));
    return i < node.parts.size() ? execute(node.part(i)) : Flow::on;
  }

  std::string captured(const JinjaNode& body) {
    std::string before = std::exchange(out_, {});
    execute(body);
    return std::exchange(out_, std::move(before));
  }

  void assign(const JinjaNode& node, Value value) {
    if (!node.name.empty()) {
      const Value target = lookup(node.names[0]);
      require(target.members() != nullptr, ExitCode::data, node.names[0], " is no namespace");
      work_.changes(*target.get<std::shared_ptr<JinjaMembers>>());
      return set_member(*target.members(), node.name, std::move(value));
    }
    bind(node.names, std::move(value));
  }

  void bind(const std::vector<std::string>& names, Value value) {
    if (names.size() == 1) {
      scopes_.back()[names[0]] = std::move(value);
      return;
    }
    const JinjaEntries entries = entries_of(value, work_);
    require(entries.size() == names.size(), ExitCode::data, "there are ", entries.size(), " values for ", names.size(), " names");
    for (size_t i = 0; i < names.size(); ++i) scopes_.back()[names[i]] = entries[i];
  }

  Flow loop(const JinjaNode& node) {
    JinjaEntries all = entries_of(evaluate(node.part(0)), work_);
    if (node.part(1).kind != Kind::absent) std::erase_if(all, [&](const Value& one) { return !passes_condition(node, one); });
    if (all.empty()) return node.part(3).kind != Kind::absent ? execute(node.part(3)) : Flow::on;
    for (size_t i = 0; i < all.size(); ++i) {
      work_.add(16);
      scopes_.emplace_back();
      bind(node.names, all[i]);
      scopes_.back()["loop"] = loop_object(all, i);
      const Flow flow = execute(node.part(2));
      scopes_.pop_back();
      if (flow == Flow::leave) break;
    }
    return Flow::on;
  }

  bool passes_condition(const JinjaNode& node, const Value& one) {
    scopes_.emplace_back();
    bind(node.names, one);
    const bool passed = is_true(evaluate(node.part(1)));
    scopes_.pop_back();
    return passed;
  }

  static Value loop_object(const JinjaEntries& all, size_t i) {
    const auto number = [](size_t value) { return jinja_value(Json(static_cast<int64_t>(value))); };
    JinjaMembers members = {{"index", number(i + 1)},
                            {"index0", number(i)},
                            {"revindex", number(all.size() - i)},
                            {"revindex0", number(all.size() - i - 1)},
                            {"length", number(all.size())},
                            {"first", jinja_value(Json(i == 0))},
                            {"last", jinja_value(Json(i + 1 == all.size()))}};
    if (i > 0) members.emplace_back("previtem", all[i - 1]);
    if (i + 1 < all.size()) members.emplace_back("nextitem", all[i + 1]);
    return object_value(std::move(members));
  }

  // The tree outlives every function.
  void define(const JinjaNode& node) {
    scopes_.back()[node.name] = jinja_function([this, &node](const Arguments& with) { return text_value(call_macro(node, with)); });
  }

  std::string call_macro(const JinjaNode& node, const Arguments& with) {
    require(with.values.size() <= node.names.size(), ExitCode::data, node.name, " takes ", count_text(node.names.size(), "argument"));
    Scope own;
    const size_t required = node.names.size() + 1 - node.parts.size();
    for (size_t i = 0; i < node.names.size(); ++i) {
      const Value* const named = member(with.named, node.names[i]);
      if (i < with.values.size())
        own[node.names[i]] = with.values[i];
      else if (named != nullptr)
        own[node.names[i]] = *named;
      else
        own[node.names[i]] = i < required ? undefined(node.names[i]) : evaluate(node.part(i - required + 1));
    }
    std::vector<Scope> before(std::make_move_iterator(scopes_.begin() + 2), std::make_move_iterator(scopes_.end()));
    scopes_.resize(2);
    scopes_.push_back(std::move(own));
    std::string text = captured(node.part(0));
    scopes_.resize(2);
    std::ranges::move(before, std::back_inserter(scopes_));
    return text;
  }

  // Expressions.

  static Value undefined(const std::string& name) {
    Value value;
    value.content = JinjaUndefined{name};
    return value;
  }

  Value lookup(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    return undefined(name);
  }

  Value evaluate(const JinjaNode& node) {
    const Deeper deeper(*this, node.line);
    return at_line(node, [&] { return result_of(node); });
  }

  Value result_of(const JinjaNode& node) {
    switch (node.kind) {
      case Kind::literal: return jinja_value(node.value);
      case Kind::variable: return lookup(node.name);
      case Kind::list: return jinja_list(evaluated(node, 0, node.parts.size()));
      case Kind::dict: return dictionary(node);
      case Kind::attribute: return attribute(evaluate(node.part(0)), node.name);
      case Kind::item: return item_of(evaluate(node.part(0)), evaluate(node.part(1)));
      case Kind::slice: return slice(node);
      case Kind::call: return called(node);
      case Kind::filter: return filtered(node.name, evaluate(node.part(0)), arguments_of(node), work_);
      case Kind::test: return jinja_value(Json(passes(node.name, evaluate(node.part(0)), evaluated(node, 1, node.parts.size()))));
      case Kind::unary: return unary(node);
      case Kind::binary: return binary(node);
      case Kind::choice: return is_true(evaluate(node.part(0))) ? evaluate(node.part(1)) : evaluate(node.part(2));
      default: return undefined("nothing");
    }
  }

  JinjaEntries evaluated(const JinjaNode& node, size_t first, size_t last) {
    JinjaEntries out;
    for (size_t i = first; i < last; ++i) out.push_back(evaluate(node.part(i)));
    return out;
  }

  Arguments arguments_of(const JinjaNode& node) {
    const size_t named = node.parts.size() - node.names.size();
    Arguments out{.values = evaluated(node, 1, named)};
    for (size_t i = 0; i < node.names.size(); ++i) out.named.emplace_back(node.names[i], evaluate(node.part(named + i)));
    return out;
  }

  Value dictionary(const JinjaNode& node) {
    JinjaMembers members;
    for (size_t i = 0; i < node.parts.size(); i += 2) {
      const Value key = evaluate(node.part(i));
      require(key.string() != nullptr, ExitCode::data, "keys of an object are strings");
      set_member(members, *key.string(), evaluate(node.part(i + 1)));
    }
    return object_value(std::move(members));
  }

  // Methods come before members of the same name, as in Python.
  Value attribute(const Value& of, const std::string& name) {
    Value method = method_of(of, name, work_);
    return method.is_undefined() ? item_of(of, text_value(name)) : method;
  }

  Value slice(const JinjaNode& node) {
    const Value of = evaluate(node.part(0));
    const Value bounds[3] = {evaluate(node.part(1)), evaluate(node.part(2)), evaluate(node.part(3))};
    return slice_of(of, bounds, work_);
  }

  Value called(const JinjaNode& node) {
    const Value function = evaluate(node.part(0));
    const JinjaFunction* const known = function.shared<JinjaFunction>();
    const std::string& name = node.part(0).name;
    require(known != nullptr, ExitCode::data, "the function ", shortened(name), " is not known here");
    return (*known)(arguments_of(node));
  }

  Value unary(const JinjaNode& node) {
    const Value value = evaluate(node.part(0));
    if (node.name == "not") return jinja_value(Json(!is_true(value)));
    return node.name == "-" ? negative(value) : value;
  }

  Value binary(const JinjaNode& node) {
    Value left = evaluate(node.part(0));
    if (node.name == "and" || node.name == "or") return is_true(left) == (node.name == "or") ? left : evaluate(node.part(1));
    return binary_result(node.name, left, evaluate(node.part(1)), work_);
  }

  std::vector<Scope> scopes_;
  JinjaWork work_;
  std::string out_;
  int depth_ = 0;
};

}  // namespace

std::string render_jinja(std::string_view source, const JinjaInput& input) {
  const JinjaNode whole = parse_jinja(source);
  return Rendering(input).run(whole);
}

}  // namespace mantissa
