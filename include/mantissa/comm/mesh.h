// The ranks of a job as a grid, data x tensor. Ranks are ordered tensor-fastest: rank = data * tensor size + tensor.
#pragma once

#include <functional>

#include "mantissa/comm/communicator.h"

namespace mantissa {

struct Mesh {
  Communicator world;   // all ranks
  Communicator tensor;  // those that share the matrices of one replica
  Communicator data;    // those that hold the same part of each replica
};

// Throws Error(usage) unless the tensor size divides the world.
Mesh make_mesh(Communicator world, int tensor_size);

// Runs body on every rank; if it throws on any, all throw the error of the lowest such rank, which the others name. The body must not
// communicate. An Error(peer_lost) is thrown as it is: there is nobody to agree with.
void agree(const Communicator& world, const std::function<void()>& body);

}  // namespace mantissa
