// One device by plain calls: what a careful user writes without the library. Everything that the
// library is compared with is measured through this, on a GPU by the CUDA runtime alone.
//
// The host's own is written with the host runtime, since there is nothing plainer with streams.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "report.h"
#include "runtime/runtime.h"

namespace bench {

using streamlap::Runtime;
using streamlap::StreamKind;
using streamlap::StreamRef;

// A point in a stream.
class Mark {
 public:
  Mark() = default;
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  virtual ~Mark() = default;
};
using MarkPtr = std::unique_ptr<Mark>;

class Device {
 public:
  Device(std::shared_ptr<Runtime> runtime, int index)
      : runtime_(std::move(runtime)), index_(index) {}
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  int index() const noexcept { return index_; }
  const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }
  bool gpu() const noexcept { return runtime_->uses_device_memory(); }
  std::string label() const { return (gpu() ? "cuda:" : "cpu:") + std::to_string(index_); }

  // Each thread calls it before any other function here.
  virtual void use_in_this_thread() = 0;
  virtual StreamRef stream() = 0;
  virtual MarkPtr mark(bool timed) = 0;
  virtual void record(Mark& mark, StreamRef stream) = 0;
  // The stream may be another device's.
  virtual void wait(StreamRef stream, const Mark& mark) = 0;
  virtual double seconds(const Mark& begin, const Mark& end) = 0;
  virtual void copy(void* dst, const void* src, std::size_t bytes, StreamRef stream) = 0;
  // False where there is no such call.
  virtual bool copy_batch(void** dst, const void** src, std::size_t* bytes, std::size_t count,
                          StreamRef stream) = 0;
  virtual void sync(StreamRef stream) = 0;
  virtual void fill(void* device_memory, unsigned char value, std::size_t bytes) = 0;
  virtual std::size_t room() = 0;  // bytes of device memory that can be had
  virtual void register_pages(void* pages, std::size_t bytes) = 0;
  virtual void unregister_pages(void* pages) noexcept = 0;
  // Whether copies to it need no staging.
  virtual bool page_locked(const void* memory) = 0;

  void copy_now(void* dst, const void* src, std::size_t bytes, StreamRef stream) {
    copy(dst, src, bytes, stream);
    sync(stream);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  int index_;
};
using DevicePtr = std::unique_ptr<Device>;

DevicePtr make_host_device(std::shared_ptr<Runtime> runtime, int index);
DevicePtr make_cuda_device(std::shared_ptr<Runtime> runtime, int index);  // only in a CUDA build
std::vector<Gpu> gpus();                                                  // the same

// Waits for the device at the end of a scope, so that no buffer dies under a copy when something
// throws. Declare it after the buffers.
class Settled {
 public:
  explicit Settled(Device& device) : device_(device) {}
  Settled(const Settled&) = delete;
  Settled& operator=(const Settled&) = delete;
  ~Settled() {
    try {
      device_.runtime()->device_sync(device_.index());
    } catch (...) {
      // The error that led here is reported; this one would hide it.
    }
  }

 private:
  Device& device_;
};

}  // namespace bench
