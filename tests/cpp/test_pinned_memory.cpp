// Page-locked memory of the CUDA runtime, made each way: usable, rolled back, and free to be
// reused.
#include "lab.h"

#ifndef STREAMLAP_WITH_CUDA

TEST(large_blocks_each_way) { SKIP(streamlap::probe_cuda().reason); }

#else

#include <cuda_runtime.h>

#include "cuda/pinned_memory.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t MiB = 1 << 20;

void require_gpu() {
  if (const CudaProbe probe = probe_cuda(); probe.devices == 0) SKIP(probe.reason);
}

bool page_locked(void* pointer) {
  cudaPointerAttributes found{};
  const cudaError_t status = cudaPointerGetAttributes(&found, pointer);
  cudaGetLastError();
  return status == cudaSuccess && found.type == cudaMemoryTypeHost;
}

}  // namespace

TEST(large_blocks_each_way) {
  require_gpu();
  for (PinnedWay way :
       {PinnedWay::measured, PinnedWay::huge_pages, PinnedWay::base_pages, PinnedWay::driver}) {
    cuda::PinnedMemory memory(way);
    for (std::size_t bytes : {std::size_t{4096}, 2 * MiB, 3 * MiB + 4096, 64 * MiB}) {
      auto* data = static_cast<unsigned char*>(memory.allocate(bytes));
      CHECK(page_locked(data));
      CHECK(page_locked(data + bytes - 1));
      std::memset(data, 7, bytes);
      void* mapped = nullptr;
      CHECK_EQ(cudaHostGetDevicePointer(&mapped, data + bytes / 2, 0), cudaSuccess);
      void* device = nullptr;
      REQUIRE(cudaMalloc(&device, bytes) == cudaSuccess);
      CHECK_EQ(cudaMemcpy(device, data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
      std::memset(data, poison, bytes);
      CHECK_EQ(cudaMemcpy(data, device, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      CHECK_EQ(data[0], 7);
      CHECK_EQ(data[bytes - 1], 7);
      cudaFree(device);
      memory.free(data);
      CHECK(!page_locked(data));
      CHECK_EQ(cudaGetLastError(), cudaSuccess);
    }
    CHECK(!memory.how().empty());
  }
}

TEST(what_cannot_be_had_leaves_nothing_behind) {
  require_gpu();
  cuda::PinnedMemory memory(PinnedWay::measured);
  for (int round = 0; round < 3; ++round) {
    CHECK_THROWS(memory.allocate(std::size_t{1} << 50), Error);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
  }
  void* data = memory.allocate(32 * MiB);
  CHECK(page_locked(data));
  // The driver refuses to register a range twice, and says so to its caller alone.
  CHECK(cudaHostRegister(data, MiB, cudaHostRegisterPortable) != cudaSuccess ||
        cudaHostUnregister(data) != cudaSuccess);
  cudaGetLastError();
  void* other = memory.allocate(32 * MiB);
  CHECK(page_locked(other));
  memory.free(data);
  memory.free(other);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

#endif
