#include "transfer/pinned_pool.h"

#include <algorithm>
#include <bit>

#include "base/process.h"
#include "runtime/order_lock.h"

namespace streamlap {
namespace {

constexpr Site site_use{"pool.record_use"};

// An event that carries an error is done too: the work it stood for will not run any more.
bool use_finished(Runtime& runtime, const EventPtr& event) {
  try {
    return runtime.event_query(*event);
  } catch (const Error& error) {
    return error.kind() != ErrorKind::sticky;
  } catch (...) {
    return true;
  }
}

}  // namespace

PinnedBlock::~PinnedBlock() {
  if (data_ == nullptr || process::leaking()) return;
  pool_->take_back(*this);
}

void PinnedBlock::record_use(StreamRef stream) {
  if (pool_->runtime()->stream_capturing(stream)) {
    throw Error(
        ErrorKind::capture,
        "a use of pinned memory inside CUDA graph capture ends with no event; keep the tensor "
        "for as long as the graph is replayed");
  }
  EventPtr event = pool_->runtime()->event_create(stream.device);
  pool_->runtime()->event_record(*event, stream, site_use);
  std::lock_guard lock(mutex_);
  if (uses_.size() >= 64) {
    std::erase_if(uses_, [&](const EventPtr& use) { return use_finished(*pool_->runtime(), use); });
  }
  uses_.push_back(std::move(event));
}

std::vector<EventPtr> PinnedBlock::uses() const {
  std::lock_guard lock(mutex_);
  return uses_;
}

PinnedPool::PinnedPool(std::shared_ptr<Runtime> runtime, std::size_t limit)
    : runtime_(std::move(runtime)) {
  set_limit(limit);
  process::mark_started();
}

PinnedPool::~PinnedPool() {
  // Blocks keep their pool, so none is live; what is retired may still be in use by a device.
  if (process::leaking()) return;
  Freed freed;
  collect_finished();
  uncache(stats_.cached, freed);
  give_to_system(freed);
}

std::size_t PinnedPool::size_class(std::size_t bytes) {
  if (bytes <= smallest_block) return smallest_block;
  if (bytes > (static_cast<std::size_t>(-1) >> 2)) {
    throw Error(ErrorKind::invalid_argument, "no block of " + std::to_string(bytes) + " bytes");
  }
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

std::size_t PinnedPool::limit() const {
  OrderLock lock(*runtime_, mutex_);
  return stats_.limit;
}

bool PinnedPool::has_room(std::size_t bytes, std::size_t count) const {
  const std::size_t capacity = size_class(bytes);
  OrderLock lock(*runtime_, mutex_);
  return stats_.live <= stats_.limit && count <= (stats_.limit - stats_.live) / capacity;
}

std::size_t PinnedPool::live() const {
  OrderLock lock(*runtime_, mutex_);
  return stats_.live;
}

void PinnedPool::set_limit(std::size_t limit) {
  if (limit < smallest_block) {
    throw Error(ErrorKind::invalid_argument, "a pool limit of " + std::to_string(limit) +
                                                 " bytes is below the smallest block (" +
                                                 std::to_string(smallest_block) + ")");
  }
  OrderLock lock(*runtime_, mutex_);
  stats_.limit = limit;
}

bool PinnedPool::finished(Retired& block) {
  std::erase_if(block.uses, [&](const EventPtr& use) { return use_finished(*runtime_, use); });
  return block.uses.empty();
}

void PinnedPool::collect_finished() {
  for (auto& entry : retired_) {
    const std::size_t capacity = entry.first;
    std::erase_if(entry.second, [&](Retired& block) {
      if (!finished(block)) return false;
      cached_[capacity].push_back(block.data);
      stats_.in_flight -= capacity;
      stats_.cached += capacity;
      return true;
    });
  }
}

std::byte* PinnedPool::take_ready(std::size_t capacity) {
  if (auto& blocks = cached_[capacity]; !blocks.empty()) {
    std::byte* data = blocks.back();
    blocks.pop_back();
    stats_.cached -= capacity;
    return data;
  }
  // One at a time: asking a device about every retired block would cost more than the block.
  auto& blocks = retired_[capacity];
  for (auto block = blocks.begin(); block != blocks.end(); ++block) {
    if (!finished(*block)) continue;
    std::byte* data = block->data;
    blocks.erase(block);
    stats_.in_flight -= capacity;
    return data;
  }
  return nullptr;
}

void PinnedPool::uncache(std::size_t bytes, Freed& out) {
  std::size_t found = 0;
  for (auto size = cached_.rbegin(); size != cached_.rend() && found < bytes; ++size) {
    auto& [capacity, blocks] = *size;
    while (!blocks.empty() && found < bytes) {
      out.emplace_back(blocks.back(), capacity);
      blocks.pop_back();
      found += capacity;
    }
  }
  stats_.cached -= found;
  leaving_ += found;
}

void PinnedPool::give_to_system(const Freed& freed) noexcept {
  std::size_t bytes = 0;
  for (auto [data, capacity] : freed) {
    runtime_->free_pinned(data, capacity);
    bytes += capacity;
  }
  OrderLock lock(*runtime_, mutex_);
  stats_.reserved -= bytes;
  leaving_ -= bytes;
}

std::unique_ptr<PinnedBlock> PinnedPool::try_allocate(std::size_t bytes) {
  process::require_usable();
  bytes = std::max<std::size_t>(bytes, 1);
  const std::size_t capacity = size_class(bytes);
  // Made before the lock is taken: nothing can fail once memory has changed hands.
  auto block = std::make_unique<PinnedBlock>(shared_from_this(), nullptr, capacity, bytes);
  LiveBlocks entry;
  entry.emplace(nullptr, block.get());
  Freed freed;
  bool reused = false;
  {
    OrderLock lock(*runtime_, mutex_);
    if (std::byte* data = take_ready(capacity)) {
      stats_.live += capacity;
      ++stats_.hits;
      hand_out(*block, data, entry);
      reused = true;
    }
  }
  if (reused) {
    runtime_->taken(block->data_, capacity);
    return block;
  }
  {
    OrderLock lock(*runtime_, mutex_);
    collect_finished();
    const std::size_t held = stats_.live;
    if (capacity > stats_.limit || held > stats_.limit - capacity) {
      throw PoolExhausted("the pinned pool cannot give " + std::to_string(bytes) + " bytes (" +
                              std::to_string(capacity) + " as a block): " + std::to_string(held) +
                              " of its " + std::to_string(stats_.limit) +
                              " bytes are held. Drop results, raise the limit "
                              "(STREAMLAP_PINNED_LIMIT), or pass out= or pin=False",
                          held, stats_.limit);
    }
    if (stats_.reserved > stats_.limit - capacity) {
      uncache(stats_.reserved - (stats_.limit - capacity), freed);
      std::size_t left = stats_.reserved;
      for (auto& piece : freed) left -= piece.second;
      if (left > stats_.limit - capacity) {
        // What is missing is in flight or being reserved by somebody else: the caller comes again.
        for (auto [data, size] : freed) {
          cached_[size].push_back(data);
          stats_.cached += size;
          leaving_ -= size;
        }
        return nullptr;
      }
    }
    // Claimed before the lock is let go, so that two threads cannot both take the last bytes. What
    // is about to be freed still counts until it is gone.
    stats_.reserved += capacity;
    stats_.live += capacity;
    ++stats_.misses;
  }
  give_to_system(freed);
  std::byte* data = nullptr;
  try {
    data = reserve(capacity);
  } catch (...) {
    OrderLock lock(*runtime_, mutex_);
    stats_.reserved -= capacity;
    stats_.live -= capacity;
    throw;
  }
  OrderLock lock(*runtime_, mutex_);
  stats_.peak = std::max(stats_.peak, stats_.reserved - leaving_);
  block->fresh_ = true;
  hand_out(*block, data, entry);
  return block;
}

std::byte* PinnedPool::reserve(std::size_t capacity) {
  try {
    return static_cast<std::byte*>(runtime_->alloc_pinned(capacity));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::out_of_memory || trim() == 0) throw;
    return static_cast<std::byte*>(runtime_->alloc_pinned(capacity));
  }
}

void PinnedPool::hand_out(PinnedBlock& block, std::byte* data, LiveBlocks& entry) noexcept {
  block.data_ = data;
  auto node = entry.extract(entry.begin());
  node.key() = data;
  live_.insert(std::move(node));
  stats_.waste += block.capacity_ - block.requested_;
  ++stats_.live_blocks;
}

void PinnedPool::take_back(PinnedBlock& block) noexcept {
  OrderLock lock(*runtime_, mutex_);
  live_.erase(block.data_);
  if (block.condemned_) return;  // held for ever: nobody waits for it to come home
  try {
    retired_[block.capacity_].push_back({block.data_, std::move(block.uses_)});
  } catch (...) {
    return;  // no memory to remember it by: as if condemned
  }
  stats_.live -= block.capacity_;
  stats_.waste -= block.capacity_ - block.requested_;
  --stats_.live_blocks;
  stats_.in_flight += block.capacity_;
}

PoolStats PinnedPool::stats() {
  OrderLock lock(*runtime_, mutex_);
  collect_finished();
  PoolStats now = stats_;
  now.reserved -= leaving_;
  return now;
}

std::size_t PinnedPool::trim() {
  process::require_usable();
  Freed freed;
  {
    OrderLock lock(*runtime_, mutex_);
    collect_finished();
    uncache(stats_.cached, freed);
  }
  give_to_system(freed);
  std::size_t bytes = 0;
  for (auto& entry : freed) bytes += entry.second;
  return bytes;
}

PinnedBlock* PinnedPool::find(const void* pointer) const {
  const auto* address = static_cast<const std::byte*>(pointer);
  auto next = live_.upper_bound(address);
  if (next == live_.begin()) return nullptr;
  const auto& [base, block] = *std::prev(next);
  return address < base + block->capacity() ? block : nullptr;
}

bool PinnedPool::record_use(const void* pointer, StreamRef stream) {
  OrderLock lock(*runtime_, mutex_);
  PinnedBlock* block = find(pointer);
  if (block == nullptr) return false;
  block->record_use(stream);
  return true;
}

std::vector<EventPtr> PinnedPool::uses(const void* pointer) const {
  OrderLock lock(*runtime_, mutex_);
  const PinnedBlock* block = find(pointer);
  return block == nullptr ? std::vector<EventPtr>{} : block->uses();
}

}  // namespace streamlap
