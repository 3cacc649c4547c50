#include "bindings/torch_tensor.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"

namespace streamlap::bindings {
namespace {

// An attribute of a class of C's, called without a look-up. Never destroyed, as the class is not.
class Getter {
 public:
  Getter() = default;
  Getter(py::handle type, const char* name) {
    const py::object found = type.attr(name);
    if (Py_TYPE(found.ptr()) != &PyGetSetDescr_Type) return;
    getter_ = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
    found.inc_ref();
  }
  explicit operator bool() const noexcept { return getter_ != nullptr; }
  // Null, and a Python error is set, where it raises.
  PyObject* operator()(py::handle object) const {
    return getter_->get(object.ptr(), getter_->closure);
  }

 private:
  PyGetSetDef* getter_ = nullptr;
};

// A method without arguments, likewise.
class Method {
 public:
  Method() = default;
  Method(py::handle type, const char* name) {
    const py::object found = type.attr(name);
    if (Py_TYPE(found.ptr()) != &PyMethodDescr_Type) return;
    PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
    if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
    if (method->ml_flags == (METH_VARARGS | METH_KEYWORDS)) {
      with_keywords_ =
          reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(method->ml_meth));
    }
    found.inc_ref();
  }
  explicit operator bool() const noexcept {
    return method_ != nullptr || with_keywords_ != nullptr;
  }
  PyObject* operator()(py::handle object) const {
    if (method_ != nullptr) return method_(object.ptr(), nullptr);
    static PyObject* nothing = PyTuple_New(0);
    return with_keywords_(object.ptr(), nothing, nullptr);
  }

 private:
  PyCFunction method_ = nullptr;
  PyCFunctionWithKeywords with_keywords_ = nullptr;
};

struct Known {
  const dlpack::ExchangeApi* api = nullptr;
  PyTypeObject* tensor = nullptr;  // kept for good, as the table is
  PyTypeObject* parameter = nullptr;
  PyObject* inference_mode = nullptr;
  Getter requires_grad;
  Getter version;
  Method is_neg;
  Method is_conj;
  Method detach;
  Method storage;
};

Known& known() {
  static Known instance;
  return instance;
}

py::object taken(PyObject* value) {
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool is_true(PyObject* value) { return taken(value).ptr() == Py_True; }

// The table, the types and the question are torch's. Without what is looked for, each tensor is
// asked by itself, from Python.
void use_tensors_of(const py::capsule& table, const py::type& tensor, const py::type& parameter,
                    const py::object& inference_mode) {
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(table.ptr(), dlpack::capsule_name));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->major != dlpack::major_known) api = api->older;
  if (api == nullptr || api->tensor_from_object == nullptr || api->managed_to_object == nullptr) {
    return;
  }
  Known found;
  found.api = api;
  found.tensor = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  found.parameter = reinterpret_cast<PyTypeObject*>(parameter.ptr());
  found.inference_mode = inference_mode.ptr();
  found.requires_grad = Getter(tensor, "requires_grad");
  found.version = Getter(tensor, "_version");
  found.is_neg = Method(tensor, "is_neg");
  found.is_conj = Method(tensor, "is_conj");
  found.detach = Method(tensor, "detach");
  found.storage = Method(tensor, "untyped_storage");
  if (!found.requires_grad || !found.version || !found.is_neg || !found.is_conj || !found.detach ||
      !found.storage) {
    return;
  }
  tensor.inc_ref();
  parameter.inc_ref();
  inference_mode.inc_ref();
  known() = found;
}

// What every one of torch's own tensors gives; None where one is something else, or gives nothing.
template <class Ask>
py::object of_each(const py::list& tensors, Ask&& ask) {
  py::list answers(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const py::handle tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (!is_torchs(tensor)) return py::none();
    py::object answer = ask(tensor);
    if (answer.is_none()) return answer;
    PyList_SET_ITEM(answers.ptr(), static_cast<Py_ssize_t>(i), answer.release().ptr());
  }
  return answers;
}

// What torch is told of memory; `managed` is the first member, so that one is the other's address.
struct Given {
  dlpack::ManagedTensor managed;
  SharedObject owner;
};

// Torch calls it in the thread that drops the tensor, as often as not without the interpreter's
// lock. It is this thread's streams that may still use the memory, so no other thread can do it.
void let_go(dlpack::ManagedTensor* managed) {
  if (process::leaking() || interpreter_ending()) return;
  auto* given = reinterpret_cast<Given*>(managed);
  if (PyGILState_Check() != 0) {
    delete given;
  } else {
    GilAcquire gil;
    delete given;
  }
}

bool is_contiguous(const dlpack::Tensor& lies) {
  std::int64_t step = 1;
  for (std::int32_t dim = lies.ndim; dim-- > 0;) {
    if (lies.shape[dim] != 1 && lies.strides[dim] != step) return false;
    step *= lies.shape[dim];
  }
  return true;
}

}  // namespace

bool is_torchs(py::handle object, bool parameters) {
  const Known& ask = known();
  const PyTypeObject* type = Py_TYPE(object.ptr());
  return ask.api != nullptr && (type == ask.tensor || (parameters && type == ask.parameter));
}

bool says(py::handle tensor, dlpack::Tensor& lies) {
  lies = {};
  if (known().api->tensor_from_object(tensor.ptr(), &lies) != 0) {
    PyErr_Clear();
    return false;
  }
  return lies.dtype.lanes == 1 && lies.dtype.bits != 0 && lies.dtype.bits % 8 == 0;
}

bool is_plain(py::handle tensor) {
  return !is_true(known().is_neg(tensor)) && !is_true(known().is_conj(tensor));
}

bool inference_mode() { return is_true(PyObject_CallNoArgs(known().inference_mode)); }

bool requires_grad(py::handle tensor) { return is_true(known().requires_grad(tensor)); }

py::object alias_of(py::handle tensor) { return taken(known().detach(tensor)); }

py::object version_of(py::handle tensor) {
  PyObject* version = known().version(tensor);
  if (version == nullptr && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    PyErr_Clear();  // of an inference tensor
    return py::none();
  }
  return taken(version);
}

py::object storage_of(py::handle tensor) { return taken(known().storage(tensor)); }

std::optional<std::size_t> bytes_of(const dlpack::Tensor& lies) {
  constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max();
  const std::size_t element = lies.dtype.bits / 8;
  std::size_t count = 1;
  for (std::int32_t dim = 0; dim < lies.ndim; ++dim) {
    const auto size = static_cast<std::size_t>(lies.shape[dim]);
    if (__builtin_mul_overflow(count, size, &count)) return std::nullopt;
  }
  return count > most / element ? std::nullopt : std::optional(count * element);
}

bool is_dense(const dlpack::Tensor& lies) {
  if (is_contiguous(lies)) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> by_stride;
  for (std::int32_t dim = 0; dim < lies.ndim; ++dim) {
    if (lies.shape[dim] != 1) by_stride.emplace_back(lies.strides[dim], lies.shape[dim]);
  }
  std::sort(by_stride.begin(), by_stride.end());
  std::int64_t step = 1;
  for (const auto& [stride, size] : by_stride) {
    if (stride != step) return false;
    step *= size;
  }
  return true;
}

std::uintptr_t address_of(const dlpack::Tensor& lies) {
  return reinterpret_cast<std::uintptr_t>(lies.data) + lies.byte_offset;
}

py::object new_tensor(const dlpack::Tensor& lies, SharedObject owner) {
  auto given = std::make_unique<Given>();
  given->managed = {known().api->major, known().api->minor, nullptr, &let_go, 0, lies};
  given->owner = std::move(owner);
  void* made = nullptr;
  if (known().api->managed_to_object(&given->managed, &made) != 0) throw py::error_already_set();
  given.release();  // the tensor's now
  return taken(static_cast<PyObject*>(made));
}

std::optional<std::uintptr_t> current_stream_of(int device) {
  const Known& ask = known();
  if (ask.api == nullptr || ask.api->current_stream == nullptr) return std::nullopt;
  void* stream = nullptr;
  if (ask.api->current_stream(dlpack::cuda, device, &stream) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return reinterpret_cast<std::uintptr_t>(stream);
}

void bind_torch_tensor(py::module_& module) {
  module.def("use_tensors_of", &use_tensors_of);
  module.def("storages_of", [](const py::list& tensors) { return of_each(tensors, storage_of); });
  module.def("versions_of", [](const py::list& tensors) { return of_each(tensors, version_of); });
}

}  // namespace streamlap::bindings
