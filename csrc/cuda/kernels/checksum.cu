// The sums of a checksum: of the words of many ranges, each mixed with its place.
#include "cuda/kernels/moves.h"
#include "cuda/kernels/tables.h"

namespace streamlap::cuda {
namespace {

template <class TableType>
__global__ void __launch_bounds__(moves::most_threads)
    checksum(const __grid_constant__ TableType table) {
  std::uint64_t sum = 0;
  each_tile(table, [&](const moves::Piece& piece, std::uint32_t tile, moves::Lane lane) {
    sum += moves::sum_tile(piece, tile, lane);
  });
  add_up(sum, table.counts, table.adds);
}

}  // namespace

cudaError_t launch_checksum(const moves::Move& move, std::uint64_t* sums, cudaStream_t stream) {
  return launch_all(move, nullptr, sums, [&](const auto& table) {
    checksum<<<move.grid.blocks, move.grid.threads, 0, stream>>>(table);
  });
}

cudaError_t load_checksum() { return load(checksum<SmallTable>, checksum<LargeTable>); }

}  // namespace streamlap::cuda
