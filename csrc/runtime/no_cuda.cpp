// What a build without CUDA links: no GPU is then a fact of the link, not a branch in the code.
#ifndef STREAMLAP_WITH_CUDA

#include "runtime/runtime.h"

namespace streamlap {

CudaProbe probe_cuda() {
  CudaProbe probe;
  probe.reason = "streamlap was built without CUDA (no nvcc at build time, or STREAMLAP_CUDA=OFF)";
  return probe;
}

std::shared_ptr<Runtime> make_cuda_runtime(PinnedWay) {
  throw Error(ErrorKind::runtime, probe_cuda().reason);
}

}  // namespace streamlap

#endif
