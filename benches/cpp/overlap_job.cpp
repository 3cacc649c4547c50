#include "overlap_job.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "pattern.h"

namespace bench {
namespace {

using streamlap::CopyEngine;
using streamlap::PinnedBlock;
using streamlap::PinnedPool;
using streamlap::TransferRequest;

// Waits without the pauses that a long wait of the library's takes: a slice ends before them.
constexpr std::chrono::milliseconds slice{1};

std::shared_ptr<PinnedBlock> take(PinnedPool& pool, std::size_t bytes) {
  for (;;) {
    if (std::shared_ptr<PinnedBlock> block = pool.try_allocate(bytes)) return block;
    std::this_thread::yield();  // another device's thread is growing the pool
  }
}

}  // namespace

OverlapJob::OverlapJob(Device& device, Size size, CopyEngine& engine, PinnedPool& pool)
    : device_(device),
      size_(size),
      bytes_(size.result_bytes()),
      engine_(engine),
      pool_(pool),
      compute_(device.stream()),
      side_(device.stream()),
      x_(device, Memory::device, bytes_),
      products_(device, Memory::device, size.stride() * std::max(size.n, depth)),
      expected_(device, Memory::device, bytes_),
      pinned_(device, Memory::pinned, bytes_ * size.n),
      expected_host_(device, Memory::pinned, bytes_),
      gemm_(make_gemm(device, compute_, size.dtype, size.side)) {
  for (std::size_t i = 0; i < size.n; ++i) {
    computed_.push_back(device.mark(false));
    copied_.push_back(device.mark(false));
  }
  transfers_.reserve(size.n);
  blocks_.reserve(size.n);
  const std::vector<std::byte> x = random_matrix(size.dtype, size.side);
  device.copy_now(x_.data(), x.data(), bytes_, compute_);
  poison(pinned_.data(), pinned_.bytes());
}

// Steps of at least 1/128, so that the results differ in bf16 too; distinct up to 2048.
float OverlapJob::scale(std::size_t i) {
  const float step = 1.0F + static_cast<float>(i % 64) / 64.0F;
  const float power = static_cast<float>(1U << (i / 64 % 16));
  return i / 1024 % 2 == 0 ? step * power : -step * power;
}

void OverlapJob::compute_alone() {
  for (std::size_t i = 0; i < size_.n; ++i) multiply(i, product(i));
  device_.sync(compute_);
}

void OverlapJob::copy_alone() {
  for (std::size_t i = 0; i < size_.n; ++i) device_.copy(plain(i), product(i), bytes_, side_);
  device_.sync(side_);
}

void OverlapJob::run_then_copy() {
  for (std::size_t i = 0; i < size_.n; ++i) multiply(i, product(i));
  device_.sync(compute_);
  for (std::size_t i = 0; i < size_.n; ++i) device_.copy_now(plain(i), product(i), bytes_, side_);
}

void OverlapJob::one_stream() {
  for (std::size_t i = 0; i < size_.n; ++i) {
    multiply(i, slot(i));
    device_.copy(plain(i), slot(i), bytes_, compute_);
  }
  device_.sync(compute_);
}

void OverlapJob::side_stream() {
  for (std::size_t i = 0; i < size_.n; ++i) {
    if (i >= depth) device_.wait(compute_, *copied_[i - depth]);
    multiply(i, slot(i));
    device_.record(*computed_[i], compute_);
    device_.wait(side_, *computed_[i]);
    device_.copy(plain(i), slot(i), bytes_, side_);
    device_.record(*copied_[i], side_);
  }
  device_.sync(side_);
}

void OverlapJob::with_streamlap() {
  constexpr std::size_t whole = std::numeric_limits<std::size_t>::max() / 4;
  for (std::size_t i = 0; i < size_.n; ++i) {
    if (i >= depth) transfers_[i - depth]->stream_wait(compute_);
    multiply(i, slot(i));
    // After the product: what this costs is hidden behind it.
    blocks_.push_back(take(pool_, bytes_));
    TransferRequest request;
    request.device = device_.index();
    request.items.push_back(
        {blocks_.back()->data(), slot(i), bytes_, element_bytes(size_.dtype), {}});
    request.after.push_back(compute_);
    request.policy = {whole, whole};
    request.timed = false;
    request.keep_destination = blocks_.back();
    transfers_.push_back(engine_.submit(std::move(request)));
  }
  while (!transfers_.back()->sync_for(slice)) {
  }
}

void OverlapJob::drop_results() {
  transfers_.clear();
  blocks_.clear();
}

void OverlapJob::spoil() {
  spoil_host();
  device_.fill(products_.data(), 0xA5, products_.bytes());
}

void OverlapJob::spoil_host() {
  drop_results();
  poison(pinned_.data(), pinned_.bytes());
  // The pool's free blocks are those that the next run gets.
  std::vector<std::shared_ptr<PinnedBlock>> all;
  for (std::size_t i = 0; i < size_.n; ++i) {
    all.push_back(take(pool_, bytes_));
    poison(all.back()->data(), bytes_);
  }
}

bool OverlapJob::right(std::size_t i, const std::byte* result) {
  multiply(i, expected_.data());
  device_.copy_now(expected_host_.data(), expected_.data(), bytes_, compute_);
  return same_bytes(result, expected_host_.data(), bytes_);
}

bool OverlapJob::plausible_product() {
  multiply(0, expected_.data());
  device_.copy_now(expected_host_.data(), expected_.data(), bytes_, compute_);
  const std::vector<std::byte> x = random_matrix(size_.dtype, size_.side);
  return plausible(expected_host_.data(), x.data(), scale(0), size_.dtype, size_.side);
}

}  // namespace bench
