// The short ways to the host: one range of bytes, or one tensor, into new page-locked memory, in
// one call that takes the memory, orders the copy and starts it, and lets go of the interpreter's
// lock once.
#include "base/process.h"
#include "bindings/py_transfer.h"
#include "bindings/tensor_row.h"
#include "bindings/types.h"

namespace streamlap::bindings {
namespace {

struct Started {
  std::shared_ptr<Transfer> transfer;
  std::unique_ptr<PyBlock> block;
};

// The copy of `item`, which has no destination yet, starts after what `stream`, a stream of
// `device`, has been given. The block that it fills holds exactly its bytes.
Started start(const std::shared_ptr<CopyEngine>& engine, PinnedPool& pool, int device,
              std::uintptr_t stream, CopyItem item, std::size_t chunk_bytes, bool timed,
              const py::object& keep_source) {
  const StreamRef producer{stream, device, StreamKind::compute};
  TransferRequest request;
  request.device = device;
  request.direction = Direction::to_host;
  request.after.push_back(producer);
  request.policy.chunk_bytes = chunk_bytes;
  request.timed = timed;
  request.keep_source = share(keep_source);
  std::shared_ptr<PinnedBlock> block;
  std::shared_ptr<Transfer> transfer;
  const auto submit = [&] {
    item.dst = block->data();
    request.items.push_back(std::move(item));
    request.keep_destination = block;
    try {
      transfer = engine->submit(std::move(request));
    } catch (...) {
      Watch::instance().look_after(engine);  // it may hold what was issued before it failed
      throw;
    }
  };
  const std::size_t bytes = item.bytes;
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
    if (block) submit();
  }
  if (!transfer) {
    block = allocate_block(pool, bytes);
    GilRelease released;
    submit();
  }
  return {std::move(transfer), std::make_unique<PyBlock>(std::move(block))};
}

py::tuple copy_out(const std::shared_ptr<CopyEngine>& engine, PinnedPool& pool, int device,
                   std::uintptr_t stream, std::uintptr_t src, std::size_t bytes,
                   std::size_t element_bytes, std::size_t chunk_bytes, bool timed,
                   const py::object& keep_source) {
  CopyItem item;
  item.src = reinterpret_cast<const void*>(src);
  item.bytes = bytes;
  item.element_bytes = element_bytes;
  Started started =
      start(engine, pool, device, stream, std::move(item), chunk_bytes, timed, keep_source);
  return py::make_tuple(std::make_unique<PyTransfer>(engine, std::move(started.transfer)),
                        std::move(started.block));
}

// The transfer of a contiguous tensor of `device`, which holds its block until take_block(); null
// for any other. It is timed from `timed_bytes` on. `alias` is kept until the copy is done.
std::unique_ptr<PyTransfer> copy_tensor_out(const std::shared_ptr<CopyEngine>& engine,
                                            PinnedPool& pool, int device, std::uintptr_t stream,
                                            const py::object& alias, std::size_t chunk_bytes,
                                            std::size_t timed_bytes) {
  dlpack::Tensor tensor;
  if (!asked(alias.ptr(), tensor)) return nullptr;
  const dlpack::Device wanted = engine->runtime()->uses_device_memory()
                                    ? dlpack::Device{dlpack::cuda, device}
                                    : dlpack::Device{dlpack::cpu, tensor.device.index};
  const std::optional<std::size_t> bytes = bytes_of(tensor);
  if (!(tensor.device == wanted) || !bytes || *bytes == 0 || !is_contiguous(tensor)) return nullptr;
  CopyItem item;
  item.src = reinterpret_cast<const void*>(address_of(tensor));
  if (item.src == nullptr) return nullptr;  // freed
  item.bytes = *bytes;
  item.element_bytes = tensor.dtype.bits / 8;
  Started started = start(engine, pool, device, stream, std::move(item), chunk_bytes,
                          *bytes >= timed_bytes, alias);
  auto made = std::make_unique<PyTransfer>(engine, std::move(started.transfer));
  made->give_block(std::move(started.block));
  return made;
}

}  // namespace

void bind_copy_out(py::module_& module) {
  // Without names: their look-up would be a part of what the call costs.
  module.def("copy_out", &copy_out);
  module.def("copy_tensor_out", &copy_tensor_out);
}

}  // namespace streamlap::bindings
