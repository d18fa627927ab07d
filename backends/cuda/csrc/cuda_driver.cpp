#include "cuda_driver.hpp"

#include <cuda.h>
#include <dlfcn.h>

#include <type_traits>
#include <utility>

namespace harli {

namespace {

struct Unloader {
    void operator()(void* library) const { dlclose(library); }
};

// Symbols carry the version suffix that cuda.h's macros would add for the signatures used here.
template <typename Function>
void find(void* library, const char* symbol, Function*& into) {
    into = reinterpret_cast<Function*>(dlsym(library, symbol));
    if (into == nullptr) {
        throw DriverError(std::string("libcuda.so.1 has no ") + symbol + ": the driver is too old, 525 or newer is needed");
    }
}

}  // namespace

struct CudaFunctions {
    std::unique_ptr<void, Unloader> library;
    decltype(cuInit)* init;
    decltype(cuDriverGetVersion)* driver_get_version;
    decltype(cuGetErrorString)* get_error_string;
    decltype(cuDeviceGet)* device_get;
    decltype(cuDeviceGetAttribute)* device_get_attribute;
    decltype(cuDevicePrimaryCtxRetain)* primary_retain;
    decltype(cuDevicePrimaryCtxRelease)* primary_release;
    decltype(cuCtxGetCurrent)* ctx_get_current;
    decltype(cuCtxPushCurrent)* ctx_push;
    decltype(cuCtxPopCurrent)* ctx_pop;
    decltype(cuMemGetAllocationGranularity)* granularity;
    decltype(cuMemAddressReserve)* reserve;
    decltype(cuMemAddressFree)* address_free;
    decltype(cuMemCreate)* create;
    decltype(cuMemRelease)* release;
    decltype(cuMemMap)* map;
    decltype(cuMemUnmap)* unmap;
    decltype(cuMemSetAccess)* set_access;
    decltype(cuEventCreate)* event_create;
    decltype(cuEventDestroy)* event_destroy;
    decltype(cuEventRecord)* event_record;
    decltype(cuEventQuery)* event_query;
    decltype(cuMemsetD16Async)* memset_d16;
    decltype(cuMemcpyAsync)* memcpy_async;

    CudaFunctions() : library(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        if (!library) {
            throw DriverError("no NVIDIA driver here: libcuda.so.1 cannot be loaded; run on a machine with an NVIDIA GPU");
        }
        void* const from = library.get();
        find(from, "cuInit", init);
        find(from, "cuDriverGetVersion", driver_get_version);
        find(from, "cuGetErrorString", get_error_string);
        find(from, "cuDeviceGet", device_get);
        find(from, "cuDeviceGetAttribute", device_get_attribute);
        find(from, "cuDevicePrimaryCtxRetain", primary_retain);
        find(from, "cuDevicePrimaryCtxRelease_v2", primary_release);
        find(from, "cuCtxGetCurrent", ctx_get_current);
        find(from, "cuCtxPushCurrent_v2", ctx_push);
        find(from, "cuCtxPopCurrent_v2", ctx_pop);
        find(from, "cuMemGetAllocationGranularity", granularity);
        find(from, "cuMemAddressReserve", reserve);
        find(from, "cuMemAddressFree", address_free);
        find(from, "cuMemCreate", create);
        find(from, "cuMemRelease", release);
        find(from, "cuMemMap", map);
        find(from, "cuMemUnmap", unmap);
        find(from, "cuMemSetAccess", set_access);
        find(from, "cuEventCreate", event_create);
        find(from, "cuEventDestroy_v2", event_destroy);
        find(from, "cuEventRecord", event_record);
        find(from, "cuEventQuery", event_query);
        find(from, "cuMemsetD16Async", memset_d16);
        find(from, "cuMemcpyAsync", memcpy_async);
    }
};

// Makes the device's primary context current for a scope, unless it is.
class CudaDriver::InContext {
public:
    explicit InContext(const CudaDriver& driver) : cuda_(*driver.cuda_) {
        const auto wanted = static_cast<CUcontext>(driver.context_);
        CUcontext current = nullptr;
        driver.check(cuda_.ctx_get_current(&current), "cuCtxGetCurrent");
        if (current == wanted) return;
        driver.check(cuda_.ctx_push(wanted), "cuCtxPushCurrent");
        pushed_ = true;
    }
    ~InContext() {
        CUcontext popped = nullptr;
        if (pushed_) cuda_.ctx_pop(&popped);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

private:
    const CudaFunctions& cuda_;
    bool pushed_ = false;
};

namespace {

CUmemAllocationProp on_device(int device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return properties;
}

CUevent event_of(Event event) { return reinterpret_cast<CUevent>(event); }
CUstream stream_of(Stream stream) { return reinterpret_cast<CUstream>(stream); }

}  // namespace

CudaDriver::CudaDriver(int device) : cuda_(std::make_shared<const CudaFunctions>()), device_(device) {
    check(cuda_->init(0), "cuInit");
    check(cuda_->driver_get_version(&driver_version_), "cuDriverGetVersion");
    CUdevice ordinal = 0;
    check(cuda_->device_get(&ordinal, device), "cuDeviceGet");
    int supported = 0;
    check(cuda_->device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ordinal),
          "cuDeviceGetAttribute");
    if (supported == 0) throw DriverError("GPU " + std::to_string(device) + " has no virtual memory management");
    const CUmemAllocationProp properties = on_device(device);
    check(cuda_->granularity(&granularity_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
    CUcontext context = nullptr;
    check(cuda_->primary_retain(&context, ordinal), "cuDevicePrimaryCtxRetain");
    context_ = context;
}

CudaDriver::~CudaDriver() { cuda_->primary_release(device_); }

void CudaDriver::check(int result, Call call) const {
    if (result != CUDA_SUCCESS) check(result, call_names[static_cast<size_t>(call)].data());
}

void CudaDriver::check(int result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    cuda_->get_error_string(static_cast<CUresult>(result), &text);
    throw DriverError(std::string("driver call ") + what + " failed: " + (text == nullptr ? "unknown error" : text) +
                      " (CUresult " + std::to_string(result) + ")");
}

Address CudaDriver::do_reserve(size_t bytes, size_t alignment) {
    const InContext current(*this);
    CUdeviceptr at = 0;
    check(cuda_->reserve(&at, bytes, alignment, 0, 0), Call::reserve);
    return at;
}

Handle CudaDriver::do_create(size_t bytes) {
    const InContext current(*this);
    const CUmemAllocationProp properties = on_device(device_);
    CUmemGenericAllocationHandle handle = 0;
    check(cuda_->create(&handle, bytes, &properties, 0), Call::create);
    return handle;
}

void CudaDriver::do_map(Address at, size_t bytes, Handle handle) {
    const InContext current(*this);
    check(cuda_->map(at, bytes, 0, handle, 0), Call::map);
    const std::lock_guard lock(mutex_);
    mapped_[at] = bytes;
}

void CudaDriver::do_set_access(Address at, size_t bytes) {
    const InContext current(*this);
    CUmemAccessDesc access{};
    access.location = on_device(device_).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(cuda_->set_access(at, bytes, &access, 1), Call::set_access);
}

void CudaDriver::do_unmap(Address at, size_t bytes) {
    const InContext current(*this);
    const std::lock_guard lock(mutex_);
    const auto first = mapped_.find(at);
    auto last = first;
    Address end = at;
    for (; last != mapped_.end() && last->first == end && end < at + bytes; ++last) end += last->second;
    if (end != at + bytes) throw DriverError("driver call unmap failed: the range is not what was mapped there");
    check(cuda_->unmap(at, bytes), Call::unmap);
    mapped_.erase(first, last);
}

void CudaDriver::do_release(Handle handle) {
    const InContext current(*this);
    check(cuda_->release(handle), Call::release);
}

void CudaDriver::do_free(Address at, size_t bytes) {
    const InContext current(*this);
    check(cuda_->address_free(at, bytes), Call::free);
}

Event CudaDriver::do_create_event() {
    const InContext current(*this);
    CUevent event = nullptr;
    check(cuda_->event_create(&event, CU_EVENT_DISABLE_TIMING), Call::event_create);
    return reinterpret_cast<Event>(event);
}

void CudaDriver::do_record(Event event, Stream stream) {
    const InContext current(*this);
    check(cuda_->event_record(event_of(event), stream_of(stream)), Call::event_record);
}

bool CudaDriver::do_query(Event event) {
    const InContext current(*this);
    const CUresult result = cuda_->event_query(event_of(event));
    if (result == CUDA_ERROR_NOT_READY) return false;
    check(result, Call::event_query);
    return true;
}

void CudaDriver::do_destroy(Event event) {
    const InContext current(*this);
    check(cuda_->event_destroy(event_of(event)), Call::event_destroy);
}

void CudaDriver::do_fill(Address at, uint16_t pattern, size_t bytes, Stream stream) {
    const InContext current(*this);
    check(cuda_->memset_d16(at, pattern, bytes / 2, stream_of(stream)), Call::fill);
}

void CudaDriver::do_copy(Address to, Address from, size_t bytes, Stream stream) {
    const InContext current(*this);
    check(cuda_->memcpy_async(to, from, bytes, stream_of(stream)), Call::copy);
}

}  // namespace harli
