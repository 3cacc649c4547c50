// The product on a worker thread: plain loops, blocked so that rows of x stay in the cache.
#include <algorithm>

#include "gemm.h"

namespace bench {
namespace {

void multiply(const float* x, float* out, float scale, std::size_t size) {
  constexpr std::size_t block = 64;
  std::fill(out, out + size * size, 0.0F);
  for (std::size_t first = 0; first < size; first += block) {
    const std::size_t last = std::min(first + block, size);
    for (std::size_t i = 0; i < size; ++i) {
      float* row = out + i * size;
      for (std::size_t k = first; k < last; ++k) {
        const float factor = scale * x[i * size + k];
        const float* other = x + k * size;
        for (std::size_t j = 0; j < size; ++j) row[j] += factor * other[j];
      }
    }
  }
}

class HostGemm final : public Gemm {
 public:
  HostGemm(std::shared_ptr<Runtime> runtime, StreamRef stream, std::size_t size)
      : runtime_(std::move(runtime)), stream_(stream), size_(size) {}

  void enqueue(const void* x, void* out, float scale) override {
    runtime_->launch(
        [=, size = size_] {
          multiply(static_cast<const float*>(x), static_cast<float*>(out), scale, size);
        },
        stream_);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  StreamRef stream_;
  std::size_t size_;
};

}  // namespace

std::unique_ptr<Gemm> make_host_gemm(Device& device, StreamRef stream, std::size_t size) {
  return std::make_unique<HostGemm>(device.runtime(), stream, size);
}

}  // namespace bench
