// A lock that also carries what its holders knew, for a checker.
#pragma once

#include <mutex>

#include "runtime/runtime.h"

namespace streamlap {

class OrderLock {
 public:
  OrderLock(Runtime& runtime, std::mutex& mutex, Site site)
      : runtime_(runtime), mutex_(mutex), site_(site) {
    if (!dropped(site_)) {
      mutex_.lock();
      runtime_.lock_acquired(&mutex_, site_);
    }
#ifdef STREAMLAP_MUTANTS
    runtime_.guarded(&mutex_, site_);
#endif
  }
  ~OrderLock() {
    if (dropped(site_)) return;
    runtime_.lock_released(&mutex_, site_);
    mutex_.unlock();
  }
  OrderLock(const OrderLock&) = delete;
  OrderLock& operator=(const OrderLock&) = delete;

 private:
  Runtime& runtime_;
  std::mutex& mutex_;
  const Site site_;
};

}  // namespace streamlap
