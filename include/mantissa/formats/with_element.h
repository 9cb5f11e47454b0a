// Selects the element type that implements a Format known at run time.
#pragma once

#include "mantissa/formats/element.h"
#include "mantissa/formats/format.h"
#include "mantissa/formats/nvfp4.h"

namespace mantissa {

// Calls body.template operator()<E>() for the element E of a format whose scales are E8M0; e2m1 for the rest, `none` and nvfp4, which the
// caller has refused or taken elsewhere.
template <class Body>
decltype(auto) with_element(Format format, Body&& body) {
  switch (format) {
    case Format::e4m3: return body.template operator()<E4M3>();
    case Format::e5m2: return body.template operator()<E5M2>();
    case Format::none:
    case Format::nvfp4:
    case Format::e2m1: break;
  }
  return body.template operator()<E2M1>();
}

// Calls body like with_element(), and for nvfp4 with Nvfp4.
template <class Body>
decltype(auto) with_any_element(Format format, Body&& body) {
  if (format == Format::nvfp4) return body.template operator()<Nvfp4>();
  return with_element(format, body);
}

}  // namespace mantissa
