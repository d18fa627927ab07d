#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "errors.hpp"
#include "sm_partitions.hpp"

namespace harli {

namespace {

template <typename Function>
void find(void* library, const char* symbol, Function*& into) {
    into = reinterpret_cast<Function*>(dlsym(library, symbol));
    if (into == nullptr) {
        throw DriverError(std::string("libcuda.so.1 has no ") + symbol + ": SM partitions need driver 550 or newer");
    }
}

}  // namespace

struct CudaPartitions::Contexts {
    void* library = nullptr;
    decltype(cuGetErrorString)* get_error_string = nullptr;
    decltype(cuInit)* init = nullptr;
    decltype(cuDeviceGet)* device_get = nullptr;
    decltype(cuDevicePrimaryCtxRetain)* primary_retain = nullptr;
    decltype(cuDevicePrimaryCtxRelease)* primary_release = nullptr;
    decltype(cuDeviceGetDevResource)* get_resource = nullptr;
    decltype(cuDevSmResourceSplitByCount)* split = nullptr;
    decltype(cuDevResourceGenerateDesc)* describe = nullptr;
    decltype(cuGreenCtxCreate)* create = nullptr;
    decltype(cuGreenCtxDestroy)* destroy = nullptr;
    decltype(cuGreenCtxGetDevResource)* get_context_resource = nullptr;
    decltype(cuGreenCtxStreamCreate)* stream_create = nullptr;
    decltype(cuStreamDestroy)* stream_destroy = nullptr;
    CUdevice device = 0;
    bool retained = false;
    std::vector<CUgreenCtx> made;
    std::vector<CUstream> streams;

    Contexts() : library(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        if (library == nullptr) throw DriverError("no NVIDIA driver here: libcuda.so.1 cannot be loaded");
        find(library, "cuGetErrorString", get_error_string);
        find(library, "cuInit", init);
        find(library, "cuDeviceGet", device_get);
        find(library, "cuDevicePrimaryCtxRetain", primary_retain);
        find(library, "cuDevicePrimaryCtxRelease_v2", primary_release);
        find(library, "cuDeviceGetDevResource", get_resource);
        find(library, "cuDevSmResourceSplitByCount", split);
        find(library, "cuDevResourceGenerateDesc", describe);
        find(library, "cuGreenCtxCreate", create);
        find(library, "cuGreenCtxDestroy", destroy);
        find(library, "cuGreenCtxGetDevResource", get_context_resource);
        find(library, "cuGreenCtxStreamCreate", stream_create);
        find(library, "cuStreamDestroy_v2", stream_destroy);
    }

    // The library stays loaded: torch has it open anyway.
    ~Contexts() {
        for (CUstream stream : streams) stream_destroy(stream);
        for (CUgreenCtx context : made) destroy(context);
        if (retained) primary_release(device);
    }
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;

    void check(CUresult result, const char* what) const {
        if (result == CUDA_SUCCESS) return;
        const char* text = nullptr;
        get_error_string(result, &text);
        throw DriverError(std::string("SM partitions: ") + what + " failed: " + (text == nullptr ? "unknown error" : text) +
                          " (CUresult " + std::to_string(static_cast<int>(result)) + ")");
    }

    // A context and stream on `resource`; returns the SMs that the context really has.
    uint32_t open(CUdevResource resource, Stream& stream) {
        CUdevResourceDesc description{};
        check(describe(&description, &resource, 1), "cuDevResourceGenerateDesc");
        CUgreenCtx context = nullptr;
        check(create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM), "cuGreenCtxCreate");
        made.push_back(context);
        CUdevResource held{};
        check(get_context_resource(context, &held, CU_DEV_RESOURCE_TYPE_SM), "cuGreenCtxGetDevResource");
        CUstream opened = nullptr;
        check(stream_create(&opened, context, CU_STREAM_NON_BLOCKING, 0), "cuGreenCtxStreamCreate");
        streams.push_back(opened);
        stream = reinterpret_cast<Stream>(opened);
        return held.sm.smCount;
    }
};

CudaPartitions::CudaPartitions(int device, const std::vector<uint32_t>& finetune_sms)
    : contexts_(std::make_unique<Contexts>()) {
    Contexts& cuda = *contexts_;
    cuda.check(cuda.init(0), "cuInit");
    cuda.check(cuda.device_get(&cuda.device, device), "cuDeviceGet");
    CUcontext primary = nullptr;
    cuda.check(cuda.primary_retain(&primary, cuda.device), "cuDevicePrimaryCtxRetain");
    cuda.retained = true;
    CUdevResource whole{};
    cuda.check(cuda.get_resource(cuda.device, &whole, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
    total_sms_ = whole.sm.smCount;
    for (const uint32_t asked : finetune_sms) {
        if (asked == 0 || asked >= total_sms_) {
            throw ConfigError("SM partitions: cannot give finetuning " + std::to_string(asked) + " of " +
                              std::to_string(total_sms_) + " SMs");
        }
        CUdevResource group{};
        CUdevResource rest{};
        unsigned int groups = 1;
        cuda.check(cuda.split(&group, &groups, &whole, &rest, 0, asked), "cuDevSmResourceSplitByCount");
        SmPair pair;
        pair.finetune_sms = cuda.open(group, pair.finetune_stream);
        pair.decode_sms = cuda.open(rest, pair.decode_stream);
        pairs_.push_back(pair);
    }
}

CudaPartitions::~CudaPartitions() = default;

}  // namespace harli
