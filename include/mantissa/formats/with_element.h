// Selects the element type that implements a Format known at run time.
#pragma once

#include "mantissa/formats/element.h"
#include "mantissa/formats/format.h"

namespace mantissa {

// Calls body.template operator()<E>() for the element E of `format`; e2m1 for the rest. `none` has no element: the caller has refused it.
template <class Body>
decltype(auto) with_element(Format format, Body&& body) {
  switch (format) {
    case Format::e4m3: return body.template operator()<E4M3>();
    case Format::e5m2: return body.template operator()<E5M2>();
    case Format::none:
    case Format::e2m1: break;
  }
  return body.template operator()<E2M1>();
}

}  // namespace mantissa
