// Many tensors into one range, of page-locked or of device memory: bytes as they are.
#include "cuda/kernels/moves.h"
#include "cuda/kernels/tables.h"

namespace streamlap::cuda {
namespace {

template <class TableType>
__global__ void __launch_bounds__(moves::most_threads)
    gather(const __grid_constant__ TableType table) {
  each_tile(table, [&](const moves::Piece& piece, std::uint32_t tile, moves::Lane lane) {
    moves::copy_tile(piece, tile, table.base, true, lane);
  });
}

}  // namespace

cudaError_t launch_gather(const moves::Move& move, std::byte* base, cudaStream_t stream) {
  return launch_all(move, base, nullptr, [&](const auto& table) {
    gather<<<blocks_with_tiles(move.grid, table), move.grid.threads, 0, stream>>>(table);
  });
}

cudaError_t load_gather() { return load(gather<SmallTable>, gather<LargeTable>); }

}  // namespace streamlap::cuda
