// CUDA's answers as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "base/errors.h"

namespace bench {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw streamlap::Error(status == cudaErrorMemoryAllocation ? streamlap::ErrorKind::out_of_memory
                                                             : streamlap::ErrorKind::runtime,
                         std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

}  // namespace bench
