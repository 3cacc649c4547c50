// What kernels of several lanes share.
#pragma once

#include <cuda_runtime.h>

#include "moves/ranges.h"

namespace streamlap::cuda {

// Loads kernels: lazy loading behind an armed gate can hang.
template <class... Kernels>
cudaError_t load(Kernels... kernels) {
  cudaError_t status = cudaSuccess;
  cudaFuncAttributes attributes;
  const auto one = [&](auto kernel) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
  };
  (one(kernels), ...);
  return status;
}

inline constexpr unsigned warp_lanes = 32;

__device__ __forceinline__ moves::Lane this_lane() { return {threadIdx.x, blockDim.x}; }

// The sum over a block, in its first thread. Every thread of the block calls it.
__device__ inline unsigned long long sum_of_block(unsigned long long value) {
  __shared__ unsigned long long sums[32];
  constexpr unsigned all = 0xffffffff;
  for (unsigned apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(all, value, apart);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  if (warp != 0) return 0;
  value = lane < blockDim.x / 32 ? sums[lane] : 0;
  for (unsigned apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(all, value, apart);
  return value;
}

// The block's number of non-finite elements, which its threads have seen; `adds` to what is there.
__device__ __forceinline__ void add_up(std::uint64_t found, std::uint64_t* counts, bool adds) {
  const std::uint64_t sum = sum_of_block(found);
  if (threadIdx.x == 0) counts[blockIdx.x] = sum + (adds ? counts[blockIdx.x] : 0);
}

}  // namespace streamlap::cuda
