// One tensor whose elements lie apart into one range, or out of it; with a cast, a scale and a
// count where they are asked for. Transposes go through shared memory.
#include "cuda/kernels/blocks.h"
#include "cuda/kernels/moves.h"

namespace streamlap::cuda {
namespace {

struct StridedMove {
  moves::Strides strides;
  moves::Change change;
  std::uint64_t* counts;
  bool gathers;
};

template <class From, class To>
__global__ void __launch_bounds__(moves::most_threads)
    strided(const __grid_constant__ StridedMove move) {
  __shared__ moves::Stage<typename To::Bits> stage;
  std::uint64_t found = 0;
  const moves::Lane lane = this_lane();
  for (std::uint64_t tile = blockIdx.x; tile < move.strides.tiles; tile += gridDim.x) {
    if (move.strides.rows == 0) {
      found += moves::move_elements<From, To>(move.strides, tile, move.gathers, move.change, lane);
    } else {
      const moves::Panel part = moves::panel_of(move.strides, tile, stage.columns);
      found +=
          moves::fill_stage<From, To>(move.strides, part, move.gathers, move.change, stage, lane);
      __syncthreads();
      moves::empty_stage<To>(move.strides, part, move.gathers, stage, lane);
      __syncthreads();
    }
  }
  if (move.change.counts) add_up(found, move.counts, false);
}

}  // namespace

cudaError_t launch_strided(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                           cudaStream_t stream) {
  const StridedMove given{moves::strides_of(move, base), move.change, counts,
                          move.way == moves::Way::gather};
  const bool fewer = !move.change.counts && given.strides.tiles < move.grid.blocks;
  const unsigned blocks = fewer ? static_cast<unsigned>(given.strides.tiles) : move.grid.blocks;
  moves::with_strided_types(move, [&]<class From, class To>() {
    strided<From, To><<<blocks, move.grid.threads, 0, stream>>>(given);
  });
  return cudaGetLastError();
}

cudaError_t load_strided() {
  cudaError_t status = cudaSuccess;
  moves::Move move;
  move.layout.emplace();
  const auto one = [&] {
    moves::with_strided_types(move, [&]<class From, class To>() {
      if (status == cudaSuccess) status = load(strided<From, To>);
    });
  };
  for (std::uint32_t bytes : {1, 2, 4, 8, 16}) {
    move.layout->element_bytes = bytes;
    one();
  }
  for (moves::Element from : moves::changeable) {
    for (moves::Element to : moves::changeable) {
      move.from = from;
      move.to = to;
      one();
    }
  }
  return status;
}

}  // namespace streamlap::cuda
