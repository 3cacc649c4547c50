// Many of torch's tensors at once: where their bytes are and how they lie, asked in one call from
// C. From Python each question costs a call a tensor, and a shape is a new tuple: ten times as
// much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/torch_tensor.h"

namespace streamlap::bindings {

// An address for each leaf of a tree; a type of its own, so that Python can hold one.
struct Addresses : std::vector<std::uintptr_t> {
  Addresses() = default;
  explicit Addresses(const std::vector<std::uintptr_t>& from) : vector(from) {}
};

// Does not change. What it knows of a tensor holds as long as nobody resizes it: for one call.
class TensorRow {
 public:
  // Of tensors of one device that are of torch's own type, and plain. Null where one is not, has
  // history, or the table of functions says nothing of it.
  static std::shared_ptr<TensorRow> of(const py::list& tensors);
  // What tensors would say that have these shapes and strides, the dtypes of `examples`, and lie on
  // this device (-1: the CPU). They have no addresses.
  static std::shared_ptr<TensorRow> described(const std::vector<std::vector<std::int64_t>>& shapes,
                                              const std::vector<std::vector<std::int64_t>>& strides,
                                              const py::list& examples, int device);

  std::size_t size() const noexcept { return kinds_.size(); }
  // Null unless these are as many such tensors, of the same shapes, strides, dtypes and device.
  std::shared_ptr<Addresses> addresses_of(const py::list& tensors) const;
  // Tensors like these of new memory, which `owner` keeps, each from its offset on. Refused where
  // a type is ambiguous.
  py::list made_in(py::handle owner, std::uintptr_t base,
                   const std::vector<std::size_t>& offsets) const;
  // The same tensors in one range from `base` on.
  std::shared_ptr<TensorRow> placed(std::uintptr_t base,
                                    const std::vector<std::size_t>& offsets) const;
  // Whether the shapes and strides are the same.
  bool lies_as(const TensorRow& other) const;
  bool has_dtypes_of(const TensorRow& other) const;
  // The range around all that are not empty: where it begins, and its bytes.
  std::pair<std::uintptr_t, std::size_t> around() const;
  // Whether no two of these share a byte, nor one of these and one of `sources`.
  bool is_apart(const TensorRow& sources) const;
  // What CopyEngine::submit takes for each of these from its source: both dense, and they lie
  // alike.
  py::list copies_of(const TensorRow& sources) const;

  const std::shared_ptr<Addresses>& addresses() const noexcept { return addresses_; }
  int device() const noexcept { return device_.type == dlpack::cpu ? -1 : device_.index; }
  // Whether each fills one range of memory: what lies as it does has its elements in the same
  // order.
  bool dense() const noexcept { return dense_; }
  bool has_complex() const noexcept { return has_complex_; }
  // Whether there are integers of a byte: torch has several dtypes of them, DLPack one.
  bool ambiguous() const noexcept { return ambiguous_; }
  bool has_empty() const noexcept { return has_empty_; }
  std::size_t count(std::size_t leaf) const { return kinds_[leaf].count; }
  std::size_t bytes(std::size_t leaf) const { return kinds_[leaf].bytes; }
  const dlpack::DataType& dtype(std::size_t leaf) const { return kinds_[leaf].dtype; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  std::size_t largest() const noexcept { return largest_; }

 private:
  struct Kind {
    dlpack::DataType dtype;
    std::int32_t ndim;
    std::size_t first;  // in dims_: its sizes, then its strides
    std::size_t count;  // elements
    std::size_t bytes;
  };

  bool add(const dlpack::Tensor& tensor);  // false: of more bytes than can be

  dlpack::Device device_{dlpack::cpu, 0};
  std::vector<Kind> kinds_;
  std::vector<std::int64_t> dims_;
  std::shared_ptr<Addresses> addresses_ = std::make_shared<Addresses>();
  bool dense_ = true;
  bool has_complex_ = false;
  bool ambiguous_ = false;
  bool has_empty_ = false;
  std::size_t nbytes_ = 0;
  std::size_t largest_ = 0;
};

// Where the range begins that has each of these at its offset; none if there is no such range.
std::optional<std::uintptr_t> base_of(const Addresses& addresses,
                                      const std::vector<std::size_t>& offsets);

}  // namespace streamlap::bindings
