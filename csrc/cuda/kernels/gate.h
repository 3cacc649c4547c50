// The kernel that holds a stream until the host opens it.
#pragma once

#include <cuda_runtime.h>

namespace streamlap::cuda {

enum GateFlag : unsigned { gate_closed = 0, gate_open = 1, gate_timed_out = 2 };

// `flag` is the device's address of mapped page-locked memory. Gives up after limit_ns.
cudaError_t launch_gate(volatile unsigned* flag, unsigned long long limit_ns, cudaStream_t stream);

// Loads the kernel: lazy loading behind an armed gate can hang.
cudaError_t load_gate();

}  // namespace streamlap::cuda
