#include "base/open_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

#include "mantissa/base/text.h"

namespace mantissa {

OpenedLibrary open_library(std::span<const std::string> paths) {
  std::string why;
  for (const std::string& path : paths) {
    if (void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      const link_map* found = nullptr;
      const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &found) == 0 && *found->l_name != '\0';
      return {.handle = handle, .text = known ? found->l_name : path};
    }
    const char* const reason = dlerror();
    why += text(why.empty() ? "" : "; ", reason ? reason : path);
  }
  return {.handle = nullptr, .text = text(why, "; set LD_LIBRARY_PATH to the folder that has it")};
}

std::vector<std::string> nvidia_library_paths(const std::string& name, std::span<const char* const> variables) {
  std::vector<std::string> out = {name};
  for (const char* const variable : variables) {
    const char* const folder = std::getenv(variable);
    if (folder == nullptr || *folder == '\0') continue;
    for (const char* const below : {"/lib64/", "/lib/"}) out.push_back(text(folder, below, name));
  }
  out.push_back(text("/usr/local/cuda/lib64/", name));
  return out;
}

}  // namespace mantissa
