#include "tools/function_names.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

namespace mantissa::tools {
namespace {

template <class T>
std::vector<T> read_array(std::ifstream& file, uint64_t offset, uint64_t bytes) {
  std::vector<T> out(bytes / sizeof(T));
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size() * sizeof(T)));
  if (!file) out.clear();
  return out;
}

std::vector<char> read_names(std::ifstream& file, const Elf64_Shdr& strings) {
  std::vector<char> names = read_array<char>(file, strings.sh_offset, strings.sh_size);
  names.push_back('\0');
  return names;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? readable.get() : name;
}

// Returns where the file that has the address is mapped, and what else the dynamic linker knows; all null: no file has it.
Dl_info object_of(const void* address) {
  Dl_info object{};
  return ::dladdr(address, &object) != 0 ? object : Dl_info{};
}

}  // namespace

FunctionNames::FunctionNames() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::vector<Elf64_Ehdr> header = read_array<Elf64_Ehdr>(file, 0, sizeof(Elf64_Ehdr));
  if (header.empty()) return;
  const auto sections = read_array<Elf64_Shdr>(file, header[0].e_shoff, header[0].e_shnum * sizeof(Elf64_Shdr));
  const auto table = std::ranges::find(sections, uint32_t{SHT_SYMTAB}, &Elf64_Shdr::sh_type);
  if (table == sections.end() || table->sh_link >= sections.size()) return;
  const std::vector<char> names = read_names(file, sections[table->sh_link]);
  for (const Elf64_Sym& symbol : read_array<Elf64_Sym>(file, table->sh_offset, table->sh_size)) {
    if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_size == 0 || symbol.st_name >= names.size()) continue;
    functions_.push_back({.begin = symbol.st_value, .size = symbol.st_size, .name = names.data() + symbol.st_name});
  }
  std::ranges::sort(functions_, {}, &Function::begin);
}

std::string FunctionNames::name_in_program(uint64_t offset) const {
  const auto after = std::ranges::upper_bound(functions_, offset, {}, &Function::begin);
  if (after == functions_.begin()) return "";
  const Function& found = *std::prev(after);
  return offset < found.begin + found.size ? demangled(found.name.c_str()) : "";
}

std::string FunctionNames::describe(const void* address) const {
  static const char of_program = 0;
  std::ostringstream out;
  out << std::hex << std::showbase;
  const Dl_info object = object_of(address);
  if (object.dli_fbase == nullptr) {
    out << std::bit_cast<uint64_t>(address);
    return out.str();
  }
  const uint64_t offset = std::bit_cast<uint64_t>(address) - std::bit_cast<uint64_t>(object.dli_fbase);
  out << std::filesystem::path(object.dli_fname).filename().string() << "(+" << offset << ')';
  const bool own = object.dli_fbase == object_of(&of_program).dli_fbase;
  const std::string name = own ? name_in_program(offset) : object.dli_sname != nullptr ? demangled(object.dli_sname) : "";
  return name.empty() ? out.str() : out.str() + ' ' + name;
}

}  // namespace mantissa::tools
