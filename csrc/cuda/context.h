// Errors and contexts of the CUDA driver: checked calls, the sticky-error latch, and a guard that
// makes a device current without ever creating a context on any other.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "runtime/runtime.h"

namespace streamlap::cuda {

// Throws for anything but success. Context-destroying errors are latched: every later call reports
// the first of them, whatever it was doing.
[[noreturn]] void throw_error(cudaError_t status, const char* operation, const std::string& detail);
inline void check(cudaError_t status, const char* operation, const char* detail = "") {
  if (status != cudaSuccess) throw_error(status, operation, detail);
}
// `detail()` makes the words: nobody needs them where all is well.
template <class Detail, class = std::enable_if_t<std::is_invocable_v<Detail>>>
void check(cudaError_t status, const char* operation, Detail&& detail) {
  if (status != cudaSuccess) throw_error(status, operation, detail());
}
void throw_if_sticky();
bool sticky() noexcept;

// Makes `device` current in this thread and puts back exactly what was current, no context
// included. The primary context is retained, so it exists from the first use of the device to the
// end of the process. Calls made inside do not break a graph capture of some other thread.
// A guard inside another one of the same device does nothing.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  CUcontext before_ = nullptr;
  int outer_;  // the device of the guard around this one; -1: none
  bool nested_ = false;
  bool changed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Whether the device has its primary context; asking makes none.
bool primary_active(int device) noexcept;

// For work that belongs to no device in particular: the current one if there is one, else the first
// that already has a context, else 0.
int any_active_device();

}  // namespace streamlap::cuda
