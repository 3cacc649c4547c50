// What is asked of torch's tensors from C, and making them: from Python each question costs a call,
// and a view of memory three times as much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "bindings/dlpack_table.h"
#include "bindings/gil.h"

namespace streamlap::bindings {

// Of the functions below, those that take an object take what one of these is true of.
// A tensor of torch's own type, and where parameters do, too, also one of those. False for
// everything where torch has no table of functions for C.
bool is_torchs(py::handle object, bool parameters = false);

// The answer of a function that asks tensors; none where a question raises an error, as of one that
// has escaped from a transformation: such a tensor goes another way, to be refused there.
template <class Ask>
auto unless_it_raises(Ask&& ask) -> std::optional<decltype(ask())> {
  try {
    return ask();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt
    return std::nullopt;
  }
}

// What a tensor says of itself; false where it cannot say it. The sizes and strides are the
// tensor's own memory: good until other code of Python's may run, as it may in each of the
// functions below.
bool says(py::handle tensor, dlpack::Tensor& lies);
// Whether its bytes are its values: no lazy negation or conjugation.
bool is_plain(py::handle tensor);
bool requires_grad(py::handle tensor);
bool inference_mode();
// Without history, over the same memory: it keeps that, whatever becomes of the other object.
py::object alias_of(py::handle tensor);
// The version counter; None where it has none.
py::object version_of(py::handle tensor);
// What holds the memory.
py::object storage_of(py::handle tensor);

// None: more than there can be.
std::optional<std::size_t> bytes_of(const dlpack::Tensor& lies);
// Whether the elements fill one range, each once, in whatever order, as those of channels_last do.
bool is_dense(const dlpack::Tensor& lies);
std::uintptr_t address_of(const dlpack::Tensor& lies);

// A tensor that lies so, in memory that `owner` keeps. Its storage is its own, and ends with it.
py::object new_tensor(const dlpack::Tensor& lies, SharedObject owner);

// The handle of the current stream of torch's on a GPU; none where the table does not say it.
std::optional<std::uintptr_t> current_stream_of(int device);

}  // namespace streamlap::bindings
