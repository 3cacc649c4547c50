// Blocks that the pool's own threads make ahead of their use.
#include <optional>
#include <string>

#include "base/process.h"
#include "runtime/order_lock.h"
#include "transfer/pinned_pool.h"

namespace streamlap {
namespace {

constexpr Site site_lock_grow_ahead{"pool.lock_grow_ahead"};
constexpr Site site_lock_grow_claim{"pool.lock_grow_claim"};
constexpr Site site_lock_grow_settle{"pool.lock_grow_settle"};
constexpr Site site_lock_cancel{"pool.lock_cancel"};
constexpr Site site_lock_grown{"pool.lock_grown"};
constexpr Site site_lock_prewarm{"pool.lock_prewarm"};
constexpr Site site_lock_busy{"pool.lock_busy"};

}  // namespace

std::shared_ptr<Growth> PinnedPool::grow_ahead(std::size_t bytes, std::size_t count) {
  process::require_usable();
  const std::size_t capacity = size_class(bytes);
  std::shared_ptr<Growth> growth;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_grow_ahead);
    SizeClass& size = size_of(capacity);
    const std::size_t there = size.ready() + size.retired.size() + size.promised;
    if (there >= count) return nullptr;
    growth = std::make_shared<Growth>(capacity, count - there);
    size.promised += count - there;
  }
  try {
    if (runtime_->virtual_time()) {
      while (grow_step(*growth)) {
      }
      return growth;
    }
    for (Worker& worker : workers_) {
      // A pool that nobody has any more does not go on growing.
      worker.task([weak = weak_from_this(), growth] {
        for (auto pool = weak.lock(); pool && pool->grow_step(*growth); pool = weak.lock()) {
          pool.reset();
        }
      });
    }
  } catch (...) {
    cancel(*growth);
    throw;
  }
  return growth;
}

bool PinnedPool::grow_step(Growth& growth) {
  Freed freed;
  std::optional<Claim> claimed;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_grow_claim);
    if (growth.left_ == 0) return false;
    SizeClass& size = size_of(growth.capacity_);
    std::size_t count = slab_blocks(size, growth.left_);
    bool room = make_room(count * size.capacity(), freed, &size);
    if (!room && count > 1) {
      count = 1;
      room = make_room(size.capacity(), freed, &size);
    }
    try {
      if (process::ending()) {
        drop(growth, nullptr);
      } else if (!room) {
        throw exhausted("more blocks of " + std::to_string(size.capacity()) + " bytes");
      } else {
        claimed = claim(size, count);
        growth.left_ -= count;
        ++growth.making_;
        ++making_;
      }
    } catch (...) {
      drop(growth, std::current_exception());
    }
  }
  give_to_system(freed);
  std::byte* data = nullptr;
  if (claimed) {
    std::exception_ptr error;
    try {
      // Without trimming: that could cost somebody the blocks that were just made for him.
      data = static_cast<std::byte*>(runtime_->alloc_pinned(claimed->bytes));
    } catch (...) {
      error = std::current_exception();
    }
    OrderLock lock(*runtime_, mutex_, site_lock_grow_settle);
    claimed->size->promised -= claimed->count;
    --growth.making_;
    --making_;
    if (data != nullptr) {
      settle(*claimed, data);
    } else {
      unclaim(*claimed);
      drop(growth, error);
    }
  }
  changes_.note();
  return data != nullptr;
}

void PinnedPool::drop(Growth& growth, std::exception_ptr error) noexcept {
  sizes_.find(growth.capacity_)->second.promised -= growth.left_;
  growth.left_ = 0;
  if (!growth.error_) growth.error_ = std::move(error);
}

void PinnedPool::cancel(Growth& growth) noexcept {
  if (process::leaking()) return;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_cancel);
    drop(growth, nullptr);
  }
  changes_.note();
}

bool PinnedPool::grown(const Growth& growth) {
  std::exception_ptr error;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_grown);
    if (growth.left_ > 0 || growth.making_ > 0) return false;
    error = growth.error_;
  }
  if (error) std::rethrow_exception(error);
  return true;
}

void PinnedPool::prewarm(std::size_t bytes, std::size_t count) {
  const std::shared_ptr<Growth> growth = start_prewarm(bytes, count);
  if (!growth) return;
  for (;;) {
    const std::uint64_t seen = changes_.seen();
    if (grown(*growth)) return;
    changes_.wait(seen, std::chrono::seconds(1));
  }
}

std::shared_ptr<Growth> PinnedPool::start_prewarm(std::size_t bytes, std::size_t count) {
  const std::size_t capacity = size_class(bytes);
  {
    OrderLock lock(*runtime_, mutex_, site_lock_prewarm);
    if (!fits(capacity, count)) {
      throw exhausted(std::to_string(count) + " blocks of " + std::to_string(capacity) + " bytes");
    }
  }
  return grow_ahead(bytes, count);
}

bool PinnedPool::busy() const {
  OrderLock lock(*runtime_, mutex_, site_lock_busy);
  return making_ > 0;
}

}  // namespace streamlap
