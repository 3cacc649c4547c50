#include "gemm.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace bench {
namespace {

float element(const std::byte* matrix, std::size_t index, Dtype dtype) {
  std::uint32_t bits = 0;
  if (dtype == Dtype::bf16) {
    std::uint16_t half = 0;
    std::memcpy(&half, matrix + index * 2, 2);
    bits = static_cast<std::uint32_t>(half) << 16;
  } else {
    std::memcpy(&bits, matrix + index * 4, 4);
  }
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// How far rounding may lead: of the inputs for TF32, of the result for bf16.
double tolerance(Dtype dtype) {
  if (dtype == Dtype::fp32) return 1e-4;
  return dtype == Dtype::tf32 ? 5e-3 : 8e-3;
}

}  // namespace

const char* dtype_name(Dtype dtype) {
  if (dtype == Dtype::fp32) return "fp32";
  return dtype == Dtype::tf32 ? "tf32" : "bf16";
}

std::vector<std::byte> random_matrix(Dtype dtype, std::size_t size) {
  const std::size_t each = element_bytes(dtype);
  std::vector<std::byte> bytes(size * size * each);
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < size * size; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float value = static_cast<float>(state >> 40) * 0x1p-24F;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (dtype == Dtype::bf16) {
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + i * each, &half, each);
    } else {
      std::memcpy(bytes.data() + i * each, &bits, each);
    }
  }
  return bytes;
}

bool plausible(const std::byte* out, const std::byte* x, float scale, Dtype dtype,
               std::size_t size) {
  for (std::size_t sample = 0; sample < 16; ++sample) {
    const std::size_t row = (sample * 7919 + sample / 4) % size;
    const std::size_t column = (sample * 104729 + 1) % size;
    double sum = 0;
    for (std::size_t k = 0; k < size; ++k) {
      sum += static_cast<double>(element(x, row * size + k, dtype)) *
             static_cast<double>(element(x, k * size + column, dtype));
    }
    sum *= static_cast<double>(scale);
    const double found = static_cast<double>(element(out, row * size + column, dtype));
    // Written so that a NaN fails.
    if (!(std::abs(found - sum) <= tolerance(dtype) * std::abs(sum) + 1e-6)) return false;
  }
  return true;
}

std::unique_ptr<Gemm> make_gemm(Device& device, StreamRef stream, Dtype dtype, std::size_t size) {
  if (!device.gpu()) return make_host_gemm(device, stream, size);
#ifdef STREAMLAP_BENCH_CUBLAS
  return make_cublas_gemm(stream, dtype, size);
#else
  static_cast<void>(dtype);
  require_products(device.gpu());
  return nullptr;
#endif
}

#ifdef STREAMLAP_BENCH_CUBLAS
void require_products(bool) {}
#else
void require_products(bool on_gpu) {
  if (!on_gpu) return;
  throw streamlap::Error(streamlap::ErrorKind::runtime,
                         "products on a GPU need cuBLAS, which this build has not got: install the "
                         "CUDA toolkit's cuBLAS or pip's nvidia-cublas, or set "
                         "STREAMLAP_CUBLAS_ROOT, and build again (or use --device cpu)");
}
#endif

#ifndef STREAMLAP_BENCH_CUBLAS
std::string cublas_version() { return ""; }
#endif

}  // namespace bench
