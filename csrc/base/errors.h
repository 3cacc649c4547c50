// The errors that the core raises. Bindings turn each kind into one class of streamlap.errors.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace streamlap {

enum class ErrorKind {
  runtime,           // an operation failed; the library stays usable
  invalid_argument,  // refused before anything was enqueued
  out_of_memory,     // the system gave no memory
  pool_exhausted,    // the pool's own limit
  sticky,            // the device's context is lost: the process must restart
  forked,            // used in a child of the process that started the library
  capture,           // not possible while a CUDA graph is being captured
  order,             // two accesses to the same memory are not ordered (the checker's)
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

class PoolExhausted : public Error {
 public:
  PoolExhausted(const std::string& what, std::size_t used_bytes, std::size_t limit_bytes)
      : Error(ErrorKind::pool_exhausted, what), used(used_bytes), limit(limit_bytes) {}
  std::size_t used;
  std::size_t limit;
};

}  // namespace streamlap
