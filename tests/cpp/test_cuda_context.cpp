// The caller's CUDA context is as it was after every call, and no device gets one unasked. A
// program of its own: what is counted is every context of the process.
#include "lab.h"

#ifndef STREAMLAP_WITH_CUDA

TEST(cuda_context_is_left_alone) { SKIP(streamlap::probe_cuda().reason); }

#else

#include <cuda.h>
#include <cuda_runtime.h>

#include <thread>

using namespace streamlap;
using namespace streamlap::testing;

namespace {

// This machine may have no libcuda to link against.
template <class Function>
Function driver(const char* symbol) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found;
  REQUIRE(cudaGetDriverEntryPointByVersion(symbol, &pointer, 12000, cudaEnableDefault, &found) ==
          cudaSuccess);
  REQUIRE(found == cudaDriverEntryPointSuccess);
  return reinterpret_cast<Function>(pointer);
}

CUcontext current() {
  CUcontext context = nullptr;
  REQUIRE(driver<CUresult (*)(CUcontext*)>("cuCtxGetCurrent")(&context) == CUDA_SUCCESS);
  return context;
}

void make_current(CUcontext context) {
  REQUIRE(driver<CUresult (*)(CUcontext)>("cuCtxSetCurrent")(context) == CUDA_SUCCESS);
}

bool has_context(int device) {
  unsigned flags = 0;
  int active = 0;
  auto state = driver<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState");
  REQUIRE(state(device, &flags, &active) == CUDA_SUCCESS);
  return active != 0;
}

int devices_with_context() {
  int count = 0;
  for (int device = 0; device < probe_cuda().devices; ++device) count += has_context(device);
  return count;
}

// Every call of the seam, on `device`; `check_after` runs after each.
void use_everything(Runtime& runtime, int device, const std::function<void(const char*)>& after) {
  constexpr std::size_t bytes = 4096;
  void* pinned = runtime.alloc_pinned(bytes);
  after("alloc_pinned");
  void* memory = runtime.alloc_device(device, bytes);
  after("alloc_device");
  StreamRef stream = runtime.stream_create(device, StreamKind::copy, true);
  after("stream_create");
  StreamRef host = runtime.stream_create(device, StreamKind::host);
  after("stream_create(host)");
  runtime.stream_capturing(stream);
  after("stream_capturing");
  runtime.copy_async(memory, pinned, bytes, stream);
  after("copy_async");
  EventPtr begin = runtime.event_create(device, true);
  EventPtr end = runtime.event_create(device, true);
  runtime.event_record(*begin, stream, here);
  after("event_record");
  auto gate = runtime.gate(stream);
  after("gate");
  runtime.event_record(*end, stream, here);
  runtime.stream_wait(host, *end, here);
  after("stream_wait(host)");
  runtime.launch([] {}, host);
  after("launch");
  runtime.stream_wait(stream, *begin, here);
  after("stream_wait");
  runtime.event_query(*end, here);
  after("event_query");
  runtime.event_sync_for(*end, 1ms, here);
  after("event_sync_for");
  runtime.stream_idle(stream);
  after("stream_idle");
  runtime.idle();
  after("idle");
  gate->open();
  runtime.stream_sync(stream, here);
  after("stream_sync");
  runtime.stream_sync(host, here);
  after("stream_sync(host)");
  runtime.event_elapsed(*begin, *end);
  after("event_elapsed");
  runtime.device_sync(device);
  after("device_sync");
  runtime.free_device(device, memory, bytes);
  after("free_device");
  runtime.free_pinned(pinned, bytes);
  after("free_pinned");
  CHECK_THROWS(runtime.alloc_device(device, std::size_t{1} << 60), Error);
  after("a failed alloc_device");
  CHECK_THROWS(runtime.launch([] {}, stream), Error);
  after("a refused launch");
}

void expect_current(CUcontext expected, const char* call) {
  if (current() != expected) {
    check::fail(__FILE__, __LINE__, std::string(call) + " changed the current context");
  }
}

// A context that is not the device's own, current in this thread while it lives.
struct OtherContext {
  OtherContext() {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    // As it was in CUDA 11.0; its parameters have changed since.
    REQUIRE(cudaGetDriverEntryPointByVersion("cuCtxCreate", &pointer, 11000, cudaEnableDefault,
                                             &found) == cudaSuccess);
    REQUIRE(found == cudaDriverEntryPointSuccess);
    auto create = reinterpret_cast<CUresult (*)(CUcontext*, unsigned, CUdevice)>(pointer);
    REQUIRE(create(&context, 0, 0) == CUDA_SUCCESS);
  }
  ~OtherContext() { driver<CUresult (*)(CUcontext)>("cuCtxDestroy")(context); }
  CUcontext context = nullptr;
};

CUcontext context_of(void* memory) {
  CUcontext context = nullptr;
  auto ask = driver<CUresult (*)(void*, CUpointer_attribute, CUdeviceptr)>("cuPointerGetAttribute");
  REQUIRE(ask(&context, CU_POINTER_ATTRIBUTE_CONTEXT, reinterpret_cast<CUdeviceptr>(memory)) ==
          CUDA_SUCCESS);
  return context;
}

CUcontext primary_context() {
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  return current();
}

}  // namespace

// First in this file: the tests after it create contexts.
TEST(cuda_no_context_on_devices_not_asked_for) {
  CudaProbe probe = probe_cuda();
  if (probe.devices == 0) SKIP(probe.reason);
  CHECK_EQ(devices_with_context(), 0);  // a probe makes none
  auto runtime = make_cuda_runtime();
  CHECK_EQ(devices_with_context(), 0);  // nor does a runtime
  const int last = probe.devices - 1;
  StreamRef stream = runtime->stream_create(last, StreamKind::copy);
  CHECK(has_context(last));
  for (int device = 0; device < probe.devices; ++device) {
    CHECK_EQ(runtime->device_active(device), device == last);
  }
  CHECK_EQ(devices_with_context(), 1);
  make_current(nullptr);
  use_everything(*runtime, last, [](const char* call) {
    expect_current(nullptr, call);
    CHECK_EQ(devices_with_context(), 1);
  });
  runtime->stream_sync(stream, here);
}

TEST(cuda_no_current_context_stays_none) {
  auto runtime = cuda_backend();
  std::thread([&] {
    make_current(nullptr);
    use_everything(*runtime, 0, [](const char* call) { expect_current(nullptr, call); });
  }).join();
}

TEST(cuda_the_current_device_stays_current) {
  auto runtime = cuda_backend();
  for (int mine = 0; mine < probe_cuda().devices; ++mine) {
    for (int theirs = 0; theirs < probe_cuda().devices; ++theirs) {
      REQUIRE(cudaSetDevice(mine) == cudaSuccess);
      CUcontext expected = current();
      use_everything(*runtime, theirs, [&](const char* call) { expect_current(expected, call); });
      int device = -1;
      CHECK(cudaGetDevice(&device) == cudaSuccess);
      CHECK_EQ(device, mine);
      CHECK(cudaGetLastError() == cudaSuccess);
    }
  }
}

TEST(cuda_memory_is_the_devices_own_whatever_is_current) {
  auto runtime = cuda_backend();
  const CUcontext primary = primary_context();
  OtherContext other;
  REQUIRE(current() == other.context);
  void* memory = runtime->alloc_device(0, 4096);
  CHECK(context_of(memory) == primary);
  expect_current(other.context, "alloc_device");
  runtime->free_device(0, memory, 4096);
}

TEST(cuda_a_device_that_was_held_is_held_no_more) {
  auto runtime = cuda_backend();
  const CUcontext primary = primary_context();
  OtherContext other;
  {
    const std::shared_ptr<void> held = runtime->hold_device(0);
    expect_current(primary, "hold_device");
    runtime->free_device(0, runtime->alloc_device(0, 4096), 4096);
    expect_current(primary, "a call while the device is held");
  }
  expect_current(other.context, "the end of hold_device");
  void* memory = runtime->alloc_device(0, 4096);
  CHECK(context_of(memory) == primary);
  runtime->free_device(0, memory, 4096);
}

TEST(cuda_a_capture_of_this_thread_survives_our_calls) {
  auto runtime = cuda_backend();
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  StreamRef stream = runtime->stream_create(0, StreamKind::copy, false);
  EventPtr event = runtime->event_create(0, false);
  runtime->event_record(*event, stream, here);
  CHECK(runtime->event_sync_for(*event, patience, here));
  cudaStream_t captured = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
  void* memory = nullptr;
  try {
    CHECK(runtime->event_query(*event, here));
    memory = runtime->alloc_device(0, 4096);
  } catch (const Error& error) {
    check::fail(__FILE__, __LINE__, error.what());
  }
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(captured);
  cudaGetLastError();
  if (memory != nullptr) runtime->free_device(0, memory, 4096);
}

TEST(cuda_the_capture_mode_stays_the_callers) {
  auto runtime = cuda_backend();
  for (cudaStreamCaptureMode mine : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                     cudaStreamCaptureModeRelaxed}) {
    cudaStreamCaptureMode mode = mine;
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    void* memory = runtime->alloc_device(0, 4096);
    runtime->free_device(0, memory, 4096);
    // Puts back what was there before, and tells what our calls left.
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    CHECK(mode == mine);
  }
}

#endif
