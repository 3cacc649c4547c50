// The product that copies hide behind: scale * x * x, of square matrices.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace bench {

enum class Dtype { fp32, tf32, bf16 };

const char* dtype_name(Dtype dtype);
inline std::size_t element_bytes(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

class Gemm {
 public:
  Gemm() = default;
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  virtual ~Gemm() = default;
  // Enqueues out = scale * x * x on the stream that it was made for. Same arguments, same bits.
  virtual void enqueue(const void* x, void* out, float scale) = 0;
};

// Throws Error when there is no way to make products: on a GPU, in a build without cuBLAS.
void require_products(bool on_gpu);
std::unique_ptr<Gemm> make_gemm(Device& device, StreamRef stream, Dtype dtype, std::size_t size);
std::unique_ptr<Gemm> make_host_gemm(Device& device, StreamRef stream, std::size_t size);
std::unique_ptr<Gemm> make_cublas_gemm(StreamRef stream, Dtype dtype, std::size_t size);
std::string cublas_version();  // empty without cuBLAS

// A matrix with elements in [0, 1), as the bytes of `dtype`.
std::vector<std::byte> random_matrix(Dtype dtype, std::size_t size);
// Whether a few elements of out are what a plain sum of products gives, as far as dtype is exact.
bool plausible(const std::byte* out, const std::byte* x, float scale, Dtype dtype,
               std::size_t size);

}  // namespace bench
