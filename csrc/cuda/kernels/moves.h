// The kernels that move many tensors at once. `base` and `counts` are the device's addresses of the
// move's.
#pragma once

#include <cuda_runtime.h>

#include "moves/move.h"

namespace streamlap::cuda {

// gather.cu and scatter.cu: bytes as they are.
cudaError_t launch_gather(const moves::Move& move, std::byte* base, cudaStream_t stream);
cudaError_t launch_scatter(const moves::Move& move, std::byte* base, cudaStream_t stream);
// cast.cu: both ways, with a cast, a scale and a count of non-finite elements in one pass.
cudaError_t launch_cast(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                        cudaStream_t stream);
// strided.cu: the one piece of a move with a layout.
cudaError_t launch_strided(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                           cudaStream_t stream);
// checksum.cu: each block's part of the sum.
cudaError_t launch_checksum(const moves::Move& move, std::uint64_t* sums, cudaStream_t stream);

// Load them, for who is about to arm a gate.
cudaError_t load_gather();
cudaError_t load_scatter();
cudaError_t load_cast();
cudaError_t load_strided();
cudaError_t load_checksum();

}  // namespace streamlap::cuda
