# Compiler flags. Rounding is part of the interface: no fast-math, and no contraction of a*b+c behind our back (an explicit fma is one).
add_library(mantissa_warnings INTERFACE)
target_compile_options(mantissa_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wold-style-cast -Wdouble-promotion -Wnon-virtual-dtor -Werror
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)  # a false report of g++ 12 on string concatenation
# Instrumented code hides the values of variables from g++ 12, which gives false reports. Other builds make errors of warnings.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  target_compile_options(mantissa_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> -Wno-error)
endif()
if(MANTISSA_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL Clang)
    message(FATAL_ERROR "MANTISSA_FUZZ needs clang, which has libFuzzer: cmake --preset fuzz")
  endif()
  if(MANTISSA_FUZZ_COVERAGE)
    add_compile_options(-fsanitize=fuzzer-no-link -fprofile-instr-generate -fcoverage-mapping)
    add_link_options(-fprofile-instr-generate)
  else()
    add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=address,undefined)
  endif()
  target_compile_options(mantissa_warnings INTERFACE -Wno-error)  # the product is held to those of g++
endif()

set(MANTISSA_ROUNDING_FLAGS -ffp-contract=off)
add_compile_options(${MANTISSA_ROUNDING_FLAGS})
# errno of mathematical functions is never read, and with it no square root is vectorized; rounding is the same. The note on the calling
# convention of vector types has no subject: every function that takes one is inlined.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:-fno-math-errno> $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>)
# The compiler collects its garbage later: a tenth less time for half as much memory again, still below the 3 GiB of scripts/jobs.sh.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-expand=400> $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=1500000>)
if("${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_RELEASE} $ENV{CXXFLAGS}" MATCHES "-ffast-math|-Ofast|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math")
  message(FATAL_ERROR "fast-math changes rounding and is refused: ${CMAKE_CXX_FLAGS}")
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3")

# Hardening: a position-independent executable with read-only relocations, checked library calls and stack canaries.
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)
# Distributions define _FORTIFY_SOURCE=2, and definitions precede all options, so this one is an option behind the -U.
add_compile_options($<$<CONFIG:Release>:-fstack-protector-strong>
  "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:SHELL:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3>")
add_compile_definitions($<$<CONFIG:Release>:_GLIBCXX_ASSERTIONS>)
add_link_options(-Wl,-z,relro,-z,now)
