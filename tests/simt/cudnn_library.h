// State of the cuDNN over the executor (cudnn_calls.cpp), which tests set and read.
#pragma once

#include <cstdint>
#include <string>

namespace mantissa::simt {

struct CudnnState {
  int version = 91900;
  std::string failing_call;  // "BackendExecute": the call that fails, with this status; empty: none
  int status = 0;
  int64_t refused_plans = 0;    // how many of the engines proposed for a graph cannot be made ready
  int64_t unordered_plans = 0;  // how many of them have no memory for the gradients of scores
  // Counts of this process.
  int64_t plans = 0, executions = 0, workspace = 0;  // workspace: bytes of the latest plan
};
CudnnState& cudnn();  // the computing thread and its stream use it in turn

}  // namespace mantissa::simt
