// The short way to the host: one range of bytes into new page-locked memory, in one call that takes
// the memory, orders the copy and starts it, and lets go of the interpreter's lock once.
#include "base/process.h"
#include "bindings/py_block.h"
#include "bindings/py_transfer.h"
#include "bindings/types.h"

namespace streamlap::bindings {
namespace {

// The copy starts after what `stream`, a stream of `device`, has been given. The transfer and the
// block that it fills, which holds exactly `bytes`.
py::tuple copy_out(const std::shared_ptr<CopyEngine>& engine, PinnedPool& pool, int device,
                   std::uintptr_t stream, std::uintptr_t src, std::size_t bytes,
                   std::size_t element_bytes, std::size_t chunk_bytes, bool timed,
                   const py::object& keep_source) {
  const StreamRef producer{stream, device, StreamKind::compute};
  TransferRequest request;
  request.device = device;
  request.direction = Direction::to_host;
  request.items.push_back(
      {nullptr, reinterpret_cast<const void*>(src), bytes, element_bytes, nullptr});
  request.after.push_back(producer);
  request.policy.chunk_bytes = chunk_bytes;
  request.timed = timed;
  request.keep_source = share(keep_source);
  std::shared_ptr<PinnedBlock> block;
  std::shared_ptr<Transfer> transfer;
  const auto start = [&] {
    request.items.front().dst = block->data();
    request.keep_destination = block;
    try {
      transfer = engine->submit(std::move(request));
    } catch (...) {
      Watch::instance().look_after(engine);  // it may hold what was issued before it failed
      throw;
    }
  };
  {
    GilRelease released;
    const std::shared_ptr<void> held = engine->runtime()->hold_device(device);
    if (engine->runtime()->stream_capturing(producer)) {
      throw Error(ErrorKind::capture,
                  "to_cpu() inside CUDA graph capture: copies to the host cannot be part of a "
                  "captured graph. Call it before or after the capture");
    }
    try {
      block = pool.try_allocate(bytes);
    } catch (const PoolExhausted&) {
      // What is on its way home is waited for below.
    }
    if (block) start();
  }
  if (!transfer) {
    block = allocate_block(pool, bytes);
    GilRelease released;
    start();
  }
  return py::make_tuple(std::make_unique<PyTransfer>(engine, std::move(transfer)),
                        std::make_unique<PyBlock>(std::move(block)));
}

}  // namespace

void bind_copy_out(py::module_& module) {
  // Without names: their look-up would be a part of what the call costs.
  module.def("copy_out", &copy_out);
}

}  // namespace streamlap::bindings
