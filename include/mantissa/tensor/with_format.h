// From a Format known at run time to the element type of its codec.
#pragma once

#include <utility>

#include "mantissa/base/error.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/format.h"

namespace mantissa {

// function(E4M3{}), function(E5M2{}) or function(E2M1{}); all must return the same type. Throws Error(internal) for none.
template <class Function>
decltype(auto) with_format(Format format, Function&& function) {
  switch (format) {
    case Format::e4m3: return std::forward<Function>(function)(E4M3{});
    case Format::e5m2: return std::forward<Function>(function)(E5M2{});
    case Format::e2m1: return std::forward<Function>(function)(E2M1{});
    case Format::none: break;
  }
  fail(ExitCode::internal, "an element format is needed, not high precision");
}

}  // namespace mantissa
