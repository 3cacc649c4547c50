// The plain calls of a GPU: the CUDA runtime and nothing of ours, so that the library is compared
// with what it is built on.
#include "cuda_check.h"
#include "device.h"

namespace bench {
namespace {

cudaStream_t native(StreamRef stream) { return reinterpret_cast<cudaStream_t>(stream.handle); }

class CudaMark final : public Mark {
 public:
  explicit CudaMark(bool timed) {
    check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
  }
  ~CudaMark() override { cudaEventDestroy(event); }

  cudaEvent_t event = nullptr;
};

cudaEvent_t event_of(const Mark& mark) { return static_cast<const CudaMark&>(mark).event; }

class CudaDevice final : public Device {
 public:
  using Device::Device;

  void use_in_this_thread() override { check(cudaSetDevice(index()), "cudaSetDevice"); }

  StreamRef stream() override {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return {reinterpret_cast<std::uintptr_t>(made), index(), StreamKind::compute};
  }

  MarkPtr mark(bool timed) override { return std::make_unique<CudaMark>(timed); }

  void record(Mark& mark, StreamRef stream) override {
    check(cudaEventRecord(event_of(mark), native(stream)), "cudaEventRecord");
  }

  void wait(StreamRef stream, const Mark& mark) override {
    check(cudaStreamWaitEvent(native(stream), event_of(mark), 0), "cudaStreamWaitEvent");
  }

  double seconds(const Mark& begin, const Mark& end) override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)),
          "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void copy(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
  }

  bool copy_batch(void** dst, const void** src, std::size_t* bytes, std::size_t count,
                  StreamRef stream) override {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t status =
        cudaMemcpyBatchAsync(dst, src, bytes, count, &attributes, &first, 1, native(stream));
#else
    std::size_t failed = 0;
    const cudaError_t status =
        cudaMemcpyBatchAsync(dst, const_cast<void**>(src), bytes, count, &attributes, &first, 1,
                             &failed, native(stream));
#endif
    if (status == cudaErrorCallRequiresNewerDriver || status == cudaErrorNotSupported) {
      cudaGetLastError();
      return false;
    }
    check(status, "cudaMemcpyBatchAsync");
    return true;
  }

  void sync(StreamRef stream) override {
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
  }

  void fill(void* memory, unsigned char value, std::size_t bytes) override {
    check(cudaMemset(memory, value, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  std::size_t room() override {
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }

  void register_pages(void* pages, std::size_t bytes) override {
    check(cudaHostRegister(pages, bytes, cudaHostRegisterPortable), "cudaHostRegister");
  }

  void unregister_pages(void* pages) noexcept override {
    cudaHostUnregister(pages);
    cudaGetLastError();
  }

  bool page_locked(const void* memory) override {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeHost;
  }
};

}  // namespace

DevicePtr make_cuda_device(std::shared_ptr<Runtime> runtime, int index) {
  return std::make_unique<CudaDevice>(std::move(runtime), index);
}

std::vector<Gpu> gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<Gpu> found;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    found.push_back({index, properties.name, properties.totalGlobalMem});
  }
  return found;
}

}  // namespace bench
