// A gather or a scatter that casts its elements, scales them and counts the non-finite ones, in one
// pass over them.
#include "cuda/kernels/moves.h"
#include "cuda/kernels/tables.h"

namespace streamlap::cuda {
namespace {

// The sum over a block, in its first thread.
__device__ unsigned long long sum_of_block(unsigned long long value) {
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

template <class From, class To, class TableType>
__global__ void __launch_bounds__(moves::most_threads)
    cast(const __grid_constant__ TableType table) {
  std::uint64_t found = 0;
  each_tile(table, [&](const moves::Piece& piece, std::uint32_t tile) {
    found += moves::change_tile<From, To>(piece, tile, table.base, table.gathers, table.change,
                                          this_lane());
  });
  if (!table.change.counts) return;  // all threads of the launch alike
  const std::uint64_t sum = sum_of_block(found);
  if (threadIdx.x == 0) {
    table.counts[blockIdx.x] = sum + (table.adds ? table.counts[blockIdx.x] : 0);
  }
}

}  // namespace

cudaError_t launch_cast(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                        cudaStream_t stream) {
  return moves::with_types(move, [&]<class From, class To>() {
    return launch_all(move, base, counts, [&](const auto& table) {
      using TableType = std::remove_cvref_t<decltype(table)>;
      const bool fewer = !move.change.counts && table.tiles < move.grid.blocks;
      cast<From, To, TableType>
          <<<fewer ? table.tiles : move.grid.blocks, move.grid.threads, 0, stream>>>(table);
    });
  });
}

}  // namespace streamlap::cuda
