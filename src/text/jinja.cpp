#include "text/jinja.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "text/jinja_syntax.h"

namespace mantissa {
namespace {

using Value = JinjaValue;
using Arguments = JinjaArguments;
using Kind = JinjaKind;

enum class Flow { on, leave, next };

class Rendering {
 public:
  explicit Rendering(const JinjaInput& input) : input_(input), scopes_(2) {}

  std::string run(const JinjaNode& whole) {
    return at_line(line_, [&] {
      for (const auto& [name, value] : input_.variables.members()) scopes_[0][name] = jinja_value(value, work_);
      for (const char* const name : {"raise_exception", "namespace", "dict", "range"}) scopes_[0][name] = {JinjaFunction{}};
      if (input_.strftime_now) scopes_[0]["strftime_now"] = {JinjaFunction{}};
      execute(whole);
      return std::move(out_);
    });
  }

 private:
  using Scope = std::map<std::string, Value, std::less<>>;

  // Does what a node asks for, at its line, where the line stays if it fails.
  template <class Body>
  auto enter(const JinjaNode& node, const Body& body) {
    constexpr size_t kNode = 32;  // an allowance for its time
    const JinjaLevel level(depth_);
    const int before = std::exchange(line_, node.line);
    work_.add(kNode);
    auto result = body();
    line_ = before;
    return result;
  }

  // Statements.

  Flow execute(const JinjaNode& node) {
    return enter(node, [&] {
      switch (node.kind) {
        case Kind::text: return print(node.name), Flow::on;
        case Kind::output: return print(printed(evaluate(node.part(0)), work_)), Flow::on;
        case Kind::sequence: return sequence(node);
        case Kind::branch: return branch(node);
        case Kind::loop: return loop(node);
        case Kind::assign: return assign(node, evaluate(node.part(0))), Flow::on;
        case Kind::capture: return capture(node), Flow::on;
        case Kind::macro:
          // Keeps the node, since the tree outlives every value. A macro sees no names of a loop, which Jinja lets it do.
          require(scopes_.size() == 2, ExitCode::data, "a macro within a loop, a macro or a set is not supported");
          scopes_.back()[node.name] = {JinjaFunction{.macro = &node}};
          return Flow::on;
        case Kind::leave: return Flow::leave;
        default: return Flow::next;
      }
    });
  }

  void print(const std::string& text) {
    constexpr size_t kMostOutput = size_t{4} << 20;
    work_.add(text.size());
    out_ += text;
    require(out_.size() <= kMostOutput, ExitCode::data, "the template writes more than ", kMostOutput, " bytes");
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

  Value written(const JinjaNode& body) {
    std::string before = std::exchange(out_, {});
    execute(body);
    return jinja_text(std::exchange(out_, std::move(before)), work_);
  }

  // Nobody else sees what the body sets.
  void capture(const JinjaNode& node) {
    scopes_.emplace_back();
    Value text = written(node.part(0));
    scopes_.pop_back();
    assign(node, std::move(text));
  }

  void assign(const JinjaNode& node, Value value) {
    if (node.name.empty()) return bind(node.names, std::move(value));
    const Value target = lookup(node.names[0]);
    auto* const space = target.shared<JinjaNamespace>();
    require(space != nullptr, ExitCode::data, node.names[0], " is not a namespace");
    set_member(space->members, node.name, std::move(value), work_);
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
    if (node.part(1).kind != Kind::absent) {
      std::erase_if(all, [&](const Value& one) {
        scopes_.emplace_back();
        bind(node.names, one);
        const bool passed = is_true(evaluate(node.part(1)));
        scopes_.pop_back();
        return !passed;
      });
    }
    if (all.empty()) return node.part(3).kind != Kind::absent ? execute(node.part(3)) : Flow::on;
    for (size_t i = 0; i < all.size(); ++i) {
      scopes_.emplace_back();
      bind(node.names, all[i]);
      scopes_.back()["loop"] = loop_object(all, i);
      const Flow flow = execute(node.part(2));
      scopes_.pop_back();
      if (flow == Flow::leave) break;
    }
    return Flow::on;
  }

  Value loop_object(const JinjaEntries& all, size_t i) {
    const auto number = [](size_t value) { return Value{static_cast<int64_t>(value)}; };
    JinjaMembers members = {{"index", number(i + 1)},
                            {"index0", number(i)},
                            {"revindex", number(all.size() - i)},
                            {"revindex0", number(all.size() - i - 1)},
                            {"length", number(all.size())},
                            {"first", {i == 0}},
                            {"last", {i + 1 == all.size()}}};
    if (i > 0) members.emplace_back("previtem", all[i - 1]);
    if (i + 1 < all.size()) members.emplace_back("nextitem", all[i + 1]);
    return jinja_object(std::move(members), work_);
  }

  Value call_macro(const JinjaNode& node, const Arguments& with) {
    const auto given = in_order(node.name, with, node.names);
    std::vector<Scope> before(std::make_move_iterator(scopes_.begin() + 2), std::make_move_iterator(scopes_.end()));
    scopes_.resize(2);
    scopes_.emplace_back();
    const size_t size = node.names.size(), required = size + 1 - node.parts.size();
    for (size_t i = 0; i < size; ++i)
      scopes_.back()[node.names[i]] = given[i] != nullptr ? *given[i] : jinja_undefined(node.names[i], work_);
    for (size_t i = required; i < size; ++i)  // defaults see the other parameters
      if (given[i] == nullptr) scopes_.back()[node.names[i]] = evaluate(node.part(i - required + 1));
    Value text = written(node.part(0));
    scopes_.resize(2);
    std::ranges::move(before, std::back_inserter(scopes_));
    return text;
  }

  // Expressions.

  Value evaluate(const JinjaNode& node) {
    return enter(node, [&]() -> Value {
      switch (node.kind) {
        case Kind::absent: return jinja_undefined("what an if without else leaves out", work_);
        case Kind::literal: return node.value;
        case Kind::variable: return lookup(node.name);
        case Kind::call: return called(node);
        case Kind::choice: return evaluate(node.part(is_true(evaluate(node.part(0))) ? 1 : 2));
        case Kind::logic: return logic(node);
        case Kind::comparison: return comparison(node);
        default: return made_of(node, evaluated(node, 0));
      }
    });
  }

  Value made_of(const JinjaNode& node, JinjaEntries parts) {
    switch (node.kind) {
      case Kind::list: return jinja_list(std::move(parts), work_);
      case Kind::dict: return dictionary(parts);
      case Kind::attribute: return attribute_of(parts[0], node.name, work_);
      case Kind::item: return item_of(parts[0], parts[1], work_);
      case Kind::slice: return slice_of(parts[0], {parts[1], parts[2], parts[3]}, work_);
      case Kind::filter: return filtered(node.name, parts[0], arguments_of(node, {parts.begin() + 1, parts.end()}), work_);
      case Kind::test: return {passes(node.name, parts[0], parts.size() > 1 ? &parts[1] : nullptr, work_)};
      case Kind::unary: return unary(node.name, parts[0]);
      default: return binary_result(node.name, parts[0], parts[1], work_);
    }
  }

  Value lookup(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    return jinja_undefined(name, work_);
  }

  JinjaEntries evaluated(const JinjaNode& node, size_t first) {
    JinjaEntries out;
    for (size_t i = first; i < node.parts.size(); ++i) out.push_back(evaluate(node.part(i)));
    return out;
  }

  static Arguments arguments_of(const JinjaNode& node, JinjaEntries values) {
    Arguments out;
    const auto named = values.end() - std::ssize(node.names);
    for (size_t i = 0; i < node.names.size(); ++i) out.named.emplace_back(node.names[i], named[static_cast<std::ptrdiff_t>(i)]);
    values.resize(values.size() - node.names.size());
    out.values = std::move(values);
    return out;
  }

  Value dictionary(const JinjaEntries& parts) {
    JinjaMembers members;
    for (size_t i = 0; i < parts.size(); i += 2) {
      require(parts[i].string() != nullptr, ExitCode::data, "keys of an object must be strings");
      set_member(members, *parts[i].string(), parts[i + 1], work_);
    }
    return jinja_object(std::move(members), work_);
  }

  Value unary(const std::string& name, const Value& value) {
    if (name == "not") return {!is_true(value)};
    if (const auto* const number = value.get<double>()) return {name == "-" ? -*number : *number};
    return binary_result(name, {int64_t{0}}, value, work_);
  }

  Value logic(const JinjaNode& node) {
    Value left = evaluate(node.part(0));
    return is_true(left) == (node.name == "or") ? left : evaluate(node.part(1));
  }

  Value comparison(const JinjaNode& node) {
    Value left = evaluate(node.part(0));
    for (size_t i = 0; i < node.names.size(); ++i) {
      Value right = evaluate(node.part(i + 1));
      if (!compares(node.names[i], left, right, work_)) return {false};
      left = std::move(right);
    }
    return {true};
  }

  Value called(const JinjaNode& node) {
    const JinjaNode& callee = node.part(0);
    if (callee.kind == Kind::attribute) {
      const Value object = evaluate(callee.part(0));
      const Arguments with = arguments_of(node, evaluated(node, 1));
      if (const std::optional<Value> result = method_result(callee.name, object, with, work_)) return *result;
      attribute_of(object, callee.name, work_);
    } else if (const Value function = evaluate(callee); const auto* const known = function.get<JinjaFunction>()) {
      const Arguments with = arguments_of(node, evaluated(node, 1));
      return known->macro != nullptr ? call_macro(*known->macro, with) : call_given(callee.name, with);
    }
    fail(ExitCode::data, "the function ", shortened(callee.name), " is not supported");
  }

  // Calls a function that every template has.
  Value call_given(const std::string& name, const Arguments& with) {
    if (name == "raise_exception") {
      const Value* const message = in_order(name, with, {"message"})[0];
      fail(ExitCode::data, "the template raised an exception: ", message != nullptr ? shortened(printed(*message, work_), 1000) : "");
    }
    if (name == "range") return range(with);
    if (name == "namespace" || name == "dict") {
      require(with.values.empty(), ExitCode::data, name, " with an argument without a name is not supported");
      const Value object = jinja_object(with.named, work_);
      return name == "dict" ? object : Value{std::make_shared<JinjaNamespace>(JinjaNamespace{with.named})};
    }
    require(name == "strftime_now" && input_.strftime_now, ExitCode::data, "the function ", shortened(name), " is not supported");
    return jinja_text(input_.strftime_now(printed(*in_order(name, with, {"format"}, 1)[0], work_)), work_);
  }

  Value range(const Arguments& with) {
    const auto given = in_order("range", with, {"", ""}, 1);
    const auto bound = [](const Value& value) {
      constexpr int64_t kMost = 100'000;
      const auto* const whole = value.get<int64_t>();
      require(whole != nullptr && *whole >= -kMost && *whole <= kMost, ExitCode::data, "range needs integers up to ", kMost);
      return *whole;
    };
    const bool two = given[1] != nullptr;
    JinjaEntries out;
    for (int64_t i = two ? bound(*given[0]) : 0, end = bound(*given[two ? 1 : 0]); i < end; ++i) out.push_back({i});
    return jinja_list(std::move(out), work_);
  }

  const JinjaInput& input_;
  std::vector<Scope> scopes_;  // given variables, those that the template sets, and those of loops and macros
  JinjaWork work_;
  std::string out_;
  int line_ = 1, depth_ = 0;
};

}  // namespace

std::string render_jinja(std::string_view source, const JinjaInput& input) {
  const JinjaNode whole = parse_jinja(source);
  return Rendering(input).run(whole);
}

}  // namespace mantissa
