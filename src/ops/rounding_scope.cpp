#include "mantissa/ops/rounding_scope.h"

#include <utility>

namespace mantissa {
namespace {

thread_local const RoundingPosition* current_position = nullptr;

}  // namespace

RoundingScope::RoundingScope(const RoundingPosition& position)
    : position_(position), previous_(std::exchange(current_position, &position_)) {}
RoundingScope::~RoundingScope() { current_position = previous_; }

const RoundingPosition* rounding_position() { return current_position; }

}  // namespace mantissa
