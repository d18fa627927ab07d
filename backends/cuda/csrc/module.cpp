// What Python sees of the extension; the contract of each name is in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>

#include <optional>

#include "host_driver.hpp"
#include "page_pool.hpp"
#include "sm_partitions.hpp"
#include "tensor_space.hpp"
#include "torch_entry.hpp"
#ifdef HARLI_WITH_CUDA
#include "cuda_driver.hpp"
#endif

namespace nb = nanobind;
using namespace harli;
using namespace nb::literals;

namespace {

Call call_of(const std::string& name) {
    for (size_t at = 0; at < call_names.size(); ++at) {
        if (call_names[at] == name) return static_cast<Call>(at);
    }
    throw ConfigError("no driver call is named " + name);
}

std::string extension_file() {
    Dl_info found{};
    if (dladdr(reinterpret_cast<void*>(&harli_torch_malloc), &found) == 0) throw StateError("the extension has no path");
    return found.dli_fname;
}

nb::dict latency_dict(const Latency& it) {
    nb::dict out;
    out["count"] = it.count;
    out["min_ns"] = it.count > 0 ? nb::cast(it.min_ns) : nb::none();
    out["mean_ns"] = it.count > 0 ? nb::cast(static_cast<double>(it.total_ns) / static_cast<double>(it.count)) : nb::none();
    out["max_ns"] = it.count > 0 ? nb::cast(it.max_ns) : nb::none();
    return out;
}

nb::dict pool_dict(const PoolStats& it) {
    nb::dict out;
    out["rows_committed"] = it.rows_committed;
    out["rows_lent"] = it.rows_lent;
    out["rows_stranded"] = it.rows_stranded;
    out["physical_bytes"] = it.physical_bytes;
    out["lend"] = latency_dict(it.lend);
    out["return"] = latency_dict(it.give_back);
    return out;
}

nb::dict space_dict(const SpaceStats& it) {
    nb::dict out;
    out["rows"] = it.rows;
    out["live"] = it.live;
    out["requested_bytes"] = it.requested_bytes;
    out["used_bytes"] = it.used_bytes;
    out["free_bytes"] = it.free_bytes;
    out["pending_bytes"] = it.pending_bytes;
    out["cut_up_free_bytes"] = it.cut_up_free_bytes;
    out["fragmentation_bytes"] = it.fragmentation_bytes;
    out["largest_allocatable_bytes"] = it.largest_allocatable_bytes;
    out["refused"] = it.refused;
    out["allocate"] = latency_dict(it.allocate);
    out["free"] = latency_dict(it.free);
    return out;
}

// The Python classes that C++ errors become; they live in harli_core.errors.
template <typename Error>
void translate(const char* python_name) {
    nb::register_exception_translator(
        [](const std::exception_ptr& raised, void* name) {
            try {
                std::rethrow_exception(raised);
            } catch (const Error& error) {
                const nb::object type = nb::module_::import_("harli_core.errors").attr(static_cast<const char*>(name));
                PyErr_SetString(type.ptr(), error.what());
            }
        },
        const_cast<char*>(python_name));
}

void bind_driver(nb::module_& m) {
    nb::class_<Driver>(m, "Driver")
        .def_prop_ro("name", &Driver::name)
        .def_prop_ro("fresh_memory_is_zero", &Driver::fresh_memory_is_zero)
        .def_prop_ro("granularity", &Driver::granularity)
        .def("reserve", &Driver::reserve, "size_bytes"_a, "alignment"_a = 0)
        .def("create", &Driver::create, "size_bytes"_a)
        .def("map", &Driver::map, "address"_a, "size_bytes"_a, "handle"_a)
        .def("set_access", &Driver::set_access, "address"_a, "size_bytes"_a)
        .def("unmap", &Driver::unmap, "address"_a, "size_bytes"_a)
        .def("release", &Driver::release, "handle"_a)
        .def("free", &Driver::free, "address"_a, "size_bytes"_a)
        .def("create_event", &Driver::create_event)
        .def("record", &Driver::record, "event"_a, "stream"_a)
        .def("query", &Driver::query, "event"_a)
        .def("destroy", &Driver::destroy, "event"_a)
        .def("fill", &Driver::fill, "address"_a, "pattern"_a, "size_bytes"_a, "stream"_a = 0)
        .def("copy", &Driver::copy, "to"_a, "source"_a, "size_bytes"_a, "stream"_a = 0)
        .def("calls", [](Driver& it, const std::string& call) { return it.ledger().made(call_of(call)); }, "call"_a)
        .def("fail",
             [](Driver& it, const std::string& call, int64_t nth, int64_t times) { it.ledger().fail(call_of(call), nth, times); },
             "call"_a, "nth"_a = 0, "times"_a = 1)
        .def("stall", [](Driver& it, const std::string& call) { it.ledger().stall(call_of(call)); }, "call"_a)
        .def_prop_ro("stalled", [](const Driver& it) { return it.ledger().stalled(); })
        .def("go_on", [](Driver& it) { it.ledger().go_on(); })
        .def("clear_faults", [](Driver& it) { it.ledger().clear_faults(); });

    nb::class_<HostDriver, Driver>(m, "HostDriver")
        .def(nb::init<size_t>(), "granularity"_a = size_t{2} << 20)
        .def("submit", [](HostDriver& it, Stream stream) { it.streams().submit(stream, [] {}); }, "stream"_a)
        .def("hold", [](HostDriver& it, Stream stream) { it.streams().hold(stream); }, "stream"_a)
        .def("complete", [](HostDriver& it, Stream stream, uint64_t pieces) { it.streams().complete(stream, pieces); },
             "stream"_a, "pieces"_a)
        .def("let_go", [](HostDriver& it, Stream stream) { it.streams().let_go(stream); }, "stream"_a)
        .def("outstanding", [](HostDriver& it, Stream stream) { return it.streams().outstanding(stream); }, "stream"_a)
        .def("use", [](const HostDriver& it) {
            const HostUse use = it.use();
            return nb::make_tuple(use.reservations, use.handles, use.mappings, use.events);
        });

#ifdef HARLI_WITH_CUDA
    nb::class_<CudaDriver, Driver>(m, "CudaDriver")
        .def(nb::init<int>(), "device"_a = 0)
        .def_prop_ro("device", &CudaDriver::device)
        .def_prop_ro("driver_version", &CudaDriver::driver_version);
    m.attr("with_cuda") = true;
#else
    m.attr("with_cuda") = false;
#endif
}

// Driver calls can take milliseconds, and so can waiting for the mutex of a pool that makes them: other Python threads
// run meanwhile.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

template <typename Stats>
Stats unlocked(const auto& it) {
    const nb::gil_scoped_release released;
    return it.stats();
}

void bind_pool(nb::module_& m) {
    nb::class_<PagePool>(m, "PagePool")
        .def("__init__",
             [](PagePool* self, std::shared_ptr<Driver> driver, uint64_t rows, uint64_t columns, uint64_t block_bytes, bool alias) {
                 new (self) PagePool(std::move(driver), Grid::checked(rows, columns, block_bytes),
                                     alias ? Lending::alias : Lending::remap);
             },
             "driver"_a, "rows"_a, "columns"_a, "block_bytes"_a, "alias"_a)
        .def_prop_ro("rows", [](const PagePool& it) { return it.grid().rows; })
        .def_prop_ro("columns", [](const PagePool& it) { return it.grid().columns; })
        .def_prop_ro("block_bytes", [](const PagePool& it) { return it.grid().block_bytes; })
        .def_prop_ro("alias", [](const PagePool& it) { return it.lending() == Lending::alias; })
        .def("create_blocks", &PagePool::create_blocks, Unlocked())
        .def("commit_row", &PagePool::commit_row, "row"_a, "pattern"_a.none() = nb::none(), "stream"_a = 0, Unlocked())
        .def("lend_row", &PagePool::lend_row, "row"_a, Unlocked())
        .def("scrub_row", [](PagePool& it, uint32_t row, uint16_t pattern, Stream stream) { it.scrub_row(row, pattern, stream); },
             "row"_a, "pattern"_a, "stream"_a, Unlocked())
        .def("return_row", &PagePool::return_row, "row"_a, "pattern"_a.none(), "stream"_a, Unlocked())
        .def("release", &PagePool::release, Unlocked())
        .def("kv_address", &PagePool::kv_address, "column"_a, "row"_a)
        .def("general_address", &PagePool::general_address, "row"_a, "column"_a)
        .def("is_lent", &PagePool::is_lent, "row"_a, Unlocked())
        .def("stats", [](const PagePool& it) { return pool_dict(unlocked<PoolStats>(it)); })
        .def("check_integrity", &PagePool::check_integrity, Unlocked());
}

// What a finetune iteration calls thousands of times keeps Python's lock, since it takes less time than giving it up;
// unless another thread is in the space, perhaps behind the driver.
template <typename Space, typename Result, typename... Arguments>
auto brief(Result (Space::*method)(Arguments...)) {
    return [method](TensorSpace& it, Arguments... arguments) {
        std::optional<nb::gil_scoped_release> released;
        if (it.busy()) released.emplace();
        return (it.*method)(arguments...);
    };
}

template <typename Space, typename Result, typename... Arguments>
auto brief(Result (Space::*method)(Arguments...) const) {
    return [method](const TensorSpace& it, Arguments... arguments) {
        std::optional<nb::gil_scoped_release> released;
        if (it.busy()) released.emplace();
        return (it.*method)(arguments...);
    };
}

void bind_space(nb::module_& m) {
    nb::class_<TensorSpace>(m, "TensorSpace")
        .def(nb::init<std::shared_ptr<PagePool>, size_t>(), "pool"_a, "granule_bytes"_a = 2048)
        .def("allocate", brief(&TensorSpace::allocate), "size_bytes"_a, "stream"_a = 0)
        .def("free", brief(&TensorSpace::free), "address"_a, "stream"_a = 0)
        .def("record_use", brief(&TensorSpace::record_use), "address"_a, "stream"_a)
        .def("poll", brief(&TensorSpace::poll))
        .def("add_row", &TensorSpace::add_row, "row"_a, Unlocked())
        .def("close_row", brief(&TensorSpace::close_row), "row"_a)
        .def("open_row", &TensorSpace::open_row, "row"_a, Unlocked())
        .def("scrub_row", &TensorSpace::scrub_row, "row"_a, "pattern"_a, "stream"_a, Unlocked())
        .def("remove_row", &TensorSpace::remove_row, "row"_a, Unlocked())
        .def("holds_row", brief(&TensorSpace::holds_row), "row"_a)
        .def("rows", brief(&TensorSpace::rows))
        .def("rows_open", brief(&TensorSpace::rows_open))
        .def("rows_empty", brief(&TensorSpace::rows_empty))
        .def("rows_idle", brief(&TensorSpace::rows_idle))
        .def("lowest_idle_rows", brief(&TensorSpace::lowest_idle_rows), "count"_a)
        .def("row_empty", brief(&TensorSpace::row_empty), "row"_a)
        .def("row_open", brief(&TensorSpace::row_open), "row"_a)
        .def("owns", &TensorSpace::owns, "address"_a)
        .def("size_of", brief(&TensorSpace::size_of), "address"_a)
        .def("stats", [](const TensorSpace& it) { return space_dict(unlocked<SpaceStats>(it)); })
        .def("reset_latencies", brief(&TensorSpace::reset_latencies))
        .def("check_integrity", &TensorSpace::check_integrity, Unlocked());
    m.def("bind_torch_space", &bind_torch_space, "space"_a.none());
    m.def("bound_torch_space", &bound_torch_space);
    m.def("last_torch_error", &last_torch_error);
    m.def("extension_file", &extension_file);
}

void bind_partitions(nb::module_& m) {
    nb::class_<SmPartitions>(m, "SmPartitions")
        .def_prop_ro("total_sms", &SmPartitions::total_sms)
        .def_prop_ro("pairs", [](const SmPartitions& it) {
            nb::list out;
            for (const SmPair& pair : it.pairs()) {
                out.append(nb::make_tuple(pair.decode_sms, pair.finetune_sms, pair.decode_stream, pair.finetune_stream));
            }
            return out;
        });
    nb::class_<HostPartitions, SmPartitions>(m, "HostPartitions")
        .def(nb::init<uint32_t, const std::vector<uint32_t>&, uint32_t>(), "total_sms"_a, "finetune_sms"_a,
             "granule"_a = 8);
#ifdef HARLI_WITH_CUDA
    nb::class_<CudaPartitions, SmPartitions>(m, "CudaPartitions")
        .def(nb::init<int, const std::vector<uint32_t>&>(), "device"_a, "finetune_sms"_a);
#endif
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Harli's memory below Python: driver, page pool, tensor space.";
    nb::set_leak_warnings(false);  // a space bound for torch lives until the process ends
    translate<DriverError>("DriverCallError");
    translate<OutOfMemory>("OutOfMemoryError");
    translate<StateError>("MemoryAccountingError");
    translate<ConfigError>("ConfigError");
    bind_driver(m);
    bind_pool(m);
    bind_space(m);
    bind_partitions(m);
}
