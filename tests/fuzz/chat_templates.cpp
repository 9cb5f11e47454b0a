// Accepted: a template renders the same text each time.
#include "targets.h"
#include "text/jinja.h"

namespace mantissa::fuzz {

bool chat_template(std::string_view input) {
  const Json message = {{"role", "user"}, {"content", "Hi"}}, answer = {{"role", "assistant"}, {"content", "<think>a</think>\nb"}};
  Json variables = Json::Members();
  variables["messages"] = Json::Entries{message, answer};
  variables["bos_token"] = "<s>";
  variables["add_generation_prompt"] = true;
  const JinjaInput with{.variables = variables, .strftime_now = [](const std::string& format) { return format; }};
  return accepted([&] { promise(render_jinja(input, with) == render_jinja(input, with), "a template renders the same text each time"); });
}

}  // namespace mantissa::fuzz
