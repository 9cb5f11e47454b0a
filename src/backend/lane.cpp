#include "mantissa/backend/lane.h"

namespace mantissa {
namespace {

thread_local Lane lane = Lane::compute;

}  // namespace

Lane current_lane() { return lane; }

LaneScope::LaneScope(Lane of) : outer_(lane) { lane = of; }
LaneScope::~LaneScope() { lane = outer_; }

}  // namespace mantissa
