#include "cuda/kernels/gate.h"

namespace streamlap::cuda {
namespace {

__device__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__global__ void gate(volatile unsigned* flag, unsigned long long limit_ns) {
  const unsigned long long begin = now_ns();
  while (*flag == gate_closed) {
    if (now_ns() - begin > limit_ns) {
      *flag = gate_timed_out;
      __threadfence_system();
      return;
    }
    __nanosleep(1000);
  }
}

}  // namespace

cudaError_t launch_gate(volatile unsigned* flag, unsigned long long limit_ns, cudaStream_t stream) {
  gate<<<1, 1, 0, stream>>>(flag, limit_ns);
  return cudaGetLastError();
}

cudaError_t load_gate() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, gate);
}

}  // namespace streamlap::cuda
