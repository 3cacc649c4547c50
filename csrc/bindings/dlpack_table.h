// The table of functions that an array library offers to C callers, as DLPack 1.3 lays it out: only
// what is read here. Names are DLPack's.
#pragma once

#include <cstdint>

namespace streamlap::bindings::dlpack {

inline constexpr std::uint32_t major_known = 1;
inline constexpr char capsule_name[] = "dlpack_exchange_api";

inline constexpr std::int32_t cpu = 1;
inline constexpr std::int32_t cuda = 2;

inline constexpr std::uint8_t code_int = 0;
inline constexpr std::uint8_t code_uint = 1;
inline constexpr std::uint8_t code_float = 2;
inline constexpr std::uint8_t code_bfloat = 4;
inline constexpr std::uint8_t code_complex = 5;

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct Device {
  std::int32_t type;
  std::int32_t index;
  bool operator==(const Device&) const = default;
};

// What an array says of itself; the pointers are the array's own.
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};

// What an array is made from, with who lets go of its memory.
struct ManagedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*let_go)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeApi* older;  // another table, of an earlier major version
  void* allocate;
  void* managed_from_object;
  // Not 0: a Python error is set, and the memory is still the caller's.
  int (*managed_to_object)(ManagedTensor* tensor, void** out);
  // May be null. Not 0: a Python error is set.
  int (*tensor_from_object)(void* object, Tensor* out);
  // May be null. Not 0: a Python error is set.
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out);
};

}  // namespace streamlap::bindings::dlpack
