// A gather or a scatter that casts its elements, scales them and counts the non-finite ones, in one
// pass over them.
#include "cuda/kernels/moves.h"
#include "cuda/kernels/tables.h"

namespace streamlap::cuda {
namespace {

template <class From, class To, class TableType>
__global__ void __launch_bounds__(moves::most_threads)
    cast(const __grid_constant__ TableType table) {
  std::uint64_t found = 0;
  each_tile(table, [&](const moves::Piece& piece, std::uint32_t tile, moves::Lane lane) {
    found +=
        moves::change_tile<From, To>(piece, tile, table.base, table.gathers, table.change, lane);
  });
  if (table.change.counts) add_up(found, table.counts, table.adds);
}

}  // namespace

cudaError_t launch_cast(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                        cudaStream_t stream) {
  return moves::with_types(move, [&]<class From, class To>() {
    return launch_all(move, base, counts, [&](const auto& table) {
      using TableType = std::remove_cvref_t<decltype(table)>;
      const unsigned blocks =
          move.change.counts ? move.grid.blocks : blocks_with_tiles(move.grid, table);
      cast<From, To, TableType><<<blocks, move.grid.threads, 0, stream>>>(table);
    });
  });
}

cudaError_t load_cast() {
  cudaError_t status = cudaSuccess;
  moves::Move move;
  for (moves::Element from : moves::changeable) {
    for (moves::Element to : moves::changeable) {
      move.from = from;
      move.to = to;
      moves::with_types(move, [&]<class From, class To>() {
        if (status == cudaSuccess) {
          status = load(cast<From, To, SmallTable>, cast<From, To, LargeTable>);
        }
      });
    }
  }
  return status;
}

}  // namespace streamlap::cuda
