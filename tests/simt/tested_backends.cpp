#include "kernel_backends.h"

std::vector<std::string> mantissa::test::tested_backends() { return {"cuda"}; }
