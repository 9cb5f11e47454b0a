// Arranges the ranks of a job as a grid, data x tensor. Ranks are ordered tensor-fastest: rank = data * tensor size + tensor. Neighboring
// data ranks share experts: data rank = expert data * expert size + expert.
#pragma once

#include <functional>

#include "mantissa/comm/communicator.h"
#include "mantissa/tensor/sharding.h"

namespace mantissa {

struct Mesh {
  Communicator world = {};         // all ranks
  Communicator tensor = {};        // ranks that share the matrices of one replica
  Communicator data = {};          // ranks that hold the same part of each replica
  Communicator expert = {};        // data ranks that share the experts of one replica
  Communicator expert_data = {};   // data ranks that hold the same experts
  bool sequence_parallel = false;  // ModelRanks

  ModelRanks ranks() const;
};

// Makes the mesh in which so many tensor and expert ranks hold a model together. All ranks of the world call it together. Throws
// Error(usage) unless the tensor ranks divide the world and the expert ranks the data ranks.
Mesh make_mesh(Communicator world, const ModelRanks& ranks);

// Runs body on every rank. If it throws on any, all throw the error of the lowest such rank, which the others name. The body must not
// communicate. An Error(peer_lost) is rethrown as it is: there is nobody to agree with.
void agree(const Communicator& world, const std::function<void()>& body);

// Returns when all ranks have called it; call it before throwing an error that all ranks throw. A rank that leaves early would end the
// waits of others and turn their error into peer_lost. Also returns if ranks that already left end the wait.
void await_all(const Communicator& world);

}  // namespace mantissa
