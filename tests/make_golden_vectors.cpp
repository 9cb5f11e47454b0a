// Writes tests/golden anew from the slow reference: make_golden_vectors DIR.
#include <fstream>
#include <iostream>

#include "golden_vectors.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_golden_vectors DIR\n";
    return 2;
  }
  for (const auto& [name, content] : mantissa::test::golden_files()) {
    std::ofstream out(std::string(argv[1]) + "/" + name, std::ios::binary | std::ios::trunc);
    if (!(out << content << std::flush)) {
      std::cerr << "cannot write " << name << '\n';
      return 1;
    }
  }
  return 0;
}
