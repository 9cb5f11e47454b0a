// The names of functions by address, for stacks that people read. The C library knows only what is exported, which a program's own
// functions are not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mantissa::tools {

class FunctionNames {
 public:
  // Reads the symbol table of this program. One that was stripped has none; then functions of libraries alone have names.
  FunctionNames();
  // Returns "mantissa(+0x51c2) mantissa::Shards::arrive()", the file that has the address and where in it; "0x7f00" where no file has it.
  std::string describe(const void* address) const;

 private:
  struct Function {
    uint64_t begin, size;
    std::string name;
  };
  std::string name_in_program(uint64_t offset) const;

  std::vector<Function> functions_;  // functions of this program, by address
};

}  // namespace mantissa::tools
