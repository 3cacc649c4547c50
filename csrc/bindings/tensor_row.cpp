#include "bindings/tensor_row.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/errors.h"
#include "transfer/tree_plan.h"

namespace streamlap::bindings {
namespace {

// What a plain tensor without history says, one that is no parameter.
bool asked(py::handle object, dlpack::Tensor& tensor) {
  if (!is_torchs(object)) return false;
  const auto plain = [&] { return !requires_grad(object) && is_plain(object); };
  return unless_it_raises(plain).value_or(false) && says(object, tensor);
}

}  // namespace

bool TensorRow::add(const dlpack::Tensor& tensor) {
  constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max();
  const std::optional<std::size_t> bytes = bytes_of(tensor);
  if (!bytes || *bytes > most - nbytes_) return false;
  const std::size_t element = tensor.dtype.bits / 8;
  Kind kind{tensor.dtype, tensor.ndim, dims_.size(), *bytes / element, *bytes};
  const bool empty = kind.count == 0;
  dims_.insert(dims_.end(), tensor.shape, tensor.shape + tensor.ndim);
  dims_.insert(dims_.end(), tensor.strides, tensor.strides + tensor.ndim);
  dense_ = dense_ && (empty || is_dense(tensor));
  has_complex_ = has_complex_ || tensor.dtype.code == dlpack::code_complex;
  const bool is_integer =
      tensor.dtype.code == dlpack::code_int || tensor.dtype.code == dlpack::code_uint;
  ambiguous_ = ambiguous_ || (is_integer && tensor.dtype.bits == 8);
  has_empty_ = has_empty_ || empty;
  nbytes_ += kind.bytes;
  largest_ = std::max(largest_, kind.bytes);
  kinds_.push_back(kind);
  return true;
}

std::shared_ptr<TensorRow> TensorRow::of(const py::list& tensors) {
  auto row = std::make_shared<TensorRow>();
  row->kinds_.reserve(tensors.size());
  row->addresses_->reserve(tensors.size());
  for (const py::handle& object : tensors) {
    dlpack::Tensor tensor;
    if (!asked(object, tensor)) return nullptr;
    if (row->kinds_.empty()) row->device_ = tensor.device;
    if (!(tensor.device == row->device_)) return nullptr;
    if (!row->add(tensor)) return nullptr;
    if (address_of(tensor) == 0 && row->kinds_.back().count != 0) return nullptr;  // freed
    row->addresses_->push_back(address_of(tensor));
  }
  const bool usual = row->device_.type == dlpack::cpu || row->device_.type == dlpack::cuda;
  return usual ? row : nullptr;
}

std::shared_ptr<TensorRow> TensorRow::described(
    const std::vector<std::vector<std::int64_t>>& shapes,
    const std::vector<std::vector<std::int64_t>>& strides, const py::list& examples, int device) {
  if (shapes.size() != strides.size() || shapes.size() != examples.size()) {
    throw Error(ErrorKind::invalid_argument, "a row has shapes, strides and dtypes, one a tensor");
  }
  auto row = std::make_shared<TensorRow>();
  row->device_ = device < 0 ? dlpack::Device{dlpack::cpu, 0} : dlpack::Device{dlpack::cuda, device};
  for (std::size_t leaf = 0; leaf < shapes.size(); ++leaf) {
    dlpack::Tensor tensor;
    if (!asked(examples[leaf], tensor)) return nullptr;
    if (shapes[leaf].size() != strides[leaf].size()) {
      throw Error(ErrorKind::invalid_argument, "a tensor has a stride for each size");
    }
    tensor.ndim = static_cast<std::int32_t>(shapes[leaf].size());
    tensor.shape = const_cast<std::int64_t*>(shapes[leaf].data());
    tensor.strides = const_cast<std::int64_t*>(strides[leaf].data());
    if (!row->add(tensor)) return nullptr;
  }
  return row;
}

std::shared_ptr<Addresses> TensorRow::addresses_of(const py::list& tensors) const {
  if (tensors.size() != kinds_.size()) return nullptr;
  auto addresses = std::make_shared<Addresses>();
  addresses->reserve(kinds_.size());
  for (std::size_t leaf = 0; leaf < kinds_.size(); ++leaf) {
    const Kind& kind = kinds_[leaf];
    dlpack::Tensor tensor;
    if (!asked(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(leaf)), tensor)) {
      return nullptr;
    }
    const std::int64_t* dims = dims_.data() + kind.first;
    if (!(tensor.dtype == kind.dtype) || !(tensor.device == device_) || tensor.ndim != kind.ndim ||
        !std::equal(dims, dims + kind.ndim, tensor.shape) ||
        !std::equal(dims + kind.ndim, dims + 2 * kind.ndim, tensor.strides)) {
      return nullptr;
    }
    if (address_of(tensor) == 0 && kind.count != 0) return nullptr;  // freed
    addresses->push_back(address_of(tensor));
  }
  return addresses;
}

std::shared_ptr<TensorRow> TensorRow::placed(std::uintptr_t base,
                                             const std::vector<std::size_t>& offsets) const {
  auto row = std::make_shared<TensorRow>(*this);
  row->addresses_ = std::make_shared<Addresses>();
  for (std::size_t offset : offsets) row->addresses_->push_back(base + offset);
  return row;
}

py::list TensorRow::made_in(py::handle owner, std::uintptr_t base,
                            const std::vector<std::size_t>& offsets) const {
  if (ambiguous_ || offsets.size() != size()) {
    throw Error(ErrorKind::invalid_argument, "no such tensors can be made");
  }
  const SharedObject shared = share(owner);
  py::list made(size());
  for (std::size_t leaf = 0; leaf < size(); ++leaf) {
    const Kind& kind = kinds_[leaf];
    auto* dims = const_cast<std::int64_t*>(dims_.data() + kind.first);  // they are read
    const dlpack::Tensor lies{reinterpret_cast<void*>(base + offsets[leaf]),
                              {dlpack::cpu, 0},
                              kind.ndim,
                              kind.dtype,
                              dims,
                              dims + kind.ndim,
                              0};
    PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(leaf),
                    new_tensor(lies, shared).release().ptr());
  }
  return made;
}

bool TensorRow::lies_as(const TensorRow& other) const {
  if (size() != other.size() || dims_ != other.dims_) return false;
  return std::equal(kinds_.begin(), kinds_.end(), other.kinds_.begin(),
                    [](const Kind& a, const Kind& b) { return a.ndim == b.ndim; });
}

bool TensorRow::has_dtypes_of(const TensorRow& other) const {
  return std::equal(kinds_.begin(), kinds_.end(), other.kinds_.begin(), other.kinds_.end(),
                    [](const Kind& a, const Kind& b) { return a.dtype == b.dtype; });
}

std::pair<std::uintptr_t, std::size_t> TensorRow::around() const {
  std::uintptr_t begin = std::numeric_limits<std::uintptr_t>::max();
  std::uintptr_t end = 0;
  for (std::size_t leaf = 0; leaf < size(); ++leaf) {
    if (bytes(leaf) == 0) continue;
    begin = std::min(begin, addresses_->at(leaf));
    end = std::max(end, addresses_->at(leaf) + bytes(leaf));
  }
  return {std::min(begin, end), end - std::min(begin, end)};
}

bool TensorRow::is_apart(const TensorRow& sources) const {
  const auto extents_of = [](const TensorRow& row) {
    std::vector<moves::Extent> extents;
    for (std::size_t leaf = 0; leaf < row.size(); ++leaf) {
      const std::uintptr_t begin = row.addresses_->at(leaf);
      if (row.bytes(leaf) != 0) extents.push_back({begin, begin + row.bytes(leaf)});
    }
    return extents;
  };
  std::vector<moves::Extent> written = extents_of(*this);
  if (moves::any_overlap(written)) return false;  // sorted, if not
  if (!(device_ == sources.device_)) return true;
  for (const moves::Extent& read : extents_of(sources)) {
    const auto after = std::upper_bound(
        written.begin(), written.end(), read.begin,
        [](std::uintptr_t begin, const moves::Extent& extent) { return begin < extent.end; });
    if (after != written.end() && after->begin < read.end) return false;
  }
  return true;
}

py::list TensorRow::copies_of(const TensorRow& sources) const {
  py::list copies(size());
  for (std::size_t leaf = 0; leaf < size(); ++leaf) {
    copies[leaf] = py::make_tuple(addresses_->at(leaf), sources.addresses_->at(leaf), bytes(leaf),
                                  kinds_[leaf].dtype.bits / 8, py::none());
  }
  return copies;
}

std::optional<std::uintptr_t> base_of(const Addresses& addresses,
                                      const std::vector<std::size_t>& offsets) {
  if (addresses.empty() || addresses.size() != offsets.size()) return std::nullopt;
  const std::uintptr_t base = addresses[0] - offsets[0];
  for (std::size_t leaf = 0; leaf < addresses.size(); ++leaf) {
    if (addresses[leaf] != base + offsets[leaf]) return std::nullopt;
  }
  return base;
}

void bind_tensor_row(py::module_& module) {
  py::class_<Addresses, std::shared_ptr<Addresses>>(module, "Addresses")
      .def(py::init<const std::vector<std::uintptr_t>&>())
      .def("base", [](const Addresses& addresses, const TreePlan& plan) {
        return base_of(addresses, plan.offsets());
      });
  py::class_<TensorRow, std::shared_ptr<TensorRow>>(module, "TensorRow")
      .def_static("of", &TensorRow::of)
      .def_static("described", &TensorRow::described)
      .def("addresses_of", &TensorRow::addresses_of)
      .def("made_in", &TensorRow::made_in)
      .def("placed", [](const TensorRow& row, std::uintptr_t base,
                        const TreePlan& plan) { return row.placed(base, plan.offsets()); })
      .def("lies_as", &TensorRow::lies_as)
      .def("has_dtypes_of", &TensorRow::has_dtypes_of)
      .def("around", &TensorRow::around)
      .def("is_apart", &TensorRow::is_apart)
      .def("copies_of", &TensorRow::copies_of)
      .def_property_readonly("addresses", &TensorRow::addresses)
      .def_property_readonly("device", &TensorRow::device)
      .def_property_readonly("dense", &TensorRow::dense)
      .def_property_readonly("has_complex", &TensorRow::has_complex)
      .def_property_readonly("ambiguous", &TensorRow::ambiguous)
      .def_property_readonly("has_empty", &TensorRow::has_empty)
      .def_property_readonly("nbytes", &TensorRow::nbytes)
      .def_property_readonly("largest", &TensorRow::largest);
}

}  // namespace streamlap::bindings
