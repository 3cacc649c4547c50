// The plain calls of a logical CPU device.
#include <cstring>
#include <limits>

#include "device.h"
#include "machine.h"

namespace bench {
namespace {

constexpr streamlap::Site site{"bench.host"};

struct HostMark final : Mark {
  streamlap::EventPtr event;
};

const streamlap::Event& event_of(const Mark& mark) {
  return *static_cast<const HostMark&>(mark).event;
}

class HostDevice final : public Device {
 public:
  using Device::Device;

  void use_in_this_thread() override {}
  StreamRef stream() override { return runtime()->stream_create(index(), StreamKind::compute); }
  MarkPtr mark(bool timed) override {
    auto made = std::make_unique<HostMark>();
    made->event = runtime()->event_create(index(), timed);
    return made;
  }
  void record(Mark& mark, StreamRef stream) override {
    runtime()->event_record(*static_cast<HostMark&>(mark).event, stream, site);
  }
  void wait(StreamRef stream, const Mark& mark) override {
    runtime()->stream_wait(stream, event_of(mark), site);
  }
  double seconds(const Mark& begin, const Mark& end) override {
    return runtime()->event_elapsed(event_of(begin), event_of(end));
  }
  void copy(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
    runtime()->copy_async(dst, src, bytes, stream);
  }
  bool copy_batch(void**, const void**, std::size_t*, std::size_t, StreamRef) override {
    return false;
  }
  void sync(StreamRef stream) override { runtime()->stream_sync(stream, site); }
  void fill(void* memory, unsigned char value, std::size_t bytes) override {
    std::memset(memory, value, bytes);
  }
  std::size_t room() override { return host_room(); }
  void register_pages(void*, std::size_t) override {}
  void unregister_pages(void*) noexcept override {}
  bool page_locked(const void*) override { return true; }
};

}  // namespace

DevicePtr make_host_device(std::shared_ptr<Runtime> runtime, int index) {
  return std::make_unique<HostDevice>(std::move(runtime), index);
}

}  // namespace bench
