#include "transfer/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "base/process.h"
#include "runtime/order_lock.h"

namespace streamlap {
namespace {

constexpr Site site_use{"pool.record_use"};
constexpr Site site_keep_use{"pool.keep_use"};
constexpr Site site_forget_use{"pool.forget_finished_use"};
constexpr Site site_finished{"pool.reuse_when_finished"};
constexpr Site site_retire{"pool.retire_with_uses"};
constexpr Site site_condemned{"pool.keep_condemned"};
constexpr Site site_lock_uses{"pool.lock_uses"};
constexpr Site site_lock_limit{"pool.lock_limit"};
constexpr Site site_lock_room{"pool.lock_has_room"};
constexpr Site site_lock_live{"pool.lock_live"};
constexpr Site site_lock_set_limit{"pool.lock_set_limit"};
constexpr Site site_lock_gave{"pool.lock_gave_to_system"};
constexpr Site site_lock_claim{"pool.lock_claim"};
constexpr Site site_lock_unclaim{"pool.lock_unclaim"};
constexpr Site site_lock_hand_out{"pool.lock_hand_out"};
constexpr Site site_lock_take_back{"pool.lock_take_back"};
constexpr Site site_lock_stats{"pool.lock_stats"};
constexpr Site site_lock_trim{"pool.lock_trim"};
constexpr Site site_lock_find{"pool.lock_find_block"};
constexpr Site site_lock_find_uses{"pool.lock_find_uses"};
constexpr Site site_lock_read_uses{"pool.lock_read_uses"};

}  // namespace

PinnedBlock::~PinnedBlock() {
  if (piece_.data == nullptr || process::leaking()) return;
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
  OrderLock lock(*pool_->runtime(), mutex_, site_lock_uses);
  if (uses_.size() >= 64) {
    std::erase_if(uses_, [&](const EventPtr& use) {
      return pool_->runtime()->event_state(*use, site_forget_use) == EventState::passed;
    });
  }
  if (!dropped(site_keep_use)) uses_.push_back(std::move(event));
}

std::vector<EventPtr> PinnedBlock::uses() const {
  OrderLock lock(*pool_->runtime(), mutex_, site_lock_read_uses);
  return uses_;
}

PinnedPool::PinnedPool(std::shared_ptr<Runtime> runtime, std::size_t limit, std::size_t slab_bytes)
    : runtime_(std::move(runtime)), slab_bytes_(slab_bytes) {
  set_limit(limit);
  process::mark_started();
}

PinnedPool::~PinnedPool() {
  // Blocks keep their pool, so none is live; what is retired may still be in use by a device.
  if (process::leaking()) return;
  Freed freed;
  collect_finished();
  give_up(stats_.cached, freed);
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

// ---- the limit

std::size_t PinnedPool::limit() const {
  OrderLock lock(*runtime_, mutex_, site_lock_limit);
  return stats_.limit;
}

void PinnedPool::set_limit(std::size_t limit) {
  if (limit < smallest_block) {
    throw Error(ErrorKind::invalid_argument, "a pool limit of " + std::to_string(limit) +
                                                 " bytes is below the smallest block (" +
                                                 std::to_string(smallest_block) + ")");
  }
  OrderLock lock(*runtime_, mutex_, site_lock_set_limit);
  stats_.limit = limit;
}

std::size_t PinnedPool::live() const {
  OrderLock lock(*runtime_, mutex_, site_lock_live);
  return stats_.live;
}

bool PinnedPool::has_room(std::size_t bytes, std::size_t count) const {
  const std::size_t capacity = size_class(bytes);
  OrderLock lock(*runtime_, mutex_, site_lock_room);
  return fits(capacity, count);
}

bool PinnedPool::fits(std::size_t capacity, std::size_t count) const {
  const auto size = sizes_.find(capacity);
  const std::size_t spare = size == sizes_.end() ? 0 : size->second.spare();
  if (held_bytes_ > stats_.limit) return false;
  return count <= spare || count - spare <= (stats_.limit - held_bytes_) / capacity;
}

PoolExhausted PinnedPool::exhausted(const std::string& wanted) const {
  const std::string beside = held_bytes_ == stats_.live ? "" : ", with what lies beside them,";
  return PoolExhausted("the pinned pool cannot give " + wanted + ": " +
                           std::to_string(held_bytes_) + " of its " + std::to_string(stats_.limit) +
                           " bytes are held" + beside +
                           ". Drop results, raise the limit "
                           "(STREAMLAP_PINNED_LIMIT), or pass out= or pin=False",
                       held_bytes_, stats_.limit);
}

bool PinnedPool::make_room(std::size_t bytes, Freed& out, const SizeClass* kept) noexcept {
  if (bytes > stats_.limit) return false;
  const std::size_t most = stats_.limit - bytes;
  if (stats_.reserved <= most) return true;
  std::size_t empty = 0;
  for (const auto& [capacity, size] : sizes_) empty += &size == kept ? 0 : size.empty_bytes();
  if (stats_.reserved - empty > most) return false;
  give_up(stats_.reserved - most, out, kept);
  return true;
}

std::size_t PinnedPool::give_up(std::size_t bytes, Freed& out, const SizeClass* kept) noexcept {
  std::size_t found = 0;
  for (auto size = sizes_.rbegin(); size != sizes_.rend() && found < bytes; ++size) {
    if (&size->second != kept) found += size->second.give_up(bytes - found, out);
  }
  stats_.cached -= found;
  leaving_ += found;
  return found;
}

void PinnedPool::give_to_system(const Freed& freed) noexcept {
  if (freed.empty()) return;
  std::size_t bytes = 0;
  for (const Slab& slab : freed) {
    runtime_->free_pinned(slab.data, slab.bytes);
    bytes += slab.bytes;
  }
  OrderLock lock(*runtime_, mutex_, site_lock_gave);
  stats_.reserved -= bytes;
  leaving_ -= bytes;
}

// ---- growth

SizeClass& PinnedPool::size_of(std::size_t capacity) {
  return sizes_.try_emplace(capacity, capacity).first->second;
}

std::size_t PinnedPool::slab_blocks(const SizeClass& size, std::size_t wanted) const noexcept {
  if (size.capacity() >= carved_below) return 1;
  // A small pool must not be used up by slabs of sizes that are asked for once.
  const std::size_t most = std::min(slab_bytes_, stats_.limit / 64) / size.capacity();
  return std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(most, 1));
}

// Claimed before the lock is let go, so that two threads cannot both take the last bytes.
PinnedPool::Claim PinnedPool::claim(SizeClass& size, std::size_t count) {
  Claim claimed{&size, count, count * size.capacity(), size.prepare(count)};
  stats_.reserved += claimed.bytes;
  stats_.growing += claimed.bytes;
  return claimed;
}

void PinnedPool::unclaim(const Claim& claimed) noexcept {
  claimed.size->abandon(claimed.count);
  stats_.reserved -= claimed.bytes;
  stats_.growing -= claimed.bytes;
}

void PinnedPool::settle(Claim& claimed, std::byte* data) noexcept {
  claimed.size->add(data, claimed.count, std::move(claimed.prepared));
  stats_.growing -= claimed.bytes;
  stats_.cached += claimed.bytes;
  stats_.peak = std::max(stats_.peak, stats_.reserved - leaving_);
}

std::byte* PinnedPool::reserve(std::size_t bytes) {
  try {
    return static_cast<std::byte*>(runtime_->alloc_pinned(bytes));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::out_of_memory || trim() == 0) throw;
    return static_cast<std::byte*>(runtime_->alloc_pinned(bytes));
  }
}

// ---- blocks

bool PinnedPool::finished(Retired& block) noexcept {
  std::erase_if(block.uses, [&](const EventPtr& use) {
    const EventState state = runtime_->event_state(*use, site_finished);
    if (state == EventState::lost) lost_ = true;
    return state == EventState::passed;
  });
  return block.uses.empty();
}

void PinnedPool::collect_finished() {
  for (auto& [capacity, size] : sizes_) {
    std::erase_if(size.retired, [&](Retired& block) {
      if (!finished(block)) return false;
      size.put_back(block.piece);
      stats_.in_flight -= capacity;
      stats_.cached += capacity;
      return true;
    });
  }
}

Piece PinnedPool::take_ready(SizeClass& size) {
  if (const Piece piece = size.take(); piece.data != nullptr) {
    stats_.cached -= size.capacity();
    return piece;
  }
  // One at a time: asking a device about every retired block would cost more than the block.
  for (auto block = size.retired.begin(); block != size.retired.end(); ++block) {
    if (!finished(*block)) continue;
    const Piece piece = block->piece;
    size.retired.erase(block);
    stats_.in_flight -= size.capacity();
    return piece;
  }
  return {};
}

std::shared_ptr<PinnedBlock> PinnedPool::try_allocate(std::size_t bytes) {
  process::require_usable();
  bytes = std::max<std::size_t>(bytes, 1);
  const std::size_t capacity = size_class(bytes);
  // Made before the lock is taken: nothing can fail once memory has changed hands.
  auto block = std::make_shared<PinnedBlock>(shared_from_this(), capacity, bytes);
  LiveBlocks entry;
  entry.emplace(nullptr, block.get());
  Freed freed;
  std::optional<Claim> claimed;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_claim);
    SizeClass& size = size_of(capacity);
    if (const Piece piece = take_ready(size); piece.data != nullptr) {
      ++stats_.hits;
      hand_out(*block, size, piece, entry);
    } else {
      if (size.promised > 0) return nullptr;
      collect_finished();
      if (capacity > stats_.limit ||
          (held_bytes_ > stats_.limit - capacity && size.retired.empty())) {
        throw exhausted(std::to_string(bytes) + " bytes (" + std::to_string(capacity) +
                        " as a block)");
      }
      // What is missing is in flight or being reserved by somebody else: the caller comes again.
      if (!make_room(capacity, freed)) {
        if (lost_) {
          throw Error(ErrorKind::sticky,
                      "the pinned pool waits for blocks in use by a device whose context is lost: "
                      "restart the process");
        }
        return nullptr;
      }
      // As many again as there are: few calls for many blocks, and few blocks idle.
      std::size_t room = stats_.limit - stats_.reserved;
      for (const Slab& slab : freed) room += slab.bytes;
      claimed = claim(size, std::min(slab_blocks(size, size.blocks()), room / capacity));
      ++stats_.misses;
    }
  }
  if (!claimed) {
    runtime_->taken(block->data(), capacity);
    return block;
  }
  give_to_system(freed);
  std::byte* data = nullptr;
  try {
    data = reserve(claimed->bytes);
  } catch (...) {
    OrderLock lock(*runtime_, mutex_, site_lock_unclaim);
    unclaim(*claimed);
    throw;
  }
  OrderLock lock(*runtime_, mutex_, site_lock_hand_out);
  settle(*claimed, data);
  block->fresh_ = true;
  hand_out(*block, *claimed->size, take_ready(*claimed->size), entry);
  return block;
}

void PinnedPool::hand_out(PinnedBlock& block, SizeClass& size, Piece piece,
                          LiveBlocks& entry) noexcept {
  block.piece_ = piece;
  auto node = entry.extract(entry.begin());
  node.key() = piece.data;
  live_.insert(std::move(node));
  held_bytes_ += size.hold(piece);
  stats_.live += block.capacity_;
  stats_.waste += block.capacity_ - block.requested_;
  ++stats_.live_blocks;
}

void PinnedPool::take_back(PinnedBlock& block) noexcept {
  OrderLock lock(*runtime_, mutex_, site_lock_take_back);
  live_.erase(block.piece_.data);
  if (block.condemned_ && !dropped(site_condemned)) {
    return;  // held for ever: nobody waits for it to come home
  }
  SizeClass& size = sizes_.find(block.capacity_)->second;
  if (block.uses_.empty() || dropped(site_retire)) {
    size.put_back(block.piece_);
    stats_.cached += block.capacity_;
  } else {
    try {
      size.retired.push_back({block.piece_, std::move(block.uses_)});
    } catch (...) {
      return;  // no memory to remember it by: as if condemned
    }
    stats_.in_flight += block.capacity_;
  }
  held_bytes_ -= size.let_go(block.piece_);
  stats_.live -= block.capacity_;
  stats_.waste -= block.capacity_ - block.requested_;
  --stats_.live_blocks;
}

PoolStats PinnedPool::stats() {
  OrderLock lock(*runtime_, mutex_, site_lock_stats);
  collect_finished();
  PoolStats now = stats_;
  now.reserved -= leaving_;
  for (const auto& entry : sizes_) now.slabs += entry.second.slabs();
  return now;
}

std::size_t PinnedPool::trim() {
  process::require_usable();
  Freed freed;
  std::size_t bytes = 0;
  {
    OrderLock lock(*runtime_, mutex_, site_lock_trim);
    collect_finished();
    bytes = give_up(stats_.cached, freed);
  }
  give_to_system(freed);
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
  OrderLock lock(*runtime_, mutex_, site_lock_find);
  PinnedBlock* block = find(pointer);
  if (block == nullptr) return false;
  block->record_use(stream);
  return true;
}

std::shared_ptr<PinnedBlock> PinnedPool::around(const void* pointer) const {
  OrderLock lock(*runtime_, mutex_, site_lock_find_uses);
  PinnedBlock* block = find(pointer);
  return block == nullptr ? nullptr : block->weak_from_this().lock();
}

std::vector<EventPtr> PinnedPool::uses(const void* pointer) const {
  OrderLock lock(*runtime_, mutex_, site_lock_find_uses);
  const PinnedBlock* block = find(pointer);
  return block == nullptr ? std::vector<EventPtr>{} : block->uses();
}

}  // namespace streamlap
