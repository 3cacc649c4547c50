// The short ways to the host: one range of bytes, or one tensor, into new page-locked memory, in
// one call that takes the memory, orders the copy and starts it, and lets go of the interpreter's
// lock once.
#include <pybind11/stl.h>

#include "base/process.h"
#include "bindings/py_transfer.h"
#include "bindings/torch_tensor.h"
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

// Of the policy, as Python has told it last; guarded by the interpreter's lock.
struct Numbers {
  std::size_t chunk_bytes = std::size_t{16} << 20;
  std::size_t timed_bytes = 0;
};
Numbers numbers;

// What `to_cpu` is mostly given, one tensor on a GPU and nothing else: all that Python would ask of
// it and of the devices, asked from here. On cold caches each line of Python costs as much as a
// call of the driver's.
class ShortWay {
 public:
  // What serves a device: its engine, its pool, and what Python calls it.
  void add(int device, std::shared_ptr<CopyEngine> engine, std::shared_ptr<PinnedPool> pool,
           py::object place) {
    if (device < 0) throw Error(ErrorKind::invalid_argument, "no such device");
    const auto index = static_cast<std::size_t>(device);
    if (served_.size() <= index) served_.resize(index + 1);
    served_[index] = {std::move(engine), std::move(pool), std::move(place)};
  }

  // Starts the copy of a tensor whose values lie in one range, longer than nothing, after what
  // torch's current stream has been given. What it gives back: the transfer, which makes its result
  // in take_result(), what Python calls the device, the tensor without history, its version, and
  // whether the call is one of inference mode. Or the index of a device that nothing was added for;
  // or nothing: a tensor that is to go another way. `timed` and `chunk_bytes`: None means as the
  // policy says.
  py::object start(const py::object& tensor, const py::object& timed,
                   const py::object& chunk_bytes) {
    return start_after(tensor, timed, chunk_bytes, std::nullopt);
  }

  // The same after what `stream` has been given, also of a runtime without device memory.
  py::object start_after(const py::object& tensor, const py::object& timed,
                         const py::object& chunk_bytes, std::optional<std::uintptr_t> stream) {
    if (process::ending() || !is_torchs(tensor, true)) return py::none();
    // Nobody else has the alias: what it says stays true, whatever becomes of the caller's tensor,
    // and it keeps the memory. The version first: what is written from here on is written too
    // early.
    py::object version;
    py::object alias;
    bool inference = false;
    const auto plain = [&] {
      version = version_of(tensor);
      alias = alias_of(tensor);
      inference = inference_mode();
      return is_plain(alias);
    };
    // One that has escaped from a transformation says nothing of itself, although its alias may.
    dlpack::Tensor lies;
    if (!says(tensor, lies)) return py::none();
    if (!unless_it_raises(plain).value_or(false) || !says(alias, lies)) return py::none();
    const bool on_gpu = lies.device.type == dlpack::cuda;
    if (!on_gpu && !stream) return py::none();
    const std::optional<std::size_t> bytes = bytes_of(lies);
    if (!bytes || *bytes == 0 || !is_dense(lies) || address_of(lies) == 0) return py::none();
    const auto index = static_cast<std::size_t>(lies.device.index);
    if (index >= served_.size() || !served_[index].engine) return py::int_(lies.device.index);
    const Served served = served_[index];  // another thread may add one meanwhile
    if (served.engine->runtime()->uses_device_memory() != on_gpu) return py::none();
    if (!stream) stream = current_stream_of(lies.device.index);
    if (!stream) return py::none();
    CopyItem item;
    item.src = reinterpret_cast<const void*>(address_of(lies));
    item.bytes = *bytes;
    item.element_bytes = lies.dtype.bits / 8;
    const bool notes = timed.is_none() ? *bytes >= numbers.timed_bytes : timed.ptr() == Py_True;
    const std::size_t chunk =
        chunk_bytes.is_none() ? numbers.chunk_bytes : py::cast<std::size_t>(chunk_bytes);
    Started started = streamlap::bindings::start(served.engine, *served.pool, lies.device.index,
                                                 *stream, std::move(item), chunk, notes, alias);
    auto made = std::make_unique<PyTransfer>(served.engine, std::move(started.transfer));
    std::vector<std::int64_t> dims(lies.shape, lies.shape + lies.ndim);
    dims.insert(dims.end(), lies.strides, lies.strides + lies.ndim);
    made->give_block(std::move(started.block), lies.dtype, std::move(dims));
    return py::make_tuple(std::move(made), served.place, alias, version, inference);
  }

 private:
  struct Served {
    std::shared_ptr<CopyEngine> engine;
    std::shared_ptr<PinnedPool> pool;
    py::object place;
  };
  std::vector<Served> served_;  // by device
};

constexpr char way_name[] = "streamlap.ShortWay";

// ShortWay::start without the look-up of a method and of arguments: of the way's handle, the
// tensor, `timed` and `chunk_bytes`. False where it throws: it can be asked again as a method,
// which raises that.
PyObject* start_short(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "start_short() takes a handle, a tensor, a flag and a number");
    return nullptr;
  }
  auto* way = static_cast<ShortWay*>(PyCapsule_GetPointer(arguments[0], way_name));
  if (way == nullptr) return nullptr;
  try {
    return way
        ->start(py::reinterpret_borrow<py::object>(arguments[1]),
                py::reinterpret_borrow<py::object>(arguments[2]),
                py::reinterpret_borrow<py::object>(arguments[3]))
        .release()
        .ptr();
  } catch (...) {
    Py_RETURN_FALSE;
  }
}

PyMethodDef functions[] = {
    {"start_short", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&start_short)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_copy_out(py::module_& module) {
  // Without names: their look-up would be a part of what the call costs.
  module.def("copy_out", &copy_out);
  py::class_<ShortWay>(module, "ShortWay")
      .def(py::init<>())
      .def("add", &ShortWay::add)
      .def("handle", [](ShortWay& self) { return py::capsule(&self, way_name); })
      .def("start", &ShortWay::start)
      .def("start_after", &ShortWay::start_after);
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
  module.def("use_short_way", [](std::size_t chunk_bytes, std::size_t timed_bytes) {
    numbers = {chunk_bytes, timed_bytes};
  });
}

}  // namespace streamlap::bindings
