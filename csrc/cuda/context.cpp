#include "cuda/context.h"

#include <array>
#include <atomic>
#include <mutex>
#include <sstream>

#include "base/process.h"

namespace streamlap::cuda {
namespace {

constexpr int max_devices = 64;

constexpr Site site_enter{"cuda.guard_makes_current"};
constexpr Site site_leave{"cuda.guard_puts_back"};
constexpr Site site_end{"cuda.guard_ends"};
constexpr Site site_mode{"cuda.guard_relaxes_capture"};
constexpr Site site_mode_back{"cuda.guard_puts_capture_mode_back"};

// There is no libcuda to link against where this is built: the entry points come at run time.
template <class Function>
Function entry_point(const char* symbol, unsigned version) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion(symbol, &pointer, version, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion", symbol);
  if (found != cudaDriverEntryPointSuccess || pointer == nullptr) {
    throw Error(ErrorKind::runtime, std::string("the CUDA driver has no ") + symbol);
  }
  return reinterpret_cast<Function>(pointer);
}

struct Driver {
  CUresult (*get_current)(CUcontext*) = entry_point<CUresult (*)(CUcontext*)>("cuCtxGetCurrent",
                                                                              4000);
  CUresult (*set_current)(CUcontext) = entry_point<CUresult (*)(CUcontext)>("cuCtxSetCurrent",
                                                                            4000);
  CUresult (*retain_primary)(CUcontext*, CUdevice) =
      entry_point<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain", 7000);
  CUresult (*primary_state)(CUdevice, unsigned*, int*) =
      entry_point<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState", 7000);
  CUresult (*current_device)(CUdevice*) = entry_point<CUresult (*)(CUdevice*)>("cuCtxGetDevice",
                                                                               2000);
};

const Driver& driver() {
  static const Driver* loaded = new Driver();  // lives to the end: guards may run in exit handlers
  return *loaded;
}

void check_driver(CUresult status, const char* operation) {
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorKind::runtime, std::string(operation) + " failed with CUDA driver error " +
                                        std::to_string(status));
  }
}

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::array<std::atomic<CUcontext>, max_devices> contexts{};
  if (device < 0 || device >= max_devices) {
    throw Error(ErrorKind::invalid_argument, "no CUDA device " + std::to_string(device));
  }
  auto& slot = contexts[static_cast<std::size_t>(device)];
  CUcontext context = slot.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  std::lock_guard lock(mutex);
  context = slot.load();
  if (context == nullptr) {
    check_driver(driver().retain_primary(&context, device), "cuDevicePrimaryCtxRetain");
    slot.store(context, std::memory_order_release);
  }
  return context;
}

// Errors after which every call of the process fails; the list is CUDA's documentation's.
bool destroys_context(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
      return true;
    default:
      return false;
  }
}

std::atomic<int> g_sticky{cudaSuccess};

thread_local int t_guarded = -1;  // the device of the innermost guard of this thread, or none

std::string describe(cudaError_t status) {
  std::ostringstream text;
  text << cudaGetErrorName(status) << " (" << static_cast<int>(status)
       << "): " << cudaGetErrorString(status);
  return text.str();
}

}  // namespace

bool sticky() noexcept { return g_sticky.load(std::memory_order_relaxed) != cudaSuccess; }

void throw_if_sticky() {
  if (!sticky()) return;
  throw Error(ErrorKind::sticky,
              "the CUDA context was lost by an earlier error, " +
                  describe(static_cast<cudaError_t>(g_sticky.load())) +
                  ". It was made by work issued before, not by this call; restart the process");
}

void throw_error(cudaError_t status, const char* operation, const std::string& detail) {
  cudaGetLastError();  // so that nobody else's next call is blamed for it
  if (destroys_context(status)) {
    int expected = cudaSuccess;
    g_sticky.compare_exchange_strong(expected, status);
  }
  throw_if_sticky();
  std::string what = std::string(operation) + (detail.empty() ? "" : " (" + detail + ")") +
                     " failed: " + describe(status);
  throw Error(status == cudaErrorMemoryAllocation ? ErrorKind::out_of_memory : ErrorKind::runtime,
              what);
}

DeviceGuard::DeviceGuard(int device) : outer_(t_guarded) {
  throw_if_sticky();
  if (outer_ == device && device >= 0) {
    nested_ = true;
    return;
  }
  CUcontext wanted = primary_context(device);
  check_driver(driver().get_current(&before_), "cuCtxGetCurrent");
  if (before_ != wanted) {
    if (!dropped(site_enter)) check_driver(driver().set_current(wanted), "cuCtxSetCurrent");
    changed_ = true;
  }
  if (!dropped(site_mode)) cudaThreadExchangeStreamCaptureMode(&mode_);
  t_guarded = device;
}

DeviceGuard::~DeviceGuard() {
  if (nested_) return;
  if (!dropped(site_end)) t_guarded = outer_;
  if (!dropped(site_mode) && !dropped(site_mode_back)) cudaThreadExchangeStreamCaptureMode(&mode_);
  if (changed_ && !dropped(site_leave)) driver().set_current(before_);
}

bool primary_active(int device) noexcept {
  unsigned flags = 0;
  int active = 0;
  return driver().primary_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

int any_active_device() {
  CUcontext current = nullptr;
  if (driver().get_current(&current) == CUDA_SUCCESS && current != nullptr) {
    CUdevice device = 0;
    if (driver().current_device(&device) == CUDA_SUCCESS) return device;
  }
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int device = 0; device < count; ++device) {
    if (primary_active(device)) return device;
  }
  return 0;
}

}  // namespace streamlap::cuda
