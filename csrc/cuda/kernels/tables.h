// What a kernel is told of a move: the pieces, in the kernel's own arguments. So no memory on the
// device has to be found, filled and kept for it, and nothing of one launch can be another's.
//
// Arguments have 4 KiB, or 32,764 bytes on every GPU that this library is built for (CUDA 12.1 and
// compute capability 7.0 on). A move with more pieces than the larger table holds is several
// launches on its stream.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/blocks.h"
#include "moves/move.h"

namespace streamlap::cuda {

template <unsigned capacity_>
struct Table {
  static constexpr unsigned capacity = capacity_;

  std::byte* base;
  std::uint64_t* counts;  // of the device's address; null: not counted
  moves::Change change;
  std::uint32_t pieces;
  std::uint32_t tiles;
  bool gathers;
  bool adds;  // to the counts of the launch before
  moves::Piece piece[capacity_];
};
using SmallTable = Table<125>;
using LargeTable = Table<1020>;
static_assert(sizeof(SmallTable) <= 4096 && sizeof(LargeTable) <= 32764);

// Calls body(piece, tile, lane) for each tile of the calling warp. A block's warps take tiles that
// follow each other.
template <class TableType, class Body>
__device__ __forceinline__ void each_tile(const TableType& table, Body&& body) {
  const unsigned warps = blockDim.x / warp_lanes;
  const moves::Lane lane{threadIdx.x % warp_lanes, warp_lanes};
  std::uint32_t piece = 0;
  for (std::uint32_t tile = blockIdx.x * warps + threadIdx.x / warp_lanes; tile < table.tiles;
       tile += gridDim.x * warps) {
    piece = moves::piece_of(table.piece, table.pieces, tile, piece);
    body(table.piece[piece], tile, lane);
  }
}

// As many of a grid's blocks as have a tile.
template <class TableType>
unsigned blocks_with_tiles(const moves::Grid& grid, const TableType& table) {
  const unsigned warps = grid.threads / warp_lanes;
  const unsigned used = table.tiles / warps + (table.tiles % warps != 0);
  return used < grid.blocks ? used : grid.blocks;
}

// One launch for as many pieces as a table of this size holds, from `first` on; the next piece.
template <class TableType, class Launch>
std::size_t launch_from(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                        std::size_t first, Launch&& launch) {
  TableType table;
  const std::size_t left = move.pieces.size() - first;
  const std::size_t here = left < TableType::capacity ? left : TableType::capacity;
  const std::uint32_t tile = move.pieces[first].first_tile;
  for (std::size_t i = 0; i < here; ++i) {
    table.piece[i] = move.pieces[first + i];
    table.piece[i].first_tile -= tile;
  }
  const std::size_t next = first + here;
  table.base = base;
  table.counts = counts;
  table.change = move.change;
  table.pieces = static_cast<std::uint32_t>(here);
  table.tiles = (next < move.pieces.size() ? move.pieces[next].first_tile : move.tiles) - tile;
  table.gathers = move.way == moves::Way::gather;
  table.adds = first > 0;
  launch(table);
  return next;
}

// Calls launch(table) for all pieces of a move. The blocks of a launch that counts all run: each
// writes its number.
template <class Launch>
cudaError_t launch_all(const moves::Move& move, std::byte* base, std::uint64_t* counts,
                       Launch&& launch) {
  for (std::size_t at = 0; at < move.pieces.size();) {
    at = move.pieces.size() - at <= SmallTable::capacity
             ? launch_from<SmallTable>(move, base, counts, at, launch)
             : launch_from<LargeTable>(move, base, counts, at, launch);
    if (cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace streamlap::cuda
