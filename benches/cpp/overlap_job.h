// The job of mode overlap on one device: n products, all results on the host, in several ways.
#pragma once

#include <optional>
#include <vector>

#include "buffers.h"
#include "gemm.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"

namespace bench {

class OverlapJob {
 public:
  struct Size {
    Dtype dtype;
    std::size_t side;
    std::size_t n;

    std::size_t result_bytes() const { return side * side * element_bytes(dtype); }
    // On the device all begin alike: cuBLAS chooses by alignment, and other kernels give other
    // bits.
    std::size_t stride() const { return (result_bytes() + 255) / 256 * 256; }
  };
  static constexpr std::size_t depth = 4;  // products on the device at once, where copies overlap

  // Engine and pool may serve several devices.
  OverlapJob(Device& device, Size size, streamlap::CopyEngine& engine, streamlap::PinnedPool& pool);

  // The ways. Each begins on an idle device and returns when its results can be read.
  void compute_alone();
  void copy_alone();  // of what compute_alone() left on the device
  void run_then_copy();
  void one_stream();
  void side_stream();
  void with_streamlap();

  // Where item i is after a way; of ours, until drop_results().
  const std::byte* plain_result(std::size_t i) const { return pinned_.data() + i * bytes_; }
  const std::byte* pool_result(std::size_t i) const { return blocks_[i]->data(); }
  void drop_results();

  // Wrong bytes in all results and on the device.
  void spoil();
  // Only what has results on the host: what copy_alone() reads must stay.
  void spoil_host();
  // Computes item i again, copies it plainly and compares.
  bool right(std::size_t i, const std::byte* result);
  // Whether item 0 is near what a sum of products in double precision gives.
  bool plausible_product();

 private:
  // No two items have the same result, so that a swapped or stale one shows.
  static float scale(std::size_t i);
  std::byte* product(std::size_t i) { return products_.data() + i * size_.stride(); }
  std::byte* slot(std::size_t i) { return product(i % depth); }
  std::byte* plain(std::size_t i) { return pinned_.data() + i * bytes_; }
  void multiply(std::size_t i, std::byte* out) { gemm_->enqueue(x_.data(), out, scale(i)); }

  Device& device_;
  Size size_;
  std::size_t bytes_;  // of one result
  streamlap::CopyEngine& engine_;
  streamlap::PinnedPool& pool_;
  StreamRef compute_;
  StreamRef side_;
  Buffer x_;
  Buffer products_;  // n of them; the overlapping ways use the first `depth` in turn
  Buffer expected_;
  Buffer pinned_;
  Buffer expected_host_;
  std::unique_ptr<Gemm> gemm_;
  std::vector<MarkPtr> computed_;
  std::vector<MarkPtr> copied_;
  std::vector<std::shared_ptr<streamlap::Transfer>> transfers_;
  std::vector<std::shared_ptr<streamlap::PinnedBlock>> blocks_;
  Settled settled_{device_};  // last, so that it dies before the buffers
};

}  // namespace bench
