// A lock that also carries what its holders knew, for a checker.
#pragma once

#include <mutex>

#include "runtime/runtime.h"

namespace streamlap {

class OrderLock {
 public:
  OrderLock(Runtime& runtime, std::mutex& mutex) : runtime_(runtime), mutex_(mutex) {
    mutex_.lock();
    runtime_.lock_acquired(&mutex_);
  }
  ~OrderLock() {
    runtime_.lock_released(&mutex_);
    mutex_.unlock();
  }
  OrderLock(const OrderLock&) = delete;
  OrderLock& operator=(const OrderLock&) = delete;

 private:
  Runtime& runtime_;
  std::mutex& mutex_;
};

}  // namespace streamlap
