// What Python holds of a transfer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/process.h"
#include "bindings/py_block.h"
#include "bindings/torch_tensor.h"
#include "bindings/types.h"
#include "bindings/watch.h"

namespace streamlap::bindings {

// Hands a transfer that is still in flight to the engine when Python lets go of it.
class PyTransfer {
 public:
  PyTransfer(std::shared_ptr<CopyEngine> engine, std::shared_ptr<Transfer> transfer)
      : engine_(std::move(engine)), transfer_(std::move(transfer)) {}
  PyTransfer(const PyTransfer&) = delete;
  PyTransfer& operator=(const PyTransfer&) = delete;
  ~PyTransfer() {
    if (process::leaking()) {
      new std::shared_ptr<Transfer>(std::move(transfer_));
    } else {
      discard();
    }
  }

  // Lets go of the transfer, and with it of the error it may hold: what Python makes of that error
  // can lead back here, a circle that no garbage collector sees.
  void discard() {
    std::shared_ptr<Transfer> transfer = std::move(transfer_);
    if (!transfer) return;
    transfer->let_go();
    if (open_) {
      engine_->cut_off(*transfer, *open_);  // its last steps may be under way, or not
    } else if (transfer->ended()) {
      return;
    }
    try {
      // The last user of what it holds may be a stream of this thread; nobody will ask it later.
      for (const PyStream& stream : current_streams(engine_->runtime())) {
        transfer->also_after(stream.ref);
      }
    } catch (...) {
      transfer->keep_for_ever();
    }
    Watch::instance().abandon(engine_, std::move(transfer));
  }

  void set_open(StreamRef copy_stream) { open_ = copy_stream; }
  void set_complete() { open_.reset(); }

  // The memory that it fills, with what a tensor there is like, for whoever asks first. Nobody, and
  // it goes with the transfer. `dims`: the sizes, then the strides.
  void give_block(std::unique_ptr<PyBlock> block, dlpack::DataType dtype,
                  std::vector<std::int64_t> dims) {
    block_ = std::move(block);
    dtype_ = dtype;
    dims_ = std::move(dims);
  }
  // That tensor. After an error it can be asked for again.
  py::object take_result() {
    if (block_) {
      data_ = block_->block()->data();
      owner_ = share(py::cast(std::move(block_)));
    }
    if (!owner_) throw Error(ErrorKind::runtime, "the result was taken before");
    const auto ndim = static_cast<std::int32_t>(dims_.size() / 2);
    const dlpack::Tensor lies{data_,        {dlpack::cpu, 0},    ndim, dtype_,
                              dims_.data(), dims_.data() + ndim, 0};
    py::object made = new_tensor(lies, owner_);
    owner_.reset();
    return made;
  }

  // A reference of the caller's own: it may use it without the interpreter's lock.
  std::shared_ptr<Transfer> get() const {
    process::require_usable();
    if (!transfer_)
      throw Error(ErrorKind::runtime, "the transfer failed, which was reported before");
    return transfer_;
  }

 private:
  std::shared_ptr<CopyEngine> engine_;
  std::shared_ptr<Transfer> transfer_;
  std::unique_ptr<PyBlock> block_;
  SharedObject owner_;  // of what was the block's, once a result was asked for in vain
  void* data_ = nullptr;
  dlpack::DataType dtype_{};
  std::vector<std::int64_t> dims_;
  std::optional<StreamRef> open_;  // open-ended and not complete: the stream its last steps are on
};

}  // namespace streamlap::bindings
