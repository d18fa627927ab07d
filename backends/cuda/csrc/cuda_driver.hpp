// The driver port on an NVIDIA GPU: the driver's virtual memory management, found at run time.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "driver.hpp"

namespace harli {

struct CudaFunctions;  // the entry points of libcuda.so.1

// Works in the primary context of a device, the one that torch uses, whatever context the calling thread has current.
// Nothing here synchronises. Throws DriverError saying what is missing where there is no driver or no such device.
class CudaDriver final : public Driver {
public:
    explicit CudaDriver(int device);
    ~CudaDriver() override;

    std::string name() const override { return "cuda"; }
    bool fresh_memory_is_zero() const override { return false; }
    size_t granularity() const override { return granularity_; }
    int device() const { return device_; }
    int driver_version() const { return driver_version_; }

private:
    class InContext;

    Address do_reserve(size_t bytes, size_t alignment) override;
    Handle do_create(size_t bytes) override;
    void do_map(Address at, size_t bytes, Handle handle) override;
    void do_set_access(Address at, size_t bytes) override;
    void do_unmap(Address at, size_t bytes) override;
    void do_release(Handle handle) override;
    void do_free(Address at, size_t bytes) override;
    Event do_create_event() override;
    void do_record(Event event, Stream stream) override;
    bool do_query(Event event) override;
    void do_destroy(Event event) override;
    void do_fill(Address at, uint16_t pattern, size_t bytes, Stream stream) override;
    void do_copy(Address to, Address from, size_t bytes, Stream stream) override;

    void check(int result, Call call) const;
    void check(int result, const char* what) const;

    std::shared_ptr<const CudaFunctions> cuda_;
    int device_;
    int driver_version_ = 0;
    void* context_ = nullptr;
    size_t granularity_ = 0;
    std::mutex mutex_;
    std::map<Address, size_t> mapped_;  // the driver itself unmaps what is not mapped without a word
};

}  // namespace harli
