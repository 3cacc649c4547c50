// The product by cuBLAS. It reads matrices by columns, we by rows; x * x is the same either way,
// since the transpose of x * x is the product of the transposes in the other order.
#include <cublas_v2.h>

#include "cuda_check.h"
#include "gemm.h"

namespace bench {
namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw streamlap::Error(status == CUBLAS_STATUS_ALLOC_FAILED ? streamlap::ErrorKind::out_of_memory
                                                              : streamlap::ErrorKind::runtime,
                         std::string(call) + " failed: " + cublasGetStatusString(status));
}

class CublasGemm final : public Gemm {
 public:
  CublasGemm(StreamRef stream, Dtype dtype, std::size_t size)
      : size_(static_cast<int>(size)),
        type_(dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F),
        compute_(dtype == Dtype::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F) {
    try {
      check_cublas(cublasCreate(&handle_), "cublasCreate");
      // The stream first: setting it takes the workspace away.
      check_cublas(cublasSetStream(handle_, reinterpret_cast<cudaStream_t>(stream.handle)),
                   "cublasSetStream");
      check(cudaMalloc(&workspace_, workspace_bytes), "cudaMalloc");
      check_cublas(cublasSetWorkspace(handle_, workspace_, workspace_bytes), "cublasSetWorkspace");
    } catch (...) {
      release();
      throw;
    }
  }
  ~CublasGemm() override { release(); }

  void enqueue(const void* x, void* out, float scale) override {
    const float zero = 0;
    check_cublas(cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_N, size_, size_, size_, &scale, x,
                              type_, size_, x, type_, size_, &zero, out, type_, size_, compute_,
                              CUBLAS_GEMM_DEFAULT),
                 "cublasGemmEx");
  }

 private:
  // What cuBLAS recommends for Hopper.
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

  void release() noexcept {
    if (handle_ != nullptr) cublasDestroy(handle_);
    if (workspace_ != nullptr) cudaFree(workspace_);
    cudaGetLastError();
  }

  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  int size_;
  cudaDataType_t type_;
  cublasComputeType_t compute_;
};

}  // namespace

std::unique_ptr<Gemm> make_cublas_gemm(StreamRef stream, Dtype dtype, std::size_t size) {
  return std::make_unique<CublasGemm>(stream, dtype, size);
}

std::string cublas_version() {
  int major = 0;
  int minor = 0;
  int patch = 0;
  if (cublasGetProperty(MAJOR_VERSION, &major) != CUBLAS_STATUS_SUCCESS ||
      cublasGetProperty(MINOR_VERSION, &minor) != CUBLAS_STATUS_SUCCESS ||
      cublasGetProperty(PATCH_LEVEL, &patch) != CUBLAS_STATUS_SUCCESS) {
    return "";
  }
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

}  // namespace bench
