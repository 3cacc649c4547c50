// The extension module streamlap._native.
#include "bindings/gil.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "Streams, pinned memory and copies; the typed surface is in _native.pyi.";
  streamlap::bindings::register_errors();
  streamlap::bindings::bind_runtime(module);
  streamlap::bindings::bind_pool(module);
  streamlap::bindings::bind_transfer(module);
  streamlap::bindings::bind_copy_out(module);
  streamlap::bindings::bind_torch_tensor(module);
  streamlap::bindings::bind_tensor_row(module);
  streamlap::bindings::bind_tree(module);
  streamlap::bindings::bind_pages(module);
  streamlap::bindings::bind_sim(module);
  streamlap::bindings::bind_faults(module);
}
