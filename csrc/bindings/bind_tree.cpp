// Plans for trees of tensors, and the call that starts their moves.
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/py_transfer.h"
#include "bindings/tensor_row.h"
#include "bindings/types.h"
#include "bindings/watch.h"
#include "transfer/stripes.h"
#include "transfer/tree_plan.h"

namespace streamlap::bindings {
namespace {

using moves::Element;
using moves::Way;

Element element_named(const std::string& name) {
  for (Element element : {Element::bytes, Element::float32, Element::float16, Element::bfloat16}) {
    if (name == moves::name_of(element)) return element;
  }
  throw Error(ErrorKind::invalid_argument, "a move knows no elements '" + name + "'");
}

// The bytes of an element, sizes, and strides in bytes.
using PyLayout = std::tuple<std::uint32_t, std::vector<std::uint64_t>, std::vector<std::int64_t>>;
using PyLeaf = std::tuple<std::string, std::string, std::size_t, std::optional<PyLayout>>;

moves::Layout layout_of(const PyLayout& given) {
  const auto& [element_bytes, sizes, strides] = given;
  if (sizes.size() != strides.size() || sizes.size() > moves::most_dims) {
    throw Error(ErrorKind::invalid_argument, "a layout has a stride for each size, and at most " +
                                                 std::to_string(moves::most_dims) + " of them");
  }
  moves::Layout layout;
  layout.dims = static_cast<std::uint32_t>(sizes.size());
  layout.element_bytes = element_bytes;
  std::copy(sizes.begin(), sizes.end(), layout.sizes);
  std::copy(strides.begin(), strides.end(), layout.strides);
  return layout;
}

std::shared_ptr<TreePlan> make_plan(const std::vector<PyLeaf>& leaves, bool gathers,
                                    std::size_t align, std::vector<std::size_t> offsets,
                                    std::size_t range_bytes, std::optional<float> scale,
                                    bool counts, unsigned blocks, unsigned threads) {
  std::vector<TreeLeaf> made;
  made.reserve(leaves.size());
  for (const auto& [from, to, count, layout] : leaves) {
    made.push_back({element_named(from), element_named(to), count});
    if (layout) made.back().layout = layout_of(*layout);
  }
  TreeOptions options;
  options.way = gathers ? Way::gather : Way::scatter;
  options.align = align;
  options.offsets = std::move(offsets);
  options.range_bytes = range_bytes;
  options.change = {scale.value_or(1.0f), scale.has_value(), counts};
  options.grid = {blocks, threads};
  return std::make_shared<TreePlan>(std::move(made), std::move(options));
}

// What a move calls the elements of a dtype; none where it knows them as bytes only.
std::optional<Element> element_of(const dlpack::DataType& dtype) {
  if (dtype.code == dlpack::code_float && dtype.bits == 32) return Element::float32;
  if (dtype.code == dlpack::code_float && dtype.bits == 16) return Element::float16;
  if (dtype.code == dlpack::code_bfloat && dtype.bits == 16) return Element::bfloat16;
  return std::nullopt;
}

// A plan between the tensors of `far`, all dense, and one range, with the dtypes of `near` where
// that is given: those of `far`, or such as a move casts between. Where `near` has addresses,
// the range is the one around them.
std::shared_ptr<TreePlan> make_plan_of_rows(const TensorRow& far, const TensorRow* near,
                                            bool gathers, unsigned blocks, unsigned cast_blocks,
                                            unsigned threads) {
  std::vector<TreeLeaf> leaves;
  leaves.reserve(far.size());
  TreeOptions options;
  options.way = gathers ? Way::gather : Way::scatter;
  bool casts = false;
  if (near != nullptr && near->size() != far.size()) {
    throw Error(ErrorKind::invalid_argument, "rows of different lengths");
  }
  for (std::size_t leaf = 0; leaf < far.size(); ++leaf) {
    if (near != nullptr && near->count(leaf) != far.count(leaf)) {
      throw Error(ErrorKind::invalid_argument, "rows of different tensors");
    }
    leaves.push_back({Element::bytes, Element::bytes, far.bytes(leaf)});
    if (near == nullptr || near->dtype(leaf) == far.dtype(leaf)) continue;
    const auto from = element_of((gathers ? far : *near).dtype(leaf));
    const auto to = element_of((gathers ? *near : far).dtype(leaf));
    if (!from || !to) throw Error(ErrorKind::invalid_argument, "no move casts these dtypes");
    leaves.back() = {*from, *to, far.count(leaf)};
    casts = true;
  }
  if (near != nullptr && !near->addresses()->empty()) {
    const auto [begin, bytes] = near->around();
    options.range_bytes = bytes;
    for (std::size_t leaf = 0; leaf < near->size(); ++leaf) {
      options.offsets.push_back(near->bytes(leaf) == 0 ? 0 : near->addresses()->at(leaf) - begin);
    }
  }
  options.grid = {casts ? cast_blocks : blocks, threads};
  return std::make_shared<TreePlan>(std::move(leaves), std::move(options));
}

// Does a gather at once, in this thread, into memory that only it knows of.
void gather_now(const TreePlan& plan, const Addresses& addresses, std::uintptr_t base) {
  std::vector<void*> far;
  far.reserve(addresses.size());
  for (std::uintptr_t address : addresses) far.push_back(reinterpret_cast<void*>(address));
  GilRelease released;
  for (const moves::MovePtr& move : plan.bind(far, reinterpret_cast<void*>(base), nullptr)) {
    moves::run(*move);
  }
}

// What one plan moves this time: the plan, an address a leaf, that of the range, and that of the
// counts (0 if it does not count).
using PyMove = std::tuple<std::shared_ptr<TreePlan>, std::shared_ptr<Addresses>, std::uintptr_t,
                          std::uintptr_t>;

// Device memory of the size of a gather's range, through which it goes, the blocks that pack, and
// the bytes of the longest copy.
using PyScratch = std::tuple<std::uintptr_t, unsigned, std::size_t>;

void add_to(TransferRequest& request, const PyMove& given, std::optional<float> scale,
            const std::optional<PyScratch>& scratch) {
  const auto& [plan, addresses, base_address, counts] = given;
  auto* base = reinterpret_cast<std::byte*>(base_address);
  std::vector<void*> far;
  far.reserve(addresses->size());
  for (std::uintptr_t address : *addresses) far.push_back(reinterpret_cast<void*>(address));
  if (scratch && base == nullptr) {
    throw Error(ErrorKind::invalid_argument, "a move to memory that was freed");
  }
  void* range = scratch ? reinterpret_cast<void*>(std::get<0>(*scratch)) : base;
  for (auto& move : plan->bind(far, range, reinterpret_cast<std::uint64_t*>(counts), scale)) {
    if (scratch) {
      Stripes stripes = stripes_of(*move, base, std::get<1>(*scratch));
      std::move(stripes.moves.begin(), stripes.moves.end(), std::back_inserter(request.moves));
      request.landings.insert(request.landings.end(), stripes.landings.begin(),
                              stripes.landings.end());
    } else {
      request.moves.push_back(std::move(move));
    }
  }
  const bool gathers = plan->options().way == Way::gather;
  for (std::size_t leaf = 0; leaf < plan->size(); ++leaf) {
    void* near = base + plan->offsets()[leaf];
    request.items.push_back({gathers ? near : far[leaf], gathers ? far[leaf] : near,
                             gathers ? plan->near_bytes(leaf) : plan->far_bytes(leaf), 1, nullptr});
  }
}

TransferRequest request_for(const CopyEngine& engine, int device, bool to_device,
                            const std::vector<const PyStream*>& after,
                            const py::object& keep_source, const py::object& keep_destination) {
  TransferRequest request;
  request.device = device;
  request.direction = to_device ? Direction::to_device : Direction::to_host;
  request.after = streams_of(engine, after);
  request.keep_source = share(keep_source);
  request.keep_destination = share(keep_destination);
  return request;
}

// Without the interpreter's lock: lets `fill` say what is moved, and starts it.
template <class Fill>
std::unique_ptr<PyTransfer> submitted(const std::shared_ptr<CopyEngine>& engine,
                                      TransferRequest request, Fill&& fill) {
  std::shared_ptr<Transfer> transfer;
  {
    GilRelease released;
    fill(request);
    try {
      transfer = engine->submit(std::move(request));
    } catch (...) {
      Watch::instance().look_after(engine);  // it may hold what was issued before it failed
      throw;
    }
  }
  return std::make_unique<PyTransfer>(engine, std::move(transfer));
}

std::unique_ptr<PyTransfer> submit_moves(const std::shared_ptr<CopyEngine>& engine, int device,
                                         bool to_device, const std::vector<PyMove>& given,
                                         const std::vector<const PyStream*>& after,
                                         std::optional<float> scale, const py::object& keep_source,
                                         const py::object& keep_destination, bool timed,
                                         bool traced, const std::optional<PyScratch>& scratch) {
  if (scratch && (given.size() != 1 || std::get<0>(given[0])->move_count() != 1)) {
    throw Error(ErrorKind::invalid_argument, "one move goes through scratch memory at a time");
  }
  TransferRequest request =
      request_for(*engine, device, to_device, after, keep_source, keep_destination);
  request.timed = timed;
  request.traced = traced;
  if (scratch) request.policy.chunk_bytes = std::get<2>(*scratch);
  return submitted(engine, std::move(request), [&](TransferRequest& filled) {
    for (const PyMove& move : given) add_to(filled, move, scale, scratch);
  });
}

// The sums of a checksum, one for each block, as a transfer of its own.
std::unique_ptr<PyTransfer> submit_checksum(const std::shared_ptr<CopyEngine>& engine, int device,
                                            std::uintptr_t data, std::size_t bytes,
                                            std::uintptr_t sums, unsigned blocks, unsigned threads,
                                            const std::vector<const PyStream*>& after,
                                            const py::object& keep_source,
                                            const py::object& keep_destination) {
  TransferRequest request =
      request_for(*engine, device, false, after, keep_source, keep_destination);
  return submitted(engine, std::move(request), [&](TransferRequest& filled) {
    auto move = std::make_shared<moves::Move>();
    move->way = Way::checksum;
    move->pieces.push_back({reinterpret_cast<std::byte*>(data), 0, bytes, 0, 0});
    move->counts = reinterpret_cast<std::uint64_t*>(sums);
    move->grid = {blocks, threads};
    moves::number_tiles(*move);
    moves::check(*move);
    filled.items.push_back({move->counts, move->pieces[0].far, blocks * sizeof(std::uint64_t),
                            sizeof(std::uint64_t), nullptr});
    filled.moves.push_back(std::move(move));
  });
}

}  // namespace

void bind_tree(py::module_& module) {
  py::class_<TreePlan, std::shared_ptr<TreePlan>>(module, "TreePlan")
      .def(py::init(&make_plan), py::arg("leaves"), py::kw_only(), py::arg("gathers") = true,
           py::arg("align") = 256, py::arg("offsets") = std::vector<std::size_t>(),
           py::arg("range_bytes") = 0, py::arg("scale") = py::none(), py::arg("counts") = false,
           py::arg("blocks") = 4, py::arg("threads") = 512)
      .def_static("of_rows", &make_plan_of_rows, py::arg("far"), py::arg("near").none(true),
                  py::arg("gathers"), py::arg("blocks"), py::arg("cast_blocks"), py::arg("threads"))
      .def_property_readonly("offsets", &TreePlan::offsets)
      .def_property_readonly("range_bytes", &TreePlan::range_bytes)
      .def_property_readonly("counts", &TreePlan::counts)
      .def_property_readonly("move_count", &TreePlan::move_count);
  module.def("gather_now", &gather_now);
  module.def("submit_checksum", &submit_checksum, py::arg("engine"), py::kw_only(),
             py::arg("device"), py::arg("data"), py::arg("nbytes"), py::arg("sums"),
             py::arg("blocks"), py::arg("threads"), py::arg("after"), py::arg("keep_source"),
             py::arg("keep_destination"));
  module.def("checksum_of",
             [](std::uint64_t sum, std::uint64_t bytes) { return moves::checksum_of(sum, bytes); });
  module.def("submit_moves", &submit_moves, py::arg("engine"), py::kw_only(), py::arg("device"),
             py::arg("to_device"), py::arg("moves"), py::arg("after"),
             py::arg("scale") = py::none(), py::arg("keep_source"), py::arg("keep_destination"),
             py::arg("timed") = true, py::arg("traced") = false, py::arg("scratch") = py::none());
}

}  // namespace streamlap::bindings
